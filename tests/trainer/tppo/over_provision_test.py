"""Windows with more responses in flight than a step waits for."""

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_tppo import (
  GROUP,
  LIMIT,
  SLOTS,
  STEPS,
  WINDOW,
  record,
  released_in,
  saved,
  total,
  trained_tokens,
  written_in,
  written_tokens,
)

from jaxrl_llm.trainer import build
from jaxrl_llm.types import Status

IN_FLIGHT = 3 * SLOTS // 2


@pytest.fixture(scope="module")
def run(model):
  return build.make_run(
    tiny_run.make_config(
      model,
      schedule__window=WINDOW,
      schedule__stop="first_groups",
      schedule__over_provision=1.5,
      sampler__slots=SLOTS,
      value__pretrain_steps=0,
      run__samples_every=0,
    )
  )


@pytest.fixture(scope="module")
def history(run):
  return record(run, STEPS)[0]


def test_the_policy_sees_every_token_once_in_the_step_that_wrote_it(history):
  trained = []
  for number, step in enumerate(history):
    trained.append(trained_tokens(step.policy))
    assert trained[-1] == written_in(step)
    rollout = step.collected.rollout
    column = np.arange(LIMIT)[None]
    new = rollout.mask & (column >= rollout.window_start[:, None])
    assert (rollout.version[new] == number).all()
    assert (rollout.version[rollout.mask & ~new] < number).all()
  last = history[-1].store
  alive = written_tokens(last, range(len(last.lengths)))
  assert total(trained) == total([*map(released_in, history), alive])


def test_the_critic_sees_what_ended_once(history):
  trained = total(trained_tokens(step.critic) for step in history)
  released = total(map(released_in, history))
  waiting = history[-1].waiting
  if waiting is not None:
    released -= written_tokens(waiting.rollout, range(len(waiting.rewards)))
  assert trained == released and trained


def test_a_step_waits_for_a_batch_of_those_in_flight(history):
  cut_early = 0
  for step in history:
    rollout = step.collected.rollout
    new = rollout.lengths - rollout.window_start
    assert 0 < new.min() and new.max() <= WINDOW
    paused = (new == WINDOW) | step.collected.ended
    assert paused.sum() >= SLOTS
    assert len(rollout.lengths) <= IN_FLIGHT
    cut_early += (~paused).sum()
    # All that is in flight, begun or not, is carried or new in the next step.
    gone = step.collected.ended.sum()
    assert len(step.store.lengths) >= IN_FLIGHT - gone
    assert len(step.store.lengths) < IN_FLIGHT - gone + GROUP
    assert (step.store.status == Status.TRUNCATED).all()
  assert cut_early  # The slots' other responses were cut inside of a window.


def test_no_response_is_lost(history):
  ended, begun = [], set()
  for step in history:
    rollout = step.collected.rollout
    assert len(set(rollout.sample_id.tolist())) == len(rollout.sample_id)
    ended += rollout.sample_id[step.collected.ended].tolist()
    begun |= set(rollout.sample_id.tolist())
  assert len(set(ended)) == len(ended)
  last = history[-1]
  kept = last.store.sample_id.tolist()
  assert sorted(ended + kept) == list(range(last.after.rollout.samples))
  assert set(ended) <= begun


def test_resumes_exactly(run, history, tmp_path):
  half = STEPS // 2
  _, (states, _) = record(run, half)
  again, (resumed, _) = record(run, STEPS - half, saved(run, states, tmp_path))
  for mine, his in zip(again, history[half:], strict=True):
    chex.assert_trees_all_equal(mine.collected, his.collected)
    chex.assert_trees_all_equal(mine.store, his.store)
    assert mine.row == his.row
  _, (whole, _) = record(run, STEPS)
  chex.assert_trees_all_equal(
    *map(jax.device_get, (resumed.learner, whole.learner))
  )


def test_learning_rates_go_by_the_steps_of_the_run(history, run):
  settings = run.learner.policy.settings
  per_step = settings.updates // settings.steps
  for number, step in enumerate(history):
    found = [int(batch.schedule_step) for batch in step.policy]
    assert found == sorted(found) and found[0] == per_step * number
    assert found[-1] < per_step * (number + 1)
  assert {len(step.policy) for step in history} != {per_step}
