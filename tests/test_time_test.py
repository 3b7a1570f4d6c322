"""Test-time programs around a trained model: refinement and a tournament."""

import pathlib
import re
import types

import pytest
from helpers import chat_model, programs

from jaxrl_llm.system import plugin

_FILE = pathlib.Path(__file__).parents[1] / "docs" / "test_time.py"


@pytest.fixture(scope="module")
def program():
  return plugin.load(str(_FILE))


class Scripted:
  """A policy whose responses depend only on the prompt and the sample."""

  def __init__(self, respond, template=None):
    self.tokenizer = types.SimpleNamespace(chat_template=template)
    self.asked, self._respond = [], respond

  def generate(self, prompts, *, samples, seed=0, **sampling):
    self.asked += [(prompt, samples, seed) for prompt in prompts]
    return [
      [{"text": self._respond(prompt, k)} for k in range(samples)]
      for prompt in prompts
    ]


def test_a_workspace_is_bounded_and_has_each_last_line_once(program):
  drafts = ["long " * 100 + "\n7", "so\n8", "again\n8", "also\n9"]
  shown = program.distill(drafts, kept=2, room=10)
  assert shown.split("\n[2] ")[0] == "[1] so\n8"
  assert shown.split("\n[2] ")[1] == " ".join(["long"] * 9 + [""])[-8:] + "\n7"


def test_later_rounds_read_the_drafts_of_the_round_before(program):
  def counts_on(prompt, sample):
    seen = [int(x) for x in re.findall(r"\d+$", prompt, re.M)] or [0]
    return f"at most {max(seen) + 1 + sample}"

  policy = Scripted(counts_on)
  last = program.refine(policy, "How far?", drafts=(3, 2, 1), seed=5)
  # Each round continues with the highest number of its three or two drafts.
  assert last == ["at most 6"]
  assert [asked[1:] for asked in policy.asked] == [(3, 5), (2, 6), (1, 7)]
  assert policy.asked[0][0] == "How far?"
  for prompt, *_ in policy.asked[1:]:
    assert prompt.startswith("How far?") and "[1] at most" in prompt


def prefers_large(prompt, sample):
  a, b = (int(x) for x in re.findall(r"Answer [AB]: (\d+)", prompt))
  return "A" if a > b else "B"


@pytest.mark.parametrize(
  "answers", [[3], [2, 9, 4], [1, 2, 3, 8, 5], [*range(8)]]
)
def test_the_best_answer_wins_after_one_match_less_than_answers(
  program, answers
):
  policy = Scripted(prefers_large)
  won = program.tournament(policy, "Largest?", [str(x) for x in answers])
  assert won == str(max(answers))
  assert len(policy.asked) == 2 * (len(answers) - 1)


@pytest.mark.parametrize("letter", "AB")
def test_a_judge_that_prefers_a_position_decides_nothing(program, letter):
  policy = Scripted(lambda prompt, sample: letter)
  assert program.tournament(policy, "Which?", ["1", "2", "3"]) == "1"


def test_a_chat_model_is_asked_in_its_format(program):
  policy = Scripted(lambda prompt, sample: "yes", template="{{ messages }}")
  assert program.sample(policy, ["Well?"]) == [["yes"]]
  assert policy.asked[0][0] == [{"role": "user", "content": "Well?"}]


@pytest.mark.slow
def test_the_program_runs(tmp_path):
  model = chat_model.write(tmp_path / "chat")
  given = (f"--model={model}", "--question=3+5?", "--max_new_tokens=8")
  said, _ = programs.finish(_FILE, *given, "--drafts=2,2")
  assert re.search("^best: ", said, re.M)
  _, wrong = programs.finish(_FILE, f"--model={tmp_path}", *given[1:], code=2)
  assert wrong.startswith("error: ") and wrong.count("\n") == 1
  _, wrong = programs.finish(_FILE, *given, "--drafts=2,0", code=2)
  assert "--drafts: invalid" in wrong and "Traceback" not in wrong
