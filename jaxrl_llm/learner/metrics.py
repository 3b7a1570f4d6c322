"""Metrics of a batch and of the updates on it."""

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm import estimators, masked
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.packing import next_power_of_two
from jaxrl_llm.learner.state import TrainingBatch
from jaxrl_llm.types import Experience, Rollout, Status, sampled_by


def batch_metrics(
  batch: TrainingBatch, algorithm: Algorithm
) -> dict[str, float]:
  """Returns all metrics of a scored batch."""
  rollout, scores, experience = batch.rollout, batch.scores, batch.experience
  mask = experience["policy_mask"]
  row = experience_metrics(experience, rollout.behavior_logprobs, algorithm)
  row |= staleness(rollout, mask, batch.step)
  row |= parity(
    rollout, mask, scores["old_logprobs"], scores["scored"], batch.step
  )
  if "next_values" in scores:
    row |= boundary_error(rollout, scores["values"], scores["next_values"])
  for name, metric in algorithm.metrics.items():
    value = np.asarray(metric(experience))
    if value.size != 1:
      raise InputError(
        f"metric {name!r} returned shape {value.shape}; return a number, such"
        " as jnp.mean(x)"
      )
    row[f"own/{name}"] = float(value.item())
  return row


def over_updates(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
  """Reduces metrics over updates: means, maxima and counts of skips."""
  out = {}
  for key in rows[0]:
    over = {"max": max, "skipped": sum}.get(re.split("[/_]", key)[-1], np.mean)
    out[key] = float(over([row[key] for row in rows]))
  return out


def experience_metrics(
  experience: Experience, behavior_logprobs: np.ndarray, algorithm: Algorithm
) -> dict[str, float]:
  """Returns metrics of advantages, explained variance and corrections."""
  row, mask = {}, np.asarray(experience["policy_mask"])
  if "value_mask" in experience and np.any(experience["value_mask"]):
    row["value/explained_variance"] = explained_variance(experience)
    row |= return_range(experience)
  if not mask.any():
    return row
  advantages = np.asarray(experience["advantages"])[mask]
  row["advantage/mean"] = float(advantages.mean())
  row["advantage/std"] = float(advantages.std())
  reported = {} if algorithm.correction is None else {"": algorithm.correction}
  if len(algorithm.corrections) > 1:
    reported |= {f"{k}_": part for k, part in algorithm.corrections.items()}
  known = {"behavior_logprobs": behavior_logprobs}
  inputs = collections.ChainMap(known, experience)
  for name, correction in reported.items():
    weights, keep = map(np.asarray, correction(inputs))
    row[f"correction/{name}weight_mean"] = float(weights[mask].mean())
    row[f"correction/{name}kept"] = float(keep[mask].mean())
  return row


def explained_variance(experience: Experience) -> float:
  """1 − Var(G − V) / Var(G), with values from before the update."""
  arrays = (experience[x] for x in ("old_values", "returns", "value_mask"))
  return _over_rows(masked.explained_variance, *arrays)


def return_range(experience: Experience) -> dict[str, float]:
  """Returns the smallest and the largest target of the critic."""
  returns = experience["returns"][experience["value_mask"]]
  if not returns.size:
    return {}
  return {
    "value/return_min": float(returns.min()),
    "value/return_max": float(returns.max()),
  }


def parity(
  rollout: Rollout,
  mask: np.ndarray,
  old_logprobs: np.ndarray,
  scored: np.ndarray,
  version: int,
) -> dict[str, float]:
  """Returns the difference between the sampler's and trainer's log-probs.

  Only tokens that the current version of the policy sampled are compared: older
  tokens also differ by the updates since then (`staleness`), and the policy did
  not write tokens of another origin.

  Args:
    rollout: B responses.
    mask: bool [B, T], tokens that are trained on.
    old_logprobs: [B, T], log-probs of the trainer before the update.
    scored: bool [B], rows that have `old_logprobs`.
    version: version of the policy before the update.
  """
  same = mask & scored[:, None] & sampled_by(rollout, version)
  if not same.any():
    return {}
  difference = np.abs(old_logprobs[same] - rollout.behavior_logprobs[same])
  return {
    "sampler_trainer/logprob_diff_mean": float(difference.mean()),
    "sampler_trainer/logprob_diff_max": float(difference.max()),
  }


def staleness(
  rollout: Rollout, mask: np.ndarray, version: int
) -> dict[str, float]:
  """Returns the number of updates since the trained tokens were sampled."""
  age = version - rollout.version[mask]
  if not age.size:
    return {}
  return {
    "staleness/mean": float(age.mean()),
    "staleness/max": float(age.max()),
  }


def boundary_error(
  rollout: Rollout, values: np.ndarray, next_values: np.ndarray
) -> dict[str, float]:
  """Mean |V(s_l) − V(s_{l−1})| at window ends: EGAE's approximation error.

  Args:
    rollout: B responses.
    values: [B, T].
    next_values: [B], V of the state after the last token.
  """
  cut = rollout.status == Status.TRUNCATED
  if not cut.any():
    return {}
  error = _over_rows(
    estimators.boundary_error, values, rollout.mask, cut, next_values
  )
  return {"advantage/boundary_error": error}


def _over_rows(
  function: Callable[..., jax.Array], *arrays: np.ndarray
) -> float:
  """Applies a masked reduction to arrays [B, ...].

  Windows end a different number of responses in every step. Empty rows up to a
  power of two avoid compiling the function again each time.
  """
  rows = len(arrays[0])
  if added := next_power_of_two(rows) - rows:
    widths = lambda x: [(0, added)] + [(0, 0)] * (x.ndim - 1)
    arrays = tuple(np.pad(x, widths(x)) for x in arrays)
  return float(_jitted(function)(*arrays))


_jitted = functools.cache(jax.jit)
