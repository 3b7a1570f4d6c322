"""Records of the rollout worker: its state, batches and results."""

import dataclasses
from collections.abc import Callable
from concurrent import futures

import chex
import numpy as np

from jaxrl_llm import metrics
from jaxrl_llm.data.prompt_source import PromptSourceState
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.types import Responses, Rollout


@chex.dataclass(frozen=True)
class RolloutState:
  """The state of a worker between batches."""

  samples: int  # Responses begun so far; the id of the next one.
  store: Rollout | None  # Responses not yet handed over, or unfinished.
  # By sample id; only with an environment.
  conversations: Conversations = dataclasses.field(default_factory=dict)
  replay: Responses | None = None  # Groups that may be trained on again.


@chex.dataclass(frozen=True)
class Batch:
  """Judged responses for the learner."""

  responses: Responses
  version: int  # Version of the weights of its newest tokens.
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Collected:
  """A batch, and the states of the worker and its prompt source after it."""

  batch: Batch
  state: RolloutState
  source_state: PromptSourceState
  judged: list[Judged]  # Judged responses, one entry per call.

  @property
  def new_failures(self) -> list[metrics.Sample]:
    """Samples whose reward raised an error not seen before in this run."""
    return [
      sample
      for judged in self.judged
      for sample in metrics.make_samples(judged, judged.new_failures)
    ]


# Receives a group as soon as it is complete; its verdicts follow.
Arrived = Callable[[futures.Future[Judged]], None]


def sample_ids(rollout: Rollout | None) -> np.ndarray:
  """Returns the sample ids of the rows, int [B]; empty for None."""
  return np.zeros(0, int) if rollout is None else rollout.sample_id


def count_groups(rollout: Rollout | None) -> int:
  """Returns the number of groups of the rows; 0 for None."""
  return 0 if rollout is None else len(np.unique(rollout.group_id))
