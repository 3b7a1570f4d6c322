"""One small random model, made and compiled once and shared by tests.

Weights have a large variance, so that its distributions are neither flat nor
peaked.
"""

import functools

import jax

from jaxrl_llm import models, sharding


def tiny_config() -> models.ModelConfig:
  """Returns a config of two layers with GQA, biases and odd sizes."""
  return models.ModelConfig(
    family="qwen2",
    vocab_size=67,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope_theta=1000.0,
    attention_bias=True,
    tie_word_embeddings=True,
  )


def widen(params, key):
  """Adds normal noise of standard deviation 0.2 to every leaf."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(key, len(leaves))
  noise = [0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
  return jax.tree.unflatten(tree, [x + n for x, n in zip(leaves, noise)])


@functools.cache
def tiny_policy(mesh=None):
  """Returns `(fns, params)`; functions that tests call directly are jitted.

  Args:
    mesh: mesh of the sampler.
  """
  config = tiny_config()
  fns = models.make_policy(
    config,
    head_chunk=8,
    sampler_sharding=mesh and sharding.slot_sharding(mesh, config.num_kv_heads),
  )
  make = lambda key: widen(fns.init(key), jax.random.fold_in(key, 1))
  jitted = {
    name: jax.jit(getattr(fns, name))
    for name in ("logprobs", "logits", "for_sampling", "prefill", "decode")
  }
  return fns._replace(**jitted), jax.jit(make)(jax.random.key(0))
