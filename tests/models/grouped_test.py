"""Grouped matmuls: GPU kernels, interpreted on a CPU, equal XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted

from jaxrl_llm.models import grouped
from jaxrl_llm.models.kernels import grouped_gpu

# Group sizes for tiles of 16 rows: one group, many, full tiles, partial tiles,
# empty groups, and a smaller sum than the number of rows.
SIZES = [
  [70],
  [0, 33, 16, 0, 1, 20, 0],
  [16, 32, 16, 0],
  [0, 0, 5, 0],
  [0, 0],
]
ROWS, IN, OUT = 70, 40, 48


@pytest.fixture(name="on_gpu")
def _on_gpu(monkeypatch):
  """Runs GPU functions on a CPU."""
  interpreted.interpret_gpu(monkeypatch)
  for name, size in {"_ROWS": 16, "_COLUMNS": 32, "_TERMS": 16}.items():
    monkeypatch.setattr(grouped_gpu, name, size)
  monkeypatch.setattr(
    *(jax.lax, "platform_dependent"),
    lambda *arguments, cuda, default: cuda(*arguments),
  )


def _arrays(sizes, dtype=np.float32):
  rng = np.random.default_rng(0)
  shapes = (ROWS, IN), (len(sizes), IN, OUT), (ROWS, OUT)
  return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def _with_gradients(function, x, kernel, g):
  out, pull = jax.vjp(function, x, kernel)
  return out, *pull(g.astype(out.dtype))


def _expected(x, kernel, g, sizes):
  """Computes product and gradients group by group in float64."""
  x, kernel, g = (np.asarray(a, np.float64) for a in (x, kernel, g))
  out, d_x, d_kernel = (np.zeros(a.shape) for a in (g, x, kernel))
  for i, end in enumerate(np.cumsum(sizes)):
    rows = slice(end - sizes[i], end)
    out[rows], d_x[rows] = x[rows] @ kernel[i], g[rows] @ kernel[i].T
    d_kernel[i] = x[rows].T @ g[rows]
  return out, d_x, d_kernel


@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_multiply_each_row_with_its_matrix(sizes, on_gpu):
  x, kernel, g = _arrays(sizes)
  multiply = lambda x, kernel: grouped.grouped_matmul(
    x, kernel, jnp.int32(sizes)
  )
  got = jax.jit(functools.partial(_with_gradients, multiply))(x, kernel, g)
  for a, b in zip(got, _expected(x, kernel, g, sizes), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_kernels_round_no_more_than_their_dtype(on_gpu):
  sizes = SIZES[1]
  x, kernel, g = _arrays(sizes, jnp.bfloat16)
  multiply = lambda x, kernel: grouped.grouped_matmul(
    x, kernel, jnp.int32(sizes)
  )
  got = _with_gradients(multiply, x, kernel, g)
  for a, b in zip(got, _expected(x, kernel, g, sizes), strict=True):
    assert a.dtype == x.dtype
    np.testing.assert_allclose(
      np.asarray(a, np.float64), b, rtol=2**-8, atol=2**-8
    )


@pytest.mark.parametrize(
  "sizes", [sizes for sizes in SIZES if sum(sizes) == 70]
)
def test_other_platforms_have_the_bits_of_ragged_dot(sizes):
  x, kernel, g = _arrays(sizes)
  sizes = jnp.int32(sizes)
  ours = lambda x, kernel: grouped.grouped_matmul(x, kernel, sizes)
  xla = lambda x, kernel: jax.lax.ragged_dot(x, kernel, sizes)
  run = lambda f: jax.jit(functools.partial(_with_gradients, f))(x, kernel, g)
  jax.tree.map(np.testing.assert_array_equal, run(ours), run(xla))
