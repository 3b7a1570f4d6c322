"""Text out, score out: verifiers, and worker processes to run them in."""

import importlib.util

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.exact import RewardFn, Score, chain_sum, exact_line
from jaxrl_llm.rewards.math import math_verify, numeric
from jaxrl_llm.rewards.pool import RewardPool

REWARDS = {
  "chain_sum": chain_sum,
  "exact_line": exact_line,
  "numeric": numeric,
  "math_verify": math_verify,
}


def get_reward(name: str) -> RewardFn:
  """Returns a verifier by name.

  Raises:
    InputError: unknown name, or the library behind it is not installed.
  """
  if name not in REWARDS:
    raise InputError(
      f"reward {name!r} is unknown; choose one of {sorted(REWARDS)}"
    )
  if name == "math_verify" and importlib.util.find_spec(name) is None:
    raise InputError(
      "reward 'math_verify' needs the math extra: install jaxrl_llm[math]"
    )
  return REWARDS[name]


__all__ = [
  "REWARDS",
  "RewardFn",
  "RewardPool",
  "Score",
  "chain_sum",
  "exact_line",
  "get_reward",
  "math_verify",
  "numeric",
]
