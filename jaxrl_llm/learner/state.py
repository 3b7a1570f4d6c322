"""The state of a learner, its settings, and scored batches."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.packing import MiniBatch, next_power_of_two
from jaxrl_llm.models import Params
from jaxrl_llm.system import processes
from jaxrl_llm.types import Experience, Responses, Rollout


@chex.dataclass(frozen=True)
class LearnerState:
  """The state of a learner; with the seed it determines everything else."""

  step: int  # Batches trained on: the version of the policy.
  # By name of the member or companion, see `members`. In a checkpoint, each
  # entry is a separate field.
  models: dict[str, TrainState] = dataclasses.field(metadata={"inline": True})
  companions: dict[str, Any] = dataclasses.field(metadata={"inline": True})
  # States of logits processors by name, from the last batch; None without any.
  processor_states: Any
  waiting: Responses | None  # Ended; the critic is not yet trained on them.
  # Constants, which the checkpoints of steps leave out. Parameters that are not
  # trained, by member; a member without an entry shares the policy's.
  base: dict[str, Any] = dataclasses.field(metadata={"constant": True})
  # Trained parameters of a KL's reference policy; None without a KL.
  reference: Any = dataclasses.field(metadata={"constant": True})
  # Parameters of models that only score, by name.
  frozen: dict[str, Any] = dataclasses.field(
    default_factory=dict, metadata={"constant": True}
  )

  @property
  def policy(self) -> TrainState:
    """The model that generates responses."""
    return self.models["policy"]

  @property
  def critic(self) -> TrainState | None:
    """The value model; None without one."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class BatchArrays(Mapping):
  """Arrays [B, ...] by name, with rows sharded over the devices of a mesh.

  Arrays are copied to the hosts when they are read, in all processes at once:
  indexing by name reads a whole array, `take` reads some rows of all arrays.

  Attributes:
    parts: parts of the batch, each with its arrays, of which some may be on
      the host, and its number of rows; device arrays are padded after these.
    mesh: the mesh.
  """

  parts: tuple[tuple[dict[str, Any], int], ...]
  mesh: jax.sharding.Mesh

  def __getitem__(self, name: str) -> np.ndarray:
    # Reading a device array caches its host copy in it, so a copy is read.
    own = lambda x: x if isinstance(x, np.ndarray) else jnp.copy(x)
    found = [processes.to_host(own(x[name]))[:rows] for x, rows in self.parts]
    return found[0] if len(found) == 1 else np.concatenate(found)

  def __iter__(self) -> Iterator[str]:
    return iter(self.parts[0][0])

  def __len__(self) -> int:
    return len(self.parts[0][0])

  def __contains__(self, name: object) -> bool:
    return name in self.parts[0][0]  # Mapping's default would read the array.

  def take(self, rows: np.ndarray) -> Experience:
    """Starts reading rows of all arrays; there must be one part.

    Returns:
      Arrays [n + padding, ...] for `processes.to_host`.
    """
    ((arrays, _),) = self.parts
    # Mini-batches differ by at most one row, which must not recompile.
    rows = np.resize(rows, next_power_of_two(len(rows)))
    on_host = {k: x for k, x in arrays.items() if isinstance(x, np.ndarray)}
    there = {k: x for k, x in arrays.items() if k not in on_host}
    taken = {name: x[rows] for name, x in on_host.items()}
    return taken | _take_on(self.mesh)(there, rows)

  def __setitem__(self, name: str, values: np.ndarray) -> None:
    """Sets an array on the host; there must be one part."""
    ((arrays, _),) = self.parts
    arrays[name] = values


@functools.cache
def _take_on(mesh: jax.sharding.Mesh) -> Callable[..., Experience]:
  """Jitted (arrays by name, int [n]) -> their rows, on all devices."""

  def take(x, rows):
    if x.dtype != jnp.float32:
      return x[rows]
    # Gathering over devices may add zeros, which loses the sign of -0.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits[rows], jnp.float32)

  def take_rows(arrays, rows):
    return {name: take(x, rows) for name, x in arrays.items()}

  return jax.jit(take_rows, out_shardings=sharding.replicated(mesh))


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
  """Scored responses: a batch, or a part of one that arrives in parts."""

  rollout: Rollout
  scores: dict[str, Any]  # Arrays [B, ...] by name.
  experience: BatchArrays
  mini_batches: dict[str, list[MiniBatch]]  # By member, for the first epoch.
  step: int  # Step of the run, for the learning rate.
