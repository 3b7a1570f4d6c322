"""Lossless sparse patches of weights, for slow links; NumPy on the host.

A small step in a narrow dtype leaves most stored numbers as they were. A patch
has the places and the new bits of the others, so that old weights and patch
give the new weights bit for bit. How many others there are depends on learning
rate and dtype; a leaf that changed in too many places is sent whole.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_llm.sharding import path_name
from jaxrl_llm.sync import digesting
from jaxrl_llm.sync.errors import SyncError
from jaxrl_llm.sync.push import SamplerWeights

_GAP_DTYPES = (np.uint8, np.uint16, np.uint32)


@dataclasses.dataclass(frozen=True)
class LeafPatch:
  """What changed in one array."""

  dtype: str
  shape: tuple[int, ...]
  # Unsigned [n], elements passed over before each one that is written; None:
  # all are written.
  gaps: np.ndarray | None
  bits: np.ndarray  # Unsigned [n], new bits.

  @property
  def nbytes(self) -> int:
    return self.bits.nbytes + (0 if self.gaps is None else self.gaps.nbytes)


@dataclasses.dataclass(frozen=True)
class Patch:
  """From the weights of one version to those of another."""

  base: int  # Version that it changes.
  version: int  # Version that it makes.
  base_digest: int
  digests: digesting.Digests  # Of every leaf of the new version.
  leaves: dict[str, LeafPatch]  # By path; without those that did not change.

  @property
  def nbytes(self) -> int:
    """Bytes of places and bits."""
    return sum(leaf.nbytes for leaf in self.leaves.values())


def diff(old: SamplerWeights, new: SamplerWeights) -> Patch:
  """The patch with `apply(old, diff(old, new))` ≡ new, bit for bit.

  Args:
    old: weights that the receiver has.
    new: weights of the same paths, shapes and dtypes.

  Raises:
    SyncError: a leaf has another path, shape or dtype, or a stamp is wrong.
  """
  before = dict(zip(*digesting.named_leaves(jax.device_get(old.params))))
  after = dict(zip(*digesting.named_leaves(jax.device_get(new.params))))
  route = f"version {old.version} to {new.version}"
  for name in sorted(set(before) ^ set(after)):
    raise SyncError(f"{name} is in one of {route} only; send the weights whole")
  parts = digesting.digests(new.params)
  if digesting.fold(parts) != new.digest:
    raise SyncError(
      f"the stamp of version {new.version} is not that of its parameters; make"
      " no patch of it"
    )
  leaves = {}
  for name, array in after.items():
    array, base = np.asarray(array), np.asarray(before[name])
    if (base.shape, base.dtype) != (array.shape, array.dtype):
      raise SyncError(
        f"{name} goes from {base.dtype}{base.shape} to"
        f" {array.dtype}{array.shape}, {route}; send the weights whole"
      )
    leaf = _diff_leaf(base, array)
    if leaf is not None:
      leaves[name] = leaf
  return Patch(old.version, new.version, old.digest, parts, leaves)


def apply(old: SamplerWeights, patch: Patch) -> SamplerWeights:
  """The weights that the patch was made of; `old` stays as it is.

  Leaves that did not change are shared with `old`.

  Args:
    old: weights of the version that the patch changes.
    patch: the change.

  Raises:
    SyncError: the patch is for other weights or damaged.
  """
  route = f"the patch from version {patch.base} to {patch.version}"
  if old.version != patch.base:
    raise SyncError(
      f"{route} does not fit weights of version {old.version}; apply the"
      " patches in their order, or send the weights whole"
    )
  if old.digest != patch.base_digest:
    raise SyncError(
      f"{route} was made for other weights than these of version"
      f" {old.version}; send the weights whole"
    )
  names, _ = digesting.named_leaves(old.params)
  for name in sorted(set(names) ^ set(patch.digests)):
    raise SyncError(f"{route}: {name} is on one side only; damaged, send again")

  def new_leaf(path, leaf):
    name, leaf = path_name(path), np.asarray(leaf)
    change = patch.leaves.get(name)
    return leaf if change is None else _apply_leaf(leaf, change, name, route)

  params = jax.tree_util.tree_map_with_path(
    new_leaf, jax.device_get(old.params)
  )
  parts = digesting.digests(params)
  for name in names:
    if parts[name] != patch.digests[name]:
      raise SyncError(
        f"{route} does not give {name} of version {patch.version}: patch or"
        " weights are damaged; send the weights whole"
      )
  return SamplerWeights(params, patch.version, digesting.fold(parts))


def bits_dtype(dtype: Any) -> np.dtype:
  """The unsigned integer as wide as a dtype."""
  return np.dtype(f"u{np.dtype(dtype).itemsize}")


def _bits(array: np.ndarray) -> np.ndarray:
  """Stored bits, flat."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(bits_dtype(array.dtype))


def _diff_leaf(old: np.ndarray, new: np.ndarray) -> LeafPatch | None:
  before, after = _bits(old), _bits(new)
  changed = np.flatnonzero(before != after)
  if not len(changed):
    return None
  gaps = _code(changed, itemsize=after.itemsize)
  dtype = str(new.dtype)
  if len(gaps) * (gaps.itemsize + after.itemsize) >= after.nbytes:
    return LeafPatch(dtype, new.shape, None, after.copy())
  return LeafPatch(dtype, new.shape, gaps, after[_places(gaps)])


def _code(changed: np.ndarray, *, itemsize: int) -> np.ndarray:
  """Gaps between increasing places, in the dtype that makes the patch smallest.

  A gap too wide for the dtype is crossed by writing elements in it that stay
  as they are, which costs less than a wider dtype if such gaps are few.
  """
  gaps = np.diff(changed, prepend=-1) - 1

  def cost(dtype):
    steps = len(gaps) + int(np.sum(gaps // (np.iinfo(dtype).max + 1)))
    return steps * (np.dtype(dtype).itemsize + itemsize)

  dtype = min(_GAP_DTYPES, key=cost)
  widest = np.iinfo(dtype).max
  last = np.cumsum(gaps // (widest + 1) + 1) - 1
  coded = np.full(last[-1] + 1, widest, dtype)
  coded[last] = gaps % (widest + 1)
  return coded


def _places(gaps: np.ndarray) -> np.ndarray:
  """Places of the elements that are written, int64 [n]."""
  return np.cumsum(gaps.astype(np.int64) + 1) - 1


def _apply_leaf(
  old: np.ndarray, change: LeafPatch, name: str, route: str
) -> np.ndarray:
  damaged = f"{route}: {name} does not fit the weights; damaged, send it again"
  if (str(old.dtype), old.shape) != (change.dtype, tuple(change.shape)):
    raise SyncError(damaged)
  if change.gaps is None:
    bits = change.bits.copy()
  else:
    bits, places = _bits(old).copy(), _places(change.gaps)
    if len(places) != len(change.bits) or places[-1] >= len(bits):
      raise SyncError(damaged)
    bits[places] = change.bits
  if len(bits) != old.size:
    raise SyncError(damaged)
  return bits.view(old.dtype).reshape(old.shape)
