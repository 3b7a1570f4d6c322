"""A learner's metrics of a batch match results by hand."""

import numpy as np
import pytest
from helpers import tiny_run
from helpers.tiny_algorithm import make_algorithm
from helpers.tiny_experience import (
  BEHAVIOR,
  MASK,
  SHIFTED,
  VALUES,
  make,
  make_rollout,
  make_scores,
)

from jaxrl_llm.learner import metrics
from jaxrl_llm.metrics import CompileCounter
from jaxrl_llm.types import Origin, Status

ENDED = [Status.FINISHED, Status.OVERLONG, Status.FINISHED, Status.FINISHED]


def make_written(status):
  """Makes four responses with the given statuses."""
  return tiny_run.random_rollout(np.random.default_rng(0), rows=4).replace(
    lengths=np.asarray([4, 9, 2, 5], np.int32),
    status=np.asarray(status, np.int32),
  )


def report(got, behavior=BEHAVIOR, **changes):
  return metrics.experience_metrics(got, behavior, make_algorithm(**changes))


class TestExperience:
  def test_by_hand(self):
    got = make(judged=(True, True, False))
    row = report(got)
    inside = np.asarray(got["advantages"])[:2][MASK[:2]]
    np.testing.assert_allclose(row["advantage/mean"], inside.mean(), rtol=1e-6)
    np.testing.assert_allclose(row["advantage/std"], inside.std(), rtol=1e-6)
    returns = np.asarray(got["returns"])[:2][MASK[:2]]
    np.testing.assert_allclose(
      row["value/explained_variance"],
      1 - (returns - VALUES[:2][MASK[:2]]).var() / returns.var(),
      rtol=1e-5,
    )

  def test_nothing_judged(self):
    changes = {"off_policy__correction": "mask"}
    got = make(judged=(False, False, False), **changes)
    assert report(got, **changes) == {}

  def test_what_an_algorithm_lacks_is_not_reported(self):
    assert not any(name.startswith("correction/") for name in report(make()))
    row = report(make(estimator__name="group"), estimator__name="group")
    assert "value/explained_variance" not in row

  def test_a_correction(self):
    changes = {"off_policy__correction": "mask"}
    got = make(rollout=SHIFTED, **changes)
    row = report(got, SHIFTED.behavior_logprobs, **changes)
    names = {name for name in row if name.startswith("correction/")}
    assert names == {"correction/kept", "correction/weight_mean"}
    # The ratio of 8 exceeds 2 and is rejected.
    np.testing.assert_allclose(row["correction/kept"], 8 / 9, rtol=1e-6)
    np.testing.assert_allclose(
      row["correction/weight_mean"], (1.5 + 1 + 0.5 + 5) / 9, rtol=1e-6
    )


class TestParity:
  def parity(
    self, mask=MASK, scored=(True, True, True), version=0, rollout=None
  ):
    old = make_scores()["old_logprobs"].copy()
    old[2] += 7.0
    return metrics.parity(
      rollout or make_rollout(), mask, old, np.asarray(scored), version
    )

  def test_is_about_judged_rows_that_were_scored(self):
    judged = MASK & np.asarray([[True], [True], [False]])
    for row in (self.parity(judged), self.parity(scored=(True, True, False))):
      assert row == {
        "sampler_trainer/logprob_diff_mean": 0.25,
        "sampler_trainer/logprob_diff_max": 0.25,
      }
    assert self.parity()["sampler_trainer/logprob_diff_max"] == 7.25

  @pytest.mark.parametrize(
    ("field", "other"),
    # From a data set, with log-probs; from weights that are no longer kept.
    [("origin", int(Origin.FOREIGN)), ("version", 3)],
  )
  def test_is_about_tokens_that_this_policy_wrote(self, field, other):
    rollout = make_rollout()
    changed = rollout[field].copy()
    changed[2] = other
    row = self.parity(rollout=rollout.replace(**{field: changed}))
    assert row["sampler_trainer/logprob_diff_max"] == 0.25

  def test_where_nothing_can_be_compared(self):
    assert not self.parity(scored=(False, False, False))
    assert not self.parity(version=1)


class TestStaleness:
  def test_by_hand(self):
    rollout = make_written(ENDED)
    version = np.full(rollout.mask.shape, 5)
    version[1, :2] = (2, 4)
    mask = np.zeros(rollout.mask.shape, bool)
    mask[1, :4] = True
    row = metrics.staleness(rollout.replace(version=version), mask, 5)
    assert row == {"staleness/mean": 1.0, "staleness/max": 3.0}

  def test_of_no_token(self):
    rollout = make_written(ENDED)
    assert not metrics.staleness(rollout, np.zeros((4, 9), bool), 5)


class TestBoundaryError:
  def test_is_that_of_cut_responses_alone(self):
    status = [Status.TRUNCATED, Status.OVERLONG, Status.TRUNCATED, 0]
    rollout = make_written(status)
    present = np.arange(rollout.mask.shape[1])[None] < rollout.lengths[:, None]
    rollout = rollout.replace(mask=present)
    values = np.zeros(present.shape, np.float32)
    values[[0, 1, 2], [3, 8, 1]] = 0.5, 7.0, -1.0  # At the last tokens.
    row = metrics.boundary_error(
      rollout, values, np.asarray([0.25, 0.0, 1.0, 9.0], np.float32)
    )
    assert row == {"advantage/boundary_error": (0.25 + 2.0) / 2}

  def test_another_number_of_responses_compiles_nothing(self):
    counter = CompileCounter()
    for rows in (5, 7, 8, 6):
      rollout = tiny_run.random_rollout(np.random.default_rng(0), rows=rows)
      status = np.full(rows, Status.TRUNCATED, np.int32)
      rollout = rollout.replace(status=status)
      values = np.ones(rollout.mask.shape, np.float32)
      row = metrics.boundary_error(
        rollout, values, np.full(rows, np.float32(3))
      )
      assert row == {"advantage/boundary_error": 2.0}
      if rows == 5:
        counter.collect()
    assert not counter.collect()

  def test_is_absent_where_nothing_was_cut(self):
    assert metrics.boundary_error(make_written(ENDED), None, None) == {}
