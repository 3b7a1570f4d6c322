"""Rows whose tokens are split over the devices of a mesh, for long contexts.

A row is cut into 2 n pieces and dealt to n devices: the first and the last to
the first device, the second and the last but one to the second, and so on. So
all attend to as many tokens before their own. A device does for its tokens all
that a layer does. Only attention needs the others: keys and values of the whole
row are gathered layer by layer, and their gradients summed back. With grouped
heads they are a fraction of the queries.

Reference: Llama Team 2024, arXiv 2407.21783, section 3.3.2.
"""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def ways(sharding: NamedSharding | None, axis: int) -> int:
  """Into how many parts a sharding cuts an axis of an array."""
  spec = sharding.spec[axis : axis + 1] if sharding else ()
  return math.prod(sharding.mesh.shape[name] for name in jax.tree.leaves(spec))


def on_devices(
  function: Callable[..., Any], sharding: NamedSharding | None, *specs: Any
) -> Callable[..., Any]:
  """A function of a device's part of arrays, on whole ones.

  Args:
    function: of arguments with the given specs, then arrays [R, C, heads, d] or
      [R, C]; returns one like the former.
    sharding: of [R, C, heads, d]; None: all lie on one device.
    *specs: of its first arguments.
  """
  if sharding is None:
    return function
  of_tokens = PartitionSpec(*sharding.spec[:2])

  def run(*arguments):
    return jax.shard_map(
      function,
      mesh=sharding.mesh,
      in_specs=(
        *specs,
        *(
          sharding.spec if x.ndim == 4 else of_tokens
          for x in arguments[len(specs) :]
        ),
      ),
      out_specs=sharding.spec,
      check_vma=False,  # Kernels do not say what varies.
    )(*arguments)

  return run


def gather(x: chex.Array, sharding: NamedSharding | None) -> jax.Array:
  """Of a device's tokens [R, C / n, ...], those of the row [R, C, ...]."""
  parts = ways(sharding, 1)
  if parts == 1:
    return x
  x = jax.lax.all_gather(x, sharding.spec[1], axis=1)
  x = x.reshape(len(x), parts, 2, -1, *x.shape[3:])
  x = jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1)
  return x.reshape(len(x), -1, *x.shape[3:])


def order(length: int, parts: int) -> np.ndarray:
  """int32 [n, C / n]: where in the row the tokens of each device lie."""
  if parts == 1:
    return np.arange(length, dtype=np.int32)[None]
  pieces = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
  return np.concatenate([pieces[:parts], pieces[parts:][::-1]], axis=1)


def deal(rows: Any, parts: int) -> Any:
  """Arrays [R, C, ...], padded to divide, in the order of the devices."""
  if parts == 1:
    return rows

  def deal_one(x):
    added = -x.shape[1] % (2 * parts)
    x = jnp.pad(x, [(0, 0), (0, added)] + [(0, 0)] * (x.ndim - 2))
    return x[:, order(x.shape[1], parts).reshape(-1)]

  return jax.tree.map(deal_one, rows)


def collect(x: chex.Array, parts: int, length: int) -> jax.Array:
  """Undoes `deal` of rows of some length, of [R, C, ...]."""
  if parts == 1:
    return x
  back = np.argsort(order(x.shape[1], parts).reshape(-1))
  return x[:, back[:length]]


def as_rows(x: chex.Array, parts: int) -> jax.Array:
  """[R, C, ...] to [n R, C / n, ...]: a row's parts as rows of their own.

  With the part before the row, so that every device keeps what it has.
  """
  if parts == 1:
    return x
  x = x.reshape(len(x), parts, -1, *x.shape[2:]).swapaxes(0, 1)
  return x.reshape(-1, *x.shape[2:])


def of_rows(x: chex.Array, parts: int) -> jax.Array:
  """Undoes `as_rows`, of [n R, C / n]."""
  if parts == 1:
    return x
  x = x.reshape(parts, -1, x.shape[1]).swapaxes(0, 1)
  return x.reshape(len(x), -1)
