"""What windowed runs carry from step to step, also through a checkpoint."""

import dataclasses

import chex
import jax
import numpy as np
from helpers import tiny_run
from helpers.tiny_mesh_run import Spy, with_engine
from helpers.tiny_run import with_config
from helpers.tiny_tppo import newest, patient_of, record, saved, with_learner

from jaxrl_llm import estimators
from jaxrl_llm.learner import choices
from jaxrl_llm.trainer import build, loop


def tempered_of(run):
  """The run whose sampler is told the entropies of the batch before."""
  algorithm = dataclasses.replace(
    run.learner.algorithm,
    processors=choices.logits_processors(
      {"entropy_tau": 0.5, "processors": ()}
    ),
  )
  return with_learner(run, algorithm=algorithm)


def ewma_of(run, decay):
  """The run around the averaged policy; the losses stay as compiled."""
  config = run.config.copy_and_resolve_references()
  config.off_policy.proximal = "ewma"
  config.off_policy.ewma_decay = decay
  made = build.make_run(config)
  chosen = with_learner(
    run,
    algorithm=made.learner.algorithm,
    _estimate=made.learner._estimate,
    companions=made.learner.companions,
  )
  return dataclasses.replace(chosen, config=config)


class TestTempering:
  def test_the_sampler_goes_by_the_batch_before(self, run, history):
    told, engine = [], run.worker.writer.engine

    def untempered(*arguments, processor_states, **settings):
      told.append(processor_states["entropy_tau"])
      return engine.generate_window(*arguments, **settings)

    listening = Spy(engine, generate_window=untempered)
    chosen = with_engine(tempered_of(run), listening)
    steps, (states, _) = record(chosen, 3)
    # Nothing is known before the first step: zeros change no temperature.
    assert all(number == 0 for number in told[0])
    last = states.learner.processor_states["entropy_tau"]
    statistics = [*told[1:], last]
    for step, after in zip(steps, statistics, strict=True):
      (seen,) = step.estimated
      tokens = seen.scores["entropies"][seen.experience["policy_mask"]]
      expected = estimators.entropy_statistics(
        tokens, np.ones(tokens.shape, bool)
      )
      np.testing.assert_allclose(after, expected, rtol=1e-5)
      assert after.rms > 0
    assert [step.row for step in steps] == [step.row for step in history[:3]]

  def test_the_checkpoint_holds_them(self, run, tmp_path):
    chosen = tempered_of(run)
    states, _ = loop.begin(chosen)
    numbers = np.float32([0.1, 0.7, 1.3, -2.1])
    statistics = estimators.EntropyStatistics(*numbers)
    learner = states.learner.replace(
      processor_states={"entropy_tau": statistics}
    )
    again, _ = saved(chosen, states._replace(learner=learner), tmp_path)
    chex.assert_trees_all_equal(
      again.learner.processor_states, {"entropy_tau": statistics}
    )


class TestResume:
  def test_in_the_middle_of_responses_is_exact(self, run, tmp_path):
    chosen = with_config(run, run__steps=5, eval__every=2, checkpoint__every=9)
    loop.train(chosen, tmp_path / "whole")
    loop.train(with_config(chosen, run__steps=2), tmp_path / "parts")
    kept, _ = newest(chosen, tmp_path / "parts")
    store = kept.rollout.store
    begun = store.lengths > 0
    assert kept.step == 2 and begun.sum() > 5
    # What has no token yet is the rest of one prompt.
    assert (~begun).sum() < 4 and np.unique(store.version).size > 1
    assert kept.learner.waiting is not None
    loop.train(chosen, tmp_path / "parts")
    rows = [tiny_run.comparable(tmp_path / x) for x in ("parts", "whole")]
    assert rows[0] == rows[1]
    both = [newest(chosen, tmp_path / name)[0] for name in ("whole", "parts")]
    chex.assert_trees_all_equal(*map(jax.device_get, both))
    assert both[0].step == 5

  def test_the_checkpoint_holds_every_array(self, run, tmp_path):
    chosen = patient_of(run)
    _, (states, weights) = record(chosen, 2)
    again, sent = saved(chosen, states, tmp_path)
    assert sent.version == weights.version == 2
    assert sent.checksum == weights.checksum
    chex.assert_trees_all_equal(*map(jax.device_get, (again, states)))


class TestEwma:
  def test_without_memory_the_average_is_the_policy(self, run):
    chosen = ewma_of(run, 0.0)
    (step,), (states, _) = record(chosen, 1)
    learner = states.learner
    chex.assert_trees_all_equal(
      jax.device_get(learner.companions["ema"]["params"]),
      jax.device_get(learner.policy.trained),
    )
    (plain,), _ = record(run, 1)
    assert len(step.policy) == 2
    # The first mini-batch of a step cannot tell it from 'recompute'.
    # But for the weights, which correct what rounding left between them.
    ours, theirs = step.policy[0], plain.policy[0]
    np.testing.assert_allclose(
      ours.inputs["weights"], theirs.inputs["weights"], rtol=1e-5
    )
    same = ours.inputs | {"weights": theirs.inputs["weights"]}
    chex.assert_trees_all_equal(ours.replace(inputs=same), theirs)
