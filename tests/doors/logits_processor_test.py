"""User-defined logits processors in a run."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.algorithm import ProcessorSpec
from jaxrl_llm.learner.parts import part
from jaxrl_llm.trainer import build


def cooler(distribution, context, accuracy, *, temperature):
  """Samples closer to the mode if the previous batch was accurate."""
  del context
  factor = 1 - 0.5 * accuracy / temperature
  return distribution._replace(temperature=distribution.temperature * factor)


def accuracy(correct, judged):
  return jnp.sum(correct & judged) / jnp.maximum(jnp.sum(judged), 1)


def no_zeros(distribution, context, state):
  """Forbids the token of '0'."""
  del context, state
  changed = distribution.logits.at[:, 2].set(-jnp.inf)
  return distribution._replace(logits=changed)


def both(algorithm, s):
  """A method with a stateless and a stateful processor."""
  fn = functools.partial(cooler, temperature=s.sampler.temperature)
  stateful = ProcessorSpec(fn, part(accuracy), np.float32(0.3))
  given = {"no_zeros": ProcessorSpec(no_zeros), "cooler": stateful}
  return algorithm.change(processors=given)


BOTH = {"method__use": ("both",)}


def test_trains_with_a_correction(model, tmp_path):
  register.method("both", both)
  rows = doors.train(
    model, tmp_path / "run", off_policy__correction="truncate", **BOTH
  )
  for row in rows[1:]:
    # The sampler reports its modified distribution; the trainer, the policy.
    assert row["sampler_trainer/logprob_diff_mean"] > 0.01
    assert 0 < row["correction/weight_mean"] < 1
  plain = doors.train(model, tmp_path / "plain")
  assert plain[1]["sampler_trainer/logprob_diff_max"] < 1e-5


@pytest.mark.parametrize(
  ("changes", "why"),
  [
    ({}, r"use=.* with config.off_policy.correction='auto': they change the s"),
    ({"method__use": ("both", "more")}, "there is a '.*' already; use another"),
    ({"method__use": ("both", "both")}, "'both'.: give a method once"),
  ],
)
def test_what_does_not_agree_with_the_trainer_is_refused(model, changes, why):
  register.method("both", both)
  register.method("more", both)
  with pytest.raises(InputError, match=why):
    build.make_run(doors.make_config(model, **BOTH | changes))


@pytest.mark.parametrize(
  ("fn", "state", "why"),
  [
    (no_zeros, lambda foo: foo, "logits processor 'own': .* 'foo'"),
    (lambda logits: logits, None, "'own' .too many positional .*; its argu"),
    (lambda d, c, s, k: d, None, "'own' .missing a required .*; its argumen"),
  ],
)
def test_arguments_that_there_are_not_are_refused(model, fn, state, why):
  given = {"own": ProcessorSpec(fn, state and part(state), np.float32(0))}
  register.method(
    "own", lambda algorithm, s: algorithm.change(processors=given)
  )
  config = doors.make_config(
    model, method__use=("own",), off_policy__correction="mask"
  )
  with pytest.raises(InputError, match=why):
    build.make_run(config)
