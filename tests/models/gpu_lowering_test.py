"""GPU kernels lowered for GPUs by a JAX that has none."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.interpreted import make_kind, with_gradients
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxrl_llm.models.kernels import gpu, grouped_gpu
from jaxrl_llm.sampling import choose, filter_gpu

INT, FLOAT = jnp.int32, jnp.float32


def _count_kernels(function, *arrays):
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
  device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda")
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    traced = jax.jit(function).trace(*shapes)
    lowered = traced.lower(lowering_platforms=("cuda",))
  return lowered.as_text().count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_attention(dtype, window):
  kind = make_kind(window=window)
  ours = gpu.make_packed_attention(kind, sharding=None).attend
  q, k = ((2, 256, heads, 64) for heads in (4, 2))
  packed = (q, dtype), (k, dtype), (k, dtype), *[((2, 256), INT)] * 2
  attend = functools.partial(with_gradients, ours)
  assert _count_kernels(attend, *packed, (q, dtype)) == 3
  sampler = gpu.Pallas(kind)
  layer = (2, 256, 4, 64), dtype
  assert (
    _count_kernels(sampler.attend_contiguous, layer, (q, dtype), ((), INT)) == 1
  )
  pages, q = ((1, 9, 16, 4, 64), dtype), ((3, 2, 4, 64), dtype)
  indices, positions = ((3, 80), INT), ((3, 2), INT)
  assert _count_kernels(sampler.attend_paged, pages, q, indices, positions) == 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_experts(dtype):
  x, kernel, sizes = ((70, 96), dtype), ((5, 96, 48), dtype), ((5,), INT)
  assert _count_kernels(grouped_gpu.multiply, x, kernel, sizes) == 1
  g = (70, 48), dtype
  assert _count_kernels(grouped_gpu.gradients, x, kernel, sizes, g) == 2


def test_thresholds_of_the_filter():
  settings = ((4,), INT), ((4,), FLOAT)
  bounds = functools.partial(filter_gpu.bounds, bound=choose.bound)
  assert _count_kernels(bounds, ((4, 5000), FLOAT), *settings) == 1
