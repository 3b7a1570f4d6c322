"""APRIL in the trainer: nothing is lost, nothing is too old, all is exact."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_run

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm.train import build, collect, loop, runstate
from jaxrl_llm.types import Status

STEPS, WANTED, GROUP, MAX_AGE = 8, 4, 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")


def make_job(model, **changes):
  return build.make_job(
    tiny_run.make_config(
      model,
      **{
        "schedule__name": "first_groups",
        "schedule__over_provision": 2.0,
        "schedule__max_age": MAX_AGE,
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
def job(model):
  return make_job(model)


@dataclasses.dataclass
class Step:
  trained: runstate.Responses
  parked: runstate.Responses
  row: dict
  samples: int  # Begun so far.


def run(job, steps, state=None):
  state = state or loop.start(job, None, None, None)
  history = []
  real = collect.responses

  def responses(*arguments):
    collected = real(*arguments)
    history.append(collected)
    return collected

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(collect, "responses", responses)
    out = []
    for _ in range(steps):
      row = loop.iterate(job, state, metrics.PhaseTimer(), None)
      seen = history.pop()
      out.append(Step(seen.responses, seen.parked, row, state.samples))
  return out, state


@pytest.fixture(scope="module")
def history(job):
  return run(job, STEPS)[0]


def ids(responses):
  return responses.rollout.sample_id.tolist()


def test_a_step_has_whole_groups_and_always_as_many(history):
  for step in history:
    rollout = step.trained.rollout
    assert len(rollout.lengths) == WANTED * GROUP
    assert np.all(rollout.status != Status.TRUNCATED)
    assert np.all(np.bincount(rollout.group) == GROUP)
    assert len(step.parked.rewards) == WANTED * GROUP


def test_no_response_is_lost_and_none_trained_twice(history):
  trained = [i for step in history for i in ids(step.trained)]
  assert len(set(trained)) == len(trained)
  last = history[-1]
  assert sorted(trained + ids(last.parked)) == list(range(last.samples))


def test_tokens_are_conserved(history):
  generated = sum(step.row["rollout/tokens"] for step in history)
  trained = sum(step.trained.rollout.lengths.sum() for step in history)
  assert generated == trained + history[-1].parked.rollout.lengths.sum()


def test_some_tokens_are_older_than_the_policy_and_all_are_trained(history):
  shares = [step.row["rollout/off_policy_fraction"] for step in history]
  assert shares[0] == 0 and max(shares) > 0.05
  for number, step in enumerate(history):
    rollout = step.trained.rollout
    assert np.all(rollout.window_start == 0)
    old = (rollout.version < number)[rollout.mask]
    assert old.mean() == pytest.approx(shares[number])
    assert step.row["staleness/max"] <= MAX_AGE


def test_versions_of_a_response_never_fall(history):
  mixed = 0
  for step in history:
    for row, length in enumerate(step.trained.rollout.lengths):
      versions = step.trained.rollout.version[row, :length]
      assert np.all(np.diff(versions) >= 0)
      mixed += len(set(versions.tolist())) > 1
  assert mixed


def test_the_oldest_groups_come_first(history):
  """A group that ended but was left over is taken in the next step."""
  for before, after in zip(history, history[1:]):
    whole = before.parked
    ended = whole.ended
    for prompt in np.unique(whole.rollout.prompt_id):
      if np.all(ended[whole.rollout.prompt_id == prompt]):
        assert prompt in after.trained.rollout.prompt_id


def test_parked_responses_go_on_exactly(model):
  """With a policy that stands still, as if they had never been parked."""
  frozen = make_job(model, optimizer__policy__learning_rate=0.0)
  steps, state = run(frozen, 4)
  whole = frozen.engine.generate(
    state.sampler.params,
    [p.tokens for p in frozen.train_prompts.take(0, state.samples // GROUP)],
    sample_ids=np.arange(state.samples).reshape(-1, GROUP),
    key=collect.run_key(frozen, collect.ROLLOUTS),
    settings=frozen.sampling,
  )
  for step in steps:
    rollout = step.trained.rollout
    for name in ("tokens", "lengths", "status"):
      np.testing.assert_array_equal(
        rollout[name], whole[name][rollout.sample_id], err_msg=name
      )
    np.testing.assert_allclose(
      rollout.behavior_logprobs,
      whole.behavior_logprobs[rollout.sample_id],
      atol=1e-5,
    )


def test_without_surplus_it_is_the_full_schedule(model):
  alone = make_job(model, schedule__over_provision=1.0)
  config = alone.config.copy_and_resolve_references()
  config.schedule.name = "full"
  full = dataclasses.replace(alone, config=config)
  ours, wanted = (loop.start(job, None, None, None) for job in (alone, full))
  for _ in range(2):
    loop.iterate(alone, ours, metrics.PhaseTimer(), None)
    loop.iterate(full, wanted, metrics.PhaseTimer(), None)
  jax.tree.map(
    np.testing.assert_array_equal, ours.policy.params, wanted.policy.params
  )


def test_resumes_in_the_middle_of_responses(job, tmp_path):
  steps, whole = run(job, 4)
  saver = checkpoint.Checkpointer(tmp_path, keep=1)
  _, state = run(job, 2)
  runstate.save(job, state, saver)
  saver.wait()
  again, resumed = run(job, 2, runstate.resume(job, saver, 2))
  saver.close()
  for ours, wanted in zip(again, steps[2:]):
    jax.tree.map(
      np.testing.assert_array_equal,
      ours.trained.rollout,
      wanted.trained.rollout,
    )
  jax.tree.map(
    np.testing.assert_array_equal, resumed.policy.params, whole.policy.params
  )
