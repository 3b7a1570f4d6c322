"""What a learner keeps between updates, and plain records beside it."""

import dataclasses
from typing import Any

import chex

from jaxrl_llm import estimators
from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.types import Experience, Responses, Rollout


@chex.dataclass(frozen=True)
class LearnerState:
  """What changes from update to update; with the seed it fixes the rest."""

  step: int  # Batches learned from: the version of the policy.
  policy: TrainState
  critic: TrainState | None  # None: the method has none.
  ema: Any  # PPO-EWMA's average of the policy; None unless needed.
  # The policy's last versions, see `models.KeptWeights`; None unless needed.
  kept: Any
  # Of the last batch, for the sampler's adaptive temperature; else None.
  temperature_state: estimators.EntropyStatistics | None
  waiting: Responses | None  # Ended, but the critic has not seen them.


@dataclasses.dataclass(frozen=True)
class LearnerSettings:
  """Plain settings of a learner."""

  seed: int  # Of the order of mini-batches.
  max_tokens_per_row: int  # Capacity of a packed row.
  max_skipped: int  # Updates in a row that are not finite before it stops.
  temperature: float  # That responses are sampled at.


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
  """Responses as a model sees them before it learns from them."""

  rollout: Rollout
  experience: Experience
  mini_batches: list[MiniBatch]  # Of the first epoch.
  step: int  # Of the run, which the learning rate follows.
