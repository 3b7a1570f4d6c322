"""APRIL in the trainer: nothing is lost, nothing is too old, all is exact."""

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_run import with_config
from helpers.tiny_tppo import record, saved

from jaxrl_llm.trainer import build
from jaxrl_llm.types import ended

STEPS, WANTED, GROUP, MAX_STALENESS = 8, 4, 4, 2


def make_run(model, **changes):
  return build.make_run(
    tiny_run.make_config(
      model,
      **{
        "schedule__stop": "first_groups",
        "schedule__over_provision": 2.0,
        "schedule__max_staleness": MAX_STALENESS,
        "data__prompts_per_step": WANTED,
        "data__group_size": GROUP,
        "estimator__name": "group",
        "value__pretrain_steps": 0,
        "sampler__max_response_length": 40,
        # So often responses end: early, and some very late.
        "run__samples_every": 0,
      }
      | changes,
    )
  )


@pytest.fixture(scope="module")
def run(model):
  return make_run(model)


@pytest.fixture(scope="module")
def history(run):
  return record(run, STEPS)[0]


def is_begun(store):
  """Whether responses are cut in the middle."""
  return bool(((store.lengths > 0) & ~ended(store)).any())


def assert_same_steps(steps, wanted):
  for mine, his in zip(steps, wanted, strict=True):
    chex.assert_trees_all_equal(mine.collected, his.collected)
    chex.assert_trees_all_equal(mine.store, his.store)
    assert mine.row == his.row


def assert_same_policy(mine, his):
  chex.assert_trees_all_equal(
    *(jax.device_get(states.learner.policy) for states in (mine, his))
  )


class TestFirstGroups:
  def test_some_tokens_are_older_than_the_policy_and_all_are_trained(
    self, history
  ):
    shares = [step.row["rollout/off_policy_fraction"] for step in history]
    assert shares[0] == 0 and max(shares) > 0.05
    for number, step in enumerate(history):
      rollout = step.collected.rollout
      assert np.all(rollout.window_start == 0)
      old = (rollout.version < number)[rollout.mask]
      assert old.mean() == pytest.approx(shares[number])
      assert step.row["staleness/max"] <= MAX_STALENESS
      assert step.row["rollout/partial"] == (step.store.lengths > 0).sum()

  def test_versions_of_a_response_never_fall(self, history):
    several = 0
    for step in history:
      assert len(step.store.lengths) == WANTED * GROUP  # As many are parked.
      for row, length in enumerate(step.collected.rollout.lengths):
        versions = step.collected.rollout.version[row, :length]
        assert np.all(np.diff(versions) >= 0)
        several += len(set(versions.tolist())) > 1
    assert several

  def test_parked_responses_go_on_exactly(self, model):
    """With a policy that stands still, as if they had never been parked."""
    frozen = make_run(model, optimizer__policy__learning_rate=0.0)
    steps, (states, weights) = record(frozen, 4)
    source, worker = frozen.source, frozen.worker
    samples = states.rollout.samples
    prompts, _ = source.draw(source.init(), samples // GROUP)
    whole = worker.writer.engine.generate(
      weights.params,
      [prompt.tokens for prompt in prompts],
      sample_ids=np.arange(samples).reshape(-1, GROUP),
      key=worker.writer.key,
      settings=worker.writer.settings,
    )
    for step in steps:
      rollout = step.collected.rollout
      for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(
          rollout[name], whole[name][rollout.sample_id], err_msg=name
        )
      np.testing.assert_allclose(
        rollout.behavior_logprobs,
        whole.behavior_logprobs[rollout.sample_id],
        atol=1e-5,
      )

  def test_without_surplus_it_is_the_full_schedule(self, model):
    alone = make_run(model, schedule__over_provision=1.0)
    ours, wanted = (
      record(chosen, 2)[1][0]
      for chosen in (alone, with_config(alone, schedule__stop="all"))
    )
    assert_same_policy(ours, wanted)

  def test_resumes_in_the_middle_of_responses(self, run, history, tmp_path):
    half = (
      next(i for i in range(1, STEPS - 1) if is_begun(history[i].store)) + 1
    )
    _, (states, _) = record(run, half)
    assert is_begun(states.rollout.store)
    begun = saved(run, states, tmp_path)
    again, (resumed, _) = record(run, STEPS - half, begun)
    assert_same_steps(again, history[half:])
    _, (whole, _) = record(run, STEPS)
    assert_same_policy(resumed, whole)
