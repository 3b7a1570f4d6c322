"""Value pretraining: fits the critic to the fixed initial policy."""

import contextlib
import dataclasses
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import checkpoint, metrics, models, sharding
from jaxrl_llm.config import Settings
from jaxrl_llm.data.prompt_source import PromptSourceState
from jaxrl_llm.learner import metrics as learner_metrics
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.rollout.records import RolloutState
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.system import processes
from jaxrl_llm.trainer.bounds import bounds

FILE = "value_pretrain.jsonl"
FOLDER = "value_pretrained"  # The critic's parameters.
CHECKPOINTS = "value_pretrain_checkpoints"  # Deleted once the run has its own.
_EXPLAINED = "value/explained_variance"
_OUTCOMES = "value/outcome_explained_variance"


@dataclasses.dataclass(frozen=True)
class PretrainingState:
  """The state of value pretraining."""

  source: PromptSourceState
  rollout: RolloutState
  critic: TrainState
  best: Any  # Trained parameters of the best critic so far.
  explained: float = -math.inf  # Explained variance of the best critic.
  trained_on: int = 0  # Number of batches that the best critic was trained on.
  waited: int = 0  # Number of batches since the last improvement.
  number: int = 0  # Number of batches so far.


@dataclasses.dataclass(frozen=True)
class ValuePretraining:
  """Regresses V on Monte Carlo returns of the fixed policy (VAPO, 4.1).

  Attributes:
    learner: learner with Monte Carlo returns as targets.
    reward_model: the same, but trained only on the last token of responses.
    worker: samples complete responses, from the first prompts of the data and
      with its own random stream.
    config: settings of the run; `config.value` sets the number of batches.
    seed: seeds of the run and of the stream, for the order of mini-batches.
  """

  learner: Learner
  reward_model: Learner
  worker: RolloutWorker
  config: Settings
  seed: tuple[int, int]

  @property
  def _last(self) -> int:
    """The maximum number of batches, including those of the reward model."""
    settings = self.config.value
    return settings.reward_model_steps + settings.pretrain_steps

  def run(
    self,
    learner: LearnerState,
    weights: Weights,
    workdir: pathlib.Path,
    logger: Any,
    stopped: Any,
  ) -> LearnerState | None:
    """Trains the critic alone, and saves its parameters for later runs.

    Explained variance is measured on each batch before training on it, so it is
    held out. The last batch is only measured, to evaluate the final critic. The
    best critic is kept, because too much pretraining overfits.

    Args:
      learner: state before the first update.
      weights: weights of the policy.
      workdir: folder for a row per batch, checkpoints and the critic.
      logger: logger of the run.
      stopped: set by a signal; ends the pretraining after a checkpoint.

    Returns:
      The learner with the best critic; None if a signal ended it earlier.
    """
    saver = checkpoint.Checkpointer(workdir / CHECKPOINTS, keep=2)
    rows = logger.rows(workdir / FILE)
    with contextlib.closing(saver), contextlib.closing(rows):
      state = self._resume(workdir, saver, logger) or PretrainingState(
        source=self.worker.source.init(),
        rollout=self.worker.init(),
        critic=learner.critic,
        best=jax.tree.map(jnp.copy, learner.critic.trained),
      )
      rows.truncate_after(state.number - 1)
      health = metrics.Health(rules=bounds(self.config, self.learner))
      done, stop = False, stopped.agreed()
      while not (done or stop):
        logger.phase(f"value pretraining {state.number}/{self._last}")
        state, row, done = self._step(learner, state, weights)
        rows.log(state.number - 1, row)
        for line in health.check(state.number, row)[1]:
          logger.event(f"value pretraining, {line}")
        stop = stopped.agreed()
        due = stop or state.number % self.config.checkpoint.every == 0
        if due and not done:
          saver.save_states(state.number, {"pretraining": state})
        if stop:
          saver.wait()
        for line in saver.new_errors():
          logger.event(line)
    if not done:
      logger.event(
        "stopped in value pretraining; rerun with the same --workdir to"
        " continue"
      )
      return None
    logger.event(
      f"critic pretrained on {state.trained_on} batches: held-out explained"
      f" variance {state.explained:.3f}"
    )
    self._save(workdir, learner.base_of("critic"), state.best)
    # A reused critic starts with a fresh optimizer; so does this one.
    critic = self.learner.critic.create_state(state.best)
    return learner.with_model("critic", critic)

  def _save(self, workdir: pathlib.Path, base: Any, trained: Any) -> None:
    """Saves a critic for `value.init_from`, with its adapters merged."""
    critic = self.learner.critic
    if critic.shares_base and critic.fns.count > 1:  # All have the same base.
      each = {k: models.Params(base, x) for k, x in trained.items()}
      whole = {k: models.merge(params) for k, params in each.items()}
    else:
      whole = models.merge(models.Params(base, trained))
    if (adapters := critic.fns.config.adapters) is not None:
      plain = lambda x: jax.tree.map(jnp.float32, adapters.merge(x))
      shapes = jax.eval_shape(plain, whole)
      places = sharding.tree_shardings(shapes, self.learner.mesh)
      whole = jax.jit(plain, out_shardings=places)(whole)
    checkpoint.save_tree(workdir / FOLDER, whole)

  def _step(
    self, learner: LearnerState, state: PretrainingState, weights: Weights
  ) -> tuple[PretrainingState, dict[str, float], bool]:
    """Runs a batch; returns the state, its row, and whether it was the last.

    The first batches train a reward model, of which the newest is kept.
    """
    settings = self.config.value
    outcomes = state.number < settings.reward_model_steps
    trained = self.reward_model if outcomes else self.learner
    collected = self.worker.collect(
      state.rollout, state.source, weights, metrics.PhaseTimer()
    )
    responses = collected.batch.responses
    rng = np.random.default_rng((self.seed[0], state.number, self.seed[1]))
    # The learning-rate schedule follows the pretraining batches.
    learner = learner.with_model("critic", state.critic)
    learner = learner.replace(step=state.number)
    batch = trained.measure(learner, "critic", responses, rng)
    explained = learner_metrics.explained_variance(batch.experience)
    row = {_OUTCOMES if outcomes else _EXPLAINED: explained}
    row |= learner_metrics.return_range(batch.experience)
    if (judged := responses.judged).any():
      row["reward/accuracy"] = float(responses.correct[judged].mean())
    best, waited, done = {}, state.waited, False
    if not outcomes:
      improved = explained > state.explained + settings.pretrain_min_delta
      waited = 0 if improved else waited + 1
      done = state.number == self._last or waited >= settings.pretrain_patience
      if explained > state.explained:
        best = {"explained": explained, "trained_on": state.number}
        best["best"] = jax.tree.map(jnp.copy, state.critic.trained)
    if not done:
      learner, new = trained.update_member(learner, "critic", batch, rng)
      row |= new
    if outcomes:
      best["best"] = jax.tree.map(jnp.copy, learner.critic.trained)
    state = dataclasses.replace(
      state,
      source=collected.source_state,
      rollout=collected.state,
      critic=learner.critic,
      waited=waited,
      number=state.number + 1,
      **best,
    )
    return state, row, done

  def _resume(
    self, workdir: pathlib.Path, saver: checkpoint.Checkpointer, logger: Any
  ) -> PretrainingState | None:
    """Restores the newest undamaged checkpoint; None if there is none."""
    shapes = self.learner.critic.shapes
    abstract = PretrainingState(
      self.worker.source.init(), self.worker.abstract(), shapes, shapes.trained
    )
    try:
      states, damaged = checkpoint.newest_undamaged(
        processes.of_first(checkpoint.steps, workdir / CHECKPOINTS),
        lambda step: saver.restore_states(step, {"pretraining": abstract}),
      )
    except checkpoint.DamagedError as error:
      states, damaged = None, [f"{error}; value pretraining starts again"]
    for line in damaged:
      logger.event(line)
    if states is None:
      return None
    state = states["pretraining"]
    logger.event(f"value pretraining continues after batch {state.number}")
    return state
