"""Tests of the warnings in jaxrl_llm.metrics.health."""

import math
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest
from helpers import cases

from jaxrl_llm import metrics
from jaxrl_llm.metrics import health

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
_RULES = health.RULES
_CASES = cases.load("health")


def _settings(text):
  """Returns the dotted config keys that a text names."""
  words = set(re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", text))
  return words - {"samples.jsonl"}


def _healthy(steps=100, seed=0):
  """Makes rows of a run that learns an easy task, with realistic noise."""
  rng = np.random.default_rng(seed)
  rows = []
  for step in range(1, steps + 1):
    done = step / steps
    noise = rng.normal(size=5)
    rows.append(
      {
        "step": step,
        "reward/accuracy": min(0.3 + 0.65 * done + 0.02 * noise[0], 0.99),
        "reward/std": 0.9,
        "reward/mean": 0.4,
        "policy/entropy": 0.5 * (0.02 / 0.5) ** done * (1 + 0.1 * noise[1]),
        "policy/approx_kl": 1e-4 * math.exp(noise[2]),
        "policy/ratio_max": 1.2 * math.exp(abs(noise[3])),
        "rollout/response_length_mean": 22 + 8 * done + noise[4],
        "rollout/overlong_fraction": 0.05 * (1 - done),
        "value/explained_variance": 0.1 if step % 4 else -0.05,
        "sampler_trainer/logprob_diff_mean": 0.01,
      }
    )
  return rows


def _with(rows, **series):
  """Sets metrics (with __ for /) of rows to functions of the step."""
  return [
    row | {k.replace("__", "/"): f(row["step"]) for k, f in series.items()}
    for row in rows
  ]


class Warned(NamedTuple):
  """A rule that applies at a step."""

  rule: str
  text: str | None  # None: already reported, not repeated.


def _run(rows, state=None):
  """Returns (step, warning) for each rule that applies at a step."""
  state, found = metrics.Health() if state is None else state, []
  for row in rows:
    holds, said = state.check(row["step"], row)
    assert set(holds.values()) <= {1.0}
    said = {re.search(", (.*?): ", text)[1]: text for text in said}
    for name in holds:
      rule = name.removeprefix("health/")
      text = said.pop(rule.replace("_", " "), None)
      found.append((row["step"], Warned(rule, text)))
    assert not said
  return found


def _rules(found):
  return {warning.rule for _, warning in found}


def _changed(value):
  """Returns the value of each step; a pair changes at step 30."""
  before, after = value if isinstance(value, list) else (value, value)
  return lambda step: before if step < 30 else after


_BAD = {
  rule: {k.replace("/", "__"): _changed(x) for k, x in run.items()}
  for rule, run in _CASES["runs"].items()
}


class TestRules:
  @pytest.mark.parametrize("seed", range(5))
  def test_a_run_that_learns_is_silent(self, seed):
    assert _run(_healthy(seed=seed)) == []

  def test_each_has_a_fault_in_these_tests(self):
    assert list(_BAD) == list(_RULES)

  @pytest.mark.parametrize("rule", _BAD)
  def test_its_fault_and_no_other_is_found(self, rule):
    found = _run(_with(_healthy(), **_BAD[rule]))
    assert _rules(found) == {rule}
    # At most a few rows after the fault, never before it.
    assert 30 <= found[0][0] <= 34
    text = found[0][1].text  # One line with value, reason and setting.
    assert "\n" not in text and text.startswith("warning at step 3")
    assert text.count("; ") >= 2 and _RULES[rule].advice in text

  def test_the_page_lists_rules_and_settings(self):
    table = {
      line.split("`")[1]: _settings(line.split("|")[3])
      for line in _DOCS.read_text("utf-8").split("## Health")[1].splitlines()
      if re.match(r"\| `[a-z_]+` ", line)
    }
    wanted = {name: _settings(rule.advice) for name, rule in _RULES.items()}
    assert table == wanted and all(table.values())


def _series(texts):
  """Returns values of texts such as '0.5*20 0.1'."""
  words = [[word.partition("*") for word in text.split()] for text in texts]
  return [
    [float(x) for x, _, n in row for _ in range(int(n or 1))] for row in words
  ]


@cases.table("row", _CASES["faults"])
def test_what_is_a_fault(row):
  rule, said, *values = row
  assert said in _RULES[rule].find(*_series(values))


@cases.table("row", _CASES["healthy"])
def test_what_is_no_fault(row):
  rule, *values = row
  assert _RULES[rule].find(*_series(values)) is None


def test_a_slow_fall_is_no_fault():
  slow = list(np.geomspace(1.0, 0.15, 40))
  assert _RULES["entropy_collapse"].find(slow, [0.3] * 40) is None


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_rewards_that_differ_can_be_learned_from(accuracy):
  rows = _with(
    _healthy(),
    reward__accuracy=lambda s: accuracy,  # By a threshold.
    reward__std=lambda s: 2.5,
    policy__entropy=lambda s: 0.5,
  )
  assert _run(rows) == []


class TestLengthCollapse:
  @pytest.mark.parametrize(
    ("steps", "latest", "length"),
    [
      (20, 8, lambda s: max(1.1, 10.0 - 1.2 * s)),  # In the first steps.
      (200, 200, lambda s: 400 * 0.98**s),
    ],
  )
  def test_a_fast_or_slow_fall_is_found(self, steps, latest, length):
    rows = _with(
      _healthy(steps),
      rollout__response_length_mean=length,
      reward__accuracy=lambda s: 0.3,
      policy__entropy=lambda s: 0.5,
    )
    found = _run(rows)
    assert _rules(found) == {"length_collapse"} and found[0][0] <= latest


class TestMissingMetrics:
  @pytest.mark.parametrize("lack", [math.nan, None, "absent"])
  @pytest.mark.parametrize("rule", _BAD)
  def test_silence(self, rule, lack):
    rows = _with(_healthy(), **_BAD[rule])
    for name in _RULES[rule].needs:
      faulty = [{k: v for k, v in row.items() if k != name} for row in rows]
      if lack != "absent":
        faulty = [row | {name: lack} for row in faulty]
      assert rule not in _rules(_run(faulty))

  def test_gaps_are_passed_over(self):
    rows = _with(_healthy(), **_BAD["explained_variance"])
    rows = [
      {k: v for k, v in row.items() if not k.startswith("value/")}
      if row["step"] % 2
      else row
      for row in rows
    ]
    # Five rows with the metric: steps 30, 32, 34, 36, 38.
    assert _run(rows)[0][0] == 38

  def test_an_infinite_ratio_is_an_explosion(self):
    rows = _with(_healthy(), policy__ratio_max=lambda s: math.inf)
    assert _rules(_run(rows)) == {"ratio_explosion"}


class TestCooldown:
  @pytest.mark.parametrize(
    ("holds", "steps"),
    [
      # Goes on; clears and begins anew; comes and goes.
      (lambda s: s >= 7, [7, 57, 107, 157]),
      (lambda s: s in (10, 11, 12, 23), [10, 23]),
      (lambda s: s % 2 == 0, [2, 52, 102, 152]),
    ],
  )
  def test_what_holds_is_said_again_after_a_while(self, holds, steps):
    every = range(1, 201)
    rows = [
      {"step": s, "policy/ratio_max": 1e4 if holds(s) else 1.0} for s in every
    ]
    found = _run(rows)
    assert [s for s, _ in found] == list(filter(holds, every))
    assert [s for s, warning in found if warning.text] == steps

  def test_rules_do_not_quiet_each_other(self):
    rows = _with(
      _healthy(40), **_BAD["ratio_explosion"], **_BAD["sampler_mismatch"]
    )
    said = [(s, w.rule) for s, w in _run(rows) if w.text]
    assert said == [(30, "sampler_mismatch"), (30, "ratio_explosion")]


class TestResume:
  def _sick(self):
    """Makes rows with every fault in turn, and infinite or missing values."""
    rows = []
    for number, series in enumerate(_BAD.values()):
      for row in _with(_healthy(60, seed=number), **series):
        rows.append(row | {"step": row["step"] + 60 * number})
    rows[70] |= {"policy/ratio_max": math.inf, "policy/approx_kl": math.nan}
    rows[73] |= {"policy/ratio_max": 1e4}  # Silent: inf was reported.
    rows[75] |= {"policy/approx_kl": math.inf}
    del rows[80]["policy/entropy"]
    return rows

  def test_warns_as_the_uninterrupted_run(self, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda file: None)
    rows = self._sick()
    whole = _run(rows)
    assert _rules(whole) == set(_RULES)
    writer = metrics.JsonlWriter(tmp_path / "metrics.jsonl")
    state = metrics.Health()
    for row in rows[:333]:
      values = {k: v for k, v in row.items() if k != "step"}
      values |= state.check(row["step"], values)[0]
      writer.log(row["step"], values)
    writer.close()
    earlier = metrics.read_rows(tmp_path / "metrics.jsonl")
    for stop in (1, 31, 65, 71, 76, 100, 333):
      resumed = metrics.Health(earlier[:stop])
      after = rows[stop - 1]["step"]
      assert _run(rows[stop:], resumed) == [w for w in whole if w[0] > after]
