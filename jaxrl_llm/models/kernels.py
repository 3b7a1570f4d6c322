"""Attention backends: plain XLA, or Pallas kernels on TPUs.

One choice serves trainer and sampler. A backend is made for a kind of attention
and brings its own functions for
all that reads or writes the KV cache of a layer, so that the layout of the
cache is its own choice. Which page belongs to which slot is the caller's
(`BlockTables`).
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
  # Whether it looks at prefixes, so that samples may share their prompt; else
  # each of them has its own.
  sees_prefixes: bool


class Kernels(NamedTuple):
  """Attention on the KV cache of a layer, paged to decode, else contiguous.

  H query heads of size d share K heads of keys and values.
  """

  # Of the arrays of a paged layer; None: they lie on one device.
  kv_sharding: NamedSharding | None
  # Several slots may read a page, as sequences that begin alike do.
  shares_pages: bool
  # (shards, pages, page_size, dtype) -> a paged layer of zeros, see `kv_cache`.
  init_paged: Callable[..., Any]
  # (sequences, length, dtype) -> a contiguous layer of zeros, for prefill.
  init_contiguous: Callable[..., Any]
  # (paged layer, k [S,Q,K,d], v, BlockTables, positions [S,Q], writing [S,Q])
  #  -> the layer with them; what is not written leaves no trace.
  write_paged: Callable[..., Any]
  # (q [S,Q,H,d], paged layer, BlockTables, positions [S,Q]) -> [S,Q,H,d]: a
  #  query sees its own position and those before; 0 for a slot without pages.
  #  Positions of a slot are consecutive.
  paged_attention: Callable[..., jax.Array]
  # (contiguous layer, k [N,Q,K,d], v, start) -> the layer with them from
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
  """The backend of a name, for a sampler.

  Args:
    name: 'xla', which runs everywhere; 'pallas', kernels for TPUs; 'auto',
      'pallas' where it can serve the model and 'xla' elsewhere. On a GPU this
      is XLA.
    kind: of the attention.
    sharding: of slots along the first axis, and of KV heads along the second if
      it names one; None: all lie on one device.

  Raises:
    InputError: 'pallas' cannot serve this model on these devices.
    ValueError: there is no such name.
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
  """The backend of a name, for training.

  Args:
    name: as of `make_kernels`.
    kind: of the attention.
    sharding: of keys [R, C, K, d]; None: they lie on one device.

  Raises:
    InputError, ValueError: as of `make_kernels`.
  """
  tpu = _tpu(name, kind, sharding)
  if tpu is None:
    attend = functools.partial(attention.packed_attention, sharding=sharding)
    return PackedAttention(attend, sees_prefixes=True)
  return PackedAttention(
    tpu.make_packed_attention(kind, sharding=sharding), sees_prefixes=False
  )


def _tpu(name: str, kind: AttentionKind, sharding: NamedSharding | None) -> Any:
  """The module with the kernels for TPUs, None where plain XLA is to be."""
  if name not in NAMES:
    raise ValueError(f"kernels must be one of {NAMES}, got {name!r}")
  platform = "" if name == "xla" else platform_of(sharding)
  if name == "xla" or (name == "auto" and platform != "tpu"):
    return None
  # Pallas takes long to import, and plain XLA does not need it.
  from jaxrl_llm.models import kernels_tpu

  reason = kernels_tpu.refusal(kind, platform)
  if not reason:
    return kernels_tpu
  if name == "pallas":
    raise InputError(f"kernels='pallas' {reason}; use 'auto' or 'xla'")
  warnings.warn(f"kernels are 'xla': 'pallas' {reason}", stacklevel=4)
  return None


def platform_of(sharding: NamedSharding | None) -> str:
  """'cpu', 'gpu' or 'tpu': of the devices that programs are compiled for."""
  if sharding is None:
    return jax.default_backend()
  return next(iter(sharding.device_set)).platform


def layer_sharding(
  sharding: NamedSharding | None, *, heads_axis: int
) -> NamedSharding | None:
  """Of arrays [D, ...], with shards like slots, and heads on a later axis."""
  if sharding is None:
    return None
  slots, *heads = sharding.spec
  between = [None] * (heads_axis - 1)
  return NamedSharding(sharding.mesh, PartitionSpec(slots, *between, *heads))


def make_xla(
  kind: AttentionKind, *, sharding: NamedSharding | None = None
) -> Kernels:
  """Plain XLA: keys [..., K, d, T] and values [..., K, T, d] of a layer.

  With tokens last, the product of keys with a query runs along memory: on a
  CPU attention of a decode step took half the time of [..., T, d] keys.
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

  return Kernels(
    kv_sharding=layer_sharding(sharding, heads_axis=2),
    shares_pages=False,
    init_paged=init_paged,
    init_contiguous=init_contiguous,
    write_paged=paged_attention.write_paged,
    paged_attention=paged_attention.paged_attention,
    write_contiguous=attention.write_contiguous,
    prefill_attention=attention.prefill_attention,
  )
