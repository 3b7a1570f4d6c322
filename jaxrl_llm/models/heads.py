"""Output heads of policy and critic.

The policy's head computes log-probs of given tokens without a [B, T, V] array.
Logits are the largest activation of a language model. Here they are computed in
chunks of time, recomputed in the backward pass, and only for tokens with loss:
each row is sorted so that its loss positions come first, and chunks without
loss positions in any row are skipped.

Every chunk reads the kernel, and in the backward pass also reads and writes the
kernel's entire float32 gradient, 14 bytes per weight in total. With few tokens
per chunk this takes longer than the products (`default_chunk`).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models import context
from jaxrl_llm.models.backends import platform_of
from jaxrl_llm.models.numerics import einsum

_MIN_CHUNK = 128  # Time steps; on a CPU, larger chunks do not fit in the cache.
_CHUNK_BYTES = 2**29  # Float32 logits of a chunk on an accelerator.


class TokenLogprobs(NamedTuple):
  """Per-token results of the head, 0 where masked."""

  logprobs: Array  # float32 [B, T], log π(target).
  entropy: Array  # float32 [B, T], −Σ π log π in nats.


@dataclasses.dataclass(frozen=True)
class ValueHead:
  """A critic's head whose only output is the value; the base of other heads."""

  outputs: int = 1
  # Interval of the values; None: all numbers.
  support: tuple[float, float] | None = None

  def read(self, outputs: chex.Array) -> dict[str, Array]:
    """Returns `values` [...] from outputs [..., K], and inputs of the loss."""
    return {"values": outputs[..., 0]}


SCALAR = ValueHead()


class _Settings(NamedTuple):
  """Static arguments of `chunked_logprobs`."""

  tied: bool
  chunk: int
  sharding: NamedSharding | None
  unused: tuple[int, ...]


def project(hidden: chex.Array, kernel: chex.Array, tied: bool) -> Array:
  """Returns float32 logits [..., V]; kernel is [V, D] if tied, else [D, V]."""
  equation = "...d,vd->...v" if tied else "...d,dv->...v"
  return einsum(equation, hidden, kernel.astype(hidden.dtype))


def logits(
  hidden: chex.Array, kernel: chex.Array, tied: bool, unused: tuple[int, ...]
) -> Array:
  """Returns float32 logits [..., V], -inf for ids that are not tokens.

  Args:
    hidden: [..., D], final hidden states.
    kernel: [V, D] if `tied`, else [D, V].
    tied: whether `kernel` is the embedding.
    unused: as in `ModelConfig`.
  """
  scores = project(hidden, kernel, tied)
  if not unused:
    return scores
  absent = np.zeros((1,) * hidden.ndim, bool).repeat(scores.shape[-1], -1)
  absent[..., list(unused)] = True
  return jnp.where(absent, -jnp.inf, scores)


def default_chunk(platform: str, rows: int, time: int, vocabulary: int) -> int:
  """Returns the time steps per chunk of the head.

  On an accelerator, chunks have equal lengths, as large as memory allows, in
  multiples of 128.

  Args:
    platform: as in `kernels.platform_of`.
    rows: rows on a device.
    time: time steps of a row on a device.
    vocabulary: logits per token on a device.
  """
  if platform == "cpu":
    return _MIN_CHUNK
  most = max(_CHUNK_BYTES // (4 * rows * vocabulary), _MIN_CHUNK)
  return math.ceil(time / math.ceil(time / most) / _MIN_CHUNK) * _MIN_CHUNK


def chunked_logprobs(
  hidden: chex.Array,
  kernel: chex.Array,
  targets: chex.Array,
  mask: chex.Array,
  temperature: chex.Numeric = 1.0,
  *,
  tied: bool,
  chunk: int,
  sharding: NamedSharding | None = None,
  unused: tuple[int, ...] = (),
) -> TokenLogprobs:
  """Computes log softmax(h W / temperature)[target] and entropy in chunks.

  Args:
    hidden: [B, T, D], final hidden states, any float dtype.
    kernel: [V, D] if `tied` (the embedding) else [D, V].
    targets: int32 [B, T].
    mask: bool [B, T]; positions where it is False are neither computed (except
      to fill a chunk) nor differentiated, and return 0.
    temperature: scalar that divides the logits.
    tied: whether `kernel` is the embedding.
    chunk: time steps per chunk, `default_chunk` if 0; memory is
      B · chunk · V floats.
    sharding: sharding of [N, D, V], where rows are split among N groups of
      devices along the first axis. The kernel is then gathered once instead of
      in every chunk, and its gradient is summed over groups once; None: one
      device.
    unused: ids without a token, which have no probability; see `ModelConfig`.

  Returns:
    `TokenLogprobs` of float32 [B, T].
  """
  chex.assert_rank([hidden, kernel, targets, mask], [3, 2, 2, 2])
  chex.assert_equal_shape_prefix([hidden, targets, mask], 2)
  count, time = mask.shape
  vocabulary = kernel.shape[0 if tied else 1] // context.num_shards(sharding, 2)
  sizes = count // _groups(count, sharding), time, vocabulary
  chunk = min(chunk or default_chunk(platform_of(sharding), *sizes), time)
  temperature = jnp.asarray(temperature, jnp.float32)
  arrays = hidden, kernel, targets, mask, temperature
  settings = _Settings(tied, chunk, sharding, unused)
  return TokenLogprobs(*_logprobs(*arrays, settings))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _logprobs(*arguments):
  return _forward(*arguments)[0]


def _forward(
  hidden: Array,
  kernel: Array,
  targets: Array,
  mask: Array,
  temperature: Array,
  settings: _Settings,
):
  tied, chunk, sharding, unused = settings
  whole = _gathered(kernel, hidden.dtype, tied, sharding)
  order, count, hidden_front, targets_front = _loss_first(
    hidden, targets, mask, chunk
  )

  def body(i: Array, carry: tuple[Array, ...]):
    rows = _slice(hidden_front, i, chunk)
    scaled = logits(rows, whole, tied, unused) / temperature
    top = jnp.max(scaled, axis=-1)
    log_sum = jnp.log(jnp.sum(jnp.exp(scaled - top[..., None]), axis=-1))
    # Gathered from the logits: XLA would store log-probs to gather from them.
    picked = jnp.take_along_axis(
      scaled, _slice(targets_front, i, chunk)[..., None], axis=-1
    )[..., 0]
    picked = picked - top - log_sum
    logp = _finite(scaled - top[..., None] - log_sum[..., None], unused)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    found = picked, entropy, top, log_sum
    return tuple(_update(old, new, i, chunk) for old, new in zip(carry, found))

  zeros = jnp.zeros(targets_front.shape, jnp.float32)
  found = jax.lax.fori_loop(0, count, body, (zeros,) * 4)
  outputs = tuple(
    jnp.where(mask, _restore(x, order, mask), 0) for x in found[:2]
  )
  return outputs, (hidden, kernel, targets, mask, temperature, found[1:])


def _finite(logp: Array, unused: tuple[int, ...]):
  """Bounds log-probs from below: 0 times -inf would be NaN."""
  return jnp.maximum(logp, jnp.finfo(logp.dtype).min) if unused else logp


def _backward(
  settings: _Settings, residuals: tuple[Any, ...], cotangents: tuple[Array, ...]
):
  tied, chunk, sharding, unused = settings
  hidden, kernel, targets, mask, temperature, of_tokens = residuals
  whole = _gathered(kernel, hidden.dtype, tied, sharding)
  groups = _groups(len(hidden), sharding)
  order, count, hidden_front, targets_front = _loss_first(
    hidden, targets, mask, chunk
  )
  g_front = [_take(jnp.where(mask, g, 0.0), order) for g in cotangents]
  # [D, V] even if the kernel is [V, D]: a [V, D] product would transpose the
  # logits of every chunk.
  shape = kernel.shape[::-1] if tied else kernel.shape
  # Each group of devices has a separate sum.
  d_kernel_zero = jnp.zeros((groups, *shape), jnp.float32)
  if groups > 1:
    d_kernel_zero = jax.lax.with_sharding_constraint(d_kernel_zero, sharding)
  # [B, chunk, ...] to [N, tokens of a group, ...].
  grouped = lambda x: x.reshape(groups, -1, *x.shape[2:])
  d_hidden_zero = jnp.zeros(hidden_front.shape, jnp.float32)
  vocabulary = jnp.arange(kernel.shape[0 if tied else 1])[None, None]

  def body(i: Array, carry: tuple[Array, ...]):
    d_hidden, d_kernel = carry
    rows = _slice(hidden_front, i, chunk)
    target, g_lp, g_ent, entropy, top, log_sum = (
      _slice(x, i, chunk)[..., None]
      for x in (targets_front, *g_front, *of_tokens)
    )
    scaled = logits(rows, whole, tied, unused) / temperature
    logp = _finite(scaled - top - log_sum, unused)
    p = jnp.exp(logp)
    # ∂logπ(a)/∂z = 1[a] − π;  ∂H/∂z = −π (log π + H).
    d_logits = g_lp * ((vocabulary == target) - p)
    d_logits -= g_ent * p * (logp + entropy)
    d_logits = (d_logits / temperature).astype(hidden.dtype)
    d_rows = project(d_logits, whole, not tied)
    d_hidden = _update(d_hidden, d_rows, i, chunk)
    added = einsum("ntd,ntv->ndv", grouped(rows), grouped(d_logits))
    return d_hidden, d_kernel + added

  d_hidden, d_kernel = jax.lax.fori_loop(
    0, count, body, (d_hidden_zero, d_kernel_zero)
  )
  d_hidden = _restore(d_hidden, order, mask).astype(hidden.dtype)
  d_kernel = d_kernel.sum(axis=0)
  d_kernel = (d_kernel.T if tied else d_kernel).astype(kernel.dtype)
  return d_hidden, d_kernel, None, None, None


_logprobs.defvjp(_forward, _backward)


def _gathered(
  kernel: Array, dtype: jnp.dtype, tied: bool, sharding: NamedSharding | None
):
  """Gathers the kernel for all chunks, except along the vocabulary."""
  if sharding is None:
    return kernel
  *_, vocabulary = sharding.spec
  spec = PartitionSpec(*((vocabulary, None) if tied else (None, vocabulary)))
  place = NamedSharding(sharding.mesh, spec)
  return jax.lax.with_sharding_constraint(kernel.astype(dtype), place)


def _groups(rows: int, sharding: NamedSharding | None):
  """Returns the number of groups of devices that rows are split among."""
  groups = context.num_shards(sharding, 0)
  return 1 if rows % groups else groups


def _loss_first(hidden: Array, targets: Array, mask: Array, chunk: int):
  """Sorts each row so that its loss positions come first.

  Returns the order, padded to whole chunks, the number of chunks with a loss
  position, and the sorted hidden states and targets.
  """
  order = jnp.argsort(~mask, axis=1, stable=True)
  order = context.pad(order, 1, chunk, mask.shape[1])
  longest = jnp.max(jnp.sum(mask, axis=1, dtype=jnp.int32))
  count = (longest + chunk - 1) // chunk
  # A NaN outside the mask would turn the kernel's gradient into NaN.
  hidden = jnp.where(mask[..., None], hidden, 0)
  return order, count, _take(hidden, order), _take(targets, order)


@jax.vmap
def _take(x: Array, index: Array):
  return x.at[index].get(mode="fill", fill_value=0)  # 0 in a chunk's padding.


def _restore(x: Array, order: Array, mask: Array):
  """Undoes `_take` with this order."""
  return _take(x, jnp.argsort(order, axis=1)[:, : mask.shape[1]])


def _slice(x: Array, i: Array, chunk: int):
  return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1)


def _update(x: Array, new: Array, i: Array, chunk: int):
  return jax.lax.dynamic_update_slice_in_dim(x, new, i * chunk, axis=1)
