"""Small runs of methods other than the default."""

import jax
import numpy as np
import optax
from helpers import tiny_run

from jaxrl_llm import metrics, models
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.trainer import build


def make_config(method, model, **changes):
  """Makes a small config of a method; `__` stands for a dot."""
  settings = {
    "value__pretrain_steps": 0,
    "data__group_size": 1,
    "sampler__max_response_length": 24,
    "optimizer__policy__mini_batch": 8,
    "checkpoint__keep": 4,
    "run__steps": 3,
  }
  return tiny_run.make_config(model, method, **settings | changes)


def train(config, folder):
  """Trains three steps; resuming must repeat the last two bit for bit."""
  rows = tiny_run.train_and_resume(build.make_run(config), folder)
  assert [row["step"] for row in rows] == [0, 1, 2, 3]
  return rows, commit.read(folder / "checkpoints" / "3")


def collect(run):
  """Returns the states before the first step, and its batch."""
  states, _, collected = tiny_run.collect(run)
  return states, collected.batch.responses


def update(run, state, responses, scored=None):
  """Updates the models; returns the learner's next state and the metrics."""
  return run.learner.update(state, responses, metrics.PhaseTimer(), scored)


def logprobs(fns, params, rollout):
  """Computes log-probs [B, T] from full logits, one response per row."""
  return tiny_run.plain_logprobs(fns, params, rollout)[0]


def check_first_update(run, states, responses, loss):
  """Checks that the first gradient-descent update is the gradient of a loss.

  Args:
    run: a run with the optimizer `sgd` below, rate 1 and no warm-up.
    states: states from `collect`; their arrays are donated.
    responses: responses from `collect`.
    loss: log-probs [B, T] -> loss.
  """
  fns = run.learner.policy.fns
  before = jax.device_get(models.merge(states.learner.params("policy")))
  of_params = lambda p: loss(logprobs(fns, p, responses.rollout))
  expected, slope = jax.jit(jax.value_and_grad(of_params))(before)
  after, row = update(run, states.learner, responses)
  after = jax.device_get(models.merge(after.params("policy")))
  np.testing.assert_allclose(row["policy/loss"], expected, atol=2e-6)
  np.testing.assert_allclose(
    row["policy/grad_norm"], optax.global_norm(slope), rtol=1e-4
  )
  jax.tree.map(
    lambda x, y, g: np.testing.assert_allclose(x - y, g, atol=2e-6),
    before,
    after,
    slope,
  )
  return row


def sgd(schedule):
  """Plain gradient descent."""
  return optax.sgd(schedule)


SGD = {
  "optimizer__policy__name": "sgd",
  "optimizer__policy__learning_rate": 1.0,
  "optimizer__policy__warmup_steps": 0,
  "optimizer__policy__max_grad_norm": 1e6,
}
