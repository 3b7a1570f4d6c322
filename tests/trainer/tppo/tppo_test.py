"""Windowed rollouts as the trainer does them: each token once, by slots."""

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_run import with_config
from helpers.tiny_tppo import (
  LIMIT,
  MANY,
  SLOTS,
  WINDOW,
  newest,
  record,
  released_in,
  total,
  trained_tokens,
  whole_responses,
  written_in,
  written_tokens,
)

from jaxrl_llm.learner.packer import Packer
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Status


@pytest.mark.slow
class TestWholeWindow:
  def test_is_vapo_bit_for_bit(self, run, tmp_path):
    trees, rows, samples = [], [], []
    short = {"run__steps": 4, "run__samples_every": 2, "checkpoint__every": 9}
    for name, chosen in (
      ("windows", with_config(run, schedule__window=LIMIT, **short)),
      ("vapo", whole_responses(run, **short)),
    ):
      loop.train(chosen, tmp_path / name)
      states, _ = newest(chosen, tmp_path / name)
      source = states.source
      counters = (source.position, source.drawn, states.rollout.samples)
      assert (states.step, *counters) == (4, 32, 32, 128)
      assert states.rollout.store is None and states.learner.waiting is None
      learner = states.learner
      trees.append(jax.device_get((learner.policy, learner.critic)))
      rows.append(tiny_run.comparable(tmp_path / name))
      samples.append((tmp_path / name / "samples.jsonl").read_bytes())
    chex.assert_trees_all_equal(*trees)
    assert rows[0] == rows[1] and len(rows[0]) == 5
    assert samples[0] == samples[1]
    assert any(row["reward/std"] > 0 for row in rows[0][1:])


class TestFewSlots:
  def test_write_the_same_windows(self, run, history):
    config = run.config.copy_and_resolve_references()
    config.sampler.slots = 5
    few = record(build.make_run(config), 3)[0]
    for step, other in zip(few, history):
      same, rollout = step.collected.rollout, other.collected.rollout
      for name in ("tokens", "window_start", "version", "status", "sample_id"):
        np.testing.assert_array_equal(same[name], rollout[name])
      # A product of five rows may round otherwise than one of 32.
      chex.assert_trees_all_close(step.collected, other.collected, rtol=1e-5)


class TestEveryTokenOnce:
  def test_policy(self, history):
    trained = total(trained_tokens(step.policy) for step in history)
    for step in history:
      # In the step that wrote it.
      assert trained_tokens(step.policy) == written_in(step)
    assert trained == total(map(written_in, history))
    # Whatever the windows were, together they are the whole responses.
    released = list(map(released_in, history))
    last = history[-1].store
    alive = written_tokens(last, range(len(last.lengths)))
    assert trained == total([*released, alive])
    assert total(released).total() > 300

  @pytest.mark.parametrize("name", ["history", "patient"])
  def test_value_in_whole_mini_batches(self, name, request):
    patient = request.getfixturevalue(name)
    size = {"history": 16, "patient": MANY}[name]
    for step in patient:
      for batch in step.critic:
        last = np.unique(batch.packed.segments[batch.packed.mask])
        assert last.size <= size
    trained = total(trained_tokens(step.critic) for step in patient)
    released = total(map(released_in, patient))
    waiting = patient[-1].waiting
    if waiting is not None:
      rows = range(len(waiting.rewards))
      released -= written_tokens(waiting.rollout, rows)
    assert trained == released

  @pytest.mark.parametrize("role", ["policy", "critic"])
  @pytest.mark.parametrize(
    ("fault", "said"),
    [(lambda b: b[:-1], "hold 16, 16 of"), (lambda b: [*b, b[-1]], "hold 48,")],
    ids=["lost", "doubled"],
  )
  def test_a_fault_stops_the_run(self, run, role, fault, said, monkeypatch):
    right = Packer.mini_batches

    def mini_batches(packer, name, rollout, rows, rng=None):
      batches = right(packer, name, rollout, rows, rng)
      # Without rng they are only scored.
      wrong = rng is not None and name == role
      return fault(batches) if wrong else batches

    monkeypatch.setattr(Packer, "mini_batches", mini_batches)
    # All end at once, so that there are two mini-batches of both.
    chosen = whole_responses(run)
    with pytest.raises(
      RuntimeError, match=f"32 responses .* trained on once, .* {said}"
    ):
      record(chosen, 1)


class TestSlots:
  def test_a_response_is_of_several_versions(self, history):
    versions = [
      np.unique(rollout.version[i, : rollout.lengths[i]]).size
      for rollout in (step.collected.rollout for step in history)
      for i in range(SLOTS)
    ]
    assert max(versions) == LIMIT // WINDOW
    for number, step in enumerate(history):
      rollout = step.collected.rollout
      column = np.arange(LIMIT)[None]
      new = rollout.mask & (column >= rollout.window_start[:, None])
      assert (rollout.version[new] == number).all()
      assert (rollout.version[rollout.mask & ~new] < number).all()

  def test_what_was_written_stays_as_it_was(self, history):
    for before, after in zip(history, history[1:]):
      cut, same = before.store, after.collected.rollout
      for i in np.flatnonzero(cut.lengths):
        sample = cut.sample_id[i]
        (j,) = np.flatnonzero(same.sample_id == sample)
        length = cut.lengths[i]
        assert same.window_start[j] == length
        for name in ("tokens", "behavior_logprobs", "version", "mask"):
          np.testing.assert_array_equal(
            same[name][j, :length], cut[name][i, :length]
          )

  def test_what_is_released_is_complete(self, history):
    for step in history:
      rollout = step.collected.rollout
      over = np.flatnonzero(step.collected.ended)
      for i in over:
        stopped = rollout.tokens[i, rollout.lengths[i] - 1] == 1
        assert stopped or rollout.lengths[i] == LIMIT
        expected = Status.FINISHED if stopped else Status.OVERLONG
        assert rollout.status[i] == expected
      kept = step.store
      assert (kept.status == Status.TRUNCATED).all()
      assert kept.lengths.max() < LIMIT
      assert (kept.lengths > 0).sum() == SLOTS - over.size
