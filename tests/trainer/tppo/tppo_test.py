"""Full-length windows equal no windows; lost mini-batches are detected."""

import chex
import jax
import pytest
from helpers import tiny_run
from helpers.tiny_run import with_config
from helpers.tiny_tppo import LIMIT, newest, record

from jaxrl_llm.learner.packer import Packer
from jaxrl_llm.trainer import loop


@pytest.mark.slow
class TestWholeWindow:
  def test_is_vapo_bit_for_bit(self, run, tmp_path):
    trees, rows, samples = [], [], []
    short = {"run__steps": 4, "run__samples_every": 2, "checkpoint__every": 9}
    for name, chosen in (
      ("windows", with_config(run, schedule__window=LIMIT, **short)),
      ("vapo", with_config(run, schedule__window=0, **short)),
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


class TestEveryTokenOnce:
  @pytest.mark.parametrize(
    ("role", "fault", "said"),
    [
      ("policy", lambda batches: batches[:-1], "contain 16, 16 of"),
      ("critic", lambda batches: [*batches, batches[-1]], "contain 48,"),
    ],
    ids=["lost", "doubled"],
  )
  def test_a_fault_stops_the_run(self, run, role, fault, said, monkeypatch):
    right = Packer.mini_batches

    def mini_batches(packer, name, rollout, rows, rng=None):
      batches = right(packer, name, rollout, rows, rng)
      # Without rng, they are only scored.
      wrong = rng is not None and name == role
      return fault(batches) if wrong else batches

    monkeypatch.setattr(Packer, "mini_batches", mini_batches)
    # All responses end, so that policy and critic have two mini-batches.
    chosen = with_config(run, schedule__window=0)
    with pytest.raises(RuntimeError, match=f"of 32 responses once, .* {said}"):
      record(chosen, 1)
