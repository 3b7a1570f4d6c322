"""What a batch of responses reports."""

import json

import numpy as np

from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.sampling import EngineStats
from jaxrl_llm.types import Origin, Responses, Status


def rollout_metrics(responses: Responses) -> dict[str, float]:
  """Rewards, lengths and verdicts of a step's responses.

  What is only known at the end of a response is about those that ended.
  """
  rollout, ended = responses.rollout, responses.ended
  lengths = rollout.lengths[ended]
  new = rollout.lengths - rollout.window_start
  row = {
    "rollout/truncated_fraction": float((~ended).mean()),
    "rollout/tokens": float(new.sum()),
    "perf/tokens": float((rollout.lengths + rollout.prompt_lengths).sum()),
  }
  if not ended.any():
    return row
  correct = responses.correct[ended]
  row |= _reward_metrics(responses, ended & responses.judged) | {
    "reward/errors": float((~responses.judged[ended]).sum()),
    "rollout/response_length_mean": float(lengths.mean()),
    "rollout/response_length_max": float(lengths.max()),
    "rollout/response_length_correct": _mean(lengths[correct]),
    "rollout/response_length_incorrect": _mean(lengths[~correct]),
    "rollout/overlong_fraction": float(
      (rollout.status[ended] == Status.OVERLONG).mean()
    ),
  }
  return row | (_group_metrics(responses) if ended.all() else {})


def _reward_metrics(responses: Responses, rows: np.ndarray) -> dict[str, float]:
  """Means of rewards, verdicts and parts; who failed to judge has no say."""
  if not rows.any():
    return {}
  rewards = responses.rewards[rows]
  own = {
    "reward/mean": float(rewards.mean()),
    "reward/std": float(rewards.std()),
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
  """What the engine's calls of a step did, those thrown away included."""
  row = {"rollout/decode_steps": float(stats.decode_steps)}
  if stats.slot_steps:  # Nothing is written where enough had ended before.
    # A drafter may write several tokens in a slot's step.
    idle = 1 - stats.tokens / stats.slot_steps
    row["rollout/idle_fraction"] = max(0.0, idle)
  return row


def conversation_metrics(
  responses: Responses, conversations: Conversations
) -> dict[str, float]:
  """Turns, and tokens that an environment said, of responses that ended."""
  rollout, over = responses.rollout, responses.ended
  present = np.arange(rollout.mask.shape[1]) < rollout.lengths[:, None]
  heard = ((rollout.origin != Origin.POLICY) & present).sum(axis=1)
  ids = [str(i) for i in rollout.sample_id[over]]
  turns = [json.loads(conversations[i])["turns"] for i in ids]
  return {
    "rollout/turns_mean": float(np.mean(turns or 0)),
    "rollout/turns_max": float(max(turns, default=0)),
    "rollout/observation_tokens_mean": _mean(heard[over]),
  }


def _group_metrics(responses: Responses) -> dict[str, float]:
  """How the groups of whole responses were solved."""
  group = responses.rollout.group
  size = np.bincount(group)
  solved = np.bincount(group, responses.correct) / size
  first = np.unique(group, return_index=True)[1]
  others = responses.rewards != responses.rewards[first[group]]
  spread = np.bincount(group, others)
  return {
    "rollout/solved_none": float((solved == 0).mean()),
    "rollout/solved_all": float((solved == 1).mean()),
    "rollout/zero_variance_groups": float((spread == 0).mean()),
  }


def _mean(x: np.ndarray) -> float:
  return float(x.mean()) if x.size else 0.0
