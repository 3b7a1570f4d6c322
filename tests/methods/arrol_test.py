"""ARRoL: the choice of aborted responses, and pruning in a run."""

import numpy as np
import pytest
from helpers import doors, tiny_run
from helpers.registries import registered, registries  # noqa: F401

from jaxrl_llm import register
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import arrol, poise
from jaxrl_llm.trainer import build
from jaxrl_llm.types import Pruning, Status


def kept(values, keep, group_size=None):
  """Returns values of the responses that continue, group by group."""
  size = group_size or len(values)
  rng = np.random.default_rng(0)
  rollout = tiny_run.random_rollout(rng, rows=len(values), group_size=size)
  at_tokens = rng.normal(size=rollout.tokens.shape)
  at_tokens[np.arange(len(values)), rollout.lengths - 1] = values
  return np.asarray(values)[~arrol.surplus(rollout, at_tokens, keep=keep)]


def test_the_surest_go_on():
  assert kept([0.5, 0.9, 0.1, 0.6, 0.4, 0.8], 0.5).tolist() == [0.9, 0.1, 0.8]
  assert kept([0.5, 0.9, 0.1, 0.6], 0.25).tolist() == [0.9]
  values = [0.3, 0.2, 0.1, 0.9, 0.4, 0.6]
  assert kept(values, 0.5, 3).tolist() == [0.3, 0.1, 0.9, 0.4]
  assert kept(values, 1.0, 3).tolist() == values
  assert len(kept(range(25), 0.28)) == 7  # 0.28 · 25 is 7.000000000000001.


@pytest.mark.parametrize("size", [4, 7, 8, 16])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_an_oracle_keeps_half_positives(size, keep):
  """It does so if there are enough of both."""
  for right in range(size + 1):
    values = np.arange(size) < right
    found = kept(values.astype(float), keep)
    count, half = len(found), (len(found) + 1) // 2
    assert count == int(np.ceil(keep * size))
    wrong = size - right
    if right >= half and wrong >= count - half:
      assert found.sum() == half
    else:  # All of the rarer kind.
      assert found.sum() == (right if right < half else count - wrong)


PRUNED = {"method__use": ("arrol",), "method__arrol__at": 3}


def register_pruning(pruning):
  """Registers a method with a probe that prunes by a rule of the test."""

  def pruned(algorithm, s):
    return poise.with_probe(algorithm).change(pruning=pruning)

  register.method("pruned", pruned)
  return {"method__use": ("pruned",)}


@pytest.mark.usefixtures("registries")
def test_that_nothing_is_given_up_changes_no_response(model):
  nothing = Pruning(3, "poise_values", lambda rows, x: np.zeros(len(x), bool))
  rows = []
  for changes in ({}, register_pruning(nothing)):
    run = build.make_run(doors.make_config(model, **changes))
    rows.append(tiny_run.collect(run)[-1].batch.responses.rollout)
  for name, x in rows[0].items():
    if name == "behavior_logprobs":
      np.testing.assert_allclose(x, rows[1][name], atol=1e-6)
    else:
      np.testing.assert_array_equal(x, rows[1][name], err_msg=name)


@pytest.mark.usefixtures("registries")
def test_the_input_is_that_of_the_responses_so_far(model):
  seen = []

  def drop(rollout, logprobs):
    seen.append((rollout, logprobs))
    return rollout.sample_id % 2 == 0

  pruning = Pruning(6, "old_logprobs", drop)
  changes = register_pruning(pruning)
  run = build.make_run(doors.make_config(model, **changes))
  rollout = tiny_run.collect(run)[-1].batch.responses.rollout
  ((begun, logprobs),) = seen
  assert (begun.lengths == 6).all() and 0 < len(begun.lengths) < 16
  np.testing.assert_allclose(logprobs, begun.behavior_logprobs, atol=1e-5)
  stopped = rollout.status == Status.STOPPED
  even = begun.sample_id[begun.sample_id % 2 == 0]
  assert set(rollout.sample_id[stopped]) == set(even)
  assert (rollout.lengths[stopped] == 6).all()
  # No generated token is lost.
  assert rollout.mask.sum() == run.worker.writer.engine.stats.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {
      "schedule__lag": 1,
      "schedule__overlap": False,
      "sampler__slots": 4,
      "model__lora_rank": 2,
      "method__use": ("dars", "arrol"),
    },
    {
      "schedule__dynamic_sampling": True,
      "schedule__max_rounds": 8,
      "schedule__replay": 0.5,
      "reward__name": "even",
      "environment__name": "calculator",
      "sampler__stop": ("=",),
    },
  ],
)
def test_trains_and_resumes_bit_for_bit(model, tmp_path, changes):
  with registered():
    register.reward("even", lambda tokens: len(tokens) % 2 == 0)
    rows = doors.train(model, tmp_path / "run", **PRUNED | changes)
  for row in rows[1:]:
    assert row["rollout/stopped"] > 0 and row["reward/errors"] == 0
    assert row["poise/loss"] > 0


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"schedule__stop": "first_groups"}, "use schedule.stop='all'"),
    (
      {"schedule__streaming": True, "optimizer__policy__mini_batch": 16},
      "use schedule.streaming=False",
    ),
    ({"schedule__lag": 1}, "use schedule.overlap=False"),
    ({"method__arrol__at": 12}, r"at=12, expected a number in \[1, 11\]"),
  ],
)
def test_is_refused(model, changes, said):
  with pytest.raises(InputError, match=said):
    build.make_run(doors.make_config(model, **PRUNED | changes))


@pytest.mark.usefixtures("registries")
def test_a_critic_that_there_is_not_is_refused(model):
  changes = register_pruning(Pruning(3, "values", None))
  with pytest.raises(InputError, match="the method: this part reads 'values'"):
    build.make_run(doors.make_config(model, **changes))
