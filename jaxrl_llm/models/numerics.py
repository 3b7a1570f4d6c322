"""Numerics: what numbers a model computes with, and how it multiplies them."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Numerics:
  """Dtypes and products of a model; its trainer and its sampler have one each.

  A subclass may store weights, or multiply by them, in a way of its own.
  """

  weights: Any = jnp.float32  # As they are stored.
  activations: Any = jnp.float32  # And of products, whose sums are float32.
  kv: Any = jnp.float32  # Keys and values in a cache.

  @classmethod
  def all(cls, dtype: Any, *, kv: Any = None) -> "Numerics":
    """Everything in one dtype; `kv` in another, unless it is None."""
    return cls(dtype, dtype, kv or dtype)

  def store(self, params: Any) -> Any:
    """Returns parameters as they are stored."""
    return jax.tree.map(lambda x: x.astype(self.weights), params)

  def product(self, x: chex.Array, kernel: chex.Array) -> jax.Array:
    """x W in the dtype of x, for a stored W [in, out]."""
    return matmul(x, kernel.astype(x.dtype))


FLOAT32 = Numerics()


@jax.custom_vjp
def matmul(x: chex.Array, kernel: chex.Array) -> jax.Array:
  """x W for x [..., in] and W [in, out].

  The gradient of W is xᵀ g or (gᵀ x)ᵀ, whichever transposes the narrower of
  the two: a product wants its left factor transposed in memory, and automatic
  differentiation transposes g, fused with all elementwise work behind it. On a
  CPU that alone took a third of the time of a training step.
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
  """Product of two factors of one dtype, in that dtype.

  Sums are float32 anyhow. A CPU that has products of bfloat16 factors uses them
  only if it is asked for float32: then they take half the time of float32
  factors, else twice to four times.
  """
  product = jax.lax.dot_general(
    x, y, contract, preferred_element_type=jnp.float32
  )
  return product.astype(x.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)
