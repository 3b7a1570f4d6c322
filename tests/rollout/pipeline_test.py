"""A worker that runs ahead is late by the lag, and exact as without overlap."""

import threading

import chex
import jax
import pytest
from helpers import tiny_run
from helpers.tiny_run import with_config
from helpers.tiny_tppo import record, saved

from jaxrl_llm import metrics
from jaxrl_llm.rollout.pipeline import Pipeline, admit
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.trainer import loop
from jaxrl_llm.types import join_rows

STEPS = 6
LAG = 2  # Several batches wait; pairs_test.py covers lag 1.
NO_CRITIC = {"estimator__name": "group"}
LATE = NO_CRITIC | {
  "schedule__lag": LAG,
  "schedule__stop": "first_groups",
  "schedule__over_provision": 2.0,
  "schedule__max_staleness": 2,
  "sampler__max_response_length": 40,
}


def assert_same(mine, his):
  for step, other in zip(mine, his, strict=True):
    chex.assert_trees_all_equal(
      step.estimated[0].rollout, other.estimated[0].rollout
    )
    assert step.row == other.row


@pytest.mark.parametrize(
  "version, accepted, running, admitted",
  [(0, 0, 0, 12), (1, 6, 5, 5), (3, 24, 0, 0), (0, 20, 0, 0)],
)
def test_admit(version, accepted, running, admitted):
  assert admit(version, accepted, running, batch=4, lag=2) == admitted


@pytest.fixture(scope="module")
def late(model):
  return tiny_run.make_run(model, **LATE)


@pytest.fixture(scope="module")
def whole(late):
  """The steps of an uninterrupted run, and the states after them."""
  steps, (states, _) = record(late, STEPS)
  return steps, states


class TestLag:
  def test_in_turns_it_is_the_same(self, late, whole):
    turns = with_config(late, schedule__overlap=False)
    steps, (states, _) = record(turns, STEPS)
    assert_same(steps, whole[0])
    chex.assert_trees_all_equal(*map(jax.device_get, (states, whole[1])))

  def test_after_a_resume_it_is_the_same(self, late, whole, tmp_path):
    begun = saved(late, loop.begin(late)[0], tmp_path / "0")
    steps, (states, _) = record(late, 2, begun)
    assert len(states.batches) == LAG
    rest, _ = record(late, STEPS - 2, saved(late, states, tmp_path / "2"))
    assert_same(steps + rest, whole[0])

  def test_every_batch_is_as_late_as_it_says(self, whole):
    shares = []
    for version, step in enumerate(whole[0]):
      rollout = step.estimated[0].rollout
      age = version - rollout.version[rollout.mask]
      assert min(version, LAG) <= age.min()
      assert age.max() <= min(version, LAG) + 2
      # Some tokens are older than the weights that completed the batch.
      parked = age > min(version, LAG)
      shares.append(step.row["rollout/off_policy_fraction"])
      assert parked.mean() == pytest.approx(shares[-1])
    assert shares[0] == 0 and max(shares) > 0.05

  def test_a_batch_of_other_weights_is_refused(self, late, whole):
    _, states = whole
    batch = states.batches[0]
    late.pipeline.check(batch, STEPS)
    for wrong in (STEPS - 1, STEPS + 1):
      with pytest.raises(RuntimeError, match=f"version {wrong} must be"):
        late.pipeline.check(batch, wrong)
    responses = batch.responses
    for change in (-3, 1):  # Too old, or newer than the batch.
      rollout = responses.rollout
      rollout = rollout.replace(version=rollout.version + change)
      changed = batch.replace(responses=responses.replace(rollout=rollout))
      with pytest.raises(RuntimeError, match=r"2\.\.4 updates old, got"):
        late.pipeline.check(changed, STEPS)


PLAIN = {
  "loss__nll_coefficient": 0.0,
  "optimizer__policy__mini_batch": 32,
  "optimizer__value__mini_batch": 32,
  "sampler__max_response_length": 40,
}


@pytest.fixture(
  scope="module",
  params=[pytest.param("critic", marks=pytest.mark.slow), "environment"],
)
def plain(model, request):
  talks = NO_CRITIC | {"environment__name": "calculator"}
  settings = {"critic": {}, "environment": talks}[request.param]
  return tiny_run.make_run(model, **PLAIN | settings)


@pytest.fixture(scope="module")
def streaming(plain):
  return with_config(plain, schedule__streaming=True)


@pytest.fixture(scope="module")
def streamed(streaming):
  steps, (states, _) = record(streaming, 3)
  return steps, states


class TestStreaming:
  def test_in_turns_it_is_the_same(self, streaming, streamed):
    turns = with_config(streaming, schedule__overlap=False)
    steps, (states, _) = record(turns, 3)
    assert_same(steps, streamed[0])
    chex.assert_trees_all_equal(*map(jax.device_get, (states, streamed[1])))

  def test_it_is_the_update_on_the_whole_batch(self, plain, streamed):
    """Its first metrics, hence its gradients, agree up to the order of sums."""
    (whole,), _ = record(plain, 1)
    mine, his = streamed[0][0].row, whole.row
    assert {*mine} - {*his} <= {"sampler_trainer/logprob_diff_max"}
    for name in his:
      if "/gradient_" not in name:  # Noise depends on micro-batches.
        assert mine[name] == pytest.approx(his[name], rel=2e-6, abs=1e-7), name

  def test_groups_arrive_while_others_are_written(self, streaming):
    engine, arrived = streaming.worker.writer.engine, []
    states, weights = loop.begin(streaming)
    weights = Weights(weights.params, weights.version)

    def take(judged):
      arrived.append((len(engine.requests()), judged.result().responses))

    collected = streaming.worker.collect(
      states.rollout, states.source, weights, metrics.PhaseTimer(), take
    )
    left, groups = zip(*arrived)
    assert len(left) == 8 and left[0] > 0 == left[-1]
    assert list(left) == sorted(left, reverse=True)
    chex.assert_trees_all_equal(join_rows(groups), collected.batch.responses)


class TestFailure:
  @pytest.mark.parametrize(
    "settings",
    [
      {"lag": 1, "overlap": True},
      {"lag": 1, "overlap": False},
      {"lag": 0, "overlap": True, "streaming": True},  # Before an update.
    ],
  )
  def test_of_the_worker_comes_out_of_the_loop(self, settings):
    pipeline = Pipeline(max_staleness=0, **settings)

    def collect(state, source_state, arrived):
      raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
      with pipeline.writing(collect, None, None, version=0, ready=0) as written:
        if pipeline.streaming:
          list(pipeline.arriving(written, 0, metrics.PhaseTimer()))
        written[0].result()

  def test_of_the_learner_leaves_nobody_at_work(self):
    pipeline = Pipeline(lag=2, overlap=True, max_staleness=0)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def collect(state, source_state, arrived):
      begun.set()
      go_on.wait()
      done.append(state)

    with pytest.raises(ValueError, match="not finite"):
      with pipeline.writing(collect, None, None, version=0, ready=0):
        begun.wait()
        go_on.set()
        raise ValueError("not finite")
    assert len(done) <= 1  # Tasks that had not begun never run.
