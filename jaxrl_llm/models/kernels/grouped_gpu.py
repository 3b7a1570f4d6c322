"""Grouped matrix multiplication with Pallas kernels for GPUs.

Rows are sorted by group, and each is multiplied by the matrix of its group. A
tile has rows of one group only, so the only wasted products are the masked rows
of a group's last tile: the cost of a group is proportional to its size, also if
it is empty. On a GPU, `jax.lax.ragged_dot` copies all rows for every group.
JAX's kernels (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`) support only
Hopper and 16 bits, and have no gradients.

Reference: Gale et al. 2023, MegaBlocks, arXiv 2211.15841.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxrl_llm.models.kernels.flash_gpu import Refs, dot, pallas_call

# Maximum rows of a tile, its columns, and the terms of a sum per iteration:
# with these, every kernel fits in 99 KiB of shared memory. None has been timed.
_ROWS, _COLUMNS, _TERMS = 64, 128, 64


def multiply(
  x: Array, kernel: Array, sizes: Array, *, transposed: bool = False
) -> Array:
  """Multiplies rows [N, in] with their group's matrix, in the dtype of x.

  Args:
    x: [N, in], sorted by group.
    kernel: [E, in, out]; [E, out, in] if transposed.
    sizes: int32 [E], rows of each group; results of other rows are 0.
    transposed: whether to multiply with the transposed matrices.

  Returns:
    [N, out].
  """
  count, groups = len(x), len(sizes)
  columns = kernel.shape[1 if transposed else 2]
  rows = max(16, min(_ROWS, pl.next_power_of_2(-(-count // groups))))
  tiles = _find_tiles(sizes, count, rows)
  return pallas_call(
    functools.partial(_grouped_product, rows, transposed),
    (pl.cdiv(columns, _COLUMNS), len(tiles)),
    jax.ShapeDtypeStruct((count, columns), x.dtype),
    (x, kernel, tiles),
  )


def gradients(
  x: Array, kernel: Array, sizes: Array, g: Array
) -> tuple[Array, Array]:
  """Returns the gradients of x and kernel, in their dtypes.

  Args:
    x, kernel, sizes: as in `multiply`.
    g: [N, out], gradient with respect to the products.
  """
  g, ends = g.astype(x.dtype), jnp.cumsum(sizes)
  d_x = multiply(g, kernel, sizes, transposed=True)
  groups, inner, columns = kernel.shape
  d_kernel = pallas_call(
    _grouped_outer_product,
    (pl.cdiv(columns, _COLUMNS), pl.cdiv(inner, _ROWS), groups),
    kernel,
    (x, g, jnp.stack([ends - sizes, ends], axis=1)),
  )
  return d_x, d_kernel


def _find_tiles(sizes: Array, count: int, rows: int):
  """Returns the group, first row and end of every tile, int32 [T, 3].

  Rows after the last group belong to group E.
  """
  sizes = jnp.append(sizes, count - jnp.sum(sizes)).astype(jnp.int32)
  ends, tiles = jnp.cumsum(sizes), -(-sizes // rows)
  last = jnp.cumsum(tiles)
  tile = jnp.arange(-(-count // rows) + len(sizes), dtype=jnp.int32)
  group = jnp.sum(last[None] <= tile[:, None], axis=1)
  group = jnp.minimum(group, len(sizes) - 1)
  first = (ends - sizes)[group] + (tile - (last - tiles)[group]) * rows
  return jnp.stack([group, first, ends[group]], axis=1)


def _grouped_product(rows: int, transposed: bool, arrays: Refs, out_ref: Ref):
  x_ref, kernel_ref, tiles_ref = arrays
  column, tile = _block(pl.program_id(0), _COLUMNS), pl.program_id(1)
  group, first, end = (tiles_ref[tile, i] for i in range(3))
  row = first + jnp.arange(rows)
  axis = 1 if transposed else 0  # Axis of the terms in a block of the matrix.

  def add(i: Array, sum_: Array):
    term = _block(i, _TERMS)
    a = _load(x_ref, (), row, term, end)
    at = (column, term) if transposed else (term, column)
    b = _load(kernel_ref, (group,), *at, kernel_ref.shape[1])
    return sum_ + dot(a, b, of_b=axis)

  # Rows without a group have no matrix, and trailing tiles have no rows.
  used = (group < kernel_ref.shape[0]) & (first < end)
  terms = used.astype(jnp.int32) * pl.cdiv(x_ref.shape[1], _TERMS)
  out = jnp.zeros((rows, _COLUMNS), jnp.float32)
  out = jax.lax.fori_loop(0, terms, add, out)
  _store(out, out_ref, (), row, column, end)


def _grouped_outer_product(arrays: Refs, out_ref: Ref):
  x_ref, g_ref, spans_ref = arrays
  column, inner, group = (pl.program_id(i) for i in range(3))
  column, inner = _block(column, _COLUMNS), _block(inner, _ROWS)
  first, end = spans_ref[group, 0], spans_ref[group, 1]

  def add(i: Array, sum_: Array):
    row = first + _block(i, _TERMS)
    a = _load(x_ref, (), row, inner, end)
    b = _load(g_ref, (), row, column, end)
    return sum_ + dot(a, b, axis=0)

  out = jnp.zeros((_ROWS, _COLUMNS), jnp.float32)
  blocks = jax.lax.div(end - first + _TERMS - 1, _TERMS)
  out = jax.lax.fori_loop(0, blocks, add, out)
  _store(out, out_ref, (group,), inner, column, out_ref.shape[1])


def _block(i: Array, size: int):
  return i * size + jnp.arange(size)


def _part(
  ref: Ref,
  group: tuple[Array, ...],
  row: Array,
  column: Array,
  end: Array | int,
):
  """Returns a block of a matrix, and the mask of its elements within bounds."""
  mask = (row < end)[:, None] & (column < ref.shape[-1])[None]
  return ref.at[*group, row[:, None], column[None]], mask


def _load(*where):
  part, mask = _part(*where)
  return triton.load(part, mask=mask, other=0.0)


def _store(value: Array, ref: Ref, *where):
  part, mask = _part(ref, *where)
  triton.store(part, value.astype(ref.dtype), mask=mask)
