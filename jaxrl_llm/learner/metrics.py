"""What a learner reports of a batch before it updates on it."""

import numpy as np

from jaxrl_llm import estimators, masked
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.types import Experience, Origin, Rollout, Status


def experience_metrics(
  experience: Experience, behavior_logprobs: np.ndarray, algorithm: Algorithm
) -> dict[str, float]:
  """Advantages, how well the critic knew the returns, and the corrections."""
  row, mask = {}, np.asarray(experience["policy_mask"])
  if "value_mask" in experience and np.any(experience["value_mask"]):
    row["value/explained_variance"] = explained_variance(experience)
  if not mask.any():
    return row
  advantages = np.asarray(experience["advantages"])[mask]
  row["advantage/mean"] = float(advantages.mean())
  row["advantage/std"] = float(advantages.std())
  reported = {} if algorithm.correction is None else {"": algorithm.correction}
  if len(algorithm.corrections) > 1:
    reported |= {f"{k}_": part for k, part in algorithm.corrections.items()}
  inputs = experience | {"behavior_logprobs": behavior_logprobs}
  for name, correction in reported.items():
    weights, keep = map(np.asarray, correction(inputs))
    row[f"correction/{name}weight_mean"] = float(weights[mask].mean())
    row[f"correction/{name}kept"] = float(keep[mask].mean())
  return row


def explained_variance(experience: Experience) -> float:
  """1 − Var(G − V) / Var(G) of values that have not seen these returns."""
  return float(
    masked.explained_variance(
      experience["old_values"], experience["returns"], experience["value_mask"]
    )
  )


def parity(
  rollout: Rollout,
  mask: np.ndarray,
  old_logprobs: np.ndarray,
  scored: np.ndarray,
  version: int,
) -> dict[str, float]:
  """Difference of sampler and trainer in the log-probs of the same tokens.

  Only tokens that the policy of the present version wrote have to agree. Those
  of an older version differ by the updates since, see `staleness`, and those of
  another writer by as much as the writers do.

  Args:
    rollout: B responses.
    mask: bool [B, T], tokens that are trained on.
    old_logprobs: [B, T], of the trainer before the update.
    scored: bool [B], rows of which it is known.
    version: of the policy that the update starts from.
  """
  same = mask & scored[:, None] & (rollout.version == version)
  same &= rollout.origin == Origin.POLICY
  if not same.any():
    return {}
  difference = np.abs(old_logprobs - rollout.behavior_logprobs)[same]
  return {
    "sampler_trainer/logprob_diff_mean": float(difference.mean()),
    "sampler_trainer/logprob_diff_max": float(difference.max()),
  }


def staleness(
  rollout: Rollout, mask: np.ndarray, version: int
) -> dict[str, float]:
  """Versions between the weights that wrote a token and those it trains."""
  age = (version - rollout.version)[mask]
  if not age.size:
    return {}
  return {
    "staleness/mean": float(age.mean()),
    "staleness/max": float(age.max()),
  }


def boundary_error(
  rollout: Rollout, values: np.ndarray, next_values: np.ndarray
) -> dict[str, float]:
  """Mean |V(s_l) − V(s_{l−1})| where a window cuts, EGAE's approximation.

  Args:
    rollout: B responses.
    values: [B, T].
    next_values: [B], V of the state after the last token.
  """
  cut = rollout.status == Status.TRUNCATED
  if not cut.any():
    return {}
  error = estimators.boundary_error(values, rollout.mask, cut, next_values)
  return {"advantage/boundary_error": float(error)}
