"""Attention backends: plain XLA, or Pallas kernels on TPUs.

Trainer and sampler use the same backend. A backend is made for a kind of
attention and has its own functions for everything that reads or writes the KV
cache of a layer, so that it chooses the layout of the cache. Callers assign
pages to slots (`BlockTables`).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import attention, paged_attention
from jaxrl_llm.models.layers import AttentionKind

NAMES = ("auto", "xla", "pallas")


class PackedAttention(NamedTuple):
  """Attention of training, on packed rows."""

  # (q [R,C,H,d], k [R,C,K,d], v, segments [R,C], prefixes [R,C])
  #  -> [R,C,H,d]; see `attention.packed_attention`.
  attend: Callable[..., jax.Array]
  # Whether it supports prefixes, with which samples share one prompt; otherwise
  # each sample has a copy.
  sees_prefixes: bool


class Kernels(NamedTuple):
  """Attention on the KV cache of a layer: paged for decode, else contiguous.

  H query heads of size d share K heads of keys and values.
  """

  # Sharding of the arrays of a paged layer; None: one device.
  kv_sharding: NamedSharding | None
  # Whether several slots may read one page, for sequences with equal prefixes.
  shares_pages: bool
  # (shards, pages, page_size, dtype) -> a paged layer of zeros, see `kv_cache`.
  init_paged: Callable[..., Any]
  # (sequences, length, dtype) -> a contiguous layer of zeros, for prefill.
  init_contiguous: Callable[..., Any]
  # (paged layer, k [S,Q,K,d], v, BlockTables, positions [S,Q], writing [S,Q])
  #  -> the updated layer; tokens that are not written leave no trace.
  write_paged: Callable[..., Any]
  # (q [S,Q,H,d], paged layer, BlockTables, positions [S,Q]) -> [S,Q,H,d]: a
  #  query sees its own position and those before; 0 for a slot without pages.
  #  Positions of a slot are consecutive.
  paged_attention: Callable[..., jax.Array]
  # (contiguous layer, k [N,Q,K,d], v, start) -> the layer updated from
  #  position start on; start and the sequences' length are multiples of Q.
  write_contiguous: Callable[..., Any]
  # (q [N,Q,H,d], contiguous layer, start) -> [N,Q,H,d], likewise causal.
  prefill_attention: Callable[..., jax.Array]


def make_kernels(
  name: str,
  kind: AttentionKind,
  *,
  sharding: NamedSharding | None = None,
) -> Kernels:
  """Makes the attention backend of a sampler.

  Args:
    name: 'xla', which runs everywhere; 'pallas', kernels for TPUs; 'auto',
      'pallas' if it supports model and devices, otherwise 'xla', as on GPUs.
    kind: the kind of attention.
    sharding: sharding of slots, and of KV heads if it has a second axis; None:
      one device.

  Raises:
    InputError: 'pallas' does not support this model on these devices.
    ValueError: The name is unknown.
  """
  tpu = _tpu(name, kind, sharding)
  if tpu is None:
    return make_xla(kind, sharding=sharding)
  return tpu.make_pallas(kind, sharding=sharding)


def make_packed_attention(
  name: str,
  kind: AttentionKind,
  *,
  sharding: NamedSharding | None = None,
) -> PackedAttention:
  """Makes the attention backend of training.

  Args:
    name: as in `make_kernels`.
    kind: the kind of attention.
    sharding: sharding of keys [R, C, K, d]; None: one device.

  Raises:
    InputError, ValueError: As in `make_kernels`.
  """
  tpu = _tpu(name, kind, sharding)
  if tpu is None:
    attend = functools.partial(attention.packed_attention, sharding=sharding)
    return PackedAttention(attend, sees_prefixes=True)
  return PackedAttention(
    tpu.make_packed_attention(kind, sharding=sharding), sees_prefixes=False
  )


def _tpu(name: str, kind: AttentionKind, sharding: NamedSharding | None) -> Any:
  """Returns the module with kernels for TPUs, or None for plain XLA."""
  if name not in NAMES:
    raise ValueError(f"kernels must be one of {NAMES}, got {name!r}")
  platform = "" if name == "xla" else platform_of(sharding)
  if name == "xla" or (name == "auto" and platform != "tpu"):
    return None
  # Pallas is slow to import, and plain XLA does not need it.
  from jaxrl_llm.models import kernels_tpu

  reason = kernels_tpu.refusal(kind, platform)
  if not reason:
    return kernels_tpu
  if name == "pallas":
    raise InputError(f"kernels='pallas' {reason}; use 'auto' or 'xla'")
  warnings.warn(f"kernels are 'xla': 'pallas' {reason}", stacklevel=4)
  return None


def platform_of(sharding: NamedSharding | None) -> str:
  """Returns the platform of the devices: 'cpu', 'gpu' or 'tpu'."""
  if sharding is None:
    return jax.default_backend()
  return next(iter(sharding.device_set)).platform


def layer_sharding(
  sharding: NamedSharding | None, *, heads_axis: int
) -> NamedSharding | None:
  """Sharding of arrays [D, ...] whose KV heads are on a later axis."""
  if sharding is None:
    return None
  slots, *heads = sharding.spec
  between = [None] * (heads_axis - 1)
  return NamedSharding(sharding.mesh, PartitionSpec(slots, *between, *heads))


def make_xla(
  kind: AttentionKind, *, sharding: NamedSharding | None = None
) -> Kernels:
  """Makes the XLA backend, with keys [..., K, d, T] and values [..., K, T, d].

  With tokens last, the product of a query with its keys reads memory in order:
  on a CPU, decode attention took half the time of keys [..., T, d].
  """
  heads, size = kind.num_kv_heads, kind.head_dim

  def zeros(*shape, dtype):
    *outer, length = shape
    return (
      jnp.zeros((*outer, heads, size, length), dtype),
      jnp.zeros((*outer, heads, length, size), dtype),
    )

  def init_paged(shards, pages, page_size, dtype):
    sizes = paged_attention.segment_sizes(pages)
    return tuple(zeros(shards, n, page_size, dtype=dtype) for n in sizes)

  def init_contiguous(sequences, length, dtype):
    return zeros(sequences, length, dtype=dtype)

  def attend(q, layer, *arguments):
    # No product reads floats of eight bits.
    wide = lambda x: x.astype(q.dtype) if x.dtype.itemsize == 1 else x
    layer = jax.tree.map(wide, layer)
    return paged_attention.paged_attention(q, layer, *arguments)

  return Kernels(
    kv_sharding=layer_sharding(sharding, heads_axis=2),
    shares_pages=False,
    init_paged=init_paged,
    init_contiguous=init_contiguous,
    write_paged=paged_attention.write_paged,
    paged_attention=attend,
    write_contiguous=attention.write_contiguous,
    prefill_attention=attention.prefill_attention,
  )
