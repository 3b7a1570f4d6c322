"""Attention with JAX's Pallas kernels for TPUs.

Training uses splash attention, which skips blocks of scores after the queries,
before their windows, and between different segments. It supports segments but
not prefixes, so every sample has its own copy of the prompt, which costs little
for long responses.

The sampler uses ragged paged attention. The KV cache of a layer is one array,
[D, P, page_size, 2K, d] if paged and [N, T, 2K, d] if contiguous, in which the
value of each head follows its key. A slot reads only its own pages, from the
first page in its window up to its length, so the time is proportional to the
sum of lengths. Prefill uses the same kernel on consecutive pages: a chunk
attends to all tokens written before it.

Unsupported sizes are padded with zeros: KV heads to 1, 2, 4 or a multiple of 8,
and d to a multiple of 128, the width of a register.

Reference:
  jax.experimental.pallas.ops.tpu: splash_attention, ragged_paged_attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import context
from jaxrl_llm.models.backends import Backend, Interleaved, PackedAttention
from jaxrl_llm.models.layers import AttentionKind

_LANES = 128  # Lanes of a vector register.
_MIN_HEAD_DIM = 64  # Smaller heads would be more than half padding.
# Block sizes of ragged paged attention: tokens of the KV cache, and queries in
# decode and prefill. They fit in memory but have not been timed on a TPU.
_KV_BLOCK = 512
_DECODE_QUERIES, _PREFILL_QUERIES = 8, 32
_ROW_BLOCK = 512  # Block size of splash attention, of queries and keys.


def refusal(kind: AttentionKind) -> str:
  """Returns why the kernels do not support a model, or '' if they do."""
  size = kind.head_dim
  if size < _MIN_HEAD_DIM:
    return f"needs head_dim >= {_MIN_HEAD_DIM}, but the model has {size}"
  return ""


def make_packed_attention(
  kind: AttentionKind, *, sharding: NamedSharding | None
) -> PackedAttention:
  """Makes causal splash attention within segments of packed rows.

  Args:
    kind: the kind of attention.
    sharding: sharding of keys [R, C, K, d]; None: one device.
  """
  scale = kind.head_dim**-0.5
  parts = context.num_shards(sharding, 1)
  heads = kind.num_heads // context.num_shards(sharding, 2)

  def attention(q: Array, k: Array, v: Array, segments: Array, prefixes: Array):
    del prefixes  # There are none.
    length, time = q.shape[1], q.shape[1] // parts
    block = min(_ROW_BLOCK, -(-time // _LANES) * _LANES)
    size = lambda tokens: -(-tokens // block) * block
    # Padding is a segment of its own, 0.
    padded = lambda x: context.pad(context.pad(x, 1, block), 3, _LANES)

    def on_device(attend: Any, q: Array, k: Array, v: Array, segments: Array):
      # Numbers decrease from sample to sample and then to padding, so that the
      # segments of a block lie between its first and its last number.
      segments = jnp.where(segments > 0, length + 2 - segments, 1)
      keys = (context.gather(x, sharding) for x in (k, v, segments))
      k, v, key_segments = map(padded, keys)
      q, segments = padded(q * scale), padded(segments)
      segments = splash.SegmentIds(q=segments, kv=key_segments)
      row = functools.partial(_attend_row, attend)
      return jax.vmap(row)(q, k, v, segments)[:, :time, :, : kind.head_dim]

    shape = parts * size(time), size(length)
    mask = splash.CausalMask(shape)
    if kind.window is not None:
      mask = splash.LocalMask(shape, (kind.window - 1, 0), 0)
    places = context.zigzag_order(length, parts)
    added = np.full((parts, size(time) - time), size(length) - 1, np.int32)
    mask.q_sequence = np.concatenate([places, added], axis=1).reshape(-1)
    attend = splash.make_splash_mha(
      splash.MultiHeadMask([mask] * heads),
      head_shards=1,
      q_seq_shards=parts,
      block_sizes=splash.BlockSizes(*[block] * 8),
    )
    spec = None
    if sharding is not None:
      of_mask = PartitionSpec(None, sharding.spec[1])
      spec = attend.manual_sharding_spec(NamedSharding(sharding.mesh, of_mask))
    run = context.on_devices(on_device, sharding, spec)
    return run(attend, q, k, v, segments)

  return PackedAttention(attention, sees_prefixes=False)


def _attend_row(
  attend: Any, q: Array, k: Array, v: Array, segments: splash.SegmentIds
):
  """Computes attention in one row, skipping blocks without a common segment.

  Args:
    attend: the kernel, `splash.SplashAttentionKernel`.
    q: [Q, H, d].
    k: [T, K, d].
    v: [T, K, d].
    segments: segments of the queries, [Q], and of the keys, [T].
  """
  where = segments, attend.kwargs["block_sizes"].block_q
  own = type(attend)(
    _skip_blocks(attend.fwd_mask_info, *where),
    _skip_blocks(attend.dq_mask_info, *where),
    _skip_blocks(attend.dkv_mask_info, *where, by_keys=True),
    **attend.kwargs,
  )
  heads_first = (x.swapaxes(0, 1) for x in (q, k, v))
  return own(*heads_first, segments).swapaxes(0, 1)


def _skip_blocks(
  info: Any, segments: splash.SegmentIds, block: int, *, by_keys: bool = False
):
  """Removes blocks without a common segment from a mask.

  Args:
    info: the mask; its arrays are [1, blocks of queries, visits] or, if
      `by_keys`, [1, visits, blocks of keys].
    segments: segments of the queries, [Q], and of the keys, [T].
    block: queries and keys per block.
    by_keys: whether the kernel visits query blocks for each block of keys,
      instead of key blocks for each block of queries.
  """
  axis = 1 if by_keys else 2
  q, k = (x.reshape(-1, block) for x in segments)
  own, visited = (k, q) if by_keys else (q, k)
  own = jnp.expand_dims(own, (0, axis))
  # Visits are indices of the mask's grid, which is smaller with a window.
  number = info.data_next.astype(jnp.int32)
  shared = own.min(axis=3) <= visited.max(axis=1)[number]
  shared &= visited.min(axis=1)[number] <= own.max(axis=3)
  block_mask = jnp.where(shared, info.block_mask, 0)
  # A skipped block prefetches the next visited block; after the last one, the
  # first one, where the next head or a neighboring block starts.
  size = block_mask.shape[axis]
  index = jax.lax.broadcasted_iota(jnp.int32, block_mask.shape, axis)
  index = jnp.where(block_mask > 0, index, size)
  following = jax.lax.cummin(index, axis, reverse=True)
  first = index.min(axis=axis, keepdims=True) % size
  following = jnp.where(following < size, following, first)
  following = jnp.take_along_axis(number, following, axis)
  return info._replace(
    block_mask=block_mask, data_next=following.astype(info.data_next.dtype)
  )


class Pallas(Interleaved):
  """The attention of a sampler.

  A block consists of whole pages with at most `kv_block` tokens in total, by
  default 512.
  """

  @property
  def padded(self) -> tuple[int, int]:
    return _padded_heads(self.heads), -(-self.kind.head_dim // _LANES) * _LANES

  def check(self, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    if dtype.itemsize == 1 and self.padded[0] == 1:
      raise InputError(
        f"a KV cache of {dtype} needs two KV heads per device, but the model"
        f" has {self.kind.num_kv_heads} on"
        f" {context.num_shards(self.sharding, 1)} devices: lower"
        " sampler.mesh.tensor"
      )

  def attend_contiguous(self, layer: Array, q: Array, start: Array):
    # Consecutive pages of Q tokens, which divides T.
    pages = layer.reshape(1, -1, q.shape[1], *layer.shape[2:])
    page_indices = jnp.arange(pages.shape[1], dtype=jnp.int32)
    positions = jnp.full((len(q), 1), start + q.shape[1] - 1)
    page_indices = page_indices.reshape(len(q), -1)
    return self.attend_paged(pages, q, page_indices, positions)

  def attend_paged(
    self, layer: Array, q: Array, page_indices: Array, positions: Array
  ):
    shape, size, window = q.shape, self.kind.head_dim, self.kind.window
    block = self.kv_block or _KV_BLOCK
    # Query heads stay with their KV head.
    grouped = q.reshape(*shape[:2], self.heads, -1, size)
    for axis, multiple in zip((2, 4), self.padded):
      grouped = context.pad(grouped, axis, multiple)
    q = grouped.reshape(*shape[:2], -1, self.padded[1])
    shards, held_pages, page_size = layer.shape[:3]
    pages = layer.reshape(-1, *layer.shape[2:])
    count, queries = shape[:2]
    # The kernel hangs on a sequence of length 0: a slot without pages reads a
    # page of another slot, and its result is discarded.
    held = page_indices[:, 0] < held_pages
    lengths = jnp.where(held, positions[:, -1] + 1, queries)
    shard = jnp.arange(count, dtype=jnp.int32) // (count // shards)
    page_indices = jnp.minimum(page_indices, held_pages - 1)
    page_indices += shard[:, None] * held_pages
    if window is not None:
      # The kernel masks tokens before the window, but would still read them.
      first = jnp.maximum(lengths - queries + 1 - window, 0) // page_size
      most = -(-(window + queries - 2) // page_size) + 1
      index = (
        jnp.arange(min(most, page_indices.shape[1]))[None] + first[:, None]
      )
      page_indices = jnp.take_along_axis(page_indices, index, 1, mode="clip")
      lengths -= first * page_size
    scale_kv = 1.0 if pages.dtype.itemsize == 1 else None  # Needed to cast.
    out = ragged.ragged_paged_attention(
      q.reshape(-1, *q.shape[2:]),
      pages,
      lengths,
      page_indices,
      jnp.arange(count + 1, dtype=jnp.int32) * queries,
      jnp.array([count], jnp.int32),
      sm_scale=size**-0.5,
      sliding_window=window,
      k_scale=scale_kv,
      v_scale=scale_kv,
      num_kv_pages_per_block=min(
        max(block // page_size, 1), page_indices.shape[1]
      ),
      num_queries_per_block=min(
        _PREFILL_QUERIES if queries >= _PREFILL_QUERIES else _DECODE_QUERIES,
        count * queries,
      ),
    )
    out = jnp.where(held[:, None, None], out.reshape(*shape[:2], -1), 0)
    out = out.reshape(grouped.shape)[:, :, : self.heads, :, :size]
    return out.reshape(shape)


def _padded_heads(heads: int):
  """Rounds a number of heads up to one that fills whole registers."""
  return next((n for n in (1, 2, 4) if n >= heads), -(-heads // 8) * 8)


PALLAS = Backend(refusal, make_packed_attention, Pallas)
