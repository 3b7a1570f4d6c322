"""Packing: samples of different lengths in rows of a fixed capacity.

A sample is its prompt and response without padding. Samples of one prompt that
fit into a row share the prompt, which is then computed once: the prompt without
its last token is one segment, and every branch (last prompt token and response)
is a segment that also attends to it as its prefix. These units are packed into
rows [R, C] by first-fit decreasing, rows are grouped into micro-batches
[M, r, C] of a fixed shape, and a count tells how many of them are not empty.
Cost is then proportional to the actual tokens, but shapes never change.

This file has one of the two shifts between logits and tokens (the sampler has
the other): response token t of a sample is predicted at the position before it,
so every response-aligned [B, T] array is scattered to that position.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.models import PackedRows
from jaxrl_llm.system import processes
from jaxrl_llm.types import Rollout, take_rows


@dataclasses.dataclass(frozen=True)
class Layout:
  """The positions of B samples in packed rows [M, r, C].

  Its size depends on B only: arrays with T columns are computed on demand.

  Attributes:
    shape: (M, r, C).
    width: T, the padded length of a response.
    units: flat position of each unit and its samples, in order.
    start: int64 [B], flat position that predicts each first response token.
    lengths: int [B], response tokens (masked ones included).
  """

  shape: tuple[int, int, int]
  width: int
  units: Sequence[tuple[int, Sequence[int]]]
  start: np.ndarray
  lengths: np.ndarray

  @property
  def present(self) -> np.ndarray:
    """bool [B, T], True at actual response tokens, not padding."""
    return np.arange(self.width)[None] < self.lengths[:, None]

  @property
  def index(self) -> np.ndarray:
    """int64 [N], flat positions that predict the N actual response tokens."""
    before = np.cumsum(self.lengths) - self.lengths
    return np.arange(self.lengths.sum()) + np.repeat(
      self.start - before, self.lengths
    )

  def scatter(self, values: chex.Array, fill: int = 0) -> np.ndarray:
    """Scatters response-aligned [B, T, ...] to packed [M, r, C, ...].

    Values [B] are scattered to all tokens of their response. Positions that
    predict no token are set to `fill`.
    """
    values = np.asarray(values)
    if values.ndim == 1:
      values = np.broadcast_to(values[:, None], self.present.shape)
    shape = *self.shape, *values.shape[2:]
    packed = np.full((int(np.prod(self.shape)), *shape[3:]), fill, values.dtype)
    packed[self.index] = values[self.present]
    return packed.reshape(shape)

  def gather(self, packed: chex.Array) -> np.ndarray:
    """Gathers packed [M, r, C] to response-aligned [B, T], 0 in padding."""
    flat, present = np.asarray(packed).reshape(-1), self.present
    values = np.zeros(present.shape, flat.dtype)
    values[present] = flat[self.index]
    return values

  def gather_last(self, packed: chex.Array) -> np.ndarray:
    """Gathers packed [M, r, C] to [B], the value at the last token."""
    return np.asarray(packed).reshape(-1)[self.start + self.lengths]

  def pack(self, rollout: Rollout) -> PackedRows:
    """Packs the samples for which the layout was made."""
    _, rows, capacity = self.shape
    names = ("tokens", "targets", "segments", "prefixes", "positions")
    names += ("samples",)
    flat = {name: np.zeros(np.prod(self.shape), np.int32) for name in names}
    segments = collections.Counter()  # By row.
    for at, unit in self.units:
      row = at // capacity
      segments[row] = self._write_unit(flat, rollout, unit, at, segments[row])
    sampled = np.where(rollout.mask, rollout.behavior_logprobs, np.float32(0))
    choices = rollout.choices
    if choices is not None:
      choices = self.scatter(choices, fill=-1)
    # A token is one position after the position that predicts it.
    behind = np.roll(self.scatter(sampled).reshape(-1), 1)
    return PackedRows(
      **{name: x.reshape(self.shape) for name, x in flat.items()},
      mask=self.scatter(rollout.mask),
      logprobs=behind.reshape(self.shape),
      choices=choices,
      count=np.int32(-(-len(segments) // rows)),
    )

  def _write_unit(self, flat, rollout, unit, at, segment) -> int:
    """Writes a unit at flat position `at`; returns its last segment."""
    prompt = rollout.prompt_tokens[unit[0], : rollout.prompt_lengths[unit[0]]]
    shared = prompt[:-1] if len(unit) > 1 else prompt[:0]
    own, prefix = prompt[shared.size :], 0
    if shared.size:
      segment = prefix = segment + 1
      _write(flat, at, shared, 0, segment, 0)
      flat["samples"][at : at + shared.size] = len(unit)
    for i in unit:
      branch = np.concatenate([own, rollout.tokens[i, : rollout.lengths[i]]])
      segment += 1
      at = self.start[i] + 1 - own.size
      _write(flat, at, branch, shared.size, segment, prefix)
    return segment


def first_fit_decreasing(
  lengths: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Assigns units to rows, longest first, each to the first row that fits.

  Args:
    lengths: int [N], at most `capacity`.
    capacity: tokens per row.

  Returns:
    row [N], offset [N] and the number of rows.
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


def make_units(
  rollout: Rollout, capacity: int, *, share: bool
) -> tuple[list[list[int]], list[int]]:
  """Groups samples that share a prompt into units that fit into a row.

  A unit of n > 1 samples consists of the prompt without its last token, then
  that token and the response of each sample.

  Args:
    rollout: B samples.
    capacity: tokens per row.
    share: False makes one unit per sample.

  Returns:
    The sample indices of each unit, which partition range(B), and its length.
  """
  units: list[list[int]] = []
  lengths: list[int] = []
  last: dict[int, int] = {}  # Group -> index of its last unit.
  groups = rollout.group if share else np.arange(len(rollout.lengths))
  for i in np.lexsort((-rollout.lengths, groups)).tolist():
    group, branch = int(groups[i]), 1 + int(rollout.lengths[i])
    unit = last.get(group)
    if unit is None or lengths[unit] + branch > capacity:
      unit = last[group] = len(units)
      units.append([])
      lengths.append(int(rollout.prompt_lengths[i]) - 1)
    units[unit].append(i)
    lengths[unit] += branch
  return units, lengths


def make_layout(
  rollout: Rollout,
  *,
  capacity: int,
  rows: int,
  micro_batches: int,
  share: bool = True,
) -> Layout:
  """Assigns the samples of a rollout to packed rows.

  Args:
    rollout: B samples as NumPy arrays; rows of a group have the same prompt.
    capacity: tokens per row, C; at least the longest sample.
    rows: rows per micro-batch, r.
    micro_batches: static number of micro-batches, M. B ≤ M · r always fits.
    share: whether samples of a group share one copy of their prompt.

  Raises:
    ValueError: a sample is longer than a row, there are too few rows, or a
      group has different prompts.
  """
  _check_samples(rollout, capacity)
  units, sizes = make_units(rollout, capacity, share=share)
  row, offset, used = first_fit_decreasing(np.asarray(sizes), capacity)
  if used > rows * micro_batches:
    raise ValueError(
      f"{used} rows do not fit {micro_batches} micro-batches of {rows}"
    )
  laid = [
    (int(row[i] * capacity + offset[i]), units[i])
    for i in np.lexsort((offset, row))
  ]
  start = np.zeros(len(rollout.lengths), np.int64)
  for at, unit in laid:
    prompt = rollout.prompt_lengths[unit[0]]
    own = 1 if len(unit) > 1 else prompt
    branches = own + rollout.lengths[unit]
    start[unit] = at + prompt - 1 + np.cumsum(branches) - branches
  return Layout(
    shape=(micro_batches, rows, capacity),
    width=rollout.tokens.shape[1],
    units=laid,
    start=start,
    lengths=np.asarray(rollout.lengths),
  )


def pack(rollout: Rollout, **shape: Any) -> tuple[PackedRows, Layout]:
  """Packs the samples of a rollout; arguments as in `make_layout`.

  Returns:
    The packed tokens and the layout that maps [B, T] arrays to and from them.
  """
  layout = make_layout(rollout, **shape)
  return layout.pack(rollout), layout


def _check_samples(rollout: Rollout, capacity: int) -> None:
  longest = (rollout.prompt_lengths + rollout.lengths).max(initial=0)
  if longest > capacity:
    raise ValueError(
      f"a sample of {longest} tokens does not fit a row of {capacity}"
    )
  _, first, group = np.unique(
    rollout.group, return_index=True, return_inverse=True
  )
  if (rollout.prompt_tokens != rollout.prompt_tokens[first[group]]).any():
    raise ValueError("rows of one group have different prompts")


def _write(flat, at, tokens, position, segment, prefix) -> None:
  here = slice(at, at + tokens.size)
  flat["tokens"][here] = tokens
  flat["targets"][here] = np.append(tokens[1:], 0)
  flat["positions"][here] = position + np.arange(tokens.size)
  flat["segments"][here] = segment
  flat["prefixes"][here] = prefix
  flat["samples"][here] = 1


@chex.dataclass(frozen=True)
class PackedBatch:
  """One mini-batch for an update; arrays are [M, r, C] like its tokens.

  `packed.mask` is True where outputs of the model are used. `mask` is True at
  the subset of these tokens in the main loss; auxiliary losses may use others.
  """

  packed: PackedRows
  mask: chex.Array  # bool.
  inputs: dict[str, chex.Array]  # Inputs and weights of the losses, by name.
  schedule_step: chex.Array = np.int32(0)  # For the learning rate.
  step_scale: chex.Array | None = None  # Factor of the update; None is 1.
  # Weight of a sample's token in the model's own losses.
  own_weight: chex.Array = np.float32(0)

  @property
  def trains(self) -> bool:
    """Whether any token has a nonzero weight in any loss; reads host arrays."""
    weights = [
      x for k, x in self.inputs.items() if k.split("/")[-1] == "weights"
    ]
    return any(x.any() for x in weights)

  def micro_batch(self, i: chex.Numeric) -> dict[str, Any]:
    """Returns micro-batch i: arrays [r, C], and `own_weight`."""
    take = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    arrays = jax.tree.map(take, {"mask": self.mask, "inputs": self.inputs})
    of_all = {"own_weight": self.own_weight}
    return arrays | of_all | {"packed": self.packed.rows(i)}


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """The samples of one update: their rows in a rollout, and their layout."""

  rows: np.ndarray
  layout: Layout
  rollout: Rollout
  share: float = 1.0  # Fraction of the responses of its update.
  temperature: float = 1.0  # Sampling temperature.

  @property
  def packed(self) -> PackedRows:
    """Packs the samples. Not cached, so that only one mini-batch is packed."""
    packed = self.layout.pack(take_rows(self.rollout, self.rows))
    return packed.replace(temperature=np.float32(self.temperature))

  def routed_by(self, version: int) -> "MiniBatch":
    """Returns the samples with the experts that one version's weights chose."""
    rollout, choices = self.rollout, self.rollout.choices
    if choices is None:
      return self
    theirs = (rollout.version == version)[..., None]
    choices = np.where(theirs, choices, choices.dtype.type(-1))
    return dataclasses.replace(self, rollout=rollout.replace(choices=choices))


def mini_batches(
  rollout: Rollout,
  *,
  size: int,
  rng: np.random.Generator | None,
  capacity: int,
  rows: int,
  chosen: np.ndarray | None = None,
  share: bool = True,
  temperature: float = 1.0,
) -> list[MiniBatch]:
  """Splits a rollout into mini-batches of `size` samples.

  Groups are shuffled, not samples, so that a group's samples stay together and
  share their prompt. Sizes differ by at most one, so that all samples have
  nearly the same weight.

  Args:
    rollout: B samples.
    size: samples per mini-batch, at most.
    rng: shuffles the groups; None keeps their order.
    capacity: tokens per row.
    rows: rows per micro-batch.
    chosen: indices of the samples to split; all by default.
    share: as in `make_layout`.
    temperature: sampling temperature.
  """
  if chosen is None:
    chosen = np.arange(len(rollout.lengths))
  names, group = np.unique(rollout.group[chosen], return_inverse=True)
  rank = np.arange(names.size) if rng is None else rng.permutation(names.size)
  order = chosen[np.argsort(rank[group], kind="stable")]
  count, batches = -(-order.size // size), []
  for part in np.array_split(order, count) if count else ():
    layout = make_layout(
      take_rows(rollout, part),
      capacity=capacity,
      rows=rows,
      micro_batches=-(-size // rows),
      share=share,
    )
    made = MiniBatch(part, layout, rollout, temperature=temperature)
    batches.append(made)
  return batches


def place(batch: Any, mesh: jax.sharding.Mesh) -> Any:
  """Puts [M, r, C, ...] arrays on the mesh, with r sharded over batch axes."""
  rows, whole = sharding.along_batch(mesh, axis=1), sharding.replicated(mesh)
  places = jax.tree.map(lambda x: rows if x.ndim >= 3 else whole, batch)
  return processes.put(batch, places)


def next_power_of_two(rows: int) -> int:
  """Returns the smallest power of two that is at least `rows`.

  Programs for arrays padded to it are compiled for few sizes.
  """
  return 1 << (rows - 1).bit_length()
