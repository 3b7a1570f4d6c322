"""Packing: samples of different length side by side in rows of one capacity.

A sample is its prompt and response without padding. Samples are laid into rows
[R, C] by first-fit-decreasing, rows are grouped into micro-batches [M, r, C] of
a fixed shape, and a count says how many micro-batches hold anything. Cost then
follows the tokens that exist while every step has the same shapes.

This file holds one of the two shifts between logits and tokens (the sampler is
the other): response token t of a sample is predicted at the position before it,
so every response-aligned [B, T] array is scattered to that position.
"""

import dataclasses

import chex
import numpy as np

from jaxrl_llm.types import Rollout


@chex.dataclass(frozen=True)
class PackedTokens:
  """Micro-batches of packed rows; a loss at (m, r, c) is about `targets`."""

  tokens: chex.Array  # int32 [M, r, C].
  targets: chex.Array  # int32 [M, r, C], the next token of the same sample.
  segments: chex.Array  # int32 [M, r, C], 1.. per row, 0 is padding.
  positions: chex.Array  # int32 [M, r, C], index within the sample.
  mask: chex.Array  # bool [M, r, C], targets that are unmasked response.
  count: chex.Array  # int32 scalar, micro-batches that hold anything.


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where the response tokens of B samples lie in [M, r, C].

  Attributes:
    shape: (M, r, C).
    index: int64 [B, T], flat position that predicts each response token.
    present: bool [B, T], tokens that exist (masked ones included).
  """

  shape: tuple[int, int, int]
  index: np.ndarray
  present: np.ndarray

  def scatter(self, values: chex.Array) -> np.ndarray:
    """Response-aligned [B, T] to packed [M, r, C], 0 elsewhere."""
    values = np.asarray(values)
    packed = np.zeros(int(np.prod(self.shape)), values.dtype)
    packed[self.index[self.present]] = values[self.present]
    return packed.reshape(self.shape)

  def gather(self, packed: chex.Array) -> np.ndarray:
    """Packed [M, r, C] to response-aligned [B, T], 0 where nothing is."""
    flat = np.asarray(packed).reshape(-1)
    return np.where(self.present, flat[self.index], flat.dtype.type(0))


def first_fit_decreasing(
  lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Rows and offsets of samples, longest first into the first row with room.

  Args:
    lengths: int [B], none over capacity.
    capacity: tokens per row.

  Returns:
    row [B], offset [B] and the number of rows.
  """
  free = np.zeros(0, np.int64)
  row, offset = np.zeros(len(lengths), int), np.zeros(len(lengths), int)
  for i in np.argsort(-lengths, kind="stable"):
    fits = np.flatnonzero(free >= lengths[i])
    if not fits.size:
      free = np.append(free, capacity)
      fits = [free.size - 1]
    row[i] = fits[0]
    offset[i] = capacity - free[row[i]]
    free[row[i]] -= lengths[i]
  return row, offset, free.size


def pack(
  rollout: Rollout, *, capacity: int, rows: int, micro_batches: int
) -> tuple[PackedTokens, Layout]:
  """Packs the samples of a rollout.

  Args:
    rollout: B samples as NumPy arrays.
    capacity: tokens per row, C; at least the longest sample.
    rows: rows per micro-batch, r.
    micro_batches: static number of micro-batches, M. B ≤ M · r always fits.

  Returns:
    The packed tokens and the layout that moves [B, T] arrays to and fro.

  Raises:
    ValueError: a sample is longer than a row, or there are too few rows.
  """
  prompt, response = rollout.prompt_lengths, rollout.lengths
  total = prompt + response
  if total.max(initial=0) > capacity:
    raise ValueError(
      f"a sample of {total.max()} tokens does not fit a row of {capacity}"
    )
  row, offset, used = first_fit_decreasing(total, capacity)
  if used > rows * micro_batches:
    raise ValueError(
      f"{used} rows do not fit {micro_batches} micro-batches of {rows}"
    )
  shape = (micro_batches, rows, capacity)
  arrays = {
    name: np.zeros((rows * micro_batches, capacity), np.int32)
    for name in ("tokens", "targets", "segments", "positions")
  }
  next_segment = np.zeros(rows * micro_batches, np.int32)
  for i in np.lexsort((offset, row)):
    sample = np.concatenate(
      [
        rollout.prompt_tokens[i, : prompt[i]],
        rollout.tokens[i, : response[i]],
      ]
    )
    here = (row[i], slice(offset[i], offset[i] + total[i]))
    next_segment[row[i]] += 1
    arrays["tokens"][here] = sample
    arrays["targets"][here] = np.append(sample[1:], 0)
    arrays["segments"][here] = next_segment[row[i]]
    arrays["positions"][here] = np.arange(total[i])
  room = rollout.tokens.shape[1]
  start = row * capacity + offset + prompt - 1
  layout = Layout(
    shape=shape,
    index=start[:, None] + np.arange(room)[None],
    present=np.arange(room)[None] < response[:, None],
  )
  # Indices of absent tokens may run off the end; gather reads them blindly.
  layout.index[~layout.present] = 0
  packed = PackedTokens(
    **{k: v.reshape(shape) for k, v in arrays.items()},
    mask=layout.scatter(np.asarray(rollout.mask)),
    count=np.int32(-(-used // rows)),
  )
  return packed, layout


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """The samples of one update: their rows in the rollout, packed."""

  rows: np.ndarray
  packed: PackedTokens
  layout: Layout


def mini_batches(
  rollout: Rollout,
  *,
  size: int,
  rng: np.random.Generator | None,
  capacity: int,
  rows: int,
) -> list[MiniBatch]:
  """Splits a rollout into mini-batches of `size` samples and packs each.

  Args:
    rollout: B samples; B is a multiple of `size`.
    size: samples per mini-batch.
    rng: shuffles the samples; None keeps their order.
    capacity: tokens per row.
    rows: rows per micro-batch.
  """
  total = len(rollout.lengths)
  order = np.arange(total) if rng is None else rng.permutation(total)
  batches = []
  for chosen in order.reshape(-1, size):
    packed, layout = pack(
      select(rollout, chosen),
      capacity=capacity,
      rows=rows,
      micro_batches=-(-size // rows),
    )
    batches.append(MiniBatch(chosen, packed, layout))
  return batches


def select(rollout: Rollout, rows: np.ndarray) -> Rollout:
  """The rows of a rollout at the given indices, in that order."""
  return Rollout(**{k: np.asarray(v)[rows] for k, v in rollout.items()})
