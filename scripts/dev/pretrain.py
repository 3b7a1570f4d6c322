"""Rebuilds an embedded base model, bit for bit on the same machine and JAX.

python scripts/dev/pretrain.py --config=configs/pretrain.py[:TASK]

`--config.out=DIR` writes it elsewhere than into the package.
"""

import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import pretraining
from absl import app
from ml_collections import config_flags

from jaxrl_llm import models
from jaxrl_llm.data import tasks
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError

_CONFIG = config_flags.DEFINE_config_file("config", "configs/pretrain.py")


def main(_):
  try:
    rebuild()
  except InputError as error:
    print(f"pretrain: {error}", file=sys.stderr)
    sys.exit(2)


def rebuild() -> None:
  """Trains the base of the config and writes its directory."""
  settings = _CONFIG.value
  out = pathlib.Path(settings.out)
  out.mkdir(parents=True, exist_ok=True)
  text = pretraining.character_tokenizer_json(tasks.CHARACTERS)
  (out / "tokenizer.json").write_text(text, encoding="utf-8")
  ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
  (out / "generation_config.json").write_text(json.dumps(ids, indent=1))
  # For transformers, in a policy that is converted.
  names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
  (out / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
  tokenizer = Tokenizer(out)
  config = models.ModelConfig(
    family="llama",
    vocab_size=tokenizer.vocab_size,
    hidden_size=settings.hidden_size,
    intermediate_size=settings.intermediate_size,
    num_layers=settings.num_layers,
    num_heads=settings.num_heads,
    num_kv_heads=settings.num_heads,
    head_dim=settings.hidden_size // settings.num_heads,
    max_position_embeddings=settings.max_position_embeddings,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
  )
  fns = models.make_policy(config)
  start = time.process_time()

  def log(step, loss):
    seconds = time.process_time() - start
    print(f"step {step}: nll {loss:.4f}, {seconds:.0f} CPU-s", flush=True)

  params = pretraining.pretrain(fns, tokenizer, settings, log=log)
  # bfloat16 halves the file; the base is defined by what is stored.
  stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  models.save(str(out), fns, stored, tokenizer_from=str(out))
  print(f"wrote {models.num_params(config):,} parameters to {out}")


if __name__ == "__main__":
  app.run(main)
