"""Writes a random chat model over all ASCII characters to a directory."""

import dataclasses
import json
import pathlib
import string
from collections.abc import Sequence

import jax
import pretraining
from helpers import tiny_run

from jaxrl_llm import models

_TEMPLATE = (
  "{% for t in tools or [] %}{{ t['function']['name'] }}:"
  " {{ t['function']['description'] }}\n{% endfor %}"
  "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n"
  "{% endfor %}"
  "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(directory: pathlib.Path, words: Sequence[str] = ()) -> pathlib.Path:
  """Writes a model of 2 layers, width 32, one token per character, a template.

  Args:
    directory: a new directory.
    words: further tokens, which only the model writes.
  """
  directory.mkdir(parents=True)
  characters = sorted(set(string.printable) - set("\r\v\f\t"))
  vocabulary = [*characters, *words]
  text = pretraining.character_tokenizer_json(vocabulary)
  (directory / "tokenizer.json").write_text(text, encoding="utf-8")
  tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
  (directory / "generation_config.json").write_text(json.dumps(tokens))
  template = json.dumps({"chat_template": _TEMPLATE})
  (directory / "tokenizer_config.json").write_text(template)
  config = dataclasses.replace(
    tiny_run.model_config(),
    vocab_size=len(vocabulary) + 2,
    max_position_embeddings=512,
  )
  fns = models.make_policy(config)
  params = jax.jit(fns.init)(jax.random.key(0))
  models.save(str(directory), fns, params, tokenizer_from=str(directory))
  return directory
