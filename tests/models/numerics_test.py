"""Tests of low-precision formats, and of matmuls that round to them."""

import re
import statistics

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import tiny

from jaxrl_llm import models, sharding, sync
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import numerics

FORMATS = sorted(numerics.FORMATS)
# Rows and columns of a block, the largest code, and an error bound of
# W / (block maximum): half of the largest gap between two codes.
EXPECTED = {
  "int8": ((0, 1), 0.5 / 127),
  "fp8": ((128, 128), 16 / 448),
  "nf4": ((64, 1), (1 - 0.6961928) / 2),
}


def nf4_quantiles():
  """Computes the 16 values of the paper's section 3 (8 and 9 quantiles)."""
  normal = statistics.NormalDist().inv_cdf
  ends = 1 - (1 / 32 + 1 / 30) / 2
  upper = [normal(p) for p in np.linspace(ends, 0.5, 9)[:-1]]
  lower = [-normal(p) for p in np.linspace(ends, 0.5, 8)[:-1]]
  values = np.array(sorted([*upper, 0.0, *lower]))
  return values / values.max()


def blocks_of(w, block):
  """Returns slices of every block of the last two axes."""
  rows, columns = (b or size for b, size in zip(block, w.shape[-2:]))
  return [
    (..., slice(i, i + rows), slice(j, j + columns))
    for i in range(0, w.shape[-2], rows)
    for j in range(0, w.shape[-1], columns)
  ]


def rounded(w, name, block=None):
  """Rounds W to a format, block by block, in NumPy."""
  out = np.zeros_like(w)
  for at in blocks_of(w, block or EXPECTED[name][0]):
    largest = np.abs(w[at]).max()
    if not largest:
      continue
    if name == "int8":
      scale = largest / np.float32(127)
      out[at] = np.rint(w[at] / scale) * scale
    elif name == "fp8":
      scale = largest / np.float32(448)
      codes = (w[at] / scale).astype(ml_dtypes.float8_e4m3fn)
      out[at] = codes.astype(np.float32) * scale
    else:
      table = nf4_quantiles().astype(np.float32)
      distance = np.abs(w[at][..., None] / largest - table)
      out[at] = table[distance.argmin(axis=-1)] * largest
  return out


def matrix(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_values_of_nf4_are_quantiles_of_a_normal_distribution():
  codes = np.arange(16, dtype=np.uint8).reshape(8, 2)
  pairs = codes[:, :1] | codes[:, 1:] << 4
  found = numerics.dequantise(jnp.asarray(pairs), jnp.ones((1, 1)))
  np.testing.assert_allclose(found[:, 0], nf4_quantiles(), atol=2e-7)


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (24, 8), (70, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_equal_a_reference(name, shape):
  w = matrix(*shape)
  codes, scales = jax.jit(numerics.FORMATS[name].quantise)(w)
  found = np.asarray(numerics.dequantise(codes, scales))
  expected = rounded(w, name)
  # If a weight is halfway between two codes, both are correct.
  assert np.mean(np.abs(found - expected) > 1e-6) < 1e-3
  block, bound = EXPECTED[name]
  for at in blocks_of(w, block):
    error = np.abs(found[at] - w[at]).max()
    assert error <= 1.01 * bound * np.abs(w[at]).max()
  assert codes.size == w.size // (2 if name == "nf4" else 1)
  assert codes.dtype.itemsize == 1


def test_nf4_refuses_an_odd_number_of_rows():
  with pytest.raises(InputError, match="pairs of rows.* has 65"):
    jax.eval_shape(numerics.FORMATS["nf4"].quantise, matrix(65, 4))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_zeros_stay_zero(name):
  w = matrix(256, 256)
  block, _ = EXPECTED[name]
  blocks = blocks_of(w, block)
  for at in blocks[::2]:
    w[at] = 0
  codes, scales = numerics.FORMATS[name].quantise(w)
  found = np.asarray(numerics.dequantise(codes, scales))
  assert np.isfinite(scales).all()
  for at in blocks[::2]:
    np.testing.assert_array_equal(found[at], 0)
  assert all(np.any(found[at]) for at in blocks[1::2])


@pytest.mark.parametrize("name", FORMATS)
def test_stacked_matrices_are_quantised_one_by_one(name):
  stack = matrix(3, 130, 66)
  together = numerics.FORMATS[name].quantise(stack)
  for i, w in enumerate(stack):
    alone = numerics.FORMATS[name].quantise(w)
    chex.assert_trees_all_equal([x[i] for x in together], [*alone])


def test_a_worked_example_of_fp8():
  x = jnp.array([[1.0, 2.0, -3.0, 0.1]])
  product = jax.jit(models.Numerics(matmul="fp8").operands)
  found, _ = product(x, jnp.eye(4))
  np.testing.assert_allclose(found, [[0.9643, 1.9286, -3, 0.1004]], atol=1e-4)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_products_multiply_rounded_factors(name):
  x, w = matrix(2, 5, 300), matrix(300, 140, seed=1)
  rows = x.reshape(10, 300)
  if name == "fp8":
    rows = rounded(rows, name, block=(1, 128))
  expected = (rows @ rounded(w, name)).reshape(2, 5, 140)
  trained = models.Numerics(matmul=name)
  np.testing.assert_allclose(
    jax.jit(trained.product)(x, w), expected, atol=2e-4
  )
  assert np.abs(expected - x @ w).max() > 0.05
  stored = models.Numerics.all(jnp.float32, matmul=name)
  layer = stored.store_layer({"kernel": w, "bias": matrix(140)})
  assert layer["kernel"].dtype.itemsize == 1
  found = jax.jit(stored.product)(x, layer["kernel"], layer["kernel_scale"])
  np.testing.assert_allclose(found, expected, atol=2e-4)


def test_native_products_equal_emulated_ones():
  x, w = matrix(2, 5, 300), matrix(300, 140, seed=1)
  codes, scales = numerics.FORMATS["fp8"].quantise(w)
  native = jax.jit(numerics._fp8_product)(x, codes, scales)
  emulated = numerics._fp8_emulated(x, codes, scales)
  np.testing.assert_allclose(native, emulated, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_gradients_pass_through_rounding(name):
  x, w = matrix(7, 130), matrix(130, 20, seed=1)
  g = matrix(7, 20, seed=2)
  product = models.Numerics(matmul=name).product
  dx, dw = jax.jit(lambda *given: jax.vjp(product, *given)[1](g))(x, w)
  rows = rounded(x, name, block=(1, 128)) if name == "fp8" else x
  np.testing.assert_allclose(dx, g @ rounded(w, name).T, atol=1e-4)
  np.testing.assert_allclose(dw, rows.T @ g, atol=1e-4)


@pytest.mark.parametrize(
  "platform, native", [("cuda", 1), ("tpu", 1), ("cpu", 0)]
)
def test_accelerators_multiply_eight_bit_floats(platform, native):
  product = jax.jit(models.Numerics(matmul="fp8").product)
  lowered = product.trace(jnp.ones((8, 256)), jnp.ones((256, 128))).lower(
    lowering_platforms=(platform,)
  )
  products = re.findall(r"dot_general.*?: \((.*?)\)", lowered.as_text())
  eight = [x for x in products if x.count("xf8E4M3FN>") == 2]
  assert (len(eight), len(products)) == (native, 1)


@pytest.mark.parametrize("name", ["fp8", "native fp8", "int8", "nf4"])
def test_a_mesh_of_eight_devices_computes_the_same(name):
  x, w = matrix(8, 512), matrix(512, 512, seed=1)
  form = name.removeprefix("native ")
  own = models.Numerics.all(jnp.float32, matmul=form)
  layer = own.store_layer({"layers": {"up": {"kernel": w}}})
  product = own.product if form == name else numerics._fp8_product

  def run(x, layer):
    up = layer["layers"]["up"]
    return product(x, up["kernel"], up["kernel_scale"])

  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(layer, sharding.tree_shardings(layer, mesh))
  scales = placed["layers"]["up"]["kernel_scale"]
  assert not scales.sharding.is_fully_replicated
  along = jax.device_put(x, sharding.along_batch(mesh))
  np.testing.assert_allclose(
    jax.jit(run)(along, placed), jax.jit(run)(x, layer), atol=1e-4
  )


def parity(trainer, sampler):
  """Returns the mean log-prob difference between trainer and sampler."""
  fns = models.make_policy(
    tiny.tiny_config(),
    numerics=models.Numerics(matmul=trainer),
    sampler=models.Numerics.all(jnp.float32, matmul=sampler),
    head_chunk=8,
  )
  _, params = tiny.tiny_policy()
  tokens = sync.parity_tokens(67, rows=2, length=10)
  transfer = sync.WeightTransfer(fns.for_sampling, params)
  check = sync.make_parity_check(fns, tokens, tolerance=np.inf, page_size=4)
  return check(params, transfer.send(params, 0))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_shared_numerics_agree_and_a_sampler_alone_differs(name):
  assert parity(name, name) <= 1e-5
  assert parity("", name) > 1e-3
