"""Train state, optimizers and learning-rate schedules."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax


class OptimizerState(NamedTuple):
  """State of a model's training, without its parameters."""

  opt_state: Any  # State of the optax transformation.
  step: chex.Array  # int32 scalar, updates applied.
  skipped: chex.Array  # int32 scalar, updates skipped because not finite.
  skipped_in_a_row: chex.Array  # int32 scalar, since the last applied one.


@chex.dataclass(frozen=True)
class TrainState:
  """Trained parameters and optimizer state of a model."""

  trained: Any  # Nested dict of float32 masters, see `models.Params`.
  optimizer: OptimizerState


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """Update settings of a model: config group `optimizer.policy` or `.value`."""

  learning_rate: float
  warmup_steps: int  # Updates over which the rate rises linearly.
  learning_rate_schedule: str  # After the warm-up; a name of `SCHEDULES`.
  min_learning_rate_ratio: float  # Last rate / learning rate.
  max_grad_norm: float
  weight_decay: float
  b1: float
  b2: float
  eps: float
  mu_dtype: str  # Dtype of the first moment.
  mini_batch: int  # Responses per update.
  micro_batch_size: int  # Packed rows per micro-batch.
  epochs: int  # Passes over each batch.
  steps: int  # Steps of the run.
  updates: int  # Updates of the run, without windows.
  frozen: tuple[str, ...] = ()  # Substrings of the paths of frozen leaves.
  name: str = "adamw"  # One of `OPTIMIZERS`.

  def schedule_step(self, step: int, number: int, count: int) -> np.int32:
    """Returns the position of an update in the learning-rate schedule.

    The schedule follows the completed fraction of the run, so that it ends with
    the run even if windows change the number of mini-batches per step.

    Args:
      step: step of the run, from 0.
      number: index of the update in the step, from 0.
      count: updates in the step.
    """
    done = step * count + number
    return np.int32(self.updates * done // (self.steps * count))


# (rate, last rate, update from which it falls, over how many updates) -> rate
# of an update.
SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
  "constant": lambda rate, *_: optax.constant_schedule(rate),
  "linear": lambda rate, last, begin, updates: optax.linear_schedule(
    rate, last, updates, begin
  ),
  "cosine": lambda rate, last, begin, updates: (
    optax.warmup_cosine_decay_schedule(rate, rate, begin, begin + updates, last)
  ),
}


def make_schedule(settings: UpdateSettings) -> optax.Schedule:
  """Linear warm-up over `warmup_steps` updates, then a name of `SCHEDULES`.

  The first update already moves: its rate is learning_rate / warmup_steps. From
  update `updates` on the rate is min_learning_rate_ratio * learning_rate.
  """
  rate, warmup = settings.learning_rate, settings.warmup_steps
  last, updates = rate * settings.min_learning_rate_ratio, settings.updates
  after = SCHEDULES[settings.learning_rate_schedule](
    rate, last, warmup, max(updates - warmup, 1)
  )

  def schedule(step):
    return after(step) * jnp.minimum(1.0, (step + 1) / max(warmup, 1))

  return schedule


MATRICES = ("kernel", "embedding", "lora_a", "lora_b")


def matrices(params: Any) -> Any:
  """Returns a tree of bools: whether a parameter is a matrix.

  Matrices are recognised by name, because stacked layers add an axis.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in MATRICES, params
  )


def _each(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """Applies a transformation to every matrix or vector on its own.

  Parameters of stacked layers, and of the experts of a layer, share an array.
  """
  shapes = jax.eval_shape(inner.init, 0.0)
  inner_state, both = map(jax.tree.structure, (shapes, (0, shapes)))

  def over(function, params, shape, *trees):
    def apply(path, param, *arrays):
      of_each, own = function, 2 if path[-1].key in MATRICES else 1
      for _ in range(param.ndim - own):
        of_each = jax.vmap(of_each)
      return of_each(param, *arrays)

    found = jax.tree_util.tree_map_with_path(apply, params, *trees)
    return jax.tree.transpose(jax.tree.structure(params), shape, found)

  def update(updates, state, params):
    states = jax.tree.transpose(inner_state, jax.tree.structure(params), state)
    step = lambda param, update, state: inner.update(update, state, param)
    return over(step, params, both, updates, states)

  init = lambda params: over(inner.init, params, inner_state)
  return optax.GradientTransformation(init, update)


def adafactor(
  schedule: optax.Schedule, *, b1: float, mu_dtype: str, weight_decay: float
) -> optax.GradientTransformation:
  """Makes Adafactor with momentum, at the learning rates of AdamW.

  The second moment of a matrix is factored into its means over rows and over
  columns, so that only one full moment is stored instead of two. As in the
  paper, its decay rate is 1 - t^-0.8, and the root mean square of the update of
  a matrix is at most the learning rate; updates are not scaled by parameter
  size. Every layer and every expert has its own matrices.

  Args:
    schedule: learning rate of an update.
    b1: decay rate of the mean of updates.
    mu_dtype: dtype of that mean.
    weight_decay: as in AdamW.

  Reference: Shazeer & Stern 2018, arXiv 1804.04235.
  """
  return optax.chain(
    _each(
      optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    ),
    optax.ema(b1, accumulator_dtype=jnp.dtype(mu_dtype)),
    optax.add_decayed_weights(weight_decay, matrices),
    optax.scale_by_learning_rate(schedule),
  )


# Name -> (schedule, settings of `UpdateSettings` by name) -> optimizer. Weight
# decay applies to matrices only.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "adamw": functools.partial(optax.adamw, mask=matrices),
  "adafactor": adafactor,
}


def make_optimizer(
  schedule: optax.Schedule,
  *,
  max_grad_norm: float,
  name: str = "adamw",
  **settings: Any,
) -> optax.GradientTransformation:
  """Makes an optimizer with clipping of the global gradient norm.

  Args:
    schedule: learning rate of an update.
    max_grad_norm: maximum global norm; larger gradients are scaled down.
    name: name in `OPTIMIZERS`.
    **settings: fields of `UpdateSettings`; the optimizer receives the fields
      that it has as arguments.
  """
  make = OPTIMIZERS[name]
  _, *named = inspect.signature(make).parameters  # The first is the schedule.
  chosen = {key: settings[key] for key in named if key in settings}
  return optax.chain(
    optax.clip_by_global_norm(max_grad_norm), make(schedule, **chosen)
  )


def independent(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer of several models by name, each with its own state.

  Its update takes the tokens that each model was trained on, `of_each`, in the
  order of their names. A model without any does not move and keeps its state.
  """

  def init(params):
    return {name: optimizer.init(x) for name, x in params.items()}

  def update(updates, state, params, *, of_each):
    found = {}
    for name, tokens in zip(sorted(updates), of_each, strict=True):
      new = optimizer.update(updates[name], state[name], params[name])
      old = jax.tree.map(jnp.zeros_like, updates[name]), state[name]
      keep = functools.partial(jnp.where, tokens > 0)
      found[name] = jax.tree.map(keep, new, old)
    return tuple({k: x[i] for k, x in found.items()} for i in (0, 1))

  return optax.GradientTransformationExtraArgs(init, update)


def create_train_state(
  trained: Any, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns a state at step 0."""
  zero = lambda: jnp.zeros((), jnp.int32)
  counters = zero(), zero(), zero()
  return TrainState(
    trained=trained,
    optimizer=OptimizerState(optimizer.init(trained), *counters),
  )


def at_schedule_step(state: TrainState, step: chex.Array) -> TrainState:
  """Sets the step of a state's learning-rate schedule, an int32 scalar."""
  is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
  move = lambda x: x._replace(count=step) if is_schedule(x) else x
  opt_state = state.optimizer.opt_state
  opt_state = jax.tree.map(move, opt_state, is_leaf=is_schedule)
  return state.replace(optimizer=state.optimizer._replace(opt_state=opt_state))


def apply_gradients(
  state: TrainState,
  gradients: Any,
  optimizer: optax.GradientTransformation,
  *,
  finite: chex.Array,
  scale: chex.Array | None = None,
  of_each: chex.Array | None = None,
) -> TrainState:
  """Applies one optimizer update, or returns the same state if not `finite`.

  Args:
    state: state before the update.
    gradients: tree like the trained parameters.
    optimizer: optimizer of the state.
    finite: bool scalar.
    scale: factor of the update on top of the learning rate; None is 1.
    of_each: argument of an `independent` optimizer.
  """
  before = state.optimizer
  trained = state.trained
  more = {} if of_each is None else {"of_each": of_each}
  updates, opt_state = optimizer.update(
    gradients, before.opt_state, trained, **more
  )
  if scale is not None:
    updates = jax.tree.map(lambda x: scale * x, updates)
  moved = optax.apply_updates(trained, updates)
  keep = lambda new, old: jnp.where(finite, new, old)
  return TrainState(
    trained=jax.tree.map(keep, moved, trained),
    optimizer=OptimizerState(
      opt_state=jax.tree.map(keep, opt_state, before.opt_state),
      step=before.step + finite,
      skipped=before.skipped + ~finite,
      skipped_in_a_row=jnp.where(finite, 0, before.skipped_in_a_row + 1),
    ),
  )
