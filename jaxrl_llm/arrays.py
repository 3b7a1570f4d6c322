"""Array arguments of public functions: converts lists and checks shapes."""

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
  """Decorates a function whose array arguments have equal shapes.

  Args:
    *names: names of arguments, which may be arrays or (nested) lists of
      numbers; None stays None.
    rows: names of arguments with that shape except for its last axis, time.

  Returns:
    A decorator. Calls raise ValueError if a shape differs.
  """

  def decorate(function: Callable[P, R]):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
      bound = signature.bind(*args, **kwargs)
      given = bound.arguments

      def take(some: Sequence[str], shape: tuple[int, ...], of: str):
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
  """Converts arguments to arrays and checks that they have a given shape.

  Args:
    shape: expected shape.
    of: description of the expected shape, for the message.
    **arguments: arrays or (nested) lists of numbers, by name.

  Raises:
    ValueError: An argument has a different shape, or complex numbers.
  """
  shape = tuple(shape)
  arrays = {name: jnp.asarray(x) for name, x in arguments.items()}
  for name, x in arrays.items():
    if x.shape != shape:
      of_rows = x.shape in (shape[:-1], (*shape[:-1], 1)) and x.shape
      todo = f"; repeat {name} along the last axis" if of_rows else ""
      raise ValueError(f"{name} has shape {x.shape}, not {of}, {shape}{todo}")
    if jnp.iscomplexobj(x):
      raise ValueError(f"{name} has complex numbers")
  return list(arrays.values())
