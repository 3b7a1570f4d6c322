"""Features of prompt sources work together with other rollout features."""

import dataclasses

import pytest
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.data.prompt_source import PromptSource


class Everything(PromptSource):
  """Ragged groups with openings, and one redrawn prompt."""

  def __init__(self, *args, looks=True, **settings):
    super().__init__(*args, **settings)
    self._looks = looks

  def prompt(self, example_id, group_id):
    prompt = super().prompt(example_id, group_id)
    opening = tuple(self._tokenizer.encode("12+"[: group_id % 4]))
    return dataclasses.replace(prompt, tries=2 + group_id % 3, opening=opening)

  def again(self, state, judged):
    if not self._looks:
      return [], state
    prompt = self.prompt(judged.prompts[0].example_id, state.drawn)
    return [prompt], state.replace(drawn=state.drawn + 1)


class Whole(Everything):
  """Without redrawn prompts, which partial batches do not support."""

  again = PromptSource.again


WHOLE = {
  "a lag, few slots and a critic": {
    "schedule__lag": 1,
    "sampler__slots": 4,
    "estimator__name": "gae",
    "value__pretrain_steps": 2,
    "optimizer__value__mini_batch": 8,
  },
  "dynamic sampling and an environment": {
    "schedule__dynamic_sampling": True,
    "schedule__over_provision": 2.0,
    "schedule__max_rounds": 8,
    "reward__name": "even",
    "environment__name": "calculator",
    "sampler__stop": ("=",),
    "environment__max_turns": 3,
  },
}
PARTIAL = {
  "streaming": {
    "schedule__streaming": True,
    "optimizer__policy__mini_batch": 16,
  },
  "first groups in windows": {
    "schedule__stop": "first_groups",
    "schedule__over_provision": 1.5,
    "schedule__window": 5,
    "estimator__name": "gae",
    "optimizer__value__mini_batch": 8,
    "loss__overlong_filter": False,
  },
}


def train(model, folder, name, **changes):
  register.prompt_source("everything", Everything)
  register.prompt_source("whole", Whole)
  register.reward("even", lambda tokens: len(tokens) % 2 == 0)
  return doors.train(model, folder / "run", data__order=name, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("features", WHOLE)
def test_whole_batches(model, tmp_path, features):
  rows = train(model, tmp_path, "everything", **WHOLE[features])
  for row in rows[1:]:
    assert 2 <= row["rollout/again"] <= 4 and row["rollout/again_tokens"] > 0
    assert row["reward/errors"] == 0
    # With lag, no token is scored by the weights that sampled it.
    assert row.get("sampler_trainer/logprob_diff_max", 0.0) < 1e-5
  if "environment" in features:
    assert rows[-1]["rollout/turns_mean"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("features", PARTIAL)
def test_partial_batches(model, tmp_path, features):
  rows = train(model, tmp_path, "whole", **PARTIAL[features])
  for row in rows[1:]:
    assert row["reward/errors"] == 0 and "rollout/again" not in row
    assert row["rollout/tokens"] > 0
