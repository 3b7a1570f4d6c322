"""Requests: responses in progress, each a row of a `Rollout`.

Everything here is NumPy on the host. A new response is a row of length 0, so
that starting and continuing differ only in the context to prefill.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling.settings import EngineConfig, SamplingSettings
from jaxrl_llm.sampling.slots import DecodeOutput, SamplingMetadata, Slots
from jaxrl_llm.types import Origin, Rollout, Status


class SamplingParams(NamedTuple):
  """Sampling parameters shared by requests that are decoded together."""

  settings: SamplingSettings
  metadata: SamplingMetadata
  group_size: int  # Usual number of new responses per prompt.
  extendable: bool = False  # Also keeps the KV of ended responses.


@dataclasses.dataclass(eq=False)
class Request:
  """A response in progress; new tokens are written into its row in place."""

  row: Rollout  # This response only; arrays [1, ...].
  params: SamplingParams
  max_tokens: int  # Response length at which the response ends.
  pause_at: int  # Response length at which it leaves its slot, <= max_tokens.
  slot: int | None = None
  shard: int = 0  # The shard of its pages.
  pages: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0  # Context length when it last left its slot.
  position: int = 0  # Index of the next token to read.
  given: Sequence[int] = ()  # Response tokens to score instead of drawing.
  awaiting_environment: bool = False  # Left its slot until the reply.

  @property
  def length(self) -> int:
    """The number of response tokens so far."""
    return int(self.row.lengths[0])

  @property
  def context_length(self) -> int:
    """The number of tokens of the prompt and of the response so far."""
    return int(self.row.prompt_lengths[0] + self.row.lengths[0])

  @property
  def last_token(self) -> int:
    """The token at `position`."""
    row, index = self.row, self.position - self.row.prompt_lengths[0]
    if index >= 0:
      return row.tokens[0, index]
    return row.prompt_tokens[0, self.position]

  @property
  def turn_start(self) -> int:
    """The number of response tokens up to the last one not from the policy."""
    others = self.row.origin[0, : self.length] != Origin.POLICY
    return int(np.flatnonzero(others)[-1]) + 1 if others.any() else 0

  @property
  def prefix(self) -> tuple:
    """Key of a shared prefill, equal for new responses of a group.

    New responses may begin with given tokens.
    """
    if self.row.mask[0, : self.length].any():
      return (id(self),)
    return int(self.row.group_id[0]), self.context().tobytes()

  def append(self, output: DecodeOutput, slot: int, *, version: int) -> int:
    """Appends the new tokens of a slot, and returns how many.

    Tokens of the policy may carry loss. Mask and origin of earlier tokens are
    unchanged.

    Args:
      output: output of all slots; NumPy arrays.
      slot: row of the request in the output.
      version: version of the policy.

    Raises:
      InputError: No token has a probability above 0.
    """
    row, read = self.row, int(output.count[slot])
    old = min(self.context_length - 1 - self.position, read)
    tokens = output.tokens[slot, old:read]
    if tokens.min(initial=0) < 0:  # See `choose`.
      raise InputError(
        "no token has a probability above 0: the model's logits are not finite,"
        " or a logits processor forbids every token; check the weights and the"
        " processors"
      )
    self.position, count = self.position + read, read - old
    new = np.s_[0, self.length : self.length + count]
    row.tokens[new] = tokens
    row.behavior_logprobs[new] = output.logprobs[slot, old:read]
    row.version[new] = version
    row.origin[new] = int(Origin.POLICY)
    row.mask[new] = True
    if row.choices is not None:
      row.choices[new] = output.choices[slot, old:read]
    row.lengths[0] += count
    row.status[0] = output.status[slot]
    return count

  def context(self) -> np.ndarray:
    """Returns prompt and response so far, int32 [context_length]."""
    prompt = self.row.prompt_tokens[0, : self.row.prompt_lengths[0]]
    return np.concatenate([prompt, self.row.tokens[0, : self.length]])

  def known(self) -> np.ndarray:
    """Returns the context and the given tokens after it, int32."""
    given = np.asarray(self.given[self.length :], np.int32)
    return np.concatenate([self.context(), given])


# Fields that are 0 where a response has no token.
_PER_TOKEN = ("tokens", "behavior_logprobs", "version", "mask", "turn_rewards")

Rows = Sequence[Request | None]  # A batch; None is an idle slot.


def make_requests(
  rollout: Rollout, params: SamplingParams, limits: chex.Array, window: int
) -> list[Request]:
  """Makes a request for each row; new tokens are written to the row.

  Args:
    rollout: B rows; NumPy arrays.
    params: sampling parameters of all rows.
    limits: int [B], response lengths at which responses end.
    window: maximum number of new tokens.
  """
  pauses = np.minimum(rollout.lengths + window, limits)
  return [
    Request(
      # Views: writing to them is writing to the rollout.
      jax.tree.map(lambda x, i=i: x[i : i + 1], rollout),
      params,
      int(limits[i]),
      int(pauses[i]),
    )
    for i in range(len(limits))
  ]


def as_slots(rows: Rows, history: int, exact: bool) -> Slots:
  """Returns requests as the arrays of a decode call.

  Args:
    rows: S requests.
    history: columns of `Slots.history`, C.
    exact: whether decoding reads the known tokens that are not in the cache.
  """

  def column(value, idle, dtype=np.int32):
    return np.asarray([idle if r is None else value(r) for r in rows], dtype)

  def setting(name, idle, dtype=np.int32):
    return column(lambda r: getattr(r.params.settings, name), idle, dtype)

  known = [r.known() if r is not None and history else () for r in rows]
  contexts = np.zeros((len(rows), history), np.int32)
  for context, tokens in zip(contexts, known):
    context[: len(tokens)] = tokens
  return Slots(
    last_token=column(lambda r: r.last_token, 0),
    position=column(lambda r: r.position, 0),
    known=np.asarray([*map(len, known)], np.int32) if exact else None,
    length=column(lambda r: r.position + 1 - r.row.prompt_lengths[0], 0),
    sample_id=column(lambda r: r.row.sample_id[0], 0),
    history=contexts,
    # Filters are off in idle slots: a filter in one slot slows all of them.
    temperature=setting("temperature", 1.0, np.float32),
    top_k=setting("top_k", 0),
    top_p=setting("top_p", 1.0, np.float32),
    min_p=setting("min_p", 0.0, np.float32),
    min_tokens=setting("min_new_tokens", 0),
    max_tokens=column(lambda r: r.max_tokens, 0),
    pause_at=column(lambda r: r.pause_at, 0),
  )


def new_requests(
  prompts: Sequence[Sequence[int]],
  sample_ids: Sequence[Sequence[int]],
  group_ids: Sequence[int],
  config: EngineConfig,
  *,
  example_ids: Sequence[int] | None = None,
) -> Rollout:
  """Returns empty responses, grouped by prompt.

  Args:
    prompts: N token sequences.
    sample_ids: sample ids of the responses to each prompt, B in total.
    group_ids: N group ids.
    config: config of the engine that will write the responses.
    example_ids: N rows of the data; the group ids by default.

  Raises:
    ValueError: A prompt is empty or too long, or the numbers of prompts and ids
      differ.
  """
  lengths, limit = [len(p) for p in prompts], config.max_prompt_length
  if lengths and not 1 <= min(lengths) <= max(lengths) <= limit:
    raise ValueError(
      f"prompt lengths must be 1..{limit}, got {min(lengths)}..{max(lengths)}"
    )
  if not len(prompts) == len(sample_ids) == len(group_ids):
    raise ValueError(
      "sample_ids and group_ids must have one entry for each of the"
      f" {len(prompts)} prompts, got {len(sample_ids)} and {len(group_ids)}"
    )
  _check_unique("group_ids of new prompts", group_ids)
  counts = np.asarray([len(ids) for ids in sample_ids], np.int32)
  repeat = lambda x: np.repeat(np.asarray(x, np.int32), counts, axis=0)
  tokens = np.zeros((len(prompts), limit), np.int32)
  for row, prompt in zip(tokens, prompts):
    row[: len(prompt)] = prompt
  rows, room = int(counts.sum()), config.max_response_length

  def full(value, *shape, dtype=np.int32):
    return np.full((rows, *shape), value, dtype)

  choices = config.choices
  if choices is not None:
    choices = full(-1, room, *choices.shape, dtype=choices.dtype)

  # np.zeros: the system allocates its pages only when they are written.
  return Rollout(
    prompt_tokens=repeat(tokens),
    prompt_lengths=repeat(lengths),
    tokens=np.zeros((rows, room), np.int32),
    lengths=full(0),
    mask=np.zeros((rows, room), bool),
    behavior_logprobs=np.zeros((rows, room), np.float32),
    version=np.zeros((rows, room), np.int32),
    origin=np.full((rows, room), Origin.POLICY, np.int8),
    turn_rewards=np.zeros((rows, room), np.float32),
    status=full(int(Status.TRUNCATED)),
    window_start=full(0),
    example_id=repeat(group_ids if example_ids is None else example_ids),
    group_id=repeat(group_ids),
    group=repeat(np.arange(len(prompts))),
    sample_id=np.concatenate([full(0)[:0], *sample_ids]).astype(np.int32),
    choices=choices,
  )


def extend(
  request: Request, tokens: Sequence[int], origin: Origin, *, version: int
) -> None:
  """Appends tokens that the policy did not draw; they carry no loss.

  Args:
    request: paused or ended; it continues after these tokens.
    tokens: at least one token.
    origin: author of the tokens.
    version: version of the policy that reads them first.

  Raises:
    ValueError: There are no tokens, or they leave no room for another one.
  """
  row, start = request.row, request.length
  room = request.max_tokens - 1 - start
  if not 1 <= len(tokens) <= room:
    raise ValueError(
      f"a response of {start} tokens that ends at {request.max_tokens} can be"
      f" extended by 1..{room} tokens, got {len(tokens)}"
    )
  new = np.s_[0, start : start + len(tokens)]
  row.tokens[new], row.version[new] = tokens, version
  row.behavior_logprobs[new], row.mask[new] = 0.0, False
  row.origin[new] = int(origin)
  row.lengths[0] += len(tokens)
  row.status[0] = int(Status.TRUNCATED)
  request.pause_at = min(request.pause_at + len(tokens), request.max_tokens)


def cut(rollout: Rollout, row: int, length: int, *, status: Status) -> None:
  """Ends a row after `length` tokens, in place; NumPy arrays.

  Fields of the removed tokens are reset to those of a new request.
  """
  for name in _PER_TOKEN:
    rollout[name][row, length:] = 0
  rollout.origin[row, length:] = int(Origin.POLICY)
  if rollout.choices is not None:
    rollout.choices[row, length:] = -1
  rollout.lengths[row] = length
  rollout.status[row] = int(status)


def check_requests(
  rollout: Rollout, config: EngineConfig, *, limit: int
) -> None:
  """Checks that there are rows, unfinished, unique and of the right widths."""
  widths = {
    "prompt_tokens": config.max_prompt_length,
    "tokens": config.max_response_length,
  }
  for name, columns in widths.items():
    shape = np.shape(rollout[name])
    if len(shape) != 2 or shape[1] != columns:
      raise ValueError(
        f"requests.{name} must be [rows, {columns}] in this engine, got shape"
        f" {shape}"
      )
  if not len(rollout.sample_id):
    raise ValueError("there must be at least one request, got none")
  for row, (status, length) in enumerate(zip(rollout.status, rollout.lengths)):
    if status != Status.TRUNCATED:
      raise ValueError(
        f"requests must be {Status.TRUNCATED!r}, got {Status(int(status))!r} in"
        f" row {row}"
      )
    if not 0 <= length < limit:
      raise ValueError(
        f"requests must have 0..{limit - 1} response tokens (below the limit),"
        f" got {length} in row {row}"
      )
  _check_unique("sample ids", rollout.sample_id)


def _check_unique(name, values):
  values, counts = np.unique(np.asarray(values), return_counts=True)
  if np.any(counts > 1):
    raise ValueError(
      f"{name} must be unique, got {values[counts > 1].tolist()} more than once"
    )
