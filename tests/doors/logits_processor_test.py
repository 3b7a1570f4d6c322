"""User-defined logits processors in a run."""

import functools

import jax.numpy as jnp
import numpy as np
from helpers import doors

from jaxrl_llm import register
from jaxrl_llm.learner.algorithm import ProcessorSpec
from jaxrl_llm.learner.parts import part


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


def test_trains_with_a_correction(model, tmp_path):
  register.method("both", both)
  rows = doors.train(
    model,
    tmp_path / "run",
    off_policy__correction="truncate",
    method__use=("both",),
  )
  for row in rows[1:]:
    # The sampler reports its modified distribution; the trainer, the policy.
    assert row["sampler_trainer/logprob_diff_mean"] > 0.01
    assert 0 < row["correction/weight_mean"] < 1
  plain = doors.train(model, tmp_path / "plain")
  assert plain[1]["sampler_trainer/logprob_diff_max"] < 1e-5
