"""The learner: judged responses in, new weights out.

Phases of an update:

  score     log-probs and values of every token, in packed rows
  estimate  advantages, targets and masks: the inputs of the algorithm
  update    critic and policy, each on its own mini-batches

The state is a value and holds everything that changes between updates.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import processes, sharding, types
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.learner import metrics, packing, parts
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.batches import VALUE_MODE, critic_batch, policy_batch
from jaxrl_llm.learner.models import Ema, GradientSum, KeptWeights, TrainedModel
from jaxrl_llm.learner.optimizer import TrainState
from jaxrl_llm.learner.packing import MiniBatch, PackedBatch, place
from jaxrl_llm.learner.scoring import (
  critic_scores,
  policy_scores,
  score_gradient_norms,
  writer_logprobs,
)
from jaxrl_llm.learner.state import (
  LearnerSettings,
  LearnerState,
  TrainingBatch,
)
from jaxrl_llm.models import Params, TokenLogprobs
from jaxrl_llm.types import Experience, Responses, Rollout


@dataclasses.dataclass(eq=False)
class Learner:
  """Trains the models of a run by an algorithm.

  Construction loads no weights and compiles nothing.

  Attributes:
    algorithm: the mathematics.
    policy: the model that writes responses.
    critic: the model that judges states; None without one.
    settings: plain settings.
    mesh: that the models lie on.
    initial_params: loads the parameters that the policy starts from.
    ema: the moving average, where the algorithm follows it.
    kept: the policy's weights of the versions that may have written a token
      of a batch, where the algorithm reads what they say of it.
  """

  algorithm: Algorithm
  policy: TrainedModel
  critic: TrainedModel | None
  settings: LearnerSettings
  mesh: jax.sharding.Mesh
  initial_params: Callable[[], Any]
  ema: Ema | None = None
  kept: KeptWeights | None = None

  def init(
    self, critic_params: Callable[[Any], Any] | None = None
  ) -> LearnerState:
    """The state before the first update.

    Args:
      critic_params: (policy's parameters) -> the critic's; None without one.
    """
    params = self.policy.split(self.initial_params())
    policy = self.policy.create_state(params.trained)
    base, params = {"policy": params.base}, Params(params.base, policy.trained)
    state = self.abstract().replace(
      policy=policy, waiting=None, base=base, reference=self.reference()
    )
    if self.critic is not None:
      own, trained = self.critic.split(critic_params(params))
      state = state.replace(
        critic=self.critic.create_state(trained), base=base | {"critic": own}
      )
    if self.ema is not None:
      state = state.replace(ema=self.ema.init(policy.trained))
    if self.kept is not None:
      state = state.replace(kept=self.kept.init(policy.trained))
    return state

  def reference(self) -> Any:
    """Loads the trained parameters that the policy started from.

    None unless the algorithm takes a KL to them.
    """
    if "ref_logprobs" not in self.algorithm.leaves:
      return None
    return self.policy.split(self.initial_params()).trained

  def abstract(self) -> LearnerState:
    """The state as a checkpoint is read into it.

    ShapeDtypeStructs with shardings on the mesh; a class for a record of host
    arrays that may be absent.
    """
    processors = self.algorithm.processors.items()
    models = {"policy": self.policy, "critic": self.critic}
    return LearnerState(
      step=0,
      policy=self.policy.shapes,
      critic=self.critic and self.critic.shapes,
      ema=self.ema and self.ema.shapes,
      kept=self.kept and self.kept.shapes,
      processor_states={k: x.initial for k, x in processors} or None,
      waiting=Responses,
      base={name: model.base for name, model in models.items() if model},
      reference=None,
    )

  @functools.cached_property
  def _estimate(self) -> Callable[[Experience], Experience]:
    """(leaves) -> the inputs that the algorithm reads, jitted."""
    names, made = sorted(self.algorithm.experience), self.algorithm.parts
    return jax.jit(functools.partial(parts.evaluate, names, made))

  def update(
    self, state: LearnerState, responses: Responses, timer: Any
  ) -> tuple[LearnerState, dict[str, float]]:
    """Updates the models on a batch.

    Mini-batches without a token to train on are skipped and have no metrics: no
    response was judged, or a correction masks all tokens.

    Args:
      state: before; its arrays are given away.
      responses: all with new tokens for the policy. Ended ones teach the
        critic, in whole mini-batches: what is left over waits in the state.
      timer: times the phases.

    Raises:
      TrainingStopped: too many updates in a row were not finite.
    """
    rng = np.random.default_rng((self.settings.seed, state.step))
    fresh_rows = np.arange(len(responses.rewards))
    joined, critic_rows, waiting = self._with_waiting(state, responses)
    rollout = joined.rollout
    with timer.phase("score"):
      policy_batches = self._mini_batches(self.policy, rollout, fresh_rows, rng)
      critic_batches = self._mini_batches(
        self.critic, rollout, critic_rows, rng
      )
      _check_rows(policy_batches, fresh_rows)
      _check_rows(critic_batches, critic_rows)
      scores = self._score(state, rollout, policy_batches, critic_batches)
      experience = self._experience(joined, scores, state.step, critic_rows)
      row = self._batch_metrics(state, rollout, scores, experience)
      if self.kept is not None:
        kept = self.kept.write(state.kept, state.policy.trained, state.step)
        state = state.replace(kept=kept)
    if critic_batches:
      batch = TrainingBatch(rollout, experience, critic_batches, state.step)
      with timer.phase("update_value"):
        state, new = self.update_critic(state, batch, rng)
      row |= new
    with timer.phase("update_policy"):
      batch = TrainingBatch(rollout, experience, policy_batches, state.step)
      state, new = self._update_policy(state, batch, rng)
    return self._after(state, scores, experience, waiting), row | new

  def update_by_groups(
    self, state: LearnerState, arriving: Iterable[Responses], timer: Any
  ) -> tuple[LearnerState, dict[str, float]]:
    """Updates the models on a batch whose groups arrive one after another.

    Gradients are summed up as they come and applied when all have come: one
    update of each model, that on the whole batch but for the order of float32
    sums. Nothing of the method may need the whole batch before.

    Args:
      state: before; its arrays are given away.
      arriving: whole groups of ended responses.
      timer: times the phases.

    Raises:
      TrainingStopped: as `update`.
    """
    sums, seen = self._gradient_sums(state), []
    for responses in self._filled(arriving):
      rollout, rows = responses.rollout, np.arange(len(responses.rewards))
      with timer.phase("score"):
        packed = {
          name: [self._packed_alone(each.model, rollout)]
          for name, each in sums.items()
        }
        scores = self._score(
          state, rollout, packed["policy"], packed.get("critic", [])
        )
        # A power of two, so that few numbers of responses compile anew.
        size = 1 << (rows.size - 1).bit_length()
        inputs = self._experience(
          responses, scores, state.step, rows, size=size
        )
      for name, each in sums.items():
        with timer.phase(each.phase):
          (part,) = packed[name]
          each.add(inputs, part)
      seen.append((responses, scores, inputs))
    parts, *others = zip(*seen)
    scores, experience = map(_concatenate, others)
    rollout = types.join_rows(parts).rollout
    row = self._batch_metrics(state, rollout, scores, experience)
    for name, each in sums.items():
      if not experience[each.mask].any():
        continue
      with timer.phase(each.phase):
        trained, new = each.apply(experience, state.step)
        row |= self._summary(name, trained, [new])
      state = state.replace(**{name: trained})
    return self._after(state, scores, experience), row

  @property
  def _room(self) -> int:
    """Tokens of a micro-batch, the critic's if it is larger."""
    models = [model for model in (self.policy, self.critic) if model]
    rows = max(model.settings.micro_batch_size for model in models)
    return rows * self.settings.max_tokens_per_row

  def _filled(self, arriving: Iterable[Responses]) -> Iterator[Responses]:
    """Groups joined until they fill a micro-batch; the last may not.

    Gradients of less would cost as much. Lengths decide, and no clock, so that
    the same groups are joined again.
    """
    gathered, tokens = [], 0
    for responses in arriving:
      rollout = responses.rollout
      share = self.policy.fns.shares_prompts
      prompts = rollout.prompt_lengths
      tokens += int(prompts.max() if share else prompts.sum())
      tokens += int(rollout.lengths.sum())
      gathered.append(responses)
      if tokens >= self._room:
        yield types.join_rows(gathered)
        gathered, tokens = [], 0
    if gathered:
      yield types.join_rows(gathered)

  def _packed_alone(self, model: TrainedModel, rollout: Rollout) -> MiniBatch:
    """One mini-batch of what `_filled` joins, always of the same shape."""
    capacity = self.settings.max_tokens_per_row
    rows = model.settings.micro_batch_size
    longest = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
    most = self._room + longest * np.bincount(rollout.group).max()
    # First-fit leaves at most one row half empty.
    most_rows = 1 + 2 * most // capacity
    packed, layout = packing.pack(
      rollout,
      capacity=capacity,
      rows=rows,
      micro_batches=-(-most_rows // rows),
      share=model.fns.shares_prompts,
    )
    return MiniBatch(np.arange(len(rollout.lengths)), packed, layout)

  def _gradient_sums(self, state: LearnerState) -> dict[str, GradientSum]:
    """Returns the gradient sums of the critic, if any, and of the policy."""
    prepared = lambda make: (
      lambda *part: place(make(*part, self.algorithm, size=1), self.mesh)
    )
    sums = {}
    if self.critic is not None:
      sums["critic"] = GradientSum(
        self.critic,
        state.critic,
        state.base["critic"],
        "update_value",
        prepared(critic_batch),
        mask="value_mask",
        mode=VALUE_MODE,
      )
    sums["policy"] = GradientSum(
      self.policy,
      state.policy,
      state.base["policy"],
      "update_policy",
      prepared(policy_batch),
      mask="policy_mask",
      mode=self.algorithm.loss_mode,
      settings=(np.float32(self.settings.temperature),),
    )
    return sums

  def measure_critic(
    self, state: LearnerState, responses: Responses, rng: np.random.Generator
  ) -> TrainingBatch:
    """Scores ended responses that the critic has not been trained on."""
    rollout, rows = responses.rollout, np.arange(len(responses.rewards))
    batches = self._mini_batches(self.critic, rollout, rows, rng)
    scores = self._score(state, rollout, [], batches)
    experience = self._experience(responses, scores, state.step, rows)
    return TrainingBatch(rollout, experience, batches, state.step)

  def update_critic(
    self, state: LearnerState, batch: TrainingBatch, rng: np.random.Generator
  ) -> tuple[LearnerState, dict[str, float]]:
    """Trains the critic alone: ½ (V − return)², a mean over each mini-batch."""
    critic, rows, base = state.critic, [], state.base["critic"]
    for prepared in self._prepared(self.critic, critic_batch, batch, rng):
      critic, row = self.critic.update(critic, prepared, base=base)
      rows.append(row)
    row = self._summary("critic", critic, rows)
    return state.replace(critic=critic), row

  def _with_waiting(
    self, state: LearnerState, responses: Responses
  ) -> tuple[Responses, np.ndarray, Responses | None]:
    """Returns the batch, the critic's rows, and the responses that still wait.

    The critic takes whole mini-batches, oldest responses first: in a smaller
    one, each response would weigh more.
    """
    ended = np.flatnonzero(responses.ended)
    if self.critic is None:
      return responses, ended[:0], None
    size = self.critic.settings.mini_batch
    waited = 0 if state.waiting is None else len(state.waiting.rewards)
    learned = (waited + ended.size) // size * size
    left = types.take_rows(responses, ended[max(learned - waited, 0) :])
    # The policy has been trained on all of their tokens.
    left = left.replace(
      rollout=left.rollout.replace(window_start=left.rollout.lengths)
    )
    if not learned:
      waiting = types.join_rows([state.waiting, left])
      return responses, ended[:0], waiting if waiting.rewards.size else None
    batch, rows = responses, ended[: learned - waited]
    if waited:
      batch = types.join_rows([responses, state.waiting])
      rows = np.append(len(responses.rewards) + np.arange(waited), rows)
    return batch, rows, left if left.rewards.size else None

  def _mini_batches(
    self,
    model: TrainedModel | None,
    rollout: Rollout,
    rows: np.ndarray,
    rng: np.random.Generator | None = None,
  ) -> list[MiniBatch]:
    """Mini-batches of a model's own size, packed; shuffled by `rng`."""
    if model is None:
      return []
    return packing.mini_batches(
      rollout,
      size=model.settings.mini_batch,
      rng=rng,
      capacity=self.settings.max_tokens_per_row,
      rows=model.settings.micro_batch_size,
      chosen=rows,
      share=model.fns.shares_prompts,
    )

  def _score(self, state, rollout, policy_batches, critic_batches):
    """Scores all rows with the current models and the reference."""
    reads, params = self.algorithm.leaves, state.params("policy")
    of = lambda trained: params._replace(trained=trained)
    # A KL in the rewards is a part of the critic's targets, so of those too
    # that only the critic learns from.
    if "ref_logprobs" in self.algorithm.parts["token_rewards"].reads:
      policy_batches = self._completed(self.policy, rollout, policy_batches)
    scores = policy_scores(
      self.logprobs,
      params,
      of(state.reference) if "ref_logprobs" in reads else None,
      rollout,
      policy_batches,
      reads_old=bool(reads & {"old_logprobs", "entropies"}),
    )
    if self.kept is not None:
      scores["writer_logprobs"] = writer_logprobs(
        self.logprobs,
        lambda version: of(self.kept.read(state.kept, version)),
        scores["old_logprobs"],
        rollout,
        policy_batches,
        version=state.step,
      )
    if "gradient_norms" in reads:
      scores["gradient_norms"] = self._gradient_norms(
        params, rollout, policy_batches
      )
    if self.critic is None:
      return scores
    # Cut responses are no part of the critic's mini-batches.
    critic_batches = self._completed(self.critic, rollout, critic_batches)
    return scores | critic_scores(
      self._values, state.params("critic"), rollout, critic_batches
    )

  def logprobs(self, params: Any, batch: MiniBatch) -> TokenLogprobs:
    """Log-probs and entropies of a mini-batch, packed [M, r, C]."""
    packed = place(batch.packed, self.mesh)
    temperature = np.float32(self.settings.temperature)
    return processes.to_host(self.policy.score(params, packed, temperature))

  @functools.cached_property
  def _score_gradient_norms(self) -> Callable[..., jax.Array]:
    """(params, packed one by one, temperature) -> [M], jitted."""
    score = functools.partial(score_gradient_norms, fns=self.policy.fns)
    return jax.jit(score, out_shardings=sharding.replicated(self.mesh))

  def _gradient_norms(self, params, rollout, batches) -> np.ndarray:
    """‖∇ log π‖ of the responses of mini-batches, [B]; 0 of others."""
    out = np.zeros(len(rollout.lengths), np.float32)
    temperature = np.float32(self.settings.temperature)
    lengths = rollout.prompt_lengths + rollout.lengths
    longest = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
    # Rows of three lengths: most responses are far from the longest.
    sizes = itertools.pairwise((0, longest // 4, longest // 2, longest))
    for batch, (shorter, size) in itertools.product(batches, sizes):
      of_size = (lengths > shorter) & (lengths <= size)
      rows = batch.rows[of_size[batch.rows]]
      if not rows.size:
        continue
      packed = packing.one_by_one(
        types.take_rows(rollout, rows),
        capacity=size,
        rows=sharding.batch_size_of(self.mesh),
        micro_batches=len(batch.rows),
      )
      norms = self._score_gradient_norms(
        params, place(packed, self.mesh), temperature
      )
      out[rows] = processes.to_host(norms)[: rows.size]
    return out

  def _values(self, params: Any, batch: MiniBatch) -> np.ndarray:
    packed = place(batch.packed, self.mesh)
    return processes.to_host(self.critic.score(params, packed))

  def _completed(self, model, rollout, batches) -> list[MiniBatch]:
    """Adds mini-batches of the remaining rows."""
    rows = np.arange(len(rollout.lengths))
    for batch in batches:
      rows = np.setdiff1d(rows, batch.rows)
    return batches + self._mini_batches(model, rollout, rows)

  def _experience(
    self,
    responses: Responses,
    scores: Mapping[str, np.ndarray],
    version: int,
    critic_rows: np.ndarray,
    *,
    size: int | None = None,
  ) -> Experience:
    """Computes the inputs of the algorithm, with rows sharded over the mesh.

    Pads to a multiple of `size` rows, by default of a mini-batch.
    """
    rows = len(responses.rewards)
    given = dict(responses.rollout.items()) | dict(scores)
    for name in ("rewards", "correct", "judged"):
      given[name] = responses[name]
    leaves = {k: v for k, v in given.items() if k in self.algorithm.leaves}
    # Pad with empty rows: other sizes would recompile or not divide the mesh.
    size = size or (self.critic or self.policy).settings.mini_batch
    size = np.lcm(sharding.batch_size_of(self.mesh), size)
    place_rows = sharding.along_batch(self.mesh)
    leaves = {
      name: processes.put(
        np.pad(x, [(0, -rows % size)] + [(0, 0)] * (x.ndim - 1)), place_rows
      )
      for name, x in leaves.items()
    }
    made = self._estimate(leaves | {"update_version": np.int32(version)})
    experience = {k: x[:rows] for k, x in processes.to_host(made).items()}
    if "value_mask" in experience:
      # Ended responses that wait for a full mini-batch have no value loss yet.
      learned = np.isin(np.arange(rows), critic_rows)
      experience["value_mask"] = experience["value_mask"] & learned[:, None]
    return experience

  def _batch_metrics(self, state, rollout, scores, experience):
    mask = experience["policy_mask"]
    row = metrics.experience_metrics(
      experience, rollout.behavior_logprobs, self.algorithm
    )
    row |= metrics.staleness(rollout, mask, state.step)
    row |= metrics.parity(
      rollout, mask, scores["old_logprobs"], scores["scored"], state.step
    )
    if self.critic is not None:
      row |= metrics.boundary_error(
        rollout, scores["values"], scores["next_values"]
      )
    return row

  def _update_policy(self, state, batch, rng):
    """Trains the policy on each mini-batch: surrogate and auxiliary losses."""
    policy, ema, rows = state.policy, state.ema, []
    base = state.base["policy"]
    temperature = np.float32(self.settings.temperature)

    def prepare(inputs, part, algorithm):
      if algorithm.follows_average:
        average = Params(base, ema["params"])
        scored = self.logprobs(average, part)
        inputs["proximal_logprobs"] = part.layout.gather(scored.logprobs)
      return policy_batch(inputs, part, algorithm)

    for prepared in self._prepared(self.policy, prepare, batch, rng):
      policy, row = self.policy.update(policy, prepared, temperature, base=base)
      if ema is not None:
        ema = self.ema.step(ema, policy.trained, row["policy/skipped"])
      rows.append(row)
    row = self._summary("policy", policy, rows)
    return state.replace(policy=policy, ema=ema), row

  def _prepared(
    self, model: TrainedModel, make: Any, batch: TrainingBatch, rng: Any
  ) -> Iterator[PackedBatch]:
    """Yields the mini-batches of all epochs on the mesh, reshuffled each epoch.

    Mini-batches without a token to train on are skipped: momentum and weight
    decay alone would move the weights.
    """
    mini_batches, settings = batch.mini_batches, model.settings
    rows = np.sort(np.concatenate([part.rows for part in mini_batches]))
    count, number = settings.epochs * len(mini_batches), itertools.count()
    for epoch in range(settings.epochs):
      if epoch:
        mini_batches = self._mini_batches(model, batch.rollout, rows, rng)
      for part in mini_batches:
        inputs = {k: x[part.rows] for k, x in batch.experience.items()}
        step = settings.schedule_step(batch.step, next(number), count)
        made = make(inputs, part, self.algorithm).replace(schedule_step=step)
        if made.trains:
          yield place(made, self.mesh)

  def _summary(self, name, state: TrainState, rows) -> dict[str, float]:
    """Mean over the updates of a step (maximum of a maximum), if any."""
    rows = processes.to_host(rows)
    in_a_row = int(state.optimizer.skipped_in_a_row)
    if in_a_row >= self.settings.max_skipped:
      raise TrainingStopped(
        f"the last {in_a_row} updates of the {name} were not finite and were"
        " skipped; lower the learning rate or look at the last samples"
      )
    if not rows:
      return {}
    over = lambda key: max if key.endswith("_max") else np.mean
    out = {k: float(over(k)([row[k] for row in rows])) for k in rows[0]}
    skipped = next(k for k in out if k.endswith("/skipped"))
    return out | {skipped: float(sum(row[skipped] for row in rows))}

  def _after(
    self,
    state: LearnerState,
    scores: Mapping[str, np.ndarray],
    experience: Experience,
    waiting: Responses | None = None,
  ) -> LearnerState:
    """Returns the state after the update of its models."""
    processors = self.algorithm.processors.items()
    if processors and experience["policy_mask"].any():
      inputs = {**scores, **experience}
      following = {name: x.state(inputs) for name, x in processors}
      state = state.replace(processor_states=jax.device_get(following))
    return state.replace(step=state.step + 1, waiting=waiting)


def _concatenate(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Concatenates dicts of arrays along axis 0."""
  return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}


def _check_rows(batches: list[MiniBatch], rows: np.ndarray) -> None:
  """Checks that mini-batches hold each row exactly once."""
  held = np.concatenate([rows[:0], *(batch.rows for batch in batches)])
  if not np.array_equal(np.sort(held), np.sort(rows)):
    raise RuntimeError(
      f"{len(rows)} responses are to be trained on once, but mini-batches hold"
      f" {len(held)}, {len(np.unique(held))} of them different"
    )
