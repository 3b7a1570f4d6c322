"""Grouped matrix products: each row times the matrix of its group."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import Array

_MAX_SIZE = 2**31  # Elements of an array: kernels use 32-bit offsets.


@jax.custom_vjp
def grouped_matmul(
  x: chex.Array, kernel: chex.Array, sizes: chex.Array
) -> Array:
  """Multiplies each row by the matrix of its group, with float32 sums.

  Uses a Pallas kernel on GPUs, where `jax.lax.ragged_dot` copies the rows for
  every group, and XLA elsewhere. The arrays are those of one device.

  Args:
    x: [N, in], sorted by group.
    kernel: [E, in, out], in the dtype of x.
    sizes: int32 [E], rows of each group; the products of any further rows are
      undefined.

  Returns:
    [N, out], in the dtype of x.
  """
  return _forward(x, kernel, sizes)[0]


def _forward(*residuals):
  on_gpu = lambda *arguments: _kernels().multiply(*arguments)
  return _by_platform(on_gpu, _ragged_dot, *residuals), residuals


def _backward(residuals: tuple[Array, ...], g: Array):
  def by_xla(x: Array, kernel: Array, sizes: Array, g: Array):
    multiply = lambda x, kernel: _ragged_dot(x, kernel, sizes)
    return jax.vjp(multiply, x, kernel)[1](g)

  on_gpu = lambda *arguments: _kernels().gradients(*arguments)
  return *_by_platform(on_gpu, by_xla, *residuals, g), None


grouped_matmul.defvjp(_forward, _backward)


def _kernels():
  # Pallas is slow to import, and other platforms do not need it.
  from jaxrl_llm.models.kernels import grouped_gpu

  return grouped_gpu


def _by_platform(on_gpu: Callable, by_xla: Callable, *arguments):
  if any(x.size >= _MAX_SIZE for x in arguments):
    return by_xla(*arguments)
  return jax.lax.platform_dependent(*arguments, cuda=on_gpu, default=by_xla)


def _ragged_dot(x: Array, kernel: Array, sizes: Array):
  y = jax.lax.ragged_dot(x, kernel, sizes, preferred_element_type=jnp.float32)
  return y.astype(x.dtype)
