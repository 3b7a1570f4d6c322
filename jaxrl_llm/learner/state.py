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
  policy: TrainState
  critic: TrainState | None  # None without a critic.
  ema: Any  # Moving average of the policy (PPO-EWMA) or None.
  # Earlier versions of the policy, see `models.KeptWeights`; or None.
  kept: Any
  # States of logits processors by name, from the last batch; None without any.
  processor_states: Any = dataclasses.field(
    metadata={"path": "temperature_state"}  # Its name in formats 4 and 5.
  )
  waiting: Responses | None  # Ended; not yet seen by the critic.
  # Constants, which the checkpoints of steps leave out. Parameters that are not
  # trained, by model.
  base: dict[str, Any] = dataclasses.field(metadata={"constant": True})
  # Trained parameters of a KL's reference policy; None without a KL.
  reference: Any = dataclasses.field(metadata={"constant": True})

  def params(self, model: str) -> Params:
    """Returns all parameters of 'policy' or 'critic'."""
    return Params(self.base[model], getattr(self, model).trained)


@dataclasses.dataclass(frozen=True)
class LearnerSettings:
  """Plain settings of a learner."""

  seed: int  # Seed of the order of mini-batches.
  max_tokens_per_row: int  # Capacity of a packed row.
  max_skipped: int  # Consecutive non-finite updates before it stops.
  temperature: float  # Sampling temperature.


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
  """The responses, inputs and mini-batches of an update."""

  rollout: Rollout
  experience: Experience
  mini_batches: list[MiniBatch]  # For the first epoch.
  step: int  # Step of the run, for the learning rate.
