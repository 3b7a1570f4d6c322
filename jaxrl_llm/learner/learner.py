"""The learner: judged responses in, new weights out.

Phases of an update:

  score     log-probs and values of every token, in packed rows
  estimate  advantages, targets and masks: the inputs of the algorithm
  update    each member on its own mini-batches, the policy last

The state is a value and holds everything that changes between updates.
`Scorer` implements the first two phases.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import masked, types
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.learner import metrics
from jaxrl_llm.learner.members import Member
from jaxrl_llm.learner.packing import MiniBatch, PackedBatch, place
from jaxrl_llm.learner.scorer import Scorer
from jaxrl_llm.learner.state import LearnerState, TrainingBatch
from jaxrl_llm.models import Params, merge
from jaxrl_llm.system import processes
from jaxrl_llm.types import Experience, Responses


@dataclasses.dataclass(frozen=True, eq=False)
class Learner(Scorer):
  """Trains the models of a run by an algorithm; see `Scorer` for attributes."""

  def init(self, **initial: Callable[[Params], Any]) -> LearnerState:
    """Returns the state before the first update.

    Args:
      **initial: member name -> function of the policy's parameters that returns
        the initial parameters of the member. By default, the member's `init`
        draws them.
    """
    policy = self.policy.split(self.initial_params())
    models = {"policy": self.policy.create_state(policy.trained)}
    policy = policy._replace(trained=models["policy"].trained)
    base = {"policy": policy.base}
    for name, member in self.members.items():
      if name in models:
        continue
      given = initial[name](policy) if name in initial else self._draw(member)
      own, trained = member.split(given)
      if not member.shares_base:
        base[name] = own
      models[name] = member.create_state(trained)
    follow = {k: x.init(policy.trained) for k, x in self.companions.items()}
    return self.abstract().replace(
      models=models,
      companions=follow,
      waiting=None,
      base=base,
      **self.constants(),
    )

  def _draw(self, member: Member) -> Any:
    """Draws random parameters of a member; they depend only on the seed."""
    places = jax.tree.map(lambda x: x.sharding, merge(member.params))
    make = jax.jit(member.fns.init, out_shardings=places)
    return make(jax.random.key(self.settings.seed))

  def update(
    self,
    state: LearnerState,
    responses: Responses | Iterable[Responses],
    timer: Any,
    scored: Callable[[TrainingBatch], None] | None = None,
  ) -> tuple[LearnerState, dict[str, float]]:
    """Updates the models on a batch.

    A batch that arrives in parts leads to one update of each model: gradients
    are accumulated as parts arrive and applied at the end. The result equals
    that of the complete batch except for the order of float32 sums, and for a
    model's own losses, which are taken over each part. The method must not need
    the complete batch before the end.

    Mini-batches without a token to train on (no verdicts, or all tokens masked
    by a correction) are skipped and have no metrics.

    Args:
      state: the state before the update; its arrays are donated.
      responses: a batch in which every response has new tokens for the policy.
        Members with `Training.waits` train on its ended responses in full
        mini-batches; the remaining responses wait in the state. Or an iterable
        of complete groups of ended responses, in order of arrival.
      timer: times the phases.
      scored: called with the scored batch, whose rows may be in any order.

    Returns:
      The state after the update, and the metrics of the step.

    Raises:
      TrainingStopped: Too many consecutive updates were not finite.
    """
    rng = np.random.default_rng((self.settings.seed, state.step))
    whole, packer = isinstance(responses, Responses), self._packer
    pack = packer.part
    if whole:
      pack = functools.partial(packer.batch, waiting=state.waiting, rng=rng)
    seen, sums, row, waiting = [], {}, {}, None
    for part in [responses] if whole else packer.joined(responses):
      with timer.phase("score"):
        part, mini_batches, waiting = pack(part)
        seen.append(self._scored(state, part, mini_batches, whole=whole))
        state = self._followed(state, "record", state.step)
      for name in reversed(self.members):
        if not mini_batches[name]:
          continue
        with timer.phase(self.members[name].phase):
          if whole:
            state, new = self.update_member(state, name, seen[-1], rng)
            row |= new
          else:
            before = sums.get(name, (None, False))
            sums[name] = self._add(state, name, seen[-1], *before)
    batch = _joined(seen)
    for name in (name for name, (_, trains) in sums.items() if trains):
      with timer.phase(self.members[name].phase):
        state, new = self._apply(state, name, batch, sums[name][0])
      row |= new
    row |= metrics.batch_metrics(batch, self.algorithm)
    if scored is not None:
      scored(batch)
    processors = self.algorithm.stateful_processors.items()
    if processors and batch.experience["policy_mask"].any():
      inputs = collections.ChainMap(batch.experience, batch.scores)
      following = {name: x.state(inputs) for name, x in processors}
      state = state.replace(processor_states=jax.device_get(following))
    return state.replace(step=state.step + 1, waiting=waiting), row

  def update_member(
    self,
    state: LearnerState,
    name: str,
    batch: TrainingBatch,
    rng: np.random.Generator,
  ) -> tuple[LearnerState, dict[str, float]]:
    """Trains one member, with one update per mini-batch and epoch.

    Mini-batches without a token to train on are skipped: otherwise momentum and
    weight decay would still move the weights.
    """
    member, rows = self.members[name], []
    mini_batches, epochs = batch.mini_batches[name], member.settings.epochs
    held = np.sort(np.concatenate([part.rows for part in mini_batches]))
    count = epochs * len(mini_batches)

    def coming():
      yield from mini_batches
      for _ in range(1, epochs):
        yield from self._packer.mini_batches(name, batch.rollout, held, rng)

    # Read one mini-batch ahead: otherwise the read would queue behind the
    # previous update.
    parts = _ahead((x, batch.experience.take(x.rows)) for x in coming())
    for number in range(count):  # `enumerate` would keep `taken` alive.
      part, taken = next(parts)
      at = member.settings.schedule_step(batch.step, number, count)
      prepared = self._prepared(state, name, batch, part, taken)
      del taken  # Frees copies on every device, which the update does not need.
      if not prepared.trains:
        continue
      placed = place(prepared.replace(schedule_step=at), self.mesh)
      model, row = member.update.whole(
        state.models[name],
        placed,
        base=self.base(state, name),
      )
      state = state.with_model(name, model)
      if name == "policy":
        state = self._followed(state, "follow", row["policy/skipped"])
      rows.append(row)
    return state, self._summary(state, name, rows)

  def _add(
    self,
    state: LearnerState,
    name: str,
    part: TrainingBatch,
    sums: Any,
    trains: bool,
  ) -> tuple[Any, bool]:
    """Adds a part's gradients; returns sums and whether any part trains."""
    member, (mini_batch,) = self.members[name], part.mini_batches[name]
    taken = part.experience.take(mini_batch.rows)
    prepared = self._prepared(state, name, part, mini_batch, taken, size=1)
    sums = member.update.accumulate(
      sums,
      state.models[name].trained,
      place(prepared, self.mesh),
      base=self.base(state, name),
    )
    # Attributes the time to this phase.
    return processes.ready(sums), trains or prepared.trains

  def _apply(
    self, state: LearnerState, name: str, batch: TrainingBatch, sums: Any
  ) -> tuple[LearnerState, dict[str, float]]:
    """Updates a member with the gradients of all parts of a batch."""
    member = self.members[name]
    mask = batch.experience[member.training.mask]
    # On the host, because this process may have no device of the mesh.
    size = jax.device_get(
      masked.reduction_size(mask, mode=member.training.mode)
    )
    at = member.settings.schedule_step(batch.step, 0, 1)
    model, row = member.update.apply(state.models[name], sums, size, at)
    state = state.with_model(name, model)
    return state, self._summary(state, name, [row])

  def _prepared(
    self,
    state: LearnerState,
    name: str,
    batch: TrainingBatch,
    part: MiniBatch,
    taken: Experience,
    size: float | None = None,
  ) -> PackedBatch:
    """Packs a mini-batch for a member; `size` as in `masked.token_weights`."""
    taken = processes.to_host(taken)
    inputs = {k: x[: len(part.rows)] for k, x in taken.items()}
    if name == "policy":
      for key, companion in self.companions.items():
        if companion.scores:
          trained = state.companions[key]["params"]
          scored = self.score(state, name, part, trained)
          # Stored in the batch too: its metrics use the values of the update.
          logprobs = batch.experience[companion.scores].copy()
          inputs[companion.scores] = part.layout.gather(scored.logprobs)
          logprobs[part.rows] = inputs[companion.scores]
          batch.experience[companion.scores] = logprobs
    return self.members[name].training.prepare(inputs, part, size)

  def _followed(
    self, state: LearnerState, event: str, *arguments: Any
  ) -> LearnerState:
    """Updates the companions that have a function for an event."""
    trained, after = state.policy.trained, dict(state.companions)
    for name, companion in self.companions.items():
      if move := getattr(companion, event):
        after[name] = move(after[name], trained, *arguments)
    return state.replace(companions=after)

  def _summary(
    self, state: LearnerState, name: str, rows: Sequence[Any]
  ) -> dict[str, float]:
    """Returns the metrics of a member's updates in a step, if any."""
    in_a_row = state.models[name].optimizer.skipped_in_a_row
    rows, in_a_row = processes.to_host((rows, in_a_row))
    if in_a_row >= self.settings.max_skipped:
      raise TrainingStopped(
        f"the last {in_a_row} updates of the {name} were not finite and were"
        " skipped; lower the learning rate or look at the last samples"
      )
    return metrics.over_updates(rows) if rows else {}


def _ahead(items: Iterable[Any]) -> Iterator[Any]:
  """Yields each item after the next one has been made."""
  items = iter(items)
  made = list(itertools.islice(items, 1))
  while made:
    made.extend(itertools.islice(items, 1))
    yield made.pop(0)  # No reference is kept here while the item is used.


def _joined(parts: Sequence[TrainingBatch]) -> TrainingBatch:
  """Concatenates the parts of a batch."""
  if len(parts) == 1:
    return parts[0]
  join = functools.partial(jax.tree.map, lambda *xs: np.concatenate(xs))
  return dataclasses.replace(
    parts[0],
    rollout=types.join_rows([part.rollout for part in parts]),
    scores=join(*(part.scores for part in parts)),
    experience=dataclasses.replace(
      parts[0].experience,
      parts=tuple(x for part in parts for x in part.experience.parts),
    ),
  )
