"""The components of a run, and the checkpoints of its states."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import base_models, checkpoint, digest, sync
from jaxrl_llm.config import Settings
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Evaluator
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.state import LearnerState, TrainingBatch
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.pipeline import Pipeline
from jaxrl_llm.rollout.records import Batch, RolloutState
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.trainer.value_pretraining import ValuePretraining

# Checkpoint item of a model's frozen parameters.
_BASE = "learner.{}.base"
_REFERENCE = "learner.reference"


@dataclasses.dataclass(frozen=True)
class Run:
  """The components of a run and the connections between them."""

  config: Settings
  source: PromptSource
  worker: RolloutWorker
  pipeline: Pipeline  # From the worker to the learner.
  learner: Learner
  transfer: sync.WeightTransfer  # From the policy to the sampler.
  # (params, sampler weights) -> difference of their log-probs of fixed tokens;
  # None with a registered engine.
  parity_check: Callable[[Any, sync.VersionedWeights], float] | None
  # Raises if a scored batch has other log-probs than the trainer's.
  check_batch: Callable[[TrainingBatch], None]
  pretraining: ValuePretraining | None  # None without a critic or pretraining.
  # (policy parameters) -> initial parameters of the critic.
  critic_params: Callable[[Any], Any]
  evaluators: Sequence[Evaluator]  # One per evaluation set.
  judge: Judge
  tokenizer: Tokenizer
  # Config key -> digest of the files at its path.
  inputs: Mapping[str, str]
  notes: Sequence[str] = ()  # Lines that are logged at the start.


class States(NamedTuple):
  """The state of a run; with the seed it determines everything else."""

  source: PromptSourceState
  rollout: RolloutState
  learner: LearnerState
  batches: tuple[Batch, ...] = ()  # Sampled but not trained on, with a lag.

  @property
  def step(self) -> int:
    """The number of completed iterations, which is the policy's version."""
    return self.learner.step


def save(
  states: States, saver: checkpoint.Checkpointer, facts: Mapping[str, Any]
) -> None:
  """Starts to save everything that the next iteration depends on.

  Args:
    states: current states.
    saver: checkpointer of the run.
    facts: facts about the run's other files, stored in the checkpoint.
  """
  saver.save_base(_base_items(states.learner))
  facts = {**facts, "shared": _shared(states.learner)}
  saver.save_states(states.step, states._asdict(), facts=facts)


def restore(
  run: Run, saver: checkpoint.Checkpointer, step: int
) -> tuple[States, sync.VersionedWeights]:
  """Restores a checkpoint onto the run's mesh and sends the sampler's weights.

  Damaged frozen parameters are made again from the model.

  Raises:
    InputError: The checkpoint is damaged or of another model.
  """
  abstract = States(
    run.source.init(),
    run.worker.abstract(),
    run.learner.abstract(),
    run.pipeline.abstract(step),
  )
  states = States(**saver.restore_states(step, abstract._asdict()))
  items, damage = _base_items(abstract.learner), ""
  try:
    base = checkpoint.load_base(saver.directory, items) if items else {}
  except checkpoint.DamagedError as error:
    damage = f"{error.folder}: damaged ({error.what})"
    base = _base_items(run.learner.init(critic=run.critic_params))
  learner = states.learner
  learner = learner.replace(
    base={k: base.get(_BASE.format(k), {}) for k in learner.base},
    **run.learner.constants(),
  )
  if saver.record(step, "facts")["facts"]["shared"] != _shared(learner):
    raise InputError(
      f"{damage and damage + ', and '}{base_models.model_path(run.config)}: its"
      " weights, or those of the checkpoint's base, have changed since"
      f" checkpoint {step} was saved; restore them from a copy"
    )
  if damage:
    saver.save_base(base, again=damage)
  weights = run.transfer.send(learner.params("policy"), states.step)
  return states._replace(learner=learner), weights


def _shared(learner: LearnerState) -> dict[str, int]:
  """Returns checksums of the parameters that no step changes, by item."""
  trees = _base_items(learner)
  if learner.reference is not None:
    trees[_REFERENCE] = learner.reference
  return {name: digest.checksum(tree) for name, tree in trees.items()}


def _base_items(learner: LearnerState) -> dict[str, Any]:
  return {_BASE.format(k): tree for k, tree in learner.base.items() if tree}
