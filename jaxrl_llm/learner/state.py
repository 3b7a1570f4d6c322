"""The state of a learner, and its records."""

import dataclasses
from typing import Any

import chex

from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.models import Params
from jaxrl_llm.types import Experience, Responses, Rollout


@chex.dataclass(frozen=True)
class LearnerState:
  """The state of a learner; with the seed it determines everything else."""

  step: int  # Batches learned from: the version of the policy.
  # By name of the member and of the companion, see `members`. The entries have
  # the names of fields in a checkpoint.
  models: dict[str, TrainState] = dataclasses.field(metadata={"inline": True})
  companions: dict[str, Any] = dataclasses.field(metadata={"inline": True})
  # States of logits processors by name, from the last batch; None without any.
  processor_states: Any = dataclasses.field(
    metadata={"path": "temperature_state"}  # Its name in formats 4 and 5.
  )
  waiting: Responses | None  # Ended; not yet seen by the critic.
  # Constants, which the checkpoints of steps leave out. Parameters that are not
  # trained, by member; one without an entry shares those of the policy.
  base: dict[str, Any] = dataclasses.field(metadata={"constant": True})
  # Trained parameters of a KL's reference policy; None without a KL.
  reference: Any = dataclasses.field(metadata={"constant": True})
  # Parameters of models that only score, by name.
  frozen: dict[str, Any] = dataclasses.field(
    default_factory=dict, metadata={"constant": True}
  )

  @property
  def policy(self) -> TrainState:
    """The model that writes responses."""
    return self.models["policy"]

  @property
  def critic(self) -> TrainState | None:
    """The model that judges states; None without one."""
    return self.models.get("critic")

  def params(self, member: str) -> Params:
    """Returns all parameters of a member."""
    return Params(self.base_of(member), self.models[member].trained)

  def base_of(self, member: str) -> Any:
    """Returns the parameters of a member that are not trained."""
    return self.base[member if member in self.base else "policy"]

  def with_model(self, member: str, model: TrainState) -> "LearnerState":
    """Returns the state with another state of a member."""
    return self.replace(models=self.models | {member: model})


@dataclasses.dataclass(frozen=True)
class LearnerSettings:
  """Plain settings of a learner."""

  seed: int  # Seed of the order of mini-batches.
  max_tokens_per_row: int  # Capacity of a packed row.
  max_skipped: int  # Consecutive non-finite updates before it stops.
  temperature: float  # Sampling temperature.


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
  """Scored responses: a batch, or a part of one that arrives in parts."""

  rollout: Rollout
  scores: dict[str, Any]  # By name: arrays [B, ...].
  experience: Experience
  mini_batches: dict[str, list[MiniBatch]]  # By member, for the first epoch.
  step: int  # Step of the run, for the learning rate.
