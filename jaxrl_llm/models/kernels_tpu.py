"""The sampler's attention by the ragged paged kernel for TPUs of JAX.

A layer is one array, [D, P, L, 2K, d] in pages and [N, T, 2K, d] in rows, with
the key and the value of a head side by side. Slots read their own pages up to
their own length, so time follows the sum of lengths. Rows are read by the same
kernel, as slots whose pages lie in order: a chunk of a prefill sees what is
written before it and no more.

Sizes that the kernel lacks are filled with zeros: heads of keys up to 1, 2, 4
or a multiple of 8, d up to a multiple of 128, which is how wide the registers
are.

Reference:
  jax.experimental.pallas.ops.tpu.ragged_paged_attention.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.sharding import PartitionSpec

from jaxrl_llm.models import attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kernels import Kernels

_LANES = 128  # Numbers side by side in a register.
_SMALLEST = 64  # Of a head: below, more than half of what is read is zeros.
# Positions that the kernel holds at a time, and queries, few or many a slot.
# What fits; on no TPU were other values timed.
_POSITIONS = 512
_FEW, _MANY = 8, 32


def refusal(config: ModelConfig, platform: str) -> str:
  """Why the kernel cannot serve a model; '' if it can."""
  if platform != "tpu":
    return f"needs a TPU, and the devices are of {platform!r}"
  if config.head_dim < _SMALLEST:
    return f"needs head_dim >= {_SMALLEST}, and the model has {config.head_dim}"
  return ""


def make_pallas(
  config: ModelConfig, *, sharding: jax.sharding.NamedSharding | None
) -> Kernels:
  """The kernel for a model.

  Args:
    config: the architecture.
    sharding: of slots, along their first axis; None: all lie on one device.
  """
  heads, size = config.num_kv_heads, config.head_dim
  wide = (_tiled(heads), -(-size // _LANES) * _LANES)

  def init_pages(shards, pages, length, dtype):
    return jnp.zeros((shards, pages, length, 2 * wide[0], wide[1]), dtype)

  def init_rows(rows, length, dtype):
    return jnp.zeros((rows, length, 2 * wide[0], wide[1]), dtype)

  def run(function, layer, *arguments):
    return _on_shards(function, sharding, layer.shape[0])(layer, *arguments)

  def attend(function, q, layer, *arguments):
    function = functools.partial(function, scale=size**-0.5)
    out = run(function, layer, _widened(q, heads, wide), *arguments)
    return _narrowed(out, q.shape, heads, wide)

  def write_tokens(layer, k, v, pages, positions, writing):
    new = _side_by_side(k, v, wide)
    return run(_put_tokens, layer, new, pages.table, positions, writing)

  def paged_attention(q, layer, pages, positions):
    return attend(_of_slots, q, layer, pages.table, positions[:, -1] + 1)

  def write_rows(layer, k, v, start):
    starts = jnp.full(k.shape[:1], start, jnp.int32)
    return run(_put_rows, layer, _side_by_side(k, v, wide), starts)

  def row_attention(q, layer, start):
    lengths = jnp.full(q.shape[:1], start + q.shape[1], jnp.int32)
    return attend(_of_rows, q, layer, lengths)

  return Kernels(
    init_pages=init_pages,
    init_rows=init_rows,
    write_tokens=write_tokens,
    paged_attention=paged_attention,
    write_rows=write_rows,
    row_attention=row_attention,
  )


def _put_tokens(layer, new, table, positions, writing):
  """The layer [D, P, L, 2K, d] of a device with what is new, [S, Q, 2K, d]."""
  shards, count, length = layer.shape[:3]
  page, offset = attention.places(
    table, positions, writing, count=count, length=length
  )
  local = lambda x: x.reshape(shards, -1, *x.shape[2:])
  put = lambda layer, page, offset, new: layer.at[page, offset].set(
    new, mode="drop"
  )
  new = new.astype(layer.dtype)
  return jax.vmap(put)(layer, *map(local, (page, offset, new)))


def _put_rows(layer, new, starts):
  """The rows [N, T, 2K, d] of a device with new ones, [N, Q, 2K, d]."""
  put = jax.lax.dynamic_update_slice_in_dim
  return put(layer, new.astype(layer.dtype), starts[0], axis=1)


def _of_slots(layer, q, table, lengths, *, scale):
  """Attention of slots on shards of a device.

  Args:
    layer: [D, P, L, 2K, d].
    q: [S, Q, H, d].
    table: int32 [S, N].
    lengths: int32 [S], up to the last query.
    scale: of scores.
  """
  shards, count = layer.shape[:2]
  slots, queries = q.shape[:2]
  first = jnp.arange(slots, dtype=jnp.int32) // (slots // shards) * count
  held = table[:, 0] < count
  # A slot without pages reads one that it may not: what comes of it is not
  # used, but the kernel waits forever for a slot of no length.
  out = _ragged(
    q,
    layer.reshape(-1, *layer.shape[2:]),
    first[:, None] + jnp.minimum(table, count - 1),
    jnp.where(held, lengths, queries),
    scale=scale,
  )
  return jnp.where(held[:, None, None, None], out, 0)


def _of_rows(layer, q, lengths, *, scale):
  """Attention of rows: their pages are chunks of Q positions, in order.

  Args:
    layer: [N, T, 2K, d]; Q divides T.
    q: [N, Q, H, d].
    lengths: int32 [N], up to the last query.
    scale: of scores.
  """
  count, queries = q.shape[:2]
  pages = layer.reshape(-1, queries, *layer.shape[2:])
  table = jnp.arange(len(pages), dtype=jnp.int32).reshape(count, -1)
  return _ragged(q, pages, table, lengths, scale=scale)


def _ragged(q, pages, table, lengths, *, scale):
  """q [B, Q, H, d] on pages [P, L, 2K, d]; the last query is at length - 1."""
  count, queries = q.shape[:2]
  out = ragged.ragged_paged_attention(
    q.reshape(-1, *q.shape[2:]),
    pages,
    lengths,
    table,
    jnp.arange(count + 1, dtype=jnp.int32) * queries,
    jnp.array([count], jnp.int32),
    sm_scale=scale,
    num_kv_pages_per_block=min(
      max(_POSITIONS // pages.shape[1], 1), table.shape[1]
    ),
    num_queries_per_block=min(
      _MANY if queries >= _MANY else _FEW, count * queries
    ),
  )
  return out.reshape(q.shape)


def _on_shards(function, sharding, count):
  """The function on each device's part of its arguments, the layer first.

  The layer's `count` shards or rows stay where they are: left to itself, XLA
  spreads heads over the devices of other axes and gathers all pages at every
  step. What does not divide over the devices is computed whole on each.
  """
  if sharding is None:
    return function
  parts = math.prod(
    sharding.mesh.shape[axis] for axis in jax.tree.leaves(tuple(sharding.spec))
  )
  spec = PartitionSpec() if count % parts else sharding.spec
  return jax.shard_map(
    function,
    mesh=sharding.mesh,
    in_specs=spec,
    out_specs=spec,
    check_vma=False,  # The kernel does not say what varies.
  )


def _tiled(heads):
  """The next number of heads that fills whole registers."""
  return next((n for n in (1, 2, 4) if n >= heads), -(-heads // 8) * 8)


def _side_by_side(k, v, wide):
  """[B, Q, K, d] twice to [B, Q, 2K', d']: the key and value of each head."""
  both = _padded(jnp.stack([k, v], axis=3), {2: wide[0], 4: wide[1]})
  return both.reshape(*k.shape[:2], 2 * wide[0], wide[1])


def _widened(q, heads, wide):
  """[B, Q, H, d] to [B, Q, H', d'], with as many queries a head of keys."""
  q = q.reshape(*q.shape[:2], heads, -1, q.shape[3])
  q = _padded(q, {2: wide[0], 4: wide[1]})
  return q.reshape(*q.shape[:2], -1, wide[1])


def _narrowed(out, shape, heads, wide):
  """Undoes `_widened`."""
  out = out.reshape(*shape[:2], wide[0], -1, wide[1])
  return out[:, :, :heads, :, : shape[3]].reshape(shape)


def _padded(x, sizes):
  """Zeros at the end of axes, up to their sizes."""
  widths = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
  return jnp.pad(x, widths)
