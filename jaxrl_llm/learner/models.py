"""The models that are trained: functions, optimizer, update and shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import losses, masked, processes, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import optimizer as optimizer_lib
from jaxrl_llm.learner import scoring
from jaxrl_llm.learner import update as update_lib
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.optimizer import TrainState, UpdateSettings
from jaxrl_llm.models import ModelFns, Params, ValueFns, partition


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A policy or critic: its functions, scores, update and place."""

  fns: ModelFns | ValueFns
  # (trained, which are given away) -> the state at step 0 around them, jitted.
  create_state: Callable[[Any], TrainState]
  # (params, PackedTokens, *settings) -> [M, r, C], jitted; see `scoring`.
  score: Callable[..., Any]
  update: update_lib.Update
  accumulation: update_lib.Accumulation  # The same in parts.
  shapes: TrainState  # ShapeDtypeStructs with shardings.
  base: Any  # Likewise, the parameters that are not trained.
  settings: UpdateSettings

  @property
  def params(self) -> Params:
    """ShapeDtypeStructs with shardings of all parameters."""
    return Params(self.base, self.shapes.trained)

  def split(self, params: Any) -> Params:
    """Splits a nested dict of all parameters."""
    return partition(params, self.settings.frozen)


@dataclasses.dataclass
class GradientSum:
  """Gradients of a model over a batch that arrives in parts.

  Attributes:
    model: is trained.
    state: that the gradients are taken at; given away in the end.
    base: the model's parameters that are not trained.
    phase: of the timer.
    prepare: (inputs, mini-batch) -> `PackedBatch` with weights of size 1.
    mask: name of the input that says which tokens the loss is over.
    mode: how it is reduced over them, see `masked.token_weights`.
    settings: of the model's update.
    sums: so far; None: of nothing yet.
  """

  model: TrainedModel
  state: TrainState
  base: Any
  phase: str
  prepare: Callable[..., Any]
  mask: str
  mode: str
  settings: tuple = ()
  sums: Any = dataclasses.field(default=None, init=False)

  def add(self, inputs: Any, part: Any) -> None:
    """Adds the gradient on a part; arguments as `prepare` has them."""
    batch, how = self.prepare(inputs, part), self.model.accumulation
    given = self.state.trained, batch, *self.settings
    if self.sums is None:
      self.sums = how.begin(*given, base=self.base)
    sums = how.add(self.sums, *given, base=self.base)
    self.sums = processes.ready(sums)  # The phase has its own time.

  def apply(self, inputs: Any, step: int) -> tuple[TrainState, Any]:
    """The state after the update, and its metrics.

    Args:
      inputs: of all parts.
      step: of the run.
    """
    size = masked.reduction_size(inputs[self.mask], mode=self.mode)
    at = self.model.settings.schedule_step(step, 0, 1)
    return self.model.accumulation.apply(self.state, self.sums, size, at)


class Ema(NamedTuple):
  """PPO-EWMA's moving average of trained parameters: {'params', 'weight'}."""

  init: Callable[[Any], Any]  # (trained) -> average.
  # (average, trained, whether the update was skipped) -> average.
  step: Callable[[Any, Any, Any], Any]
  shapes: Any  # ShapeDtypeStructs with shardings.


class KeptWeights(NamedTuple):
  """The policy's trained parameters of its last K versions, [K, ...].

  Version v lies in slot v mod K until version v + K takes its place.
  """

  init: Callable[[Any], Any]  # (trained) -> kept, of which all are these.
  # (kept, which is given away, trained, their version) -> kept.
  write: Callable[[Any, Any, Any], Any]
  read: Callable[[Any, Any], Any]  # (kept, version) -> trained, float32.
  shapes: Any  # ShapeDtypeStructs with shardings.


def make_policy(
  fns: ModelFns,
  settings: UpdateSettings,
  algorithm: Algorithm,
  mesh: jax.sharding.Mesh,
) -> TrainedModel:
  """The policy with the algorithm's losses."""
  objective = update_lib.policy_objective(
    fns, algorithm.policy_loss, algorithm.auxiliary
  )
  return _trained(fns, settings, scoring.score_logprobs, objective, mesh)


def make_critic(
  fns: ValueFns,
  settings: UpdateSettings,
  algorithm: Algorithm,
  mesh: jax.sharding.Mesh,
) -> TrainedModel | None:
  """The critic; None if the algorithm has none."""
  if algorithm.value_loss is None:
    return None
  objective = update_lib.value_objective(fns, algorithm.value_loss)
  return _trained(fns, settings, scoring.score_values, objective, mesh)


def _trained(fns, settings, score, objective, mesh) -> TrainedModel:
  schedule = optimizer_lib.make_schedule(settings)
  optimizer = optimizer_lib.make_optimizer(
    schedule,
    max_grad_norm=settings.max_grad_norm,
    weight_decay=settings.weight_decay,
    b1=settings.b1,
    b2=settings.b2,
    eps=settings.eps,
    mu_dtype=settings.mu_dtype,
  )
  whole = jax.eval_shape(fns.init, jax.random.key(0))
  _check_frozen(whole, settings.frozen)
  base, trained = partition(whole, settings.frozen)
  create = functools.partial(
    optimizer_lib.create_train_state, optimizer=optimizer
  )
  shardings = sharding.tree_shardings(jax.eval_shape(create, trained), mesh)
  create = jax.jit(create, out_shardings=shardings, donate_argnums=0)
  place = jax.jit(
    lambda x: x, out_shardings=sharding.tree_shardings(base, mesh)
  )
  whole = sharding.replicated(mesh)
  how = objective, optimizer, schedule
  pinned = {"out_shardings": (shardings, whole)}
  score = jax.jit(functools.partial(score, fns=fns), out_shardings=whole)
  return TrainedModel(
    fns,
    create,
    score,
    update_lib.make_update(*how, **pinned),
    update_lib.make_accumulation(*how, **pinned),
    create.eval_shape(trained),
    place.eval_shape(base),
    settings,
  )


def _check_frozen(params: Any, frozen: tuple[str, ...]) -> None:
  for part in frozen:
    base, trained = partition(params, (part,))
    if not (base and trained):
      whose = "every" if base else "no"
      raise InputError(
        f"config.optimizer: frozen={part!r} is a part of {whose} parameter's"
        f" path; choose among {', '.join(sorted(params))}, or parts such as"
        " 'layers/mlp'"
      )


def make_ema(
  policy: TrainedModel, mesh: jax.sharding.Mesh, *, decay: float
) -> Ema:
  """The moving average of the policy, θ_prox of PPO-EWMA."""

  def init(params):
    copied = jax.tree.map(jnp.copy, params)
    return {"params": copied, "weight": jnp.ones((), jnp.float32)}

  def step(average, params, skipped):
    params, weight = losses.ewma_update(
      average["params"], average["weight"], params, decay=decay
    )
    moved = {"params": params, "weight": weight}
    # An update that was refused is none: the average stays with it.
    return jax.tree.map(
      lambda new, old: jnp.where(skipped, old, new), moved, average
    )

  params = policy.shapes.trained
  shardings = sharding.tree_shardings(jax.eval_shape(init, params), mesh)
  init = jax.jit(init, out_shardings=shardings)
  step = jax.jit(step, out_shardings=shardings, donate_argnums=0)
  return Ema(init, step, init.eval_shape(params))


def make_kept_weights(
  policy: TrainedModel, *, versions: int, dtype: Any
) -> KeptWeights:
  """Room for earlier weights of the policy, sharded as it is.

  Args:
    policy: whose parameters are kept.
    versions: K, at least 1.
    dtype: that they are kept in; another one than float32 rounds them.
  """

  def init(params):
    copies = lambda x: jnp.broadcast_to(x.astype(dtype), (versions, *x.shape))
    return jax.tree.map(copies, params)

  def write(kept, params, version):
    put = functools.partial(
      jax.lax.dynamic_update_index_in_dim, index=version % versions, axis=0
    )
    return jax.tree.map(lambda old, x: put(old, x.astype(dtype)), kept, params)

  def read(kept, version):
    take = functools.partial(
      jax.lax.dynamic_index_in_dim, index=version % versions, keepdims=False
    )
    return jax.tree.map(lambda x: take(x).astype(jnp.float32), kept)

  params = policy.shapes.trained
  places = jax.tree.map(lambda x: x.sharding, params)
  stacked = jax.tree.map(sharding.with_leading_axis, places)
  init = jax.jit(init, out_shardings=stacked)
  write = jax.jit(write, out_shardings=stacked, donate_argnums=0)
  # Placed like the policy's own, so that they are scored by its program.
  read = jax.jit(read, out_shardings=places)
  return KeptWeights(init, write, read, init.eval_shape(params))
