"""Array arguments of public functions: lists are taken, shapes are checked."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp


def of_equal_shape(**arguments: Any) -> list[jax.Array]:
  """Returns arguments as arrays, which must have the shape of the first.

  Args:
    **arguments: arrays or (nested) lists of numbers, by their names.

  Raises:
    ValueError: Two shapes differ.
  """
  first = next(iter(arguments))
  shape = jnp.shape(arguments[first])
  return of_shape(shape, f"that of {first}", **arguments)


def of_shape(
  shape: Sequence[int], of: str, /, **arguments: chex.Array
) -> list[jax.Array]:
  """Returns arguments as arrays, which must have a given shape.

  Args:
    shape: the shape.
    of: what has this shape, for the message.
    **arguments: arrays or (nested) lists of numbers, by their names.

  Raises:
    ValueError: An argument has another shape.
  """
  shape = tuple(shape)
  arrays = {name: jnp.asarray(x) for name, x in arguments.items()}
  for name, x in arrays.items():
    if x.shape != shape:
      raise ValueError(f"{name} has shape {x.shape}, not {of}, {shape}")
  return list(arrays.values())
