"""Attention backends: plain XLA, or Pallas kernels on TPUs and GPUs.

Trainer and sampler use the same backend. A backend implements a kind of
attention, with all functions that read or write the KV cache of a layer, so it
can choose the layout of the cache. Callers assign pages to slots
(`BlockTables`).
"""

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from chex import Numeric
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError, check_choice
from jaxrl_llm.models import attention, context, kv_cache, paged_attention
from jaxrl_llm.models.kv_cache import BlockTables
from jaxrl_llm.models.layers import AttentionKind
from jaxrl_llm.models.paged_attention import PagedLayer

NAMES = ("auto", "xla", "pallas")
_MODULES = {  # Kernels by platform.
  "tpu": "jaxrl_llm.models.kernels.tpu",
  "gpu": "jaxrl_llm.models.kernels.gpu",
}


class PackedAttention(NamedTuple):
  """Attention on packed rows, for training."""

  # (q [R,C,H,d], k [R,C,K,d], v, segments [R,C], prefixes [R,C])
  #  -> [R,C,H,d]; see `attention.packed_attention`.
  attend: Callable[..., Array]
  # Whether `attend` supports prefixes, so that samples share one copy of their
  # prompt; otherwise each sample has its own copy.
  sees_prefixes: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Kernels:
  """Attention on a layer's KV cache: paged for decode, contiguous for prefill.

  H query heads of size d share K heads of keys and values. A subclass has

    init_paged: (shards, pages, page_size, dtype) -> a paged layer of zeros, see
      `kv_cache`.
    init_contiguous: (sequences, length, dtype) -> a contiguous layer of zeros,
      for prefill.
    write_paged: (paged layer, k [S,Q,K,d], v, BlockTables, positions [S,Q],
      writing [S,Q]) -> the updated layer; tokens where `writing` is False
      change nothing.
    paged_attention: (q [S,Q,H,d], paged layer, BlockTables, positions [S,Q]) ->
      [S,Q,H,d]: a query attends to its own and earlier positions; 0 for a slot
      without pages. Positions of a slot are consecutive.
    write_contiguous: (contiguous layer, k [N,Q,K,d], v, start) -> the layer,
      updated from position `start` on; `start` and the sequence length are
      multiples of Q.
    prefill_attention: (q [N,Q,H,d], contiguous layer, start) -> [N,Q,H,d], also
      causal.
  """

  kind: AttentionKind
  # Sharding of the slots and, if it has a second axis, of the KV heads. None is
  # for one device.
  sharding: NamedSharding | None = None
  # Tokens per block of a paged kernel; 0: chosen by shape.
  kv_block: int = 0
  # Axis of the KV heads of a paged layer.
  heads_axis: ClassVar[int]
  # Whether several slots may read the same page of a shared prefix.
  shares_pages: ClassVar[bool]

  @property
  def kv_sharding(self) -> NamedSharding | None:
    """Sharding of the arrays of a paged layer; None: one device."""
    return layer_sharding(self.sharding, heads_axis=self.heads_axis)


class Backend(NamedTuple):
  """Makes the attention functions for each kind of attention in a model."""

  # (kind) -> reason why the kind is not supported, or ''.
  refusal: Callable[[AttentionKind], str]
  # (kind, sharding=sharding of keys [R, C, K, d]) -> attention for training.
  make_packed_attention: Callable[..., PackedAttention]
  # (kind, sharding=sharding of slots, and of KV heads if it has a second axis,
  #  kv_block=tokens per block of a paged kernel, 0: chosen by shape)
  #  -> attention for sampling. A sharding of None means one device.
  make_kernels: Callable[..., Kernels]


def choose(
  name: str,
  kinds: Iterable[AttentionKind],
  sharding: NamedSharding | None = None,
) -> Backend:
  """Returns the backend for all kinds of attention in a model.

  All layers of a KV cache have the same layout, and so the same backend.

  Args:
    name: 'xla', which runs everywhere; 'pallas', kernels for TPUs or GPUs;
      'auto', 'pallas' if it supports model and devices, otherwise 'xla'.
    kinds: kinds of attention in the model.
    sharding: a sharding over the devices; None: one device.

  Raises:
    InputError: 'pallas' does not support this model on these devices.
    ValueError: The name is unknown.
  """
  check_choice("kernels", name, NAMES)
  platform = platform_of(sharding)
  if name == "xla" or (name == "auto" and platform not in _MODULES):
    return XLA
  reason = f"needs a TPU or a GPU, but the devices are {platform}"
  if platform in _MODULES:
    # Pallas is slow to import, and plain XLA does not need it.
    pallas = importlib.import_module(_MODULES[platform]).PALLAS
    reason = next(filter(None, map(pallas.refusal, kinds)), "")
    if not reason:
      return pallas
  if name == "pallas":
    raise InputError(f"kernels='pallas' {reason}; use 'auto' or 'xla'")
  warnings.warn(f"using kernels='xla': 'pallas' {reason}", stacklevel=3)
  return XLA


def platform_of(sharding: NamedSharding | None) -> str:
  """Returns the platform of the devices: 'cpu', 'gpu' or 'tpu'."""
  if sharding is None:
    return jax.default_backend()
  return next(iter(sharding.device_set)).platform


def layer_sharding(
  sharding: NamedSharding | None, *, heads_axis: int
) -> NamedSharding | None:
  """Returns the sharding of arrays [D, ...] with KV heads on a later axis."""
  if sharding is None:
    return None
  slots, *heads = sharding.spec
  between = [None] * (heads_axis - 1)
  return NamedSharding(sharding.mesh, PartitionSpec(slots, *between, *heads))


def on_devices(
  function: Callable, sharding: NamedSharding | None, like: Array, *arguments
):
  """Maps a function over devices; `like` is an array with its result's axes.

  The first axis (shards, sequences or slots) and the heads, the second to last
  axis, stay on their devices: on its own, XLA would gather all pages in every
  step. A first axis that is not divisible by its devices is replicated.
  """
  if sharding is None:
    return function(*arguments)
  slots, *heads = sharding.spec
  if len(arguments[0]) % context.num_shards(sharding, 0):
    slots = None

  def place(x: Array):
    after = (*[None] * (x.ndim - 3), *heads) if x.ndim > 3 else ()
    spec = PartitionSpec(*(slots, *after)[: x.ndim])
    return NamedSharding(sharding.mesh, spec)

  specs = (place(x).spec for x in arguments)
  return context.on_devices(function, place(like), *specs)(*arguments)


class Interleaved(Kernels):
  """A backend that stores keys and values of a token next to each other.

  A layer is one array, [D, P, page_size, 2K, d] if paged and [N, T, 2K, d] if
  contiguous, in which the value of each head follows its key. A subclass has

    attend_paged: (paged layer, q [S,Q,H,d], page_indices [S,N],
      positions [S,Q]) -> [S,Q,H,d], on one device.
    attend_contiguous: (contiguous layer, q [N,Q,H,d], position of the first
      query) -> [N,Q,H,d], on one device.
    check: raises if the shape and dtype of a paged layer are not supported.
  """

  heads_axis, shares_pages = 3, True

  @property
  def heads(self) -> int:
    """KV heads on a device."""
    return self.kind.num_kv_heads // context.num_shards(self.sharding, 1)

  @property
  def padded(self) -> tuple[int, int]:
    """KV heads on a device and head dimension, padded with zeros."""
    return self.heads, self.kind.head_dim

  @property
  def _entry(self) -> tuple[int, int]:
    """Shape of a token in a layer."""
    heads, size = self.padded
    return 2 * heads * context.num_shards(self.sharding, 1), size

  def init_paged(self, shards: int, pages: int, page_size: int, dtype: Any):
    shape = shards, pages, page_size, *self._entry
    self.check(shape, jnp.dtype(dtype))
    return (jnp.zeros(shape, dtype),)

  def init_contiguous(self, sequences: int, length: int, dtype: Any):
    return jnp.zeros((sequences, length, *self._entry), dtype)

  def _write(
    self, function: Callable, layer: Array, k: Array, v: Array, *where
  ):
    heads, size = self.padded

    def on_device(layer: Array, k: Array, v: Array, *where):
      missing = (0, heads - k.shape[2]), (0, 0), (0, size - k.shape[3])
      new = jnp.pad(jnp.stack([k, v], axis=3), ((0, 0), (0, 0), *missing))
      new = new.reshape(*k.shape[:2], 2 * heads, size).astype(layer.dtype)
      return function(layer, new, *where)

    return on_devices(on_device, self.sharding, layer, layer, k, v, *where)

  def write_paged(
    self, layer: tuple[Array], k: Array, v: Array, tables: BlockTables, *where
  ):
    where = tables.page_indices, *where
    return (self._write(kv_cache.write_tokens, layer[0], k, v, *where),)

  def paged_attention(
    self, q: Array, layer: tuple[Array], tables: BlockTables, positions: Array
  ):
    arrays = layer[0], q, tables.page_indices, positions
    return on_devices(self.attend_paged, self.sharding, q, *arrays)

  def write_contiguous(self, layer: Array, k: Array, v: Array, start: Numeric):
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return self._write(update, layer, k, v, jnp.int32(start))

  def prefill_attention(self, q: Array, layer: Array, start: Numeric):
    arrays = layer, q, jnp.int32(start)
    return on_devices(self.attend_contiguous, self.sharding, q, *arrays)


def make_packed_xla(
  kind: AttentionKind, *, sharding: NamedSharding | None
) -> PackedAttention:
  """Makes attention on packed rows in plain XLA."""
  attend = functools.partial(
    attention.packed_attention, sharding=sharding, window=kind.window
  )
  return PackedAttention(attend, sees_prefixes=kind.window is None)


class Xla(Kernels):
  """The XLA backend, with keys [..., K, d, T] and values [..., K, T, d].

  With tokens last, the product of a query with its keys reads memory in order:
  on a CPU, decode attention took half as long as with keys [..., T, d]. XLA
  chooses the blocks.
  """

  heads_axis, shares_pages = 2, False
  write_paged = staticmethod(paged_attention.write_paged)
  write_contiguous = staticmethod(attention.write_contiguous)

  def init_contiguous(self, *shape: Any):
    *outer, length, dtype = shape
    heads, size = self.kind.num_kv_heads, self.kind.head_dim
    return (
      jnp.zeros((*outer, heads, size, length), dtype),
      jnp.zeros((*outer, heads, length, size), dtype),
    )

  def init_paged(self, shards: int, pages: int, page_size: int, dtype: Any):
    sizes = paged_attention.segment_sizes(pages)
    make = lambda size: self.init_contiguous(shards, size, page_size, dtype)
    return tuple(map(make, sizes))

  def paged_attention(self, q: Array, layer: PagedLayer, *arguments):
    # Matrix products do not support 8-bit floats.
    wide = lambda x: x.astype(q.dtype) if x.dtype.itemsize == 1 else x
    arguments = jax.tree.map(wide, layer), *arguments
    return paged_attention.paged_attention(
      q, *arguments, window=self.kind.window
    )

  def prefill_attention(self, *arguments: Any):
    return attention.prefill_attention(*arguments, window=self.kind.window)


XLA = Backend(lambda kind: "", make_packed_xla, Xla)
