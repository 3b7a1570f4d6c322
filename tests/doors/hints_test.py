"""Given beginnings: ADHint's hints and SCOPE's repaired steps.

Both solve the running sums of the embedded task by a program in place of a
teacher.
"""

import dataclasses
import itertools
import re

import jax.numpy as jnp
import numpy as np
from helpers import doors

from jaxrl_llm import metrics, register
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.learner import estimates
from jaxrl_llm.types import Origin

LONG = {"sampler__max_response_length": 24, "run__samples_every": 1}


def steps(question: str) -> list[str]:
  """The steps of a running sum."""
  terms = [int(t) for t in re.findall(r"[+-]?\d+", question)]
  totals = list(itertools.accumulate(terms))
  pairs = zip(totals, terms[1:], totals[1:])
  return [f"{before}{term:+d}={after};" for before, term, after in pairs]


class Hints(PromptSource):
  """Hard prompts come again with the beginning of a solution."""

  def __init__(self, *args, most=0.5, enough=0.75, **settings):
    super().__init__(*args, **settings)
    self._most, self._enough = most, enough

  def again(self, state, judged):
    asked, prompts = judged.responses.rollout.example_id, []
    for i in np.unique(asked).tolist():
      solved = judged.responses.correct[asked == i].mean()
      if solved < self._enough:
        prompt = self.prompt(i, state.drawn + len(prompts))
        text = "".join(steps(prompt.question))
        text = text[: int(self._most * (1 - solved) * len(text))]
        opening = tuple(self._tokenizer.encode(text))
        prompts.append(dataclasses.replace(prompt, opening=opening))
    return prompts, state.replace(drawn=state.drawn + len(prompts))


def hinted(
  token_rewards, mask, groups, origin, correct, *, center, scale, epsilon
):
  """Group advantages; those of right rows grow if hints made the difference."""
  base = estimates.group_advantages(
    token_rewards, mask, groups, center=center, scale=scale, epsilon=epsilon
  )
  given = jnp.any(origin == int(Origin.FOREIGN), axis=1)
  mean = lambda rows: jnp.sum(correct & rows) / jnp.maximum(jnp.sum(rows), 1)
  factor = 1 + jnp.maximum(mean(given) - mean(~given), 0)
  scaled = jnp.where(given[:, None], base < 0, base > 0)
  return jnp.where(scaled, base * factor, base)


class Scope(PromptSource):
  """A wrong response goes on from its first wrong step, put right."""

  def again(self, state, judged):
    prompts = []
    rows = zip(judged.prompts, judged.texts, judged.responses.correct)
    for prompt, text, correct in rows:
      written, right = re.findall(r"[^;]*;", text), steps(prompt.question)
      wrong = [k for k, x in enumerate(right) if written[k : k + 1] != [x]]
      if wrong and not correct:
        new = self.prompt(prompt.example_id, state.drawn + len(prompts))
        opening = self._tokenizer.encode("".join(right[: wrong[0] + 1]))
        prompts.append(
          dataclasses.replace(new, tries=1, opening=tuple(opening))
        )
    return prompts, state.replace(drawn=state.drawn + len(prompts))


def test_hints(model, tmp_path):
  register.prompt_source("hints", Hints)
  register.estimator("hinted", hinted)
  rows = doors.train(
    model,
    tmp_path / "run",
    data__order="hints",
    data__order_settings={"most": 0.8, "enough": 1.0},
    estimator__name="hinted",
    **LONG,
  )
  for row in rows[1:]:
    assert row["rollout/again"] % 4 == 0 and row["rollout/again"] > 0
    # Of tokens that the sampler wrote and the trainer scored, after an opening.
    assert row["sampler_trainer/logprob_diff_max"] < 1e-5
  samples = metrics.read_rows(tmp_path / "run" / "samples.jsonl")
  shown = [s for s in samples if s["step"] > 0]
  assert len(shown) == 8
  given = [s for s in shown if s["origin"][0][0] == "given"]
  assert given
  for sample in given:
    assert sample["advantage"][0] is None and sample["tokens"][0]
    solution = "".join(steps(sample["prompt"]))
    assert sample["response"].startswith(solution[: int(0.6 * len(solution))])


def test_repaired_steps(model, tmp_path):
  register.prompt_source("scope", Scope)
  register.estimator("by_example", doors.by_example)
  rows = doors.train(
    model,
    tmp_path / "run",
    data__order="scope",
    estimator__name="by_example",
    **LONG,
  )
  for row in rows[1:]:
    assert 0 < row["rollout/again"] <= 16
    assert row["sampler_trainer/logprob_diff_max"] < 1e-5
