"""The jitted updates: gradients over micro-batches, then one optimizer step.

Per-token losses are reduced to `sum(weights * loss)`, with weights computed
once over the whole mini-batch. Micro-batches and devices only add their sums,
so how the mini-batch is split does not change the result. Losses of the model
itself have weights of their own, and the load of experts that they balance is
counted over the mini-batch before the first gradient.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimizer import (
  TrainState,
  apply_gradients,
  at_schedule_step,
)
from jaxrl_llm.learner.packing import PackedBatch
from jaxrl_llm.learner.parts import Auxiliary, Part
from jaxrl_llm.models import ModelFns, Params, ValueFns

_NO_BASE: dict[str, Any] = {}  # Everything is trained.
Metrics = dict[str, jax.Array]


class Sums(NamedTuple):
  """Sums over a micro-batch or several; losses are weighted over the batch."""

  losses: Metrics  # Logged as they are.
  per_token: Metrics  # Divided by `tokens` when they are logged.
  maxima: Metrics
  tokens: jax.Array
  of_each: jax.Array | None = None  # Tokens of each of several critics.
  gradients: Any = None
  squares: Any = None  # Σ |g_i|² / t_i over the micro-batches, see `_noise`.
  micro_batches: Any = None  # Those with tokens.


class Objective(NamedTuple):
  """The loss of an update."""

  name: str  # Prefix of metrics, NAME/...
  # (params, micro-batch) -> (loss, sums without gradients).
  loss: Callable[..., tuple[jax.Array, Sums]]
  # Model whose `load`, summed over the mini-batch, is the loss's micro["load"].
  fns: ModelFns | ValueFns | None = None


def policy_objective(
  fns: ModelFns, policy_loss: Part, auxiliary: Mapping[str, Auxiliary]
) -> Objective:
  """Makes the objective Σ w · L_policy + Σ auxiliary losses of a policy.

  Args:
    fns: functions of the policy.
    policy_loss: as in `Algorithm`; its weights are the input `weights`.
    auxiliary: as in `Algorithm`; the weights of loss NAME are the input
      `NAME/weights`, and it is logged as `policy/NAME_loss`.
  """

  def loss(params, micro):
    packed, mask = micro["packed"], micro["mask"]
    out, of_model = fns.logprobs(params, packed, micro["load"])
    inputs = micro["inputs"] | {
      "logprobs": out.logprobs,
      "entropy": out.entropy,
      "mask": mask,
      "segments": packed.segments,
    }
    clipped = policy_loss(inputs)
    found = getattr(clipped, "loss", None)
    per_token = _check_shape("policy loss", found, mask)
    loss = surrogate = jnp.sum(inputs["weights"] * per_token)
    total = lambda x: jnp.sum(jnp.where(mask, x, 0.0))
    means = {
      "policy/entropy": total(out.entropy),
      "policy/clip_fraction_high": total(clipped.clipped_high),
      "policy/clip_fraction_low": total(clipped.clipped_low),
    }
    if "proximal_logprobs" in inputs:
      kl = losses.kl_k3(inputs["proximal_logprobs"], out.logprobs)
      means["policy/approx_kl"] = total(kl)
    sums = {"policy/loss": surrogate}
    for name, term in auxiliary.items():
      weights = term.coefficient * inputs[f"{name}/weights"]
      what = f"auxiliary loss {name!r}"
      per_token = _check_shape(what, term.loss(inputs), mask)
      sums[f"policy/{name}_loss"] = jnp.sum(weights * per_token)
      loss += sums[f"policy/{name}_loss"]
    loss += _add_of_model((sums, means), "policy", of_model, micro, mask)
    maxima = {"policy/ratio_max": jnp.max(jnp.where(mask, clipped.ratio, 0.0))}
    return loss, Sums(sums, means, maxima, total(1.0))

  return Objective("policy", loss, fns)


def _check_shape(what: str, loss: Any, mask: jax.Array) -> jax.Array:
  """Refuses a user's loss that is not per token: weights would scale it."""
  if (shape := getattr(loss, "shape", None)) != mask.shape:
    missing = loss is None
    wrong = "no field `loss`" if missing else f"shape {shape}, not {mask.shape}"
    raise InputError(
      f"{what}: the result has {wrong}; return a value for every"
      " token, and a policy loss as `loss` of a losses.ClippedPolicyLoss"
    )
  return loss


def _add_of_model(logs, name: str, of_model: Metrics, micro, mask):
  """Returns the sum of a model's own losses; logs them and its metrics."""
  sums, means = logs
  total = 0
  weights = micro["own_weight"] * micro["packed"].samples
  for key, x in of_model.items():
    if key.startswith("metrics/"):
      key = key.removeprefix("metrics/")
      means[f"{name}/{key}"] = jnp.sum(jnp.where(mask, x, 0.0))
    else:
      sums[f"{name}/{key}_loss"] = jnp.sum(weights * x)
      total += sums[f"{name}/{key}_loss"]
  return total


def value_objective(fns: ValueFns, value_loss: Part) -> Objective:
  """Makes the objective Σ w · L_value of a critic; see `Algorithm`."""

  def loss(params, micro):
    packed, inputs = micro["packed"], micro["inputs"]
    outputs, of_model = fns.outputs(params, packed, micro["load"])
    terms = value_loss(inputs | outputs)
    total = jnp.sum(inputs["weights"] * terms.loss)
    tokens = jnp.sum(packed.mask, dtype=jnp.float32)
    sums, means, of_each = {"value/loss": total}, {}, None
    if fns.owner:
      trained = jnp.where(inputs["weights"] > 0, inputs[fns.owner], -1)
      count = lambda i: jnp.sum(trained == i, dtype=jnp.float32)
      of_each = jnp.stack([*map(count, range(fns.count))])
    logs = sums, means
    total += _add_of_model(logs, "value", of_model, micro, packed.mask)
    return total, Sums(sums, means, {}, tokens, of_each)

  return Objective("value", loss, fns)


class Update(NamedTuple):
  """Jitted update of a model, in one program or in parts.

  `whole` and `apply` donate the state, and `add` donates the sums.
  """

  # (state, PackedBatch, base={}) -> (state, metrics).
  whole: Callable[..., tuple[TrainState, Metrics]]
  # (trained, PackedBatch, base={}) -> zero sums.
  begin: Callable[..., Sums]
  # (sums, trained, PackedBatch, base={}) -> sums.
  add: Callable[..., Sums]
  # (state, sums, size of the batch, schedule step) -> (state, metrics).
  apply: Callable[..., tuple[TrainState, Metrics]]

  def accumulate(
    self, sums: Sums | None, trained: Any, batch: PackedBatch, base: Any
  ) -> Sums:
    """Adds a part, weighted with size 1, to `sums`; None starts from zeros."""
    if sums is None:
      sums = self.begin(trained, batch, base=base)
    return self.add(sums, trained, batch, base=base)


def make_update(
  objective: Objective,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  *,
  out_shardings: Any = None,
) -> Update:
  """Makes the update that minimises an objective.

  Args:
    objective: loss to minimise.
    optimizer: gradient transformation of the state.
    schedule: learning rate of an update, for its metric.
    out_shardings: shardings of the state and of the metrics.
  """
  finish = functools.partial(_apply, objective.name, optimizer, schedule)
  gradient, load = _gradient_of(objective), _load_of(objective)

  def begin(trained, batch: PackedBatch, base=_NO_BASE):
    loads = jax.eval_shape(load, trained, batch, base)
    first = batch.micro_batch(0)
    shapes = jax.eval_shape(gradient, trained, first, loads, base)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    gradients, sums = zeros
    zero = jnp.float32(0.0)
    return sums._replace(gradients=gradients, squares=zero, micro_batches=zero)

  def add(sums, trained, batch: PackedBatch, base=_NO_BASE):
    given = load(trained, batch, base), base
    return _accumulate(gradient, trained, sums, batch, *given)

  def apply(state: TrainState, sums: Sums, size, step):
    over = functools.partial(jax.tree.map, lambda x: x / size)
    sums = sums._replace(
      gradients=over(sums.gradients),
      losses=over(sums.losses),
      squares=sums.squares / size**2,
    )
    return finish(state, sums, step)

  def whole(state: TrainState, batch: PackedBatch, base=_NO_BASE):
    sums = begin(state.trained, batch, base)
    sums = add(sums, state.trained, batch, base)
    return finish(state, sums, batch.schedule_step, scale=batch.step_scale)

  of_sums = None
  if out_shardings is not None:
    of_state, of_metrics = out_shardings
    of_sums = Sums(*[of_metrics] * len(Sums._fields))
    of_sums = of_sums._replace(gradients=of_state.trained)
  # A run shows these names when it compiles the programs.
  whole.__name__ = f"update_{objective.name}"
  for part in (begin, add, apply):
    part.__name__ = f"update_{objective.name}_{part.__name__}"
  return Update(
    whole=jax.jit(whole, donate_argnums=0, out_shardings=out_shardings),
    begin=jax.jit(begin, out_shardings=of_sums),
    add=jax.jit(add, donate_argnums=0, out_shardings=of_sums),
    apply=jax.jit(apply, donate_argnums=0, out_shardings=out_shardings),
  )


def _gradient_of(objective: Objective) -> Callable[..., tuple[Any, Sums]]:
  """Returns (trained, micro-batch, load, base) -> gradients and other sums.

  The function is traced once, for its shapes and the loop over micro-batches.
  """

  @functools.partial(jax.jit, inline=True)
  @functools.partial(jax.grad, has_aux=True)
  def gradient(trained, micro, load, base):
    return objective.loss(Params(base, trained), micro | {"load": load})

  return gradient


def _load_of(objective: Objective):
  """Returns (trained, batch, base) -> load of experts over the micro-batches.

  The forward pass that counts it is about a fifth of the work of an update.
  """

  def load(trained, batch: PackedBatch, base):
    if objective.fns is None or objective.fns.load is None:
      return None
    of_rows = jax.jit(objective.fns.load, inline=True)  # Traced once.
    of = lambda i: of_rows(Params(base, trained), batch.packed.rows(i))
    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(of, 0))
    add = lambda i, sums: jax.tree.map(jnp.add, sums, of(i))
    return jax.lax.fori_loop(0, batch.packed.count, add, zero)

  return load


def _noise(norm, tokens, squares, micro_batches) -> Metrics:
  """Estimates the variance of a gradient and the square of its mean.

  M micro-batches with t_i > 0 of T tokens have gradients g_i, which sum to g:

    noise = (T Σ |g_i|² / t_i - |g|²) / (M - 1),   signal = |g|² - noise

  noise / signal, times the mini-batch size, is the gradient noise scale; at a
  ratio of 1, the mini-batch has the critical size. With one micro-batch both
  are 0.

  Reference: McCandlish et al. 2018, arXiv:1812.06162, appendix A.
  """
  several, square = micro_batches > 1, jnp.square(norm)
  noise = (tokens * squares - square) / jnp.maximum(micro_batches - 1, 1)
  return {
    "gradient_noise": jnp.where(several, noise, 0.0),
    "gradient_signal": jnp.where(several, square - noise, 0.0),
  }


def _apply(name, optimizer, schedule, state, sums: Sums, step, *, scale=None):
  """Applies one optimizer step with the sums over a batch; returns metrics."""
  norm = optax.global_norm(sums.gradients)
  finite = jnp.isfinite(norm) & jnp.isfinite(sums.losses[f"{name}/loss"])
  tokens = jnp.maximum(sums.tokens, 1.0)
  noise = _noise(norm, tokens, sums.squares, sums.micro_batches)
  metrics = {
    **sums.losses,
    **{key: value / tokens for key, value in sums.per_token.items()},
    **sums.maxima,
    f"{name}/grad_norm": norm,
    f"{name}/lr": schedule(step),
    f"{name}/skipped": 1.0 - finite,
    **{f"{name}/{key}": value for key, value in noise.items()},
  }
  if scale is not None:
    metrics[f"{name}/step_scale"] = scale
  state = apply_gradients(
    at_schedule_step(state, step),
    sums.gradients,
    optimizer,
    finite=finite,
    scale=scale,
    of_each=sums.of_each,
  )
  return state, metrics


def _accumulate(gradient, params, sums: Sums, batch: PackedBatch, *given):
  """Adds gradients and metrics of the nonempty micro-batches to `sums`."""

  def body(i, before: Sums) -> Sums:
    gradients, new = gradient(params, batch.micro_batch(i), *given)
    # Compilers then add the gradients in place, and take the norm in the same
    # pass.
    gradients = jax.lax.optimization_barrier(gradients)
    square = jnp.square(optax.global_norm(gradients))
    new = new._replace(
      gradients=gradients,
      squares=square / jnp.maximum(new.tokens, 1.0),
      micro_batches=jnp.float32(new.tokens > 0),
    )
    maxima = jax.tree.map(jnp.maximum, before.maxima, new.maxima)
    return jax.tree.map(jnp.add, before, new)._replace(maxima=maxima)

  return jax.lax.fori_loop(0, batch.packed.count, body, sums)
