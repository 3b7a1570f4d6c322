"""Checksums of trees: 64 bits per array, computed on its devices.

Two parameter trees that should be equal are rarely on the same devices, so they
are compared by checksums. Checksums depend on bits, not values: 0 and −0
differ, as do NaNs with different payloads. They also depend on the path, shape
and dtype of a leaf and on the index of every element, but not on mesh or
sharding: a sum of integers is exact in any order.
"""

import collections
import functools
import hashlib
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.system import processes

Checksums = Mapping[str, int]  # Path of a leaf -> 64 bits.


def checksum(tree: Any) -> int:
  """Returns a 64-bit checksum of paths, shapes, dtypes and bits of a tree."""
  return combine(checksums(tree))


def checksums(tree: Any) -> dict[str, int]:
  """Returns the checksum of every leaf by its path.

  With the bits u_i of element i as an integer, a bijection m of 32-bit
  integers and p_i = m(i + seed of the leaf), its halves are

    Σ m(u_i ⊕ p_i)   and   Σ m(u_i ⊕ p_i) · (p_i | 1)   (mod 2³²).

  A change of one element is always detected; an accidental change of several is
  missed with a probability near 2⁻⁶⁴.

  Args:
    tree: arrays on any devices or in NumPy, of at most 32-bit numbers.

  Raises:
    TypeError: A leaf has wider or complex numbers, or none.
    ValueError: Two leaves have the same path name.
  """
  return leaf_checksums(*named_leaves(tree))


def copies_that_differ(tree: Any) -> list[str]:
  """Finds replicas on several devices that differ.

  Args:
    tree: arrays; replicas on this process's devices are compared.

  Returns:
    'PATH on DEVICE' for each replica that differs from the most common one.
  """
  copies = collections.defaultdict(dict)
  for name, leaf in zip(*named_leaves(tree)):
    for shard in leaf.addressable_shards if _is_copied(leaf) else ():
      sums = copies[name, str(shard.index)]
      sums[str(shard.device)] = _start(name, shard.data)
  found = []
  for (name, _), sums in copies.items():
    bits = {d: tuple(x.tolist()) for d, x in jax.device_get(sums).items()}
    [(usual, _)] = collections.Counter(bits.values()).most_common(1)
    found += [f"{name} on {d}" for d, x in bits.items() if x != usual]
  return found


def combine(parts: Checksums) -> int:
  """Combines checksums of leaves into one, in any order."""
  whole = hashlib.blake2b(digest_size=8)
  for name in sorted(parts):
    whole.update(f"{name}\0{parts[name]}\0".encode())
  return int.from_bytes(whole.digest(), "little")


def of_bytes(data: bytes) -> str:
  """Returns a 128-bit digest of bytes."""
  return hashlib.blake2b(data, digest_size=16).hexdigest()


def of_files(paths: Iterable[pathlib.Path]) -> str:
  """Returns the digest of the bytes of files, one after the other."""
  whole = hashlib.blake2b(digest_size=16)
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(1 << 20):
        whole.update(block)
  return whole.hexdigest()


def path_name(path: Sequence[Any]) -> str:
  """Returns a JAX key path as text, such as 'layers/mlp/up/kernel'."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> tuple[list[str], list[Any]]:
  """Returns path names and leaves of a tree.

  Raises:
    ValueError: Two leaves have the same path name.
  """
  pairs = jax.tree_util.tree_leaves_with_path(tree)
  names = [path_name(path) for path, _ in pairs]
  if len(set(names)) < len(names):
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"two leaves have the path {twice!r}; rename one")
  return names, [leaf for _, leaf in pairs]


def leaf_checksums(
  names: Sequence[str], leaves: Sequence[Any]
) -> dict[str, int]:
  """Returns the same as `checksums` for leaves with the given paths."""
  return finish_checksums(start_checksums(names, leaves))


def start_checksums(
  names: Sequence[str], leaves: Sequence[Any]
) -> dict[str, jax.Array]:
  """Starts `leaf_checksums` without waiting; leaves may be donated after it."""
  return {name: _start(name, leaf) for name, leaf in zip(names, leaves)}


def finish_checksums(started: Mapping[str, jax.Array]) -> dict[str, int]:
  """Waits for started checksums."""
  return {
    name: int(low) | int(high) << 32
    for name, (low, high) in processes.to_host(dict(started)).items()
  }


def _is_copied(leaf: Any) -> bool:
  shards = getattr(leaf, "addressable_shards", ())
  return len({str(shard.index) for shard in shards}) < len(shards)


def _start(name: str, leaf: Any) -> jax.Array:
  leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
  numeric = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
  if not numeric or leaf.dtype.itemsize > 4:
    raise TypeError(f"{name}: no checksum for dtype {leaf.dtype}")
  seed = np.uint32(zlib.crc32(f"{name} {leaf.dtype} {leaf.shape}".encode()))
  place = getattr(leaf, "sharding", None)
  if not isinstance(place, NamedSharding):
    return _program(None)(leaf, seed)
  # Replicated, so that every process can read it.
  return _program(NamedSharding(place.mesh, PartitionSpec()))(leaf, seed)


@functools.lru_cache
def _program(place: NamedSharding | None) -> Callable[..., jax.Array]:
  return jax.jit(_sums, out_shardings=place)


def _sums(x: chex.Array, seed: chex.Array) -> jax.Array:
  """Computes both halves of a leaf's checksum, uint32 [2]."""
  places = _mix(_index(x.shape) + seed)
  mixed = _mix(_bits(x) ^ places)
  # One pass for both: five times as fast on a CPU as two sums.
  zero = np.uint32(0)
  halves = jax.lax.reduce(
    (mixed, mixed * (places | 1)),
    (zero, zero),
    lambda xs, ys: (xs[0] + ys[0], xs[1] + ys[1]),
    range(x.ndim),
  )
  # An empty leaf also has a checksum, of its path.
  return _mix(seed + jnp.arange(1, 3, dtype=jnp.uint32)) + jnp.stack(halves)


def _bits(x: jax.Array) -> jax.Array:
  """Returns the stored bits as uint32."""
  if jnp.issubdtype(x.dtype, jnp.floating):
    x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  return x.astype(jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
  """Returns row-major indices mod 2³², sharded like the array."""
  index, stride = jnp.zeros(shape, jnp.uint32), 1
  for axis in reversed(range(len(shape))):
    step = np.uint32(stride % 2**32)
    index += step * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    stride *= shape[axis]
  return index


def _mix(x: jax.Array) -> jax.Array:
  """Maps 32-bit integers by a bijection in which every bit affects all others.

  Reference: the finaliser of MurmurHash3 (A. Appleby, public domain).
  """
  x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
  x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
  return x ^ x >> 16
