"""Context parallelism: the tokens of a row are sharded over devices.

A row is split into 2 n pieces, and device i of n holds pieces i and 2 n - 1 - i
(zigzag), so that causal attention costs the same on every device. Layers act on
each token separately, except for attention, which all-gathers the keys and
values of the row in every layer and reduce-scatters their gradients. With
grouped heads, keys and values are a fraction of the size of the queries.

Reference: Llama Team 2024, arXiv 2407.21783, section 3.3.2.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def num_shards(sharding: NamedSharding | None, axis: int) -> int:
  """Returns the number of shards along an axis; 1 without a sharding."""
  spec = sharding.spec[axis : axis + 1] if sharding else ()
  return math.prod(sharding.mesh.shape[name] for name in jax.tree.leaves(spec))


def leading(sharding: NamedSharding | None, axes: int) -> NamedSharding | None:
  """Returns the sharding of only the first axes."""
  if sharding is None:
    return None
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))


def on_devices(
  function: Callable[..., Any], sharding: NamedSharding | None, *specs: Any
) -> Callable[..., Any]:
  """Turns a function of per-device shards into a function of global arrays.

  Args:
    function: its first arguments have the given specs, and the others are
      [R, C, heads, d] or [R, C]; returns [R, C, heads, d].
    sharding: sharding of [R, C, heads, d]; None: one device.
    *specs: partition specs of the first arguments.
  """
  if sharding is None:
    return function

  def run(*arguments):
    rows = (leading(sharding, x.ndim).spec for x in arguments[len(specs) :])
    return jax.shard_map(
      function,
      mesh=sharding.mesh,
      in_specs=(*specs, *rows),
      out_specs=sharding.spec,
      check_vma=False,  # Pallas kernels do not declare it.
    )(*arguments)

  return run


class Queries(NamedTuple):
  """Positions and segments of the queries of attention."""

  index: Array  # [Q], positions in their row.
  segments: Array  # [R, Q].
  prefixes: Array  # [R, Q].


def over_rows(
  function: Callable[..., Array], sharding: NamedSharding | None
) -> Callable[..., Array]:
  """Turns a function of local queries and all keys into one of global arrays.

  Args:
    function: (q [R, Q, H, d], k [R, T, K, d], v, `Queries`, segments of the
      keys [R, T]) -> [R, Q, H, d].
    sharding: as in `on_devices`.

  Returns:
    (q, k, v, segments, prefixes) -> [R, C, H, d].
  """
  parts = num_shards(sharding, 1)

  def on_device(q: Array, k: Array, v: Array, segments: Array, prefixes: Array):
    k, v, keys = (gather(x, sharding) for x in (k, v, segments))
    part = jax.lax.axis_index(sharding.spec[1]) if parts > 1 else 0
    places = jnp.asarray(zigzag_order(k.shape[1], parts))[part]
    return function(q, k, v, Queries(places, segments, prefixes), keys)

  return on_devices(on_device, sharding)


def gather(x: chex.Array, sharding: NamedSharding | None) -> Array:
  """Gathers a device's tokens [R, C / n, ...] into full rows [R, C, ...]."""
  parts = num_shards(sharding, 1)
  if parts == 1:
    return x
  x = jax.lax.all_gather(x, sharding.spec[1], axis=1)
  x = x.reshape(len(x), parts, 2, -1, *x.shape[3:])
  x = jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1)
  return x.reshape(len(x), -1, *x.shape[3:])


def pad(x: chex.Array, axis: int, block: int, value: int = 0) -> Array:
  """Pads an axis to a multiple of `block`."""
  widths = [(0, -n % block * (i == axis)) for i, n in enumerate(x.shape)]
  return jnp.pad(x, widths, constant_values=value)


def zigzag_order(length: int, parts: int) -> np.ndarray:
  """Returns the row positions of each device's tokens, int32 [n, C / n]."""
  if parts == 1:
    return np.arange(length, dtype=np.int32)[None]
  pieces = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
  return np.concatenate([pieces[:parts], pieces[parts:][::-1]], axis=1)


def zigzag_shard(rows: Any, parts: int) -> Any:
  """Pads arrays [R, C, ...] to equal shards and reorders them by device.

  Scalars stay as they are.
  """
  if parts == 1:
    return rows

  def shard_one(x: Array):
    if not jnp.ndim(x):
      return x
    x = pad(x, 1, 2 * parts)
    return x[:, zigzag_order(x.shape[1], parts).reshape(-1)]

  return jax.tree.map(shard_one, rows)


def zigzag_unshard(x: chex.Array, parts: int, length: int) -> Array:
  """Undoes `zigzag_shard` for [R, C, ...]; `length` is the unpadded C."""
  if parts == 1:
    return x
  back = np.argsort(zigzag_order(x.shape[1], parts).reshape(-1))
  return x[:, back[:length]]


def shards_to_rows(x: chex.Array, parts: int) -> Array:
  """Reshapes [R, C, ...] to [n R, C / n, ...]: each shard becomes a row.

  The shard is the slower-varying index, so that no data moves between devices.
  """
  if parts == 1:
    return x
  x = x.reshape(len(x), parts, -1, *x.shape[2:]).swapaxes(0, 1)
  return x.reshape(-1, *x.shape[2:])


def rows_to_shards(x: chex.Array, parts: int) -> Array:
  """Undoes `shards_to_rows` for [n R, C / n]."""
  if parts == 1:
    return x
  x = x.reshape(parts, -1, x.shape[1]).swapaxes(0, 1)
  return x.reshape(len(x), -1)
