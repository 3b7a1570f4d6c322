"""Log-prob parity: trainer and sampler must give tokens equal log-probs.

Checksums compare the weights. Parity also compares the computation: packed rows
in the trainer, token-by-token decoding on a paged KV cache in the sampler, each
on its own mesh. `make_parity_check` compares it on fixed tokens, before they
are sampled; `check_sampled` on the tokens that an engine, any engine, sampled.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import ModelFns, PackedRows, context, make_block_tables
from jaxrl_llm.sync.transfer import SyncError, VersionedWeights
from jaxrl_llm.system import processes
from jaxrl_llm.types import Rollout, sampled_by


class Tolerance(NamedTuple):
  """The largest differences of log-probs that rounding explains.

  They are relative to max(|log-prob|, 1 nat).
  """

  fixed: float  # Mean over the fixed tokens of `make_parity_check`.
  mean: float  # Mean over the tokens of a batch.
  token: float  # A token of a batch.


# Rounding tolerance by compute dtype, or by the format of matrix products. The
# means over fixed tokens, measured on small models: 2e-7, 4e-3 and 1.4e-2; 6e-3
# and 3e-2 if only the sampler multiplies in int8 or fp8; 1e-4 (1.5e-2 with
# bfloat16) if both multiply in fp8, where activations midway between two values
# may be rounded to either. Those of sampled tokens are in docs/metrics.md.
TOLERANCES: Mapping[str, Tolerance] = {
  "float32": Tolerance(1e-5, 1e-3, 1e-2),
  "bfloat16": Tolerance(2e-2, 0.15, 5.0),
  "float8_e4m3fn": Tolerance(7e-2, 1.5, 15.0),
  "int8": Tolerance(2e-2, 0.15, 5.0),
  "fp8": Tolerance(7e-2, 1.5, 15.0),
}


_INEXACT = (
  "a bug, or the device's sums are not deterministic; use sampler.exact=False,"
  " and report it"
)
_OTHER = (
  "it has other weights, positions or settings, or computes in a lower"
  " precision than model.sampler_dtype, .cache_dtype and .sampler_matmul say;"
  " correct it or them, or set sampler.parity_check_every=0 to check nothing"
)


def tolerance(*dtypes: str, platforms: Collection[str]) -> Tolerance:
  """Returns the tolerances between two computations in these dtypes.

  Args:
    dtypes: names of the dtypes of activations and of the KV cache, and of the
      formats of products that differ or that round activations.
    platforms: platforms of the devices. All but 'cpu' multiply float32 in fewer
      bits by default; TPUs use bfloat16.
  """
  rounded = {"bfloat16"} if set(platforms) - {"cpu"} else set()
  allowed = (TOLERANCES[name] for name in {*dtypes} | rounded)
  return Tolerance(*map(max, zip(*allowed)))


def parity_tokens(
  vocab_size: int, *, rows: int, length: int, unused: Sequence[int] = ()
) -> np.ndarray:
  """Returns fixed random tokens of the vocabulary, int32 [rows, length].

  Args:
    vocab_size: number of ids.
    rows: number of rows.
    length: tokens of a row.
    unused: ids that are no tokens.
  """
  tokens = np.delete(np.arange(vocab_size, dtype=np.int32), list(unused))
  rng = np.random.default_rng(0)
  return tokens[rng.integers(0, tokens.size, (rows, length))]


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
  def parity_score(params):
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
    ours, theirs = processes.to_host(
      (parity_score(params), sampled(weights.params))
    )
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
        raise SyncError(
          "config.sampler.exact=True: log-probs of sampler and trainer differ"
          f" by up to {np.abs(again - theirs).max():.3g}: {_INEXACT}"
        )
    return error

  return check


def check_sampled(
  rollout: Rollout,
  logprobs: np.ndarray,
  scored: np.ndarray,
  *,
  version: int,
  tolerance: Tolerance,
  engine: str,
  decode: Callable[[list[int]], str],
) -> None:
  """Compares the log-probs of the sampler and of the trainer in a batch.

  Only tokens that the present version sampled are compared: older ones also
  differ by the updates since then.

  Args:
    rollout: B responses.
    logprobs: [B, T], log-probs of the trainer before the update.
    scored: bool [B], rows that have `logprobs`.
    version: version of the policy before the update.
    tolerance: the limits. A difference is relative to the smaller of the two
      |log-probs|, or to 1 nat if that is less.
    engine: name of the engine, for the message.
    decode: tokens -> text, for the message.

  Raises:
    SyncError: The difference exceeds a limit, or is NaN; the message names the
      token with the largest one.
  """
  rows, at = np.nonzero(scored[:, None] & sampled_by(rollout, version))
  if not rows.size:
    return
  ours, theirs = (x[rows, at] for x in (logprobs, rollout.behavior_logprobs))
  nats = np.abs(ours - theirs)
  scale = np.maximum(1, np.minimum(np.abs(ours), np.abs(theirs)))
  errors = np.nan_to_num(nats / scale, nan=np.inf)
  worst, mean = int(np.argmax(errors)), float(np.mean(errors))
  if mean <= tolerance.mean and errors[worst] <= tolerance.token:
    return
  row, place = rows[worst], at[worst]
  token = int(rollout.tokens[row, place])
  raise SyncError(
    f"step {version + 1}: the log-probs of {engine} differ from the trainer's,"
    f" most at token {token} ({decode([token])!r}) at position {place} of"
    f" response {rollout.sample_id[row]}, written by version {version}:"
    f" {theirs[worst]:.5g} and {ours[worst]:.5g} (difference"
    f" {nats[worst]:.3g} nats, limit {tolerance.token:g}; mean {mean:.3g},"
    f" limit {tolerance.mean:g}): {_OTHER if tolerance.token else _INEXACT}"
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

  def parity_decode(params):
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

  return parity_decode
