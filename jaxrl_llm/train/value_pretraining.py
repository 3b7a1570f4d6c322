"""Value pretraining: the critic learns a fixed policy before it judges one."""

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.learner import metrics as learner_metrics
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.rollout.worker import RolloutWorker, Weights

FILE = "value_pretrain.jsonl"
FOLDER = "value_pretrained"  # The critic's parameters.
_EXPLAINED = "value/explained_variance"


@dataclasses.dataclass(frozen=True)
class ValuePretraining:
  """Regresses V on Monte Carlo returns of the fixed policy (VAPO, 4.1).

  Attributes:
    learner: whose targets are Monte Carlo returns.
    worker: writes whole responses, from a stream of its own.
    source: draws prompts, from the first one on.
    steps: most batches that are learned from.
    patience: batches without improvement after which it stops.
    min_delta: explained variance that counts as an improvement.
    seed: (of the run, of the stream), for the order of mini-batches.
  """

  learner: Learner
  worker: RolloutWorker
  source: PromptSource
  steps: int
  patience: int
  min_delta: float
  seed: tuple[int, int]

  def run(
    self,
    state: LearnerState,
    weights: Weights,
    workdir: pathlib.Path,
    logger: Any,
    stopped: Any,
  ) -> LearnerState:
    """Trains the critic alone, and saves its parameters for later runs.

    Explained variance is measured on every batch before it is trained on, so
    it is held out. One more batch is only measured, so that the last critic has
    its measure too. The best one is kept: too much pretraining overfits.

    Args:
      state: before the first update.
      weights: of the policy.
      workdir: gets a row for each batch, and the critic.
      logger: of the run.
      stopped: set by a signal; ends the pretraining, nothing is saved.
    """
    rollouts, prompts = self.worker.init(), self.source.init()
    timer = metrics.PhaseTimer()
    best, waited, trained_on, kept = -np.inf, 0, 0, None
    with contextlib.closing(metrics.JsonlWriter(workdir / FILE)) as rows:
      rows.truncate_after(-1)
      for number in range(self.steps + 1):
        logger.phase(f"value pretraining {number}/{self.steps}")
        collected = self.worker.collect(rollouts, prompts, weights, timer)
        rollouts, prompts = collected.state, collected.source_state
        responses = collected.batch.responses
        rng = np.random.default_rng((self.seed[0], number, self.seed[1]))
        batch = self.learner.measure_critic(state, responses, rng)
        explained = learner_metrics.explained_variance(batch.experience)
        waited += 1
        if explained > best + self.min_delta:
          waited = 0
        if explained > best or kept is None:
          best, trained_on = explained, number
          kept = jax.tree.map(jnp.copy, state.critic.params)
        last = number == self.steps or waited >= self.patience
        row = {
          _EXPLAINED: explained,
          "reward/accuracy": float(responses.correct.mean()),
        }
        if not (last or stopped.signal):
          state, new = self.learner.update_critic(state, batch, rng)
          row |= new
        rows.log(number, row)
        if last or stopped.signal:
          break
    if stopped.signal:
      return state
    logger.event(
      f"critic pretrained on {trained_on} batches: held-out explained variance"
      f" {best:.3f}"
    )
    checkpoint.save_tree(workdir / FOLDER, kept)
    # A reused critic starts with a fresh optimizer; so does this one.
    return state.replace(critic=self.learner.critic.create_state(kept))
