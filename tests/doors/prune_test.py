"""Schedules that abort responses, as ARRoL does."""

import dataclasses

import numpy as np
from helpers import doors, tiny_run

from jaxrl_llm import register
from jaxrl_llm.rollout.schedule import Stop
from jaxrl_llm.sampling.rules import continuous_batching
from jaxrl_llm.trainer import build
from jaxrl_llm.types import Status

LIMIT = 8
# With few slots, a decode call ends when one is free; then the rule decides.
PRUNED = {
  "schedule__stop": "prune",
  "sampler__max_response_length": 40,
  "sampler__slots": 4,
}


def pruning(view):
  """Aborts every other response above the length limit."""
  long = view.active & (view.lengths >= LIMIT)
  stop = np.flatnonzero(long & (np.arange(long.size) % 2 == 0))
  return continuous_batching(view)._replace(stop=stop.tolist())


def pruning_the_last(view):
  """Aborts two responses that have not begun."""
  stop = np.flatnonzero(view.waiting)[-2:] if view.active.any() else []
  return continuous_batching(view)._replace(stop=list(stop))


def register_prune(rule=pruning):
  stop = Stop(groups=lambda wanted, awaited: rule, responses=lambda count: rule)
  register.schedule("prune", stop)


def test_windows_hand_them_over_once(model, tmp_path):
  register_prune()
  rows = doors.train(
    model,
    tmp_path / "run",
    **PRUNED,
    schedule__window=20,
    estimator__name="gae",
    optimizer__value__mini_batch=8,
    loss__overlong_filter=False,
  )
  assert rows[-1]["rollout/stopped"] > 0
  for row in rows[1:]:
    assert row["reward/errors"] == 0 and np.isfinite(row["policy/loss"])


def test_windows_hand_over_those_that_have_not_begun(model):
  register_prune(pruning_the_last)
  windows = {"schedule__window": 20, "estimator__name": "gae"}
  run = build.make_run(doors.make_config(model, **PRUNED, **windows))
  *_, collected = tiny_run.collect(run)
  rollout = collected.batch.responses.rollout
  stopped = rollout.status == Status.STOPPED
  assert len(rollout.lengths) == 16 and stopped.any()
  assert not rollout.lengths[stopped].any()


def test_no_loss_and_no_baseline_has_them(model):
  register_prune()
  run = build.make_run(doors.make_config(model, **PRUNED))
  *_, collected = tiny_run.collect(run)
  responses, (judged,) = collected.batch.responses, collected.judged
  rollout = responses.rollout
  stopped = rollout.status == Status.STOPPED
  assert 0 < stopped.sum() < 16 and len(rollout.lengths) == 16
  np.testing.assert_array_equal(responses.judged, ~stopped)
  assert [v.error for v in judged.verdicts] == [
    "stopped" if given_up else None for given_up in stopped
  ]
  # Their tokens are not lost.
  assert rollout.mask.sum() == run.worker.writer.engine.stats.tokens
  # Their rewards do not affect the update.
  experience = []
  for rewards in (responses.rewards, np.where(stopped, 9.0, responses.rewards)):
    given = dataclasses.replace(responses, rewards=rewards.astype(np.float32))
    zeros = np.zeros(rollout.tokens.shape, np.float32)
    scores = {"old_logprobs": zeros, "entropies": zeros}
    experience.append(run.learner._experience(given, scores, 0, np.arange(16)))
  for name in ("advantages", "policy_mask"):
    np.testing.assert_array_equal(*(each[name] for each in experience))
  assert not experience[0]["policy_mask"][stopped].any()
  assert experience[0]["policy_mask"][~stopped].any()
