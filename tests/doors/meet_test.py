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


# curricula_test.py has environments and dynamic sampling.
WHOLE = {
  "schedule__lag": 1,
  "sampler__slots": 4,
  "estimator__name": "gae",
  "value__pretrain_steps": 2,
  "optimizer__value__mini_batch": 8,
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
  return doors.train(model, folder / "run", data__order=name, **changes)


@pytest.mark.slow
def test_whole_batches(model, tmp_path):
  rows = train(model, tmp_path, "everything", **WHOLE)
  for row in rows[1:]:
    assert 2 <= row["rollout/again"] <= 4 and row["rollout/again_tokens"] > 0
    assert row["reward/errors"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("features", PARTIAL)
def test_partial_batches(model, tmp_path, features):
  rows = train(model, tmp_path, "whole", **PARTIAL[features])
  for row in rows[1:]:
    assert row["reward/errors"] == 0 and "rollout/again" not in row
    assert row["rollout/tokens"] > 0
