"""Bounds that settings put on rewards and returns, checked in every step.

They are sized for `reward.correct` and `reward.incorrect`, but rewards may come
from a user's function, an environment or a KL, and may have any size.
"""

import math
from collections.abc import Callable, Sequence

from jaxrl_llm.config import Settings
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.metrics.health import SAME_REWARDS_STEPS, Find, Rule

_REWARDS = ("reward/min", "reward/max")
_RETURNS = ("value/return_min", "value/return_max")
# Times that `loss.clip_value` fits into the range of returns; with 0.2 and
# rewards of -1 and 1 it is 10.
_MOST_CLIPS = 100


def bounds(config: Settings, learner: Learner) -> dict[str, Rule]:
  """Returns the rules about rewards and returns that the settings imply."""
  low, high, clip = -math.inf, math.inf, math.inf
  if critic := learner.critic:
    low, high = critic.fns.head.support or (low, high)
    clip = config.loss.clip_value or clip
  lowest = learner.algorithm.lowest_reward
  return {
    "reward_threshold": Rule(
      ("reward/accuracy", *_REWARDS),
      _all_alike,
      "accuracy, pass@k and dynamic sampling then distinguish nothing; if some"
      " of the responses are right, set reward.threshold to less than their"
      f" reward and more than others'; it is {config.reward.threshold:g}",
    ),
    "value_bins": Rule(
      _RETURNS,
      _ranged(
        lambda least, most: least < low or most > high,
        f"the critic's targets are {{:.3g}} to {{:.3g}}, its bins {low:g} to"
        f" {high:g}",
      ),
      "targets beyond the bins are clipped, and so are advantages; start a run"
      " with bins around them, with a margin, or with smaller rewards or"
      " loss.kl_reward_coefficient",
    ),
    "value_clip": Rule(
      _RETURNS,
      _ranged(
        lambda least, most: most - least > _MOST_CLIPS * clip,
        f"the critic's targets are {{:.3g}} to {{:.3g}}, but an update moves a"
        f" value by at most {clip:g}",
      ),
      "the critic cannot follow; raise loss.clip_value in proportion or set it"
      " to None, or scale the rewards down",
    ),
    "negative_reward": Rule(
      _REWARDS,
      _ranged(lambda least, _: least < lowest, "rewards are {:.3g} to {:.3g}"),
      f"the method divides by rewards of at least {lowest:g}; use a reward"
      " without penalties, or another method.use",
    ),
  }


def _ranged(wrong: Callable[[float, float], bool], text: str) -> Find:
  """Warns if the smallest and the largest value of a step are wrong."""

  def find(least: Sequence[float], most: Sequence[float]) -> str | None:
    values = least[-1], most[-1]
    return text.format(*values) if wrong(*values) else None

  return find


def _all_alike(
  accuracies: Sequence[float], least: Sequence[float], most: Sequence[float]
) -> str | None:
  """Warns if rewards of several steps differ, but none or all are correct."""
  rows = slice(-SAME_REWARDS_STEPS, None)
  low, high, kinds = min(least[rows]), max(most[rows]), {*accuracies[rows]}
  if len(accuracies) < SAME_REWARDS_STEPS or low == high:
    return None
  if kinds not in ({0.0}, {1.0}):
    return None
  verdict = "correct" if kinds == {1.0} else "incorrect"
  return f"rewards of {low:.3g} to {high:.3g} all count as {verdict}"
