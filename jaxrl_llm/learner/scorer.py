"""The scoring half of a learner: scores of its models, and inputs made of them.

score     log-probs and values of every token, in packed rows
estimate  advantages, targets and masks: the inputs of the algorithm
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.learner import parts, providers
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.members import Companion, Frozen, Member
from jaxrl_llm.learner.packer import Packer, View
from jaxrl_llm.learner.packing import MiniBatch, next_power_of_two, place
from jaxrl_llm.learner.state import (
  BatchArrays,
  LearnerSettings,
  LearnerState,
  TrainingBatch,
)
from jaxrl_llm.models import Params
from jaxrl_llm.system import processes
from jaxrl_llm.types import Experience, Responses, Rollout


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
  """Scores responses with the models of a run and computes their inputs.

  Construction loads no weights and compiles nothing.

  Attributes:
    algorithm: parts of the update.
    members: trained models by name. The first is 'policy', which is sampled
      from; the others are updated before it, in reverse order.
    settings: plain settings.
    mesh: mesh of all models.
    initial_params: loads the initial parameters of the policy. It is called
      again for the reference of a KL, and its result is donated.
    companions: weights that follow the policy's, by name.
    column: reads numeric columns of the data, for algorithms that use them.
    frozen: models that only score, by name.
    sampler_logprobs: (policy's parameters, responses) -> `old_logprobs` [B, T],
      computed by the sampling program; None uses the policy's `score`.
    views: member -> function that returns the samples as the member reads them.
  """

  algorithm: Algorithm
  members: Mapping[str, Member]
  settings: LearnerSettings
  mesh: jax.sharding.Mesh
  initial_params: Callable[[], Any]
  companions: Mapping[str, Companion] = dataclasses.field(default_factory=dict)
  column: providers.Column | None = None
  frozen: Mapping[str, Frozen] = dataclasses.field(default_factory=dict)
  sampler_logprobs: Callable[[Params, Rollout], np.ndarray] | None = None
  views: Mapping[str, View] = dataclasses.field(default_factory=dict)

  @property
  def policy(self) -> Member:
    """The model that is sampled from."""
    return self.members["policy"]

  @property
  def critic(self) -> Member | None:
    """The value model; None without one."""
    return self.members.get("critic")

  def abstract(self) -> LearnerState:
    """Returns the abstract state into which a checkpoint is restored.

    Leaves are ShapeDtypeStructs with shardings; a class stands for a record of
    host arrays that may be absent.
    """
    processors = self.algorithm.stateful_processors.items()
    return LearnerState(
      step=0,
      models={k: x.shapes for k, x in self.members.items()},
      companions={k: x.shapes for k, x in self.companions.items()},
      processor_states={k: x.initial for k, x in processors} or None,
      waiting=Responses,
      base={k: x.base for k, x in self.members.items() if not x.shares_base},
      reference=None,
    )

  def alone(self, name: str, params: Any) -> LearnerState:
    """Returns a state with one member, for scoring but not for training.

    Args:
      name: name of the member.
      params: nested dict of all its parameters.

    Returns:
      The state; nothing is allocated for the member's optimizer.
    """
    member = self.members[name]
    own, trained = member.split(params)
    model = member.shapes.replace(trained=trained)
    return self.abstract().replace(models={name: model}, base={name: own})

  def constants(self) -> dict[str, Any]:
    """Loads the models that checkpoints leave out, by field of the state."""
    reference = None  # The initial policy, for a KL to it.
    if "reference" in self.algorithm.needs(self.algorithm.leaves):
      reference = self.policy.split(self.initial_params()).trained
    frozen = {name: x.load() for name, x in self.frozen.items()}
    return {"reference": reference, "frozen": frozen}

  @functools.cached_property
  def _packer(self) -> Packer:
    share = {k: x.fns.shares_prompts for k, x in self.members.items()}
    # Frozen models score the packed rows of the policy.
    share["policy"] &= all(x.shares_prompts for x in self.frozen.values())
    settings = self.settings
    sizes = settings.max_tokens_per_row, settings.temperature
    return Packer(self.members, share, *sizes, self.views)

  @functools.cached_property
  def _estimate(self) -> Callable[[Experience], Experience]:
    """Jitted (leaves) -> `Algorithm.experience`."""
    names, made = sorted(self.algorithm.experience), self.algorithm.parts

    def estimate(leaves):
      return parts.evaluate(names, made, leaves)

    return jax.jit(estimate)

  def score(
    self,
    state: LearnerState,
    name: str,
    batch: MiniBatch,
    trained: Any = None,
    version: int = -1,
  ) -> Any:
    """Scores packed rows with a model; returns arrays [M, r, C] on the host.

    Args:
      state: state of the learner.
      name: name of a member or of a frozen model.
      batch: packed rows.
      trained: trained parameters to use instead of those of the state.
      version: version of the policy that these parameters are; other versions'
        choices of experts are not replayed. -1 is none.
    """
    if name in self.frozen:
      params, score = state.frozen[name], self.frozen[name].score
    else:
      params = Params(self.base(state, name), state.models[name].trained)
      score = self.members[name].score
    if trained is not None:
      params = params._replace(trained=trained)
      batch = batch.routed_by(version)
    return processes.to_host(score(params, place(batch.packed, self.mesh)))

  def base(self, state: LearnerState, name: str) -> Any:
    """Returns the parameters that a member reads and that are not trained."""
    if self.members[name].training.reads_policy:
      return state.params("policy")
    return state.base_of(name)

  def read(
    self, state: LearnerState, name: str, rollout: Rollout
  ) -> np.ndarray:
    """Returns an input that a model provides, also for unfinished responses.

    Args:
      state: state of the learner.
      name: name of the input, an entry of `Algorithm.providers`.
      rollout: B responses.

    Returns:
      [B, T] or [B].
    """
    rows = np.arange(len(rollout.lengths))
    packed = {
      member: self._packer.mini_batches(member, rollout, rows)
      for member in self.algorithm.needs([name]) & self.members.keys()
    }
    scoring = providers.Scoring(self, state, rollout, packed)
    return self.algorithm.providers[name].give(scoring)[name]

  def measure(
    self,
    state: LearnerState,
    name: str,
    responses: Responses,
    rng: np.random.Generator,
  ) -> TrainingBatch:
    """Scores ended responses that a member was not trained on."""
    rows = np.arange(len(responses.rewards))
    made = self._packer.mini_batches(name, responses.rollout, rows, rng)
    mini_batches = {k: made if k == name else [] for k in self.members}
    return self._scored(state, responses, mini_batches)

  def _scored(
    self,
    state: LearnerState,
    responses: Responses,
    mini_batches: Mapping[str, list[MiniBatch]],
    *,
    whole: bool = True,
  ) -> TrainingBatch:
    """Scores all rows with the current models and computes the inputs."""
    rollout, waits = responses.rollout, self._packer.waits
    # Targets need scores of all rows: the policy must also score responses that
    # waited, and the critic truncated ones, whose advantages bootstrap from it.
    targets = parts.leaves_of(["returns"], self.algorithm.parts)
    packed, complete = dict(mini_batches), self.algorithm.needs(targets)
    for name in self.members:
      if name in complete | waits:
        packed[name] = self._packer.completed(name, rollout, packed[name])
    scores = providers.Scoring(self, state, rollout, packed).scores()
    rows = [part.rows for name in waits for part in mini_batches[name]]
    learned = np.concatenate([np.arange(0), *rows])
    experience = self._experience(
      responses, scores, state.step, learned, whole=whole
    )
    return TrainingBatch(
      rollout, scores, experience, dict(mini_batches), state.step
    )

  def _experience(
    self,
    responses: Responses,
    scores: Mapping[str, np.ndarray],
    version: int,
    learned: np.ndarray,
    *,
    whole: bool = True,
  ) -> BatchArrays:
    """Computes the inputs of the algorithm, with rows sharded over the mesh.

    Args:
      responses: B judged responses.
      scores: scores of the models by name.
      version: version of the policy before the update.
      learned: rows that members with `Training.waits` train on.
      whole: whether to pad to a multiple of a mini-batch, otherwise to a power
        of two; both limit the number of compilations.
    """
    # Sorted: all processes must place arrays in the same order.
    rows, names = len(responses.rewards), sorted(self.algorithm.leaves)
    given = providers.of_responses(responses, version, names, self.column)
    given |= {name: x for name, x in scores.items() if name in names}
    size = next_power_of_two(rows)
    if whole:
      size = self._packer.size or self.policy.settings.mini_batch
    size = np.lcm(sharding.batch_size_of(self.mesh), size)
    place_rows = sharding.along_batch(self.mesh)

    def placed(x):
      # Pad with empty rows: other sizes would recompile or not divide the mesh.
      if added := -rows % size:
        x = np.pad(x, [(0, added)] + [(0, 0)] * (x.ndim - 1))
      return processes.put(x, place_rows)

    leaves = {k: placed(x) if np.ndim(x) else x for k, x in given.items()}
    made = processes.ready(self._estimate(leaves))
    for name in (k for k, x in made.items() if not x.ndim):  # A version.
      made[name] = placed(np.full(rows, made[name]))
    # Ended responses that wait for a full mini-batch are not in this update.
    held = placed(np.isin(np.arange(rows), learned)[:, None])
    waits = sorted(self._packer.waits)
    for mask in dict.fromkeys(self.members[x].training.mask for x in waits):
      made[mask] = made[mask] & held
    return BatchArrays(((made, rows),), self.mesh)
