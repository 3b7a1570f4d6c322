"""Numerics: storage formats of weights, and matrix products.

A low-bit matrix is stored as codes and scales, W = values(codes) · scales. The
elements of a block share a scale. A block of zeros stays zero.

  name  codes           block      scale
  int8  int8            a column   max |w| / 127
  fp8   float8_e4m3fn   128 x 128  max |w| / 448
  nf4   uint8, 2 each   64 x 1     max |w|

The 16 values of nf4 are quantiles of a normal distribution.

References:
  Dettmers et al. 2023, QLoRA, arXiv 2305.14314 (nf4, without quantised scales).
  DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.3 (blocks of fp8).
  Xi et al. 2026, Jet-RL, arXiv 2601.14243 (fp8 in both trainer and sampler).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.errors import InputError

SCALE = "kernel_scale"  # Name of the scales next to a `kernel` of codes.
_NF4 = np.array(
  [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
  ],
  np.float32,
)


@dataclasses.dataclass(frozen=True)
class Format:
  """A low-bit storage format of matrices [..., in, out].

  Attributes:
    block: rows and columns of a block; 0: all. Blocks at the end may be
      smaller.
    largest: largest value of a code.
    encode: (W / scales) -> codes.
  """

  block: tuple[int, int]
  largest: float
  encode: Callable[[Array], Array]

  def quantise(self, w: chex.Array) -> tuple[Array, Array]:
    """Returns codes and float32 scales [..., blocks, blocks] of a matrix."""
    w = w.astype(jnp.float32)
    scales = jnp.abs(w)
    for axis, block in zip((-2, -1), self.block):
      size = w.shape[axis]
      block = min(block or size, size)
      scales = jnp.moveaxis(scales, axis, -1)
      padding = [(0, 0)] * (w.ndim - 1) + [(0, -size % block)]
      scales = jnp.pad(scales, padding)
      scales = scales.reshape(*scales.shape[:-1], -1, block).max(axis=-1)
      scales = jnp.moveaxis(scales, -1, axis)
    scales = scales / self.largest
    scales = jnp.where(scales > 0, scales, 1)
    return self.encode(w / self._spread(scales, w.shape)), scales

  def dequantise(self, codes: chex.Array, scales: chex.Array) -> Array:
    """Returns the float32 matrix that codes and scales represent."""
    w = _values(codes)
    return w * self._spread(scales, w.shape)

  def _spread(self, scales: Array, shape: tuple[int, ...]):
    """Repeats scales over their blocks, unless they broadcast."""
    for axis, block in zip((-2, -1), self.block):
      if scales.shape[axis] not in (1, shape[axis]):
        scales = jnp.repeat(scales, block, axis=axis)
        scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def rounded(form: Format, w: chex.Array) -> Array:
  """Returns W rounded to a format, with a straight-through gradient."""
  return form.dequantise(*form.quantise(w)).astype(w.dtype)


@rounded.defjvp
def _rounded_jvp(form: Format, primals: tuple[Array], tangents: tuple[Array]):
  return rounded(form, *primals), *tangents


def _encode_nf4(x: Array):
  if x.shape[-2] % 2:
    raise InputError(
      f"nf4 stores pairs of rows, but a matrix of the model has {x.shape[-2]}"
      " rows; use model.base_dtype='int8'"
    )
  middles = (_NF4[1:] + _NF4[:-1]) / 2
  codes = sum((x > middle).astype(jnp.uint8) for middle in middles)
  # Neighbouring rows share a byte, so that a sharded axis stays divisible.
  return codes[..., ::2, :] | codes[..., 1::2, :] << 4


def _values(codes: Array):
  """Returns the values of codes, float32 [..., in, out]."""
  if codes.dtype != jnp.uint8:
    return codes.astype(jnp.float32)
  # A tree of selects runs in registers; a table lookup would be a gather.
  halves = []
  for first in (0, 4):
    values = [jnp.float32(x) for x in _NF4]
    for bit in range(first, first + 4):
      odd = (codes >> bit & 1).astype(bool)
      pairs = zip(values[::2], values[1::2])
      values = [jnp.where(odd, high, low) for low, high in pairs]
    halves += values
  rows = jnp.stack(halves, axis=-2)
  return rows.reshape(*codes.shape[:-2], -1, codes.shape[-1])


_INT8 = Format((0, 1), 127, lambda x: jnp.round(x).astype(jnp.int8))
_FP8 = Format((128, 128), 448, lambda x: x.astype(jnp.float8_e4m3fn))
_ACTIVATIONS = dataclasses.replace(_FP8, block=(1, 128))
FORMATS: Mapping[str, Format] = {
  "int8": _INT8,
  "fp8": _FP8,
  "nf4": Format((64, 1), 1, _encode_nf4),
}
_BY_CODES = {"int8": "int8", "float8_e4m3fn": "fp8", "uint8": "nf4"}
# Matrix products that training supports too; '' uses the activations' dtype.
MATMULS = ("", "fp8", "int8")


def quantise_kernels(params: Any, name: str) -> Any:
  """Replaces the kernels in a nested dict with codes and scales."""
  if not isinstance(params, dict):
    return params
  params = {key: quantise_kernels(x, name) for key, x in params.items()}
  if "kernel" in params and params["kernel"].dtype.itemsize > 1:
    params["kernel"], params[SCALE] = FORMATS[name].quantise(params["kernel"])
  return params


def dequantise(codes: chex.Array, scales: chex.Array) -> Array:
  """Returns the float32 matrix that codes and scales of any format encode."""
  return FORMATS[_BY_CODES[codes.dtype.name]].dequantise(codes, scales)


@dataclasses.dataclass(frozen=True)
class Numerics:
  """Dtypes and matrix products of a model, in the trainer or the sampler."""

  weights: Any = jnp.float32  # Stored weights.
  activations: Any = jnp.float32  # Activations; products accumulate in float32.
  kv: Any = jnp.float32  # Keys and values in the cache.
  # Format in which linear layers multiply, one of `MATMULS`. 'fp8' rounds
  # activations too, in blocks of 1 x 128.
  matmul: str = ""
  quantised: bool = False  # Whether kernels are stored in that format.

  def to_cache(self, x: chex.Array) -> Array:
    """Clips keys or values to the cache's range; others would become NaN."""
    if jnp.dtype(self.kv).itemsize > 1:
      return x
    limit = float(jnp.finfo(self.kv).max)
    return jnp.clip(x, -limit, limit)

  @classmethod
  def all(cls, dtype: Any, *, kv: Any = None, matmul: str = "") -> "Numerics":
    """Makes numerics of one dtype, except for `kv` if given.

    Kernels are stored in the format of the products, as samplers require.
    """
    return cls(dtype, dtype, kv or dtype, matmul, bool(matmul))

  def store(self, params: Any, *, kept: Sequence[str] = ()) -> Any:
    """Converts parameters to their storage dtype, except quantised ones.

    Args:
      params: tree of arrays.
      kept: names of other leaves that stay unchanged.
    """

    def leaf(path: tuple[jax.tree_util.DictKey, ...], x: Array):
      keep = x.dtype.itemsize == 1 or path[-1].key in (SCALE, *kept)
      return x if keep else x.astype(self.weights)

    return jax.tree_util.tree_map_with_path(leaf, params)

  def store_layer(self, params: Any) -> Any:
    """Converts the parameters of a layer to their storage format."""
    if self.quantised:
      params = quantise_kernels(params, self.matmul)
    return self.store(params)

  def operands(
    self, x: chex.Array, kernel: chex.Array, scales: chex.Array | None = None
  ) -> tuple[Array, Array]:
    """Returns the rounded x and W of a product, in the dtype of x.

    Rounding passes gradients unchanged. Arguments are those of `product`, but
    kernels may have leading axes.
    """
    if scales is not None:
      kernel = dequantise(kernel, scales)
    elif self.matmul:
      kernel = rounded(FORMATS[self.matmul], kernel)
    if self.matmul == "fp8":
      x = rounded(_ACTIVATIONS, x)
    return x, kernel.astype(x.dtype)

  def product(
    self, x: chex.Array, kernel: chex.Array, scales: chex.Array | None = None
  ) -> Array:
    """Returns x W in the dtype of x.

    Args:
      x: [..., in].
      kernel: W [in, out], or its codes.
      scales: scales of the codes; None: the kernel is W.
    """
    if scales is not None:
      return _stored_product(x, kernel, scales)
    if self.matmul:
      return _quantised_product(x, kernel, self.matmul)
    return matmul(*self.operands(x, kernel))


FLOAT32 = Numerics()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _quantised_product(x: Array, kernel: Array, name: str):
  """Returns x W with W rounded to a format; see `Numerics.operands`."""
  return _stored_product(x, *FORMATS[name].quantise(kernel))


def _quantised_product_fwd(x: Array, kernel: Array, name: str):
  return _quantised_product(x, kernel, name), (x, kernel)


def _quantised_product_bwd(name: str, residuals: tuple[Array, Array], g: Array):
  numerics = Numerics(matmul=name)
  emulated = lambda *given: matmul(*numerics.operands(*given))
  return jax.vjp(emulated, *residuals)[1](g)


_quantised_product.defvjp(_quantised_product_fwd, _quantised_product_bwd)


def _stored_product(x: Array, codes: Array, scales: Array):
  """Returns x W for W in codes and scales, in the dtype of x."""
  if codes.dtype == jnp.float8_e4m3fn:
    return jax.lax.platform_dependent(
      x, codes, scales, cpu=_fp8_emulated, default=_fp8_product
    )
  if scales.shape[0] > 1:
    return matmul(x, dequantise(codes, scales).astype(x.dtype))
  # A column has one scale, which is applied to the sum.
  scale = scales.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
  return matmul(x, _values(codes).astype(x.dtype)) * scale


def _fp8_emulated(x: Array, codes: Array, scales: Array):
  return matmul(*Numerics(matmul="fp8").operands(x, codes, scales))


def _fp8_product(x: Array, codes: Array, scales: Array):
  """Multiplies fp8 codes by fp8 codes, 128 at a time, with float32 sums."""
  (inputs, outputs), block = codes.shape, _FP8.block[0]
  rows, row_scales = _ACTIVATIONS.quantise(x.reshape(-1, inputs))
  padding = ((0, 0), (0, -inputs % block))
  rows = jnp.pad(rows, padding).reshape(len(rows), -1, block)
  blocks = jnp.pad(codes, padding[::-1]).reshape(-1, block, outputs)

  def add(total: Array, part: tuple[Array, ...]):
    row, row_scale, block, scale = part
    product = jnp.dot(row, block, preferred_element_type=jnp.float32)
    scale = _FP8._spread(scale[None], codes.shape)
    return total + product * row_scale[:, None] * scale, None

  parts = jnp.moveaxis(rows, 1, 0), row_scales.T, blocks, scales
  total = jnp.zeros((len(rows), outputs), jnp.float32)
  total, _ = jax.lax.scan(add, total, parts)
  return total.astype(x.dtype).reshape(*x.shape[:-1], outputs)


# Sums are float32.
einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def matmul(x: chex.Array, kernel: chex.Array) -> Array:
  """Returns x W for x [..., in] and W [in, out].

  The gradient of W is computed as xᵀ g or (gᵀ x)ᵀ, whichever transposes the
  narrower factor. Automatic differentiation always transposes g, together with
  the elementwise operations that produce it, which took a third of the time of
  a training step on a CPU.
  """
  return _matmul_fwd(x, kernel)[0]


def _matmul_fwd(x: Array, kernel: Array):
  return _dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))), (x, kernel)


def _matmul_bwd(residuals: tuple[Array, Array], g: Array):
  x, kernel = residuals
  rows = tuple(range(x.ndim - 1))
  contract = ((rows, rows), ((), ()))
  if kernel.shape[0] <= kernel.shape[1]:
    d_kernel = _dot(x, g, contract)
  else:
    d_kernel = _dot(g, x, contract).T
  return _dot(g, kernel, (((g.ndim - 1,), (1,)), ((), ()))), d_kernel


def _dot(x: Array, y: Array, contract: jax.lax.DotDimensionNumbers):
  """Multiplies two arrays of one dtype, in that dtype, with float32 sums.

  CPUs with bfloat16 products use them only if the result is float32: they then
  take half the time of float32 products, and otherwise two to four times as
  long.
  """
  product = jax.lax.dot_general(
    x, y, contract, preferred_element_type=jnp.float32
  )
  return product.astype(x.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)
