"""Rows of a `Rollout` before they are written on: made, checked, batched.

Everything here is NumPy on the host. A new response is a row of length 0, so
that starting and continuing differ in nothing but the context to prefill.
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import numpy as np

from jaxrl_llm.types import Origin, Rollout, Status


class Contexts(NamedTuple):
  """N contexts to prefill, each with G responses that go on from it.

  Contexts and responses that a batch does not fill are marked by slot S.
  """

  tokens: np.ndarray  # int32 [N, C], prompt and response so far.
  lengths: np.ndarray  # int32 [N].
  written: np.ndarray  # int32 [N], response tokens among them.
  slot_index: np.ndarray  # int32 [N, G], the slot of a row is its number.
  sample_ids: np.ndarray  # int32 [N, G].


def new_rows(
  prompts: Sequence[Sequence[int]],
  sample_ids: Sequence[Sequence[int]],
  prompt_ids: Sequence[int],
  *,
  width: int,
  room: int,
) -> Rollout:
  """Rows without a token yet, those of a prompt side by side.

  Args:
    prompts: N token sequences.
    sample_ids: for each prompt the ids of its responses, B in all.
    prompt_ids: N numbers.
    width: P, room for a prompt.
    room: T, room for a response.
  """
  counts = np.asarray([len(ids) for ids in sample_ids], np.int32)
  share = lambda x: np.repeat(np.asarray(x, np.int32), counts, axis=0)
  tokens = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(tokens, prompts):
    row[: len(prompt)] = prompt
  rows = int(counts.sum())
  full = lambda value, *shape: np.full((rows, *shape), value, np.int32)
  return Rollout(
    prompt_tokens=share(tokens),
    prompt_lengths=share([len(p) for p in prompts]),
    tokens=full(0, room),
    lengths=full(0),
    mask=np.zeros((rows, room), bool),
    behavior_logprobs=np.zeros((rows, room), np.float32),
    version=full(0, room),
    origin=full(int(Origin.POLICY), room),
    status=full(int(Status.TRUNCATED)),
    window_start=full(0),
    prompt_id=share(prompt_ids),
    group=share(np.arange(len(prompts))),
    sample_id=np.concatenate([full(0)[:0], *sample_ids]).astype(np.int32),
  )


def join(rollouts: Sequence[Rollout]) -> Rollout:
  """The rows of all, in order, as NumPy arrays."""
  return jax.tree.map(lambda *parts: np.concatenate(parts), *rollouts)


def split(rollout: Rollout, size: int) -> list[Rollout]:
  """Parts of `size` rows, the last one of what remains."""

  def part(start):
    return jax.tree.map(lambda x: x[start : start + size], rollout)

  return [part(i) for i in range(0, len(rollout.lengths), size)]


def groups_of(prompt_ids: chex.Array) -> np.ndarray:
  """Index 0, 1, ... of each prompt id, by first appearance; int32 [B]."""
  _, first, inverse = np.unique(
    prompt_ids, return_index=True, return_inverse=True
  )
  return np.argsort(np.argsort(first))[inverse].astype(np.int32)


def sharing_context(rows: Rollout) -> tuple[list, list]:
  """Row numbers of each context: of new responses, and of continued ones.

  New responses of a group share their prompt; a continued response has its
  context for itself.
  """
  new, old = np.flatnonzero(rows.lengths == 0), np.flatnonzero(rows.lengths)
  groups = rows.group[new]
  return [new[groups == g] for g in np.unique(groups)], list(old[:, None])


def chunks(rows: Rollout, contexts: list, size: int) -> list[tuple[int, list]]:
  """Contexts of like length together: (longest, at most `size` of them)."""
  total = rows.prompt_lengths + rows.lengths
  order = sorted(contexts, key=lambda numbers: total[numbers[0]])
  parts = [order[i : i + size] for i in range(0, len(order), size)]
  return [
    (int(total[part[-1][0]]), sorted(part, key=lambda numbers: numbers[0]))
    for part in parts
  ]


def lay_out(
  rows: Rollout, contexts: list, shape: tuple[int, int], span: int, slots: int
) -> Contexts:
  """The contexts as arrays of a shape [N, G] that does not depend on them.

  Args:
    rows: all rows of the call.
    contexts: row numbers of at most N contexts, at most G each.
    shape: (N, G).
    span: tokens that each context is padded to.
    slots: S, the slot number of absent ones.
  """
  tokens = np.zeros((shape[0], span), np.int32)
  lengths, written = np.ones(shape[0], np.int32), np.zeros(shape[0], np.int32)
  index, ids = np.full(shape, slots, np.int32), np.zeros(shape, np.int32)
  for i, numbers in enumerate(contexts):
    row = numbers[0]
    prompt, response = rows.prompt_lengths[row], rows.lengths[row]
    lengths[i], written[i] = prompt + response, response
    tokens[i, :prompt] = rows.prompt_tokens[row, :prompt]
    tokens[i, prompt : lengths[i]] = rows.tokens[row, :response]
    index[i, : len(numbers)] = numbers
    ids[i, : len(numbers)] = rows.sample_id[numbers]
  return Contexts(tokens, lengths, written, index, ids)


def check_prompts(prompts: Sequence[Sequence[int]], *, width: int) -> None:
  """Refuses prompts that are empty or longer than `width`."""
  lengths = [len(p) for p in prompts]
  if lengths and (min(lengths) < 1 or max(lengths) > width):
    raise ValueError(
      f"prompt lengths must be 1..{width}, got {min(lengths)}..{max(lengths)}"
    )


def check_new(
  prompts: Sequence[Sequence[int]],
  sample_ids: Sequence[Sequence[int]],
  prompt_ids: Sequence[int],
  *,
  group_size: int,
) -> None:
  """Refuses prompts, ids and sample ids that do not belong together."""
  if not len(prompts) == len(sample_ids) == len(prompt_ids):
    raise ValueError(
      "sample_ids and prompt_ids must have one entry for each of the"
      f" {len(prompts)} prompts, got {len(sample_ids)} and {len(prompt_ids)}"
    )
  for prompt_id, ids in zip(prompt_ids, sample_ids):
    if np.ndim(ids) != 1 or not 1 <= len(ids) <= group_size:
      raise ValueError(
        f"a prompt must have 1..{group_size} sample ids (group_size), got"
        f" shape {np.shape(ids)} for prompt {prompt_id}"
      )
  _check_unique("prompt_ids of new prompts", prompt_ids)


def check_unfinished(
  rows: Rollout, *, width: int, room: int, limit: int
) -> None:
  """Refuses rows that did not stop at the end of a window."""
  for name, columns in (("prompt_tokens", width), ("tokens", room)):
    shape = np.shape(rows[name])
    if len(shape) != 2 or shape[1] != columns:
      raise ValueError(
        f"unfinished.{name} must be [rows, {columns}] in this engine, got"
        f" shape {shape}"
      )
  for row, status in enumerate(rows.status):
    if status != Status.TRUNCATED:
      raise ValueError(
        f"unfinished rows must be {Status.TRUNCATED!r}, got"
        f" {Status(int(status))!r} in row {row}"
      )
  for row, length in enumerate(rows.lengths):
    if not 1 <= length < limit:
      raise ValueError(
        f"unfinished rows must have 1..{limit - 1} response tokens (below the"
        f" limit), got {length} in row {row}"
      )


def check_all(rows: Rollout, *, slots: int) -> None:
  """Refuses rows that are none, too many, or the same response twice."""
  count = len(rows.sample_id)
  if not 1 <= count <= slots:
    raise ValueError(
      f"unfinished and new responses must be 1..{slots} (the slots) together,"
      f" got {count}"
    )
  _check_unique("sample ids", rows.sample_id)


def _check_unique(name, values):
  values, counts = np.unique(np.asarray(values), return_counts=True)
  if np.any(counts > 1):
    raise ValueError(
      f"{name} must differ, got {values[counts > 1].tolist()} more than once"
    )
