"""DARS: hard prompts get more tries in the same step.

Yang et al. 2025, Depth-breadth synergy in RLVR, arXiv 2508.13755.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build


def extra(wins: int, n: int, most: int) -> int:
  """Further tries for a prompt; 'equal treatment' of the paper."""
  p = wins / n or 0.5 / n
  signal = 2 * p * (1 - p)
  if p >= 0.5:
    return 0
  return min(most - n, math.ceil((n / 2 - n * signal) / signal - 1e-9))


class Dars(PromptSource):
  def again(self, state, judged):
    asked, prompts = judged.responses.rollout.example_id, []
    for i in np.unique(asked).tolist():
      right = judged.responses.correct[asked == i]
      if more := extra(int(right.sum()), right.size, 4 * right.size):
        prompt = self.prompt(i, state.drawn + len(prompts))
        prompts.append(dataclasses.replace(prompt, tries=more))
    return prompts, state.replace(drawn=state.drawn + len(prompts))


@pytest.mark.parametrize(
  ("n", "expected"), [(8, [24, 11, 3, 1, 0, 0]), (4, [6, 2, 0, 0])]
)
def test_extra_tries(n, expected):
  assert [extra(wins, n, 4 * n) for wins in range(len(expected))] == expected


def test_trains(model, tmp_path):
  register.prompt_source("dars", Dars)
  register.estimator("by_example", doors.by_example)
  rows = doors.train(
    model, tmp_path / "run", data__order="dars", estimator__name="by_example"
  )
  for row in rows[1:]:
    # Random weights solve little: 6 more for each of 4 prompts at most.
    assert 0 < row["rollout/again"] <= 24 and row["rollout/again"] % 2 == 0
    assert 0 < row["rollout/again_tokens"] < row["rollout/tokens"]
    assert row["perf/tokens"] > row["rollout/tokens"]


@pytest.mark.parametrize(
  ("key", "value", "needed"),
  [
    ("schedule__stop", "first_groups", "'all'"),
    ("schedule__window", 4, "0"),
    ("schedule__streaming", True, "False"),
  ],
)
def test_needs_whole_batches(model, key, value, needed):
  register.prompt_source("dars", functools.partial(Dars))
  changes = {
    "data__order": "dars",
    "optimizer__policy__mini_batch": 16,
    "estimator__name": "gae" if key == "schedule__window" else "group",
    "estimator__normalize": "none",
    "loss__overlong_filter": False,
    key: value,
  }
  key = key.replace("__", ".")
  said = rf"config.data.order='dars' with config.{key}=.* use {key}={needed}"
  with pytest.raises(InputError, match=said):
    build.make_run(doors.make_config(model, **changes))
