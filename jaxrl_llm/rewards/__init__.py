"""Verifiers, and the worker processes that run them."""

import importlib.util
import inspect
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.adapters import Trl, Verl, load_function
from jaxrl_llm.rewards.exact import chain_sum, environment, exact_line
from jaxrl_llm.rewards.math import gold_answer, math_verify, numeric
from jaxrl_llm.rewards.pool import RewardPool as RewardPool
from jaxrl_llm.rewards.verdict import (
  Grading as Grading,
  RewardFn as RewardFn,
  Verdict as Verdict,
)

# Name -> reward; 'verl' and 'trl' load reward.function from reward.path.
REWARDS: dict[str, RewardFn] = {
  "chain_sum": chain_sum,
  "exact_line": exact_line,
  "numeric": numeric,
  "math_verify": math_verify,
  "environment": environment,
  "verl": Verl,
  "trl": Trl,
}

OF_FILES = ("verl", "trl")  # Rewards that read functions of a file.

# Name -> (texts, verdicts) of a group -> a reward's result for each response;
# '' keeps the verdicts.
GROUP_REWARDS: dict[str, Any] = {"": None}

# Verifier -> response that it must accept, given a gold answer.
_GOLD = {
  "chain_sum": "#{}.",
  "exact_line": "{}\n",
  "numeric": "The answer is \\boxed{{{}}}",
  "math_verify": "The answer is \\boxed{{{}}}",
}


# Inputs of rewards, here and in TRL, that need no column of the data.
_GIVEN = frozenset(
  "id prompt question messages response tokens finished source columns"
  " conversation texts verdicts prompts completions completion_ids"
  " trainer_state log_extra log_metric".split()
)


def needs(reward: RewardFn) -> set[str]:
  """Returns the columns of the data, or `answer`, that a reward requires."""
  functions = reward.loaded() if isinstance(reward, Trl) else [reward]
  return {
    p.name
    for fn in functions
    for p in inspect.signature(fn).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  } - _GIVEN


def gold_response(name: str, answer: str) -> str | None:
  """Returns a response that the named verifier must accept, or None."""
  made = _GOLD.get(name)
  return made and made.format(gold_answer(answer))


def get_reward(name: str, path: str = "", function: str = "") -> RewardFn:
  """Returns a reward by name.

  Args:
    name: a key of `REWARDS`.
    path: the file of 'verl' and 'trl'.
    function: functions of the file, separated by commas.

  Raises:
    InputError: A required library is not installed, or the file has no such
      function.
  """
  if name == "math_verify" and importlib.util.find_spec(name) is None:
    raise InputError(
      "reward 'math_verify' needs the math extra: install jaxrl_llm[math]"
    )
  if name not in OF_FILES:
    return REWARDS[name]
  names = tuple(part.strip() for part in function.split(","))
  if not path or (name == "verl" and len(names) > 1):
    raise InputError(
      f"reward {name!r} needs reward.path=FILE.py and reward.function, the name"
      f" of {'a function' if name == 'verl' else 'functions'} in it; got"
      f" {path!r} and {function!r}"
    )
  for part in names:
    load_function(path, part)
  return REWARDS[name](path, names)
