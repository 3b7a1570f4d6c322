"""Array arguments of public functions: lists are taken, shapes are checked."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import chex
import jax
import jax.numpy as jnp

P, R = ParamSpec("P"), TypeVar("R")


def of_equal_shape(
  *names: str, rows: Sequence[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Makes a function take some arguments as arrays of equal shape.

  Args:
    *names: arguments, which may be arrays or (nested) lists of numbers; None
      stays None.
    rows: further ones, which have that shape without its last axis, time.

  Returns:
    A decorator. Calls raise ValueError if a shape is another one.
  """

  def decorate(function):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
      bound = signature.bind(*args, **kwargs)
      given = bound.arguments

      def take(some, shape, of):
        arrays = {k: given[k] for k in some if given.get(k) is not None}
        given.update(zip(arrays, of_shape(shape, of, **arrays)))

      shape, of = jnp.shape(given[names[0]]), f"that of {names[0]}"
      take(names, shape, of)
      take(rows, shape[:-1], f"{of} without time")
      return function(*bound.args, **bound.kwargs)

    return checked

  return decorate


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
