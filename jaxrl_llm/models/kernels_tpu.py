"""Attention by the kernels that JAX has for TPUs.

Training has splash attention, which skips what causality hides. It compares
segments and knows no prefixes, so that every sample has a prompt of its own:
long responses, which TPUs are for, hardly notice.

The sampler has ragged paged attention.
The KV cache of a layer is one array, [D, P, page_size, 2K, d] if paged and
[N, T, 2K, d] if contiguous, with the key and the value of a head side by side.
Slots read their own pages up to their own length, so time follows the sum of
lengths. A prefill uses the same kernel, as slots whose pages lie in order: a
chunk of it sees what is written before it and no more.

Sizes that the kernel lacks are padded with zeros: KV heads up to 1, 2, 4 or a
multiple of 8, d up to a multiple of 128, which is how wide the registers are.

Reference:
  jax.experimental.pallas.ops.tpu: splash_attention, ragged_paged_attention.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models import context, kv_cache
from jaxrl_llm.models.kernels import Kernels, layer_sharding
from jaxrl_llm.models.layers import AttentionKind

_LANES = 128  # Numbers side by side in a register.
_SMALLEST = 64  # Of a head: below, more than half of what is read is zeros.
# Block sizes of the kernel: tokens of the KV cache, and queries when a slot has
# few (decode) or many (prefill). They fit; on no TPU were others timed.
_KV_BLOCK = 512
_DECODE_QUERIES, _PREFILL_QUERIES = 8, 32
_BLOCKS = ("block_q", "block_kv", "block_kv_compute")
_BLOCKS += ("block_q_dq", "block_kv_dq")
_BLOCKS += ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
_ROW_BLOCK = 512  # Of splash attention: queries, and keys, at a time.


def refusal(kind: AttentionKind, platform: str) -> str:
  """Why the kernel cannot serve a model; '' if it can."""
  if platform != "tpu":
    return f"needs a TPU, and the devices are of {platform!r}"
  if kind.head_dim < _SMALLEST:
    return f"needs head_dim >= {_SMALLEST}, and the model has {kind.head_dim}"
  return ""


def make_packed_attention(
  kind: AttentionKind, *, sharding: NamedSharding | None
) -> Callable[..., jax.Array]:
  """Splash attention of packed rows: each segment for itself, causal.

  Args:
    kind: of the attention.
    sharding: of keys [R, C, K, d]; None: they lie on one device.
  """
  scale = kind.head_dim**-0.5
  parts = context.ways(sharding, 1)
  heads = kind.num_heads // context.ways(sharding, 2)

  def attention(q, k, v, segments, prefixes):
    del prefixes  # There are none.
    length, time = q.shape[1], q.shape[1] // parts
    block = min(_ROW_BLOCK, -(-time // _LANES) * _LANES)
    size = lambda tokens: -(-tokens // block) * block

    def padded(x, tokens):
      # What is added is a segment of its own.
      sizes = {1: size(tokens), 3: -(-kind.head_dim // _LANES) * _LANES}
      return _pad(x, sizes)

    def on_device(attend, q, k, v, segments):
      segments += 1
      keys = (context.gather(x, sharding) for x in (k, v, segments))
      k, v, key_segments = (padded(x, length) for x in keys)
      q, segments = padded(q * scale, time), padded(segments, time)
      out = jax.vmap(attend)(
        *(x.swapaxes(1, 2) for x in (q, k, v)),
        splash.SegmentIds(q=segments, kv=key_segments),
      )
      return out.swapaxes(1, 2)[:, :time, :, : kind.head_dim]

    mask = splash.CausalMask((parts * size(time), size(length)))
    places = context.order(length, parts)
    added = np.full((parts, size(time) - time), size(length) - 1, np.int32)
    mask.q_sequence = np.concatenate([places, added], axis=1).reshape(-1)
    attend = splash.make_splash_mha(
      splash.MultiHeadMask([mask] * heads),
      head_shards=1,
      q_seq_shards=parts,
      block_sizes=splash.BlockSizes(**dict.fromkeys(_BLOCKS, block)),
    )
    spec = None
    if sharding is not None:
      of_mask = PartitionSpec(None, sharding.spec[1])
      spec = attend.manual_sharding_spec(NamedSharding(sharding.mesh, of_mask))
    run = context.on_devices(on_device, sharding, spec)
    return run(attend, q, k, v, segments)

  return attention


def make_pallas(
  kind: AttentionKind, *, sharding: NamedSharding | None
) -> Kernels:
  """The kernel for a model.

  Args:
    kind: of the attention.
    sharding: as in `make_kernels`.
  """
  parts = context.ways(sharding, 1)
  heads, size = kind.num_kv_heads // parts, kind.head_dim  # Of a device.
  padded = (_padded_heads(heads), -(-size // _LANES) * _LANES)
  # The keys and values of a token, on all devices.
  entry = (parts * 2 * padded[0], padded[1])

  def init_paged(shards, pages, page_size, dtype):
    return (jnp.zeros((shards, pages, page_size, *entry), dtype),)

  def init_contiguous(sequences, length, dtype):
    return jnp.zeros((sequences, length, *entry), dtype)

  def write(function, layer, k, v, *arguments):
    def on_device(layer, k, v, *arguments):
      return function(layer, _interleave(k, v, padded), *arguments)

    return _on_devices(on_device, sharding)(layer, layer, k, v, *arguments)

  def attend(function, layer, q, *arguments):
    def on_device(layer, q, *arguments):
      queries = _pad_queries(q, heads, padded)
      out = function(layer, queries, *arguments, scale=size**-0.5)
      return _unpad_queries(out, q.shape, heads, padded)

    return _on_devices(on_device, sharding)(q, layer, q, *arguments)

  def write_paged(layer, k, v, block_tables, positions, writing):
    where = block_tables.page_indices, positions, writing
    return (write(_write_paged, layer[0], k, v, *where),)

  def paged_attention(q, layer, block_tables, positions):
    indices, lengths = block_tables.page_indices, positions[:, -1] + 1
    return attend(_attend_paged, layer[0], q, indices, lengths)

  def write_contiguous(layer, k, v, start):
    starts = jnp.full(k.shape[:1], start, jnp.int32)
    return write(_write_contiguous, layer, k, v, starts)

  def prefill_attention(q, layer, start):
    lengths = jnp.full(q.shape[:1], start + q.shape[1], jnp.int32)
    return attend(_attend_contiguous, layer, q, lengths)

  return Kernels(
    kv_sharding=layer_sharding(sharding, heads_axis=3),
    shares_pages=True,
    init_paged=init_paged,
    init_contiguous=init_contiguous,
    write_paged=write_paged,
    paged_attention=paged_attention,
    write_contiguous=write_contiguous,
    prefill_attention=prefill_attention,
  )


def _write_paged(layer, new, page_indices, positions, writing):
  """Tokens [S, Q, 2K, d] into a device's [D, P, page_size, 2K, d]."""
  shards, pages, page_size = layer.shape[:3]
  page, offset = kv_cache.page_and_offset(
    page_indices, positions, writing, pages, page_size
  )
  by_shard = lambda x: x.reshape(shards, -1, *x.shape[2:])
  write = lambda layer, page, offset, new: layer.at[page, offset].set(
    new, mode="drop"
  )
  new = new.astype(layer.dtype)
  return jax.vmap(write)(layer, *map(by_shard, (page, offset, new)))


def _write_contiguous(layer, new, starts):
  """Tokens [N, Q, 2K, d] into the sequences [N, T, 2K, d] of a device."""
  return jax.lax.dynamic_update_slice_in_dim(
    layer, new.astype(layer.dtype), starts[0], axis=1
  )


def _attend_paged(layer, q, page_indices, lengths, *, scale):
  """Attention of slots on shards of a device.

  Args:
    layer: [D, P, page_size, 2K, d].
    q: [S, Q, H, d].
    page_indices: int32 [S, N].
    lengths: int32 [S], up to the last query.
    scale: of scores.
  """
  shards, pages = layer.shape[:2]
  slots, queries = q.shape[:2]
  first = jnp.arange(slots, dtype=jnp.int32) // (slots // shards) * pages
  held = page_indices[:, 0] < pages
  # The kernel hangs on a sequence of length 0: a slot without pages reads some
  # page of another, and what comes of it is not used.
  out = _ragged(
    q,
    layer.reshape(-1, *layer.shape[2:]),
    first[:, None] + jnp.minimum(page_indices, pages - 1),
    jnp.where(held, lengths, queries),
    scale=scale,
  )
  return jnp.where(held[:, None, None, None], out, 0)


def _attend_contiguous(layer, q, lengths, *, scale):
  """Attention of sequences: their pages are chunks of Q tokens, in order.

  Args:
    layer: [N, T, 2K, d]; Q divides T.
    q: [N, Q, H, d].
    lengths: int32 [N], up to the last query.
    scale: of scores.
  """
  count, queries = q.shape[:2]
  pages = layer.reshape(-1, queries, *layer.shape[2:])
  page_indices = jnp.arange(len(pages), dtype=jnp.int32).reshape(count, -1)
  return _ragged(q, pages, page_indices, lengths, scale=scale)


def _ragged(q, pages, page_indices, lengths, *, scale):
  """q [B, Q, H, d] on [P, page_size, 2K, d]; the last query is the newest."""
  count, queries = q.shape[:2]
  out = ragged.ragged_paged_attention(
    q.reshape(-1, *q.shape[2:]),
    pages,
    lengths,
    page_indices,
    jnp.arange(count + 1, dtype=jnp.int32) * queries,
    jnp.array([count], jnp.int32),
    sm_scale=scale,
    num_kv_pages_per_block=min(
      max(_KV_BLOCK // pages.shape[1], 1), page_indices.shape[1]
    ),
    num_queries_per_block=min(
      _PREFILL_QUERIES if queries >= _PREFILL_QUERIES else _DECODE_QUERIES,
      count * queries,
    ),
  )
  return out.reshape(q.shape)


def _on_devices(function, sharding):
  """The function on each device's part: (like what it returns, arguments).

  Shards, sequences and slots, along the first axis, stay where they are, and so
  do heads, the last axis but one of arrays that have them: alone, XLA gathers
  all pages at every step. What does not divide over devices is computed whole
  on each.
  """
  if sharding is None:
    return lambda like, *arguments: function(*arguments)
  slots, *heads = sharding.spec

  def run(like, *arguments):
    whole = len(arguments[0]) % context.ways(sharding, 0)

    def spec(x):
      between = [None] * (x.ndim - 3)
      last = (*between, *heads) if x.ndim > 3 else ()
      return PartitionSpec(None if whole else slots, *last)

    return jax.shard_map(
      function,
      mesh=sharding.mesh,
      in_specs=tuple(map(spec, arguments)),
      out_specs=spec(like),
      check_vma=False,  # The kernel does not say what varies.
    )(*arguments)

  return run


def _padded_heads(heads):
  """The next number of heads that fills whole registers."""
  return next((n for n in (1, 2, 4) if n >= heads), -(-heads // 8) * 8)


def _interleave(k, v, padded):
  """[B, Q, K, d] twice to [B, Q, 2K', d']: the key and value of each head."""
  both = _pad(jnp.stack([k, v], axis=3), {2: padded[0], 4: padded[1]})
  return both.reshape(*k.shape[:2], 2 * padded[0], padded[1])


def _pad_queries(q, heads, padded):
  """[B, Q, H, d] to [B, Q, H', d'], with as many query heads a KV head."""
  q = q.reshape(*q.shape[:2], heads, -1, q.shape[3])
  q = _pad(q, {2: padded[0], 4: padded[1]})
  return q.reshape(*q.shape[:2], -1, padded[1])


def _unpad_queries(out, shape, heads, padded):
  """Undoes `_pad_queries`."""
  out = out.reshape(*shape[:2], padded[0], -1, padded[1])
  return out[:, :, :heads, :, : shape[3]].reshape(shape)


def _pad(x, sizes):
  """Zeros at the end of axes, up to their sizes."""
  widths = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
  return jnp.pad(x, widths)
