"""Users' reward functions for verl and TRL."""

import asyncio
import contextlib
import sys

import pytest
from helpers import cases

from jaxrl_llm import rewards
from jaxrl_llm.errors import InputError

_CASES = cases.load("rewards")

_PROGRAMS = cases.load("code")


def verdicts(path, name, function, calls, workers=0):
  file = path / "own_score_functions.py"
  file.write_text(_PROGRAMS[f"adapters_{name}"])
  reward = rewards.get_reward(name, str(file), function)
  with contextlib.closing(
    rewards.RewardPool(reward, workers=workers, deadline_s=1.0)
  ) as pool:
    return pool.judge(calls)


def call(response, answer="4", *, messages=None, source="s", **columns):
  return {
    "question": "2+2?",
    "messages": messages,
    "response": response,
    "tokens": [7, 8],
    "answer": answer,
    "source": source,
    "columns": columns,
  }


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
  """Lets every test write a separate module with the same name."""
  rewards.adapters.load_function.cache_clear()
  monkeypatch.delitem(sys.modules, "own_score_functions", raising=False)
  monkeypatch.setattr("sys.path", list(sys.path))


class TestVerl:
  @pytest.mark.parametrize("workers", [0, 1])
  def test_numbers_and_mappings(self, tmp_path, workers):
    calls = [call("hang")] * workers + [
      call("4", data_source="dapo", reward_model={"ground_truth": "4"}),
      call("4", data_source="dapo", reward_model={"ground_truth": "5"}),
      call("", data_source="plain", extra_info={"level": 0.75}),
      call("", data_source="numpy"),
      call("", data_source="bad"),
      call("a", reward_model={"ground_truth": {"target": "a"}}),
    ]
    found = verdicts(tmp_path, "verl", "compute_score", calls, workers)
    *killed, right, wrong, plain, low, bad, other = found
    assert [v.error for v in killed] == ["timeout"] * workers
    parts = {"acc": 1.0, "n": 3.0}
    assert right == rewards.Verdict(True, "4", value=1.0, parts=parts)
    assert (wrong.correct, wrong.value) == (False, -1.0)
    assert plain == rewards.Verdict(True, value=0.75, parts={"format": 0.25})
    assert low.correct and low.parts == {"acc": 1.0}
    assert "without a 'score'" in bad.error
    assert other == rewards.Verdict(True, value=1.0)

  def test_may_be_asynchronous(self, tmp_path):
    calls = [call("4", reward_model={"ground_truth": "4"})]
    (found,) = verdicts(tmp_path, "verl", "judge", calls)
    assert (found.correct, found.value) == (True, 0.5)


class TestTrl:
  @pytest.mark.parametrize("workers", [0, 1])
  def test_may_be_asynchronous_and_return_an_array(self, tmp_path, workers):
    calls = [call(text) | {"group": 0} for text in "45"]

    async def notebook():  # Whose cells run inside an event loop.
      return verdicts(tmp_path, "trl", "judge", calls, workers)

    assert [v.value for v in asyncio.run(notebook())] == [0.0, 1.0]

  @pytest.mark.parametrize("workers", [0, 1])
  def test_what_trl_passes_is_there_and_logged(self, tmp_path, workers):
    calls = [call(x) | {"group": 0, "policy_version": 7} for x in ("a", "bcd")]
    found = verdicts(tmp_path, "trl", "logs", calls, workers)
    assert [(v.value, v.parts) for v in found] == [(1.0, {"logs": 1.0})] * 2
    shared = {"step": 7.0, "array": 0.5}
    assert [v.logged for v in found] == [
      shared | {"length": 1.0},
      shared | {"length": 3.0},
    ]

  def test_functions_are_parts(self, tmp_path):
    calls = [
      call("4") | {"columns": {"prompt": "2+2?", "answer": "4", "level": 1}}
    ]
    (found,) = verdicts(tmp_path, "trl", "length, right", calls)
    parts = {"length": 1.0, "right": 2.5}
    assert found == rewards.Verdict(True, value=3.5, parts=parts)

  def test_a_conversation_is_answered_by_messages(self, tmp_path):
    messages = [{"role": "user", "content": "2+2?"}]
    calls = [call(text, messages=messages) for text in "45"]
    right, none = verdicts(tmp_path, "trl", "said", calls)
    assert right == rewards.Verdict(True, value=1.0, parts={"said": 1.0})
    assert "no function gave this response a reward" in none.error

  def test_compares_the_responses_of_a_group(self, tmp_path):
    calls = [
      call(text) | {"group": group, "columns": {"level": group}}
      for text, group in (("aa", 3), ("b", 5), ("aaaa", 3), ("bbb", 5))
    ]
    found = verdicts(tmp_path, "trl", "rank", calls)
    assert [v.value for v in found] == [3, 5, 4, 6]  # Its index plus `level`.

  def test_one_that_hangs_loses_its_group_alone(self, tmp_path):
    calls = [
      call(text) | {"group": i // 2, "columns": {"level": 1}}
      for i, text in enumerate(["a", "hang", "bb", "b", "bad", "a"])
    ]
    found = verdicts(tmp_path, "trl", "rank", calls, workers=2)
    assert [v.error for v in found[:4]] == ["timeout"] * 2 + [None] * 2
    assert [v.value for v in found[2:4]] == [2, 1]
    assert all("KeyError: 'bad'" in v.error for v in found[4:])

  def test_a_list_is_wanted(self, tmp_path):
    (found,) = verdicts(tmp_path, "trl", "scalar", [call("4")])
    assert "scalar returned '1.0'; return a list" in found.error


class TestRefusals:
  @cases.table("chosen, said", _CASES["refusals"])
  def test_are_one_line(self, tmp_path, monkeypatch, chosen, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").touch()
    text = "x = 1\ndef score(): ...\ndef other(): ...\n"
    (tmp_path / "own_score_functions.py").write_text(text)
    with pytest.raises(InputError, match=said):
      rewards.get_reward(*chosen)

  def test_weights_of_no_part(self):
    grading = rewards.Grading({"formt": 2.0})
    pool = rewards.RewardPool(lambda response: {"format": 1}, grading=grading)
    said = (
      r"weights names 'formt', but the parts of the reward are \['format'\]"
    )
    with pytest.raises(InputError, match=said):
      pool.judge([call("4")])

  def test_a_weighted_function_may_not_apply_to_the_first_responses(
    self, tmp_path
  ):
    file = tmp_path / "own_score_functions.py"
    file.write_text(_PROGRAMS["adapters_trl"])
    reward = rewards.get_reward("trl", str(file), "tidy, code")
    grading = rewards.Grading({"code": 2.0})
    pool = rewards.RewardPool(reward, grading=grading)
    (math,) = pool.judge([call("4", kind="math")])
    (code,) = pool.judge([call("4", kind="code")])
    assert (math.value, code.value) == (0.5, 2.5)
