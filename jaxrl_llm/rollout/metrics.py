"""Metrics of a batch of responses."""

import json
from collections.abc import Mapping

import numpy as np

from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.sampling import EngineStats
from jaxrl_llm.types import Responses, Rollout, Status, is_over, take_rows


def rollout_metrics(
  batch: Responses, judged: Responses | None
) -> dict[str, float]:
  """Returns metrics of the rewards, lengths and verdicts of a step.

  Args:
    batch: responses that are trained on.
    judged: all judged responses of the step, including those that dynamic
      sampling discarded, except surplus ones, which are judged again in the
      step that trains on them. Most metrics are computed from these.
  """
  rollout, over = batch.rollout, is_over(batch.rollout)
  row = {
    "rollout/truncated_fraction": float((~over).mean()),
    "perf/tokens": float((rollout.lengths + rollout.prompt_lengths).sum()),
  }
  stopped = rollout.status == Status.STOPPED
  if stopped.any():
    row["rollout/stopped"] = float(stopped.sum())
  if judged is None or not judged.ended.any():
    return row
  judged = take_rows(judged, judged.ended)  # Without stopped responses.
  rollout = judged.rollout
  lengths, overlong = rollout.lengths, rollout.status == Status.OVERLONG
  row |= _reward_metrics(judged) | {
    "reward/errors": float((~judged.judged).sum()),
    "rollout/response_length_mean": float(lengths.mean()),
    "rollout/response_length_max": float(lengths.max()),
    "rollout/overlong_fraction": float(overlong.mean()),
  }
  # A response whose reward failed is neither correct nor incorrect.
  judged = take_rows(judged, judged.judged)
  lengths, correct = judged.rollout.lengths, judged.correct
  for verdict, rows in {"correct": correct, "incorrect": ~correct}.items():
    if rows.any():
      row[f"rollout/response_length_{verdict}"] = float(lengths[rows].mean())
  return row | (_group_metrics(judged) if over.all() and len(lengths) else {})


def source_metrics(
  judged: Responses, sources: Mapping[int, str]
) -> dict[str, float]:
  """Returns metrics of the rewards and lengths of each data source.

  Args:
    judged: see `rollout_metrics`.
    sources: data source of each response, by sample id.
  """
  row, judged = {}, take_rows(judged, judged.ended)
  named = np.array([sources[i] for i in judged.rollout.sample_id.tolist()])
  for name in np.unique(named).tolist():
    one = take_rows(judged, named == name)
    for metric, value in _reward_metrics(one).items():
      row[f"reward/{name}/{metric.removeprefix('reward/')}"] = value
    mean = float(one.rollout.lengths.mean())
    row[f"rollout/{name}/response_length_mean"] = mean
  return row


def _reward_metrics(responses: Responses) -> dict[str, float]:
  """Returns means of rewards, verdicts and parts over judged responses."""
  rows = responses.judged
  if not rows.any():
    return {}
  rewards = responses.rewards[rows]
  own = {
    "reward/mean": float(rewards.mean()),
    "reward/std": float(rewards.std()),
    "reward/min": float(rewards.min()),
    "reward/max": float(rewards.max()),
    "reward/accuracy": float(responses.correct[rows].mean()),
  }
  parts = {}
  for name, values in responses.parts.items():
    present = values[rows][~np.isnan(values[rows])]
    taken = f"reward/{name}" in own or name == "errors"
    if present.size:
      parts[f"reward/{name}{'_part' if taken else ''}"] = float(present.mean())
  return own | parts


def decoding_metrics(stats: EngineStats) -> dict[str, float]:
  """Returns metrics of a step's engine calls, including discarded tokens."""
  row = {
    "rollout/tokens": float(stats.tokens),
    "rollout/decode_steps": float(stats.decode_steps),
  }
  if stats.slot_steps:  # 0 if enough responses had already ended.
    # With a drafter, a slot may get several tokens per step.
    idle = 1 - stats.tokens / stats.slot_steps
    row["rollout/idle_fraction"] = max(0.0, idle)
  return row


def partial_metrics(
  trained: Rollout, store: Rollout | None, version: int
) -> dict[str, float]:
  """Returns metrics of unfinished responses and of off-policy tokens."""
  begun = 0 if store is None else int(store.mask.any(axis=1).sum())
  late = trained.version[trained.mask] < version
  return {
    "rollout/partial": float(begun),
    "rollout/off_policy_fraction": float(late.mean()),
  }


def conversation_metrics(
  judged: Responses | None, conversations: Conversations
) -> dict[str, float]:
  """Returns metrics of the turns and observations of judged responses."""
  if judged is None:
    return {}
  rollout = judged.rollout
  ids = map(str, rollout.sample_id)
  turns = [json.loads(conversations[i])["turns"] for i in ids]
  given = np.argmax(rollout.mask, axis=1)  # Before the first turn.
  heard = rollout.lengths - rollout.mask.sum(axis=1) - given
  return {
    "rollout/turns_mean": float(np.mean(turns)),
    "rollout/turns_max": float(max(turns)),
    "rollout/observation_tokens_mean": float(heard.mean()),
  }


def _group_metrics(responses: Responses) -> dict[str, float]:
  """Returns fractions of solved groups of ended and judged responses."""
  _, first, group = np.unique(
    responses.rollout.group_id, return_index=True, return_inverse=True
  )
  size = np.bincount(group)
  solved = np.bincount(group, responses.correct) / size
  others = responses.rewards != responses.rewards[first[group]]
  spread = np.bincount(group, others)
  return {
    "rollout/solved_none": float((solved == 0).mean()),
    "rollout/solved_all": float((solved == 1).mean()),
    "rollout/zero_variance_groups": float((spread == 0).mean()),
  }
