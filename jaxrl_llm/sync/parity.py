"""Log-prob parity: trainer and sampler must give tokens equal log-probs.

Checksums compare the weights. Parity also compares the computation: packed rows
in the trainer, token-by-token decoding on a paged KV cache in the sampler, each
on its own mesh.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import ModelFns, PackedRows, context, make_block_tables
from jaxrl_llm.sync.transfer import SyncError, VersionedWeights
from jaxrl_llm.system import processes

# Rounding tolerance by compute dtype, or by the format of matrix products,
# relative to max(|log-prob|, 1 nat). Measured on small models: 2e-7, 4e-3 and
# 1.4e-2; 6e-3 and 3e-2 if only the sampler multiplies in int8 or fp8; 1e-4
# (1.5e-2 with bfloat16) if both multiply in fp8, where activations midway
# between two values may be rounded to either.
TOLERANCES: Mapping[str, float] = {
  "float32": 1e-5,
  "bfloat16": 2e-2,
  "float8_e4m3fn": 7e-2,
  "int8": 2e-2,
  "fp8": 7e-2,
}


def tolerance(*dtypes: str, platforms: Collection[str]) -> float:
  """Returns the tolerance between two computations in these dtypes.

  Args:
    dtypes: names of the dtypes of activations and of the KV cache, and of the
      formats of products that differ or that round activations.
    platforms: platforms of the devices. All but 'cpu' multiply float32 in fewer
      bits by default; TPUs use bfloat16.
  """
  rounded = {"bfloat16"} if set(platforms) - {"cpu"} else set()
  return max(TOLERANCES[name] for name in {*dtypes} | rounded)


def parity_tokens(vocab_size: int, *, rows: int, length: int) -> np.ndarray:
  """Returns fixed random tokens of the vocabulary, int32 [rows, length]."""
  rng = np.random.default_rng(0)
  return rng.integers(0, vocab_size, (rows, length)).astype(np.int32)


def make_parity_check(
  fns: ModelFns,
  tokens: chex.Array,
  *,
  tolerance: float,
  page_size: int,
  send: Callable[[Any, int], VersionedWeights] | None = None,
) -> Callable[[Any, VersionedWeights], float]:
  """Makes a check of the sampler's weights against the trainer's parameters.

  Args:
    fns: the policy.
    tokens: int32 [B, T], the same in every call; B must be divisible over the
      trainer's and the sampler's devices.
    tolerance: maximum mean of |Δ log π| / max(1, |log π|) over the tokens. It
      is relative because random tokens are improbable, and rounding grows with
      the logits.
    page_size: tokens per page of the KV cache.
    send: (params, version) -> weights; only with an exact sampler. Sending the
      trainer's parameters again must give bitwise equal log-probs.

  Returns:
    (params, weights) -> this mean; raises SyncError if it exceeds the tolerance
    or is NaN, or if `send` is given and a log-prob differs.
  """
  inputs, targets = np.asarray(tokens)[:, :-1], np.asarray(tokens)[:, 1:]
  positions = np.broadcast_to(
    np.arange(inputs.shape[1], dtype=np.int32), inputs.shape
  )
  arrays = inputs, targets, positions

  @jax.jit
  def trained(params):
    rows = PackedRows(
      tokens=inputs,
      segments=np.ones_like(inputs),
      positions=positions,
      targets=targets,
      mask=np.ones(inputs.shape, bool),
    )
    return fns.logprobs(params, rows)[0].logprobs

  sampled = jax.jit(_decoded_logprobs(fns, arrays, page_size))

  def check(params, weights):
    ours, theirs = processes.to_host((trained(params), sampled(weights.params)))
    errors = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
    error = float(np.mean(errors))
    if not error <= tolerance:  # NaN fails too.
      raise SyncError(
        f"log-probs of the sampler's version {weights.version} differ from the"
        f" trainer's by {error:.3g} (relative), more than {tolerance:g}:"
        " transfer the policy again, or compare the two computations"
      )
    if send is not None:
      again = processes.to_host(sampled(send(params, weights.version).params))
      if not np.array_equal(again, theirs):
        raise inexact(np.abs(again - theirs).max())
    return error

  return check


def inexact(difference: float) -> SyncError:
  """Returns the error of an exact sampler whose log-probs differ."""
  return SyncError(
    "config.sampler.exact=True: log-probs of sampler and trainer differ by up"
    f" to {difference:.3g}: a bug, or the device's sums are not"
    " deterministic; use sampler.exact=False, and report it"
  )


def _decoded_logprobs(fns, arrays, page_size):
  """Makes a function: sampler's params -> decoded log-probs [B, T - 1]."""
  rows, length = arrays[0].shape
  shards = context.num_shards(fns.slots_sharding, 0)
  share, blocks = rows // shards, -(-length // page_size)
  table = np.arange(share * blocks, dtype=np.int32).reshape(share, blocks)
  pages = make_block_tables(
    np.tile(table, (shards, 1)),
    shards=shards,
    pages=table.size,
    page_size=page_size,
  )

  def decoded(params):
    kv_cache = fns.init_kv_cache(
      shards=shards, pages=table.size, page_size=page_size
    )
    if fns.slots_sharding is not None:
      constrain = jax.lax.with_sharding_constraint
      kv_cache = constrain(kv_cache, fns.kv_sharding)

    def step(kv_cache, column):
      tokens, targets, positions = (x[:, None] for x in column)
      logits, kv_cache, *_ = fns.decode(
        params, kv_cache, pages, tokens, positions, np.ones((rows, 1), bool)
      )
      logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
      picked = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)
      return kv_cache, picked[:, 0, 0]

    return jax.lax.scan(step, kv_cache, [jnp.asarray(x.T) for x in arrays])[1].T

  return decoded
