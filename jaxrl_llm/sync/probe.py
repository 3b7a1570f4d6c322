"""A probe: do trainer and sampler give the same tokens the same log-probs?

Digests say that the bits are right. The probe says that both sides also mean
the same by them: the trainer's packed rows, the sampler's cached decoding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import ModelFns, PageMap
from jaxrl_llm.sync.errors import SyncError
from jaxrl_llm.sync.push import SamplerWeights

# What is rounding, by compute dtype: a share of a log-prob, or of 1 nat where
# it is smaller. Measured on small models: 2e-7 and 4e-3.
TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2}


def probe_tokens(vocab_size: int, *, rows: int, length: int) -> np.ndarray:
  """Fixed tokens, int32 [rows, length], drawn from the whole vocabulary."""
  rng = np.random.default_rng(0)
  return rng.integers(0, vocab_size, (rows, length)).astype(np.int32)


def make_probe(
  fns: ModelFns, tokens: chex.Array, *, tolerance: float
) -> Callable[[Any, SamplerWeights], float]:
  """A check of a sampler's weights against the trainer's parameters.

  Args:
    fns: the policy.
    tokens: int32 [B, T], the same in every call; B divides over the devices
      among which the trainer splits a batch.
    tolerance: most that the mean of |Δ log π| / max(1, |log π|) over the
      tokens may be. Relative, because fixed tokens are improbable ones, and
      rounding grows with the logits.

  Returns:
    (params, weights) -> that mean; raises SyncError if it is over the tolerance
    or not a number.
  """
  inputs, targets = np.asarray(tokens)[:, :-1], np.asarray(tokens)[:, 1:]
  rows, length = inputs.shape
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), inputs.shape)
  every = np.ones(inputs.shape, bool)
  # One page a row, one shard.
  numbers = np.arange(rows, dtype=np.int32)
  pages = PageMap(
    numbers[None], np.zeros((1, rows), np.int32), numbers[:, None]
  )

  @jax.jit
  def trained(params):
    segments = every.astype(np.int32)
    return fns.logprobs(
      params, inputs, targets, every, segments, positions
    ).logprobs

  @jax.jit
  def sampled(params):
    memory = fns.init_pages(shards=1, pages=rows, length=length)
    logits, _ = fns.decode(params, memory, pages, inputs, positions, every)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]

  def check(params, weights):
    ours, theirs = jax.device_get((trained(params), sampled(weights.params)))
    errors = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
    error = float(np.mean(errors))
    if not error <= tolerance:  # NaN fails too.
      raise SyncError(
        f"log-probs of the sampler's version {weights.version} differ from the"
        f" trainer's by a share of {error:.3g}, more than {tolerance:g}:"
        " push the policy again, or see what the two compute differently"
      )
    return error

  return check
