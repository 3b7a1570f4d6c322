"""Other libraries' samplers, as functions that decode a static batch.

Each function imports its library itself: it runs in that library's environment,
where jax or torch may be missing.
"""

from collections.abc import Callable

import numpy as np

# (prompts int [B, P], new tokens) -> None, once every row has so many.
Decode = Callable[[np.ndarray, int], None]


def hugging_face(fields: dict[str, int], longest: int) -> Decode:
  """`generate` of transformers, with its default cache."""
  import torch
  import transformers

  config = transformers.Qwen2Config(
    num_hidden_layers=fields["num_layers"],
    hidden_size=fields["hidden_size"],
    intermediate_size=fields["intermediate_size"],
    num_attention_heads=fields["num_heads"],
    num_key_value_heads=fields["num_kv_heads"],
    vocab_size=fields["vocab_size"],
    max_position_embeddings=longest,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
  )
  torch.manual_seed(0)
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float32
  )
  model = model.eval().to(device)

  def decode(prompts, count):
    tokens = torch.as_tensor(prompts, device=device)
    with torch.no_grad():
      model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
      )

  return decode


class _Numbers:
  """A tokenizer whose text is the tokens' numbers."""

  encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
  decode = staticmethod(lambda tokens, **_: " ".join(map(str, tokens)))
  bos_id = staticmethod(lambda: 0)  # 0 is not put in front.
  eos_id = staticmethod(lambda: 1)
  pad_id = staticmethod(lambda: 0)


def tunix(fields: dict[str, int], longest: int) -> Decode:
  """Tunix's own sampler, with a cache for the longest response."""
  import jax
  from flax import nnx
  from tunix.generate import sampler
  from tunix.models.llama3 import model as llama

  config = llama.ModelConfig(
    num_layers=fields["num_layers"],
    vocab_size=fields["vocab_size"],
    embed_dim=fields["hidden_size"],
    hidden_dim=fields["intermediate_size"],
    num_heads=fields["num_heads"],
    head_dim=64,
    num_kv_heads=fields["num_kv_heads"],
    rope_theta=10_000,
    norm_eps=1e-5,
    weight_tying=True,
  )
  model = llama.Llama3(config, rngs=nnx.Rngs(0))
  state = nnx.state(model, nnx.Param)
  nnx.update(model, jax.tree.map(lambda x: x.astype("float32"), state))
  engine = sampler.Sampler(
    model,
    _Numbers(),
    sampler.CacheConfig(
      cache_size=longest,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
    ),
  )

  def decode(prompts, count):
    engine(
      [" ".join(map(str, row)) for row in prompts.tolist()],
      max_generation_steps=count,
      max_prompt_length=prompts.shape[1],
      temperature=1.0,
      top_p=1.0,
      seed=0,
      eos_tokens=[-1],
      return_logprobs=True,
    )

  return decode


DECODERS = {"hf": hugging_face, "tunix": tunix}
