"""Attention with Pallas kernels for GPUs, compiled by Triton.

Training uses flash attention on packed rows, which skips the blocks of other
samples (`flash_gpu`).

Samples share their prompt, except in models with sliding windows. For G
responses of L tokens to a prompt of P tokens, layers process P + G L tokens
instead of G (P + L) with copies of the prompt: 31 % less for P = 100, L = 200,
G = 16, and 6 % less for P = 512, L = 8,192, in FLOPs and in bytes. Prefixes
cost one comparison per score.

The sampler keeps keys and values in one array, [D, P, page_size, 2K, d] if
paged and [N, T, 2K, d] if contiguous, in which the value of each head follows
its key. Decoding reads the pages of a slot through its block table, starting
with the first page in its window, in partitions of a fixed number of tokens; a
second kernel merges them in order. The result of a slot depends neither on
other slots nor on the placement of its pages. Prefill uses the forward kernel
of training.

JAX has similar kernels in `jax.experimental.pallas.ops.gpu`. Its `mha` skips
key blocks only by causality and needs a copy of the keys for every query head;
its `paged_attention` takes one query per slot.

Products in float32 follow `jax_default_matmul_precision`, as elsewhere.

Reference: partitions as in Flash-Decoding (Dao et al. 2023).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import context
from jaxrl_llm.models.attention import MASKED, in_reach
from jaxrl_llm.models.backends import Backend, Interleaved, PackedAttention
from jaxrl_llm.models.kernels import flash_gpu
from jaxrl_llm.models.kernels.flash_gpu import Refs
from jaxrl_llm.models.layers import AttentionKind

_HEAD_DIMS = (16, 32, 64, 128, 256)
# Decoding: minimum tokens per partition, and maximum partitions per sequence.
_PARTITION, _MAX_PARTITIONS = 512, 32
_MAX_SIZE = 2**31  # Elements of an array: offsets in kernels have 32 bits.


def refusal(kind: AttentionKind) -> str:
  """Returns why the kernels do not support a model, or '' if they do."""
  if kind.head_dim not in _HEAD_DIMS:
    return f"needs head_dim in {_HEAD_DIMS}, but the model has {kind.head_dim}"
  return ""


def make_packed_attention(
  kind: AttentionKind, *, sharding: NamedSharding | None
) -> PackedAttention:
  """Makes causal flash attention within segments and their prefixes.

  Args:
    kind: the kind of attention.
    sharding: sharding of keys [R, C, K, d]; None: one device.
  """

  def on_device(
    q: Array, k: Array, v: Array, queries: context.Queries, keys: Array
  ):
    index = jnp.broadcast_to(queries.index[None], queries.segments.shape)
    prefixes = jnp.where(queries.prefixes > 0, queries.prefixes, -1)
    stacked = jnp.stack([index, queries.segments, prefixes], 1)
    return flash_gpu.attend(q, k, v, stacked, keys, kind.window)

  attend = context.over_rows(on_device, sharding)
  return PackedAttention(attend, sees_prefixes=kind.window is None)


class Pallas(Interleaved):
  """The attention of a sampler.

  A block is a partition, rounded up to a power of two: by default 512 tokens,
  or more in sequences over 16,384.
  """

  def check(self, shape: tuple[int, ...], _: jnp.dtype) -> None:
    ways = [context.num_shards(self.sharding, axis) for axis in (0, 1)]
    if math.prod(shape) >= _MAX_SIZE * math.prod(ways):
      raise InputError(
        f"kernels='pallas' supports fewer than {_MAX_SIZE:,} elements in the KV"
        " cache of a layer on one GPU; reduce sampler.kv_pages"
      )

  def attend_contiguous(self, layer: Array, q: Array, start: Array):
    index = start + jax.lax.broadcasted_iota(jnp.int32, q.shape[:2], 1)
    one = jnp.zeros_like(index)  # All tokens belong to one segment.
    queries = jnp.stack([index, one, one], 1)
    keys = jnp.zeros(layer.shape[:2], jnp.int32)
    return flash_gpu.attend(
      *(q, layer, layer, queries, keys), self.kind.window, interleaved=True
    )

  def attend_paged(
    self, layer: Array, q: Array, page_indices: Array, positions: Array
  ):
    window = self.kind.window
    (slots, count, heads, size), kv_heads = q.shape, layer.shape[3] // 2
    pages, page_size = layer.shape[1:3]
    length, queries = page_indices.shape[1] * page_size, count * heads
    least = pl.next_power_of_2(length) // _MAX_PARTITIONS
    partition = max(
      16, pl.next_power_of_2(self.kv_block or max(_PARTITION, least))
    )
    partitions = pl.cdiv(length, partition)
    rows = flash_gpu.block_size(q, queries // kv_heads)
    # Range of the tokens that a slot's queries attend to; empty without pages.
    # Draft tokens may lie beyond the longest sequence.
    ends = jnp.minimum(positions[:, -1] + 1, length)
    ends = jnp.where(page_indices[:, 0] < pages, ends, 0)
    starts = jnp.zeros_like(ends)
    if window is not None:
      starts = jnp.maximum(positions[:, 0] + 1 - window, 0)
      partitions = min(partitions, pl.cdiv(window + count - 2, partition) + 1)
    spans = jnp.stack([starts, ends], axis=1)
    by_partition = slots, partitions, queries
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    partial = flash_gpu.pallas_call(
      functools.partial(_decode_partition, partition, rows, window),
      (-(-queries // kv_heads // rows), partitions, kv_heads, slots),
      (array((*by_partition, size)), array(by_partition)),
      (q.reshape(slots, queries, size), layer, page_indices, positions, spans),
    )
    out = flash_gpu.pallas_call(
      functools.partial(_decode_merge, partition),
      (queries, slots),
      jax.ShapeDtypeStruct((slots, queries, size), q.dtype),
      (*partial, spans),
    )
    return out.reshape(q.shape)


def _decode_partition(
  partition: int, rows: int, window: int | None, arrays: Refs, *outputs: Ref
):
  out_ref, lse_ref = outputs
  q_ref, layer_ref, pages_ref, positions_ref, spans_ref = arrays
  block, part, head, slot = (pl.program_id(i) for i in range(4))
  shards, pages, page_size, kv_heads, size = layer_ref.shape
  group = q_ref.shape[1] // positions_ref.shape[1] // (kv_heads // 2)
  # Rows are the queries of a KV head, token by token.
  row = block * rows + jnp.arange(rows)
  query, member = flash_gpu.div(row, group), flash_gpu.rem(row, group)
  present = query < positions_ref.shape[1]
  at = (query * (kv_heads // 2) + head) * group + member
  dims = jnp.arange(size)[None]
  first, end = spans_ref[slot, 0], spans_ref[slot, 1]
  start = (flash_gpu.div(first, partition) + part) * partition

  @pl.when(start < end)
  def _():
    load = functools.partial(triton.load, other=0.0)
    position = load(positions_ref.at[slot, query], mask=present, other=0)
    q = load(q_ref.at[slot, at[:, None], dims], mask=present[:, None])
    shard = flash_gpu.div(slot, spans_ref.shape[0] // shards)
    keys = flash_gpu.block_size(q, partition)
    begin = jnp.maximum(start, flash_gpu.div(first, keys) * keys)

    def body(i: Array, carry: tuple[Array, ...]):
      place = begin + i * keys + jnp.arange(keys)
      page = pages_ref.at[slot, flash_gpu.div(place, page_size)]
      page = triton.load(page, mask=place < end, other=pages)
      # Draft tokens that cannot be accepted may have no page.
      held, within = page < pages, flash_gpu.rem(place, page_size)
      visible = in_reach(place[None], position[:, None], window) & held[None]
      token = shard, page[:, None], within[:, None]
      k, v = (layer_ref.at[*token, 2 * head + j, dims] for j in range(2))
      k, v = (load(x, mask=held[:, None]).astype(q.dtype) for x in (k, v))
      return flash_gpu.softmax_step(q, k, v, visible, carry)

    left = jnp.minimum(end, start + partition) - begin
    count = flash_gpu.div(left + keys - 1, keys)
    carry = flash_gpu.softmax_start(q)
    out, top, total = jax.lax.fori_loop(0, count, body, carry)
    out, lse = out / total[:, None], top + jnp.log2(total)
    to = out_ref.at[slot, part, at[:, None], dims]
    triton.store(to, out, mask=present[:, None])
    triton.store(lse_ref.at[slot, part, at], lse, mask=present)


def _decode_merge(partition: int, arrays: Refs, out_ref: Ref):
  partial_ref, lse_ref, spans_ref = arrays
  query, slot = pl.program_id(0), pl.program_id(1)
  part = jnp.arange(pl.next_power_of_2(lse_ref.shape[1]))
  first = flash_gpu.div(spans_ref[slot, 0], partition)
  written = (first + part) * partition < spans_ref[slot, 1]
  lse = triton.load(lse_ref.at[slot, part, query], mask=written, other=MASKED)
  dims = jnp.arange(out_ref.shape[2])[None]
  partial = partial_ref.at[slot, part[:, None], query, dims]
  partial = triton.load(partial, mask=written[:, None], other=0)
  weights = jnp.exp2(lse - jnp.max(lse))[:, None]
  out = jnp.sum(partial * weights, axis=0) / jnp.sum(weights)
  out_ref[slot, query] = out.astype(out_ref.dtype)


PALLAS = Backend(refusal, make_packed_attention, Pallas)
