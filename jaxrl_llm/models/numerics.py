"""Numerics: the dtypes of a model and its matrix product."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Numerics:
  """Dtypes and matrix product of a model, for its trainer or its sampler.

  A subclass may store weights or multiply by them differently.
  """

  weights: Any = jnp.float32  # Stored weights.
  activations: Any = jnp.float32  # Activations; products sum in float32.
  kv: Any = jnp.float32  # Keys and values in the cache.

  def to_cache(self, x: chex.Array) -> jax.Array:
    """Clips keys or values to the range of the cache, where others are NaN."""
    if jnp.dtype(self.kv).itemsize > 1:
      return x
    limit = float(jnp.finfo(self.kv).max)
    return jnp.clip(x, -limit, limit)

  @classmethod
  def all(cls, dtype: Any, *, kv: Any = None) -> "Numerics":
    """Makes numerics of one dtype, with `kv` in another one if given."""
    return cls(dtype, dtype, kv or dtype)

  def store(self, params: Any) -> Any:
    """Converts parameters to their stored form."""
    return jax.tree.map(lambda x: x.astype(self.weights), params)

  def product(self, x: chex.Array, kernel: chex.Array) -> jax.Array:
    """Returns x W in the dtype of x, for a stored W [in, out]."""
    return matmul(x, kernel.astype(x.dtype))


FLOAT32 = Numerics()


@jax.custom_vjp
def matmul(x: chex.Array, kernel: chex.Array) -> jax.Array:
  """Returns x W for x [..., in] and W [in, out].

  The gradient of W is computed as xᵀ g or (gᵀ x)ᵀ, whichever transposes the
  narrower factor. Automatic differentiation always transposes g, together with
  the elementwise operations that produce it, which took a third of the time of
  a training step on a CPU.
  """
  return _matmul_fwd(x, kernel)[0]


def _matmul_fwd(x, kernel):
  return _dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))), (x, kernel)


def _matmul_bwd(residuals, g):
  x, kernel = residuals
  rows = tuple(range(x.ndim - 1))
  contract = ((rows, rows), ((), ()))
  if kernel.shape[0] <= kernel.shape[1]:
    d_kernel = _dot(x, g, contract)
  else:
    d_kernel = _dot(g, x, contract).T
  return _dot(g, kernel, (((g.ndim - 1,), (1,)), ((), ()))), d_kernel


def _dot(x, y, contract):
  """Multiplies two arrays of one dtype, in that dtype, with float32 sums.

  A CPU with bfloat16 products uses them only if the result is float32: they
  then take half the time of float32 factors, and otherwise two to four times as
  long.
  """
  product = jax.lax.dot_general(
    x, y, contract, preferred_element_type=jnp.float32
  )
  return product.astype(x.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)
