"""Thresholds of top-k and top-p with a Pallas kernel for GPUs.

On a GPU, a conditional waits until the host has read its predicate. Here each
slot decides inside a kernel whether to search for its threshold.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.kernels.flash_gpu import pallas_call

_CHUNK, _WARPS = 4096, 8  # Vocabulary entries per iteration, and warps.


def bounds(
  weights: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  bound: Callable[..., jax.Array],
) -> jax.Array:
  """Returns the smallest kept weight, float32 [S, 1]; 0 if all are kept.

  Args:
    weights: float32 [S, V], at most 1.
    top_k: int32 [S], as in `Distribution`.
    top_p: float32 [S].
    bound: finds the threshold of one slot, `choose.bound`.
  """
  find = functools.partial(_find_bound, bound)
  arrays = weights, top_k, top_p
  least = pallas_call(find, top_p.shape, top_p, *arrays, num_warps=_WARPS)
  return least[:, None]


def _find_bound(bound, weights_ref, top_k_ref, top_p_ref, out_ref):
  slot, size = pl.program_id(0), weights_ref.shape[1]
  top_k, top_p = top_k_ref[slot], top_p_ref[slot]

  def total(of):
    def add(i, sum_):
      at = i * _CHUNK + jnp.arange(_CHUNK)
      weights = weights_ref.at[slot, at]
      # Padding is below every threshold.
      weights = triton.load(weights, mask=at < size, other=-1.0)
      return sum_ + jnp.sum(of(weights))

    return jax.lax.fori_loop(0, pl.cdiv(size, _CHUNK), add, jnp.float32(0))

  out_ref[slot] = 0.0

  @pl.when((top_k > 0) | (top_p < 1))
  def _():
    out_ref[slot] = bound(total, top_k, top_p)
