"""samples.jsonl has the responses of a step with the learner's inputs."""

import numpy as np
import pytest
from helpers import registries, tiny_run
from helpers.echo import Echo
from helpers.tiny_run import with_config

from jaxrl_llm import metrics, register
from jaxrl_llm.rollout import turns
from jaxrl_llm.trainer import build, loop

NO_CRITIC = {"estimator__name": "group", "loss__nll_coefficient": 0.0}
ALL = {
  "value__pretrain_steps": 0,
  "run__samples": 0,
  "run__samples_every": 1,
  "run__steps": 4,
  "eval__every": 9,
  "reward__name": "odd_length",
}


def odd_length(response):
  """A reward of two components that a random model gets sometimes."""
  odd = float(len(response) % 2)
  return {"odd": odd, "short": 1 / (1 + len(response))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  with registries.registered():
    register.reward("odd_length", odd_length)
    yield tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")


def make_run(model, **changes):
  return build.make_run(tiny_run.make_config(model, **ALL | changes))


def train(run, folder):
  """Trains; returns rows of metrics, and samples by step."""
  loop.train(run, folder)
  samples = metrics.read_rows(folder / "samples.jsonl")
  steps = range(1, run.config.run.steps + 1)
  by_step = {s: [x for x in samples if x["step"] == s] for s in steps}
  return metrics.read_rows(folder / "metrics.jsonl"), by_step


def numbers(samples, name):
  """Returns the values of all tokens that have one."""
  every = [x for sample in samples for x in sample.get(name, [])]
  return np.array([x for x in every if x is not None])


def check_rows(samples):
  """Checks invariants of every response."""
  assert len({sample["sample"] for sample in samples}) == len(samples)
  for sample in samples:
    tokens = sample["tokens"]
    assert len(tokens) == sample["length"]
    written = "".join(x for x in tokens if x not in ("<pad>", "<eos>"))
    assert written == sample["response"]
    assert sum(count for _, count in sample["origin"]) == len(tokens)
    for name in ("advantage", "value", "logprob_diff"):
      assert len(sample.get(name, tokens)) == len(tokens)
    ended = sample["stop"] in ("finished", "overlong")
    assert (sample["reward"] is not None) == ended
    assert (sample["correct"] is not None) == ended


class TestCritic:
  @pytest.fixture(scope="class")
  def run(self, model):
    return make_run(model)

  @pytest.fixture(scope="class")
  def trained(self, run, tmp_path_factory):
    return train(run, tmp_path_factory.mktemp("critic"))

  def test_all_responses_of_a_step(self, trained):
    rows, samples = trained
    for row in rows[1:]:
      shown = samples[row["step"]]
      check_rows(shown)
      assert len(shown) == 32
      assert len({sample["group"] for sample in shown}) == 8
      # The metrics of the step, from its samples.
      rewards = np.array([sample["reward"] for sample in shown])
      assert rewards.mean() == pytest.approx(row["reward/mean"], abs=1e-6)
      for sample in shown:
        parts = odd_length(sample["response"])
        assert sample["parts"] == pytest.approx(parts)
        assert sample["reward"] == pytest.approx(sum(parts.values()))
      mean = np.mean([sample["correct"] for sample in shown])
      assert mean == pytest.approx(row["reward/accuracy"])
      advantages = numbers(shown, "advantage")
      assert advantages.size == sum(sample["length"] for sample in shown)
      assert advantages.std() == pytest.approx(row["advantage/std"], abs=1e-4)
      # The return of every token is the reward of its response.
      lengths = [sample["length"] for sample in shown]
      returns, values = np.repeat(rewards, lengths), numbers(shown, "value")
      explained = 1 - np.var(returns - values) / np.var(returns)
      assert explained == pytest.approx(
        row["value/explained_variance"], abs=2e-3
      )
      largest = np.abs(numbers(shown, "logprob_diff")).max()
      wanted = row["sampler_trainer/logprob_diff_max"]
      assert largest == pytest.approx(wanted, abs=1e-5)

  def test_some_are_drawn_and_the_run_is_the_same(self, run, trained, tmp_path):
    rows, whole = trained
    few = with_config(run, run__samples=3)
    found, some = train(few, tmp_path / "some")
    for step, shown in some.items():
      assert len(shown) == 3 and all(sample in whole[step] for sample in shown)
    train(with_config(run, run__samples_every=0), tmp_path / "none")
    assert (tmp_path / "none" / "samples.jsonl").read_bytes() == b""
    first, other = (
      tiny_run.comparable(tmp_path / name) for name in ("some", "none")
    )
    assert first == other
    mean = lambda rows: [row["reward/mean"] for row in rows[1:]]
    assert mean(found) == mean(rows)


class TestGroup:
  @pytest.mark.parametrize(
    "lag, streaming", [(0, False), (1, False), (0, True)]
  )
  def test_advantages_are_those_of_the_rewards(
    self, model, tmp_path, lag, streaming
  ):
    changes = {"schedule__lag": lag, "schedule__streaming": streaming}
    if streaming:
      changes["optimizer__policy__mini_batch"] = 32
    rows, samples = train(make_run(model, **NO_CRITIC | changes), tmp_path)
    differences = []
    for row in rows[1:]:
      shown = samples[row["step"]]
      check_rows(shown)
      rewards = [sample["reward"] for sample in shown]
      assert np.mean(rewards) == pytest.approx(row["reward/mean"], abs=1e-6)
      for sample in shown:
        group = [x["reward"] for x in shown if x["group"] == sample["group"]]
        assert len(group) == 4 and "value" not in sample
        std = np.std(group, ddof=1)
        wanted = (sample["reward"] - np.mean(group)) / (std + 1e-6)
        found = np.array(sample["advantage"], float)
        np.testing.assert_allclose(found, wanted, atol=2e-3)
        assert sample["gold"] and sample["example"]
        assert lag == 0 or sample["extracted"] is None
      differences.append(np.abs(numbers(shown, "logprob_diff")).max())
    # With lag, the trainer is one update ahead of the sampler.
    assert (differences[-1] > 1e-4) == bool(lag)


def test_windows_show_each_visit(model, tmp_path):
  rows, samples = train(make_run(model, schedule__window=3), tmp_path)
  visits = {}
  for row in rows[1:]:
    shown = samples[row["step"]]
    check_rows(shown)
    cut = [sample["stop"] == "truncated" for sample in shown]
    assert np.mean(cut) == row["rollout/truncated_fraction"]
    for sample in shown:
      has_one = [x is not None for x in sample["advantage"]]
      before = visits.get(sample["sample"], {"length": 0, "prompt": None})
      # Only the tokens of this window are in the policy loss.
      assert has_one == [i >= before["length"] for i in range(sample["length"])]
      assert before["prompt"] in (None, sample["prompt"])
      visits[sample["sample"]] = sample
  assert any(cut) and max(x["length"] for x in visits.values()) > 3


def test_turns_of_an_environment(model, tmp_path, monkeypatch):
  monkeypatch.setitem(turns.ENVIRONMENTS, "echo", Echo)
  changes = {"environment__name": "echo", "sampler__max_response_length": 24}
  run = make_run(model, run__steps=1, **NO_CRITIC, **changes)
  _, samples = train(run, tmp_path)
  check_rows(samples[1])
  replies = 0
  for sample in samples[1]:
    start = 0
    for i, (author, size) in enumerate(sample["origin"]):
      assert author == ("environment" if i % 2 else "policy")
      end = start + size
      has_one = {x is not None for x in sample["advantage"][start:end]}
      assert has_one == {author == "policy"}
      if author == "environment":
        text = "".join(sample["tokens"][start:end])
        assert text.strip() == str(i // 2 + 1)
        replies += 1
      start = end
  assert replies > 0
