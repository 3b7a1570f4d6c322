"""Members of a learner, companions that follow the policy, and frozen models.

Members are trained models. A learner holds them by name; only the policy has a
special role. Models that only score are frozen.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import masked, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import optimizer as optimizer_lib
from jaxrl_llm.learner import scoring, update
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.optimizer import TrainState, UpdateSettings
from jaxrl_llm.learner.packing import MiniBatch, PackedBatch
from jaxrl_llm.learner.parts import Auxiliary, Part
from jaxrl_llm.models import ModelFns, Params, ValueFns, partition
from jaxrl_llm.types import Experience


class Training(NamedTuple):
  """Description of how a member is trained on a batch.

  Attributes:
    objective: loss of the member.
    score: (params, PackedRows) -> arrays [M, r, C]; see `scoring`.
    reads: names of the inputs [B, T] or [B] of the loss, which it reads at
      every token; it also reads `weights`.
    mask: name of the bool input [B, T] that selects the tokens to train on.
    mode: reduction of the loss over them, see `masked.token_weights`.
    norm: constant length of the mode; None for modes without one.
    auxiliary: additional losses by name, see `update.policy_objective`.
    correction: factor of the weights, see `Algorithm.correction`.
    step_scale: factor of an update, see `Algorithm`.
    reads_policy: whether `params.base` of loss and score are the policy's
      parameters, as for a probe.
    waits: whether to train only on ended responses, in full mini-batches; the
      remaining responses of a batch wait for the next one.
  """

  objective: update.Objective
  score: Callable[..., Any]
  reads: Collection[str]
  mask: str
  mode: str
  norm: float | None = None
  auxiliary: Mapping[str, Auxiliary] = {}
  correction: Part | None = None
  step_scale: Part | None = None
  reads_policy: bool = False
  waits: bool = False

  def prepare(
    self, inputs: Experience, batch: MiniBatch, size: float | None = None
  ) -> PackedBatch:
    """Packs the inputs of a mini-batch's rows, with weights over these rows.

    The reduction over the mini-batch (VAPO eq. 7-8: its token mean) and that of
    every auxiliary loss (eq. 9-10: over its correct responses) are fixed before
    any micro-batching. An off-policy correction multiplies the weights; the
    denominator still counts all tokens. The model's own losses are means over
    all tokens of the samples, whatever the other losses count; those of parts
    of a mini-batch are weighted by what the main loss is a mean over.

    Args:
      inputs: the algorithm's `experience` for the b rows.
      batch: the rows and their layout.
      size: as in `masked.token_weights`, if the rows are a part of a
        mini-batch.
    """
    # On the host: work on the device would queue behind the previous update.
    weigh = functools.partial(masked.token_weights, size=size, xp=np)
    mask = read = inputs[self.mask]
    weights = weigh(mask, mode=self.mode, norm=self.norm)
    if self.correction is not None:
      weights = weights * self.correction(inputs).weights
    columns = {name: inputs[name] for name in self.reads}
    for name, term in self.auxiliary.items():
      columns[f"{name}/weights"] = weigh(
        inputs[term.mask], mode=term.mode, norm=term.norm
      )
      # Auxiliary losses may read tokens of earlier windows.
      read = read | inputs[term.mask]
    columns["weights"] = weights
    packed, own = batch.packed, np.float32(batch.share)
    if size is not None and self.mode not in masked.SUM_MODES:
      own = masked.reduction_size(mask, mode=self.mode, xp=np)
    scale = None
    if self.step_scale is not None:
      scale = np.float32(self.step_scale(inputs))
    scatter = batch.layout.scatter
    return PackedBatch(
      packed=packed.replace(mask=scatter(read)),
      mask=scatter(mask),
      inputs={name: scatter(x) for name, x in columns.items()},
      step_scale=scale,
      own_weight=own / np.float32(packed.samples.sum()),
    )


@dataclasses.dataclass(frozen=True)
class Member:
  """A trained model with its functions, update and shardings."""

  # With `init`, (key) -> params, and `shares_prompts`, see `packing.pack`.
  fns: Any
  training: Training
  # (trained parameters, donated) -> state at step 0, jitted.
  create_state: Callable[[Any], TrainState]
  # (params, PackedRows) -> arrays [M, r, C], jitted.
  score: Callable[..., Any]
  update: update.Update
  shapes: TrainState  # ShapeDtypeStructs with shardings.
  base: Any  # ShapeDtypeStructs of the parameters that are not trained.
  settings: UpdateSettings
  shares_base: bool = False  # Whether `base` is shared with the policy.

  @property
  def params(self) -> Params:
    """ShapeDtypeStructs with shardings of all parameters."""
    return Params(self.base, self.shapes.trained)

  @property
  def phase(self) -> str:
    """Name of the phase that times the member's updates."""
    return f"update_{self.training.objective.name}"

  def split(self, params: Any) -> Params:
    """Splits a nested dict of all parameters into trained and frozen ones."""
    return partition(params, self.settings.frozen)


class Companion(NamedTuple):
  """Weights that follow the policy's, such as a moving average.

  Functions that are None are not called.
  """

  shapes: Any  # ShapeDtypeStructs with shardings.
  init: Callable[[Any], Any]  # (trained) -> tree.
  # (tree, donated, trained, version) -> tree, after a batch was scored.
  record: Callable[[Any, Any, int], Any] | None = None
  # (tree, donated, trained, whether the update was skipped) -> tree, after an
  # update.
  follow: Callable[[Any, Any, Any], Any] | None = None
  # (tree, version) -> trained parameters.
  read: Callable[[Any, int], Any] | None = None
  # Input of the policy's mini-batches that `tree["params"]` scores before each
  # update.
  scores: str | None = None


class Frozen(NamedTuple):
  """A model that only scores, such as a teacher; checkpoints leave it out."""

  shapes: Any  # ShapeDtypeStructs with shardings of all parameters.
  load: Callable[[], Any]  # () -> params.
  # (params, PackedRows) -> arrays [M, r, C], jitted.
  score: Callable[..., Any]
  shares_prompts: bool  # See `packing.pack`.


def make_frozen(
  fns: ModelFns, read: Callable[[Any], Any], mesh: jax.sharding.Mesh
) -> Frozen:
  """Makes a language model that scores the policy's tokens.

  Args:
    fns: functions of the model.
    read: (ShapeDtypeStructs with shardings) -> params.
    mesh: mesh of the model; `sharding.PARAMETERS` shards its parameters.
  """
  shapes = make_shapes(fns, mesh)
  score = functools.partial(scoring.score_logprobs, fns=fns)
  score = jax.jit(score, out_shardings=sharding.replicated(mesh))
  read = functools.partial(read, shapes)
  return Frozen(shapes, read, score, fns.shares_prompts)


def make_shapes(fns: ModelFns, mesh: jax.sharding.Mesh) -> Any:
  """Returns ShapeDtypeStructs with shardings of all parameters of a model."""
  whole = jax.eval_shape(fns.init, jax.random.key(0))
  return _on_mesh(whole, mesh).eval_shape(whole)


def _on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  places = sharding.tree_shardings(tree, mesh)
  return jax.jit(lambda x: x, out_shardings=places)


def policy_training(fns: ModelFns, algorithm: Algorithm) -> Training:
  """Returns the training of the policy with the algorithm's losses."""
  auxiliary = algorithm.auxiliary
  return Training(
    update.policy_objective(fns, algorithm.policy_loss, auxiliary),
    functools.partial(scoring.score_logprobs, fns=fns),
    reads=algorithm.policy_inputs,
    mask="policy_mask",
    mode=algorithm.mode,
    norm=algorithm.norm,
    auxiliary=auxiliary,
    correction=algorithm.correction,
    step_scale=algorithm.step_scale,
  )


def critic_training(fns: ValueFns, algorithm: Algorithm) -> Training:
  """Returns the training of the critic, whose loss is a token mean."""
  return Training(
    update.value_objective(fns, algorithm.value_loss),
    functools.partial(scoring.score_values, fns=fns),
    reads=algorithm.value_inputs,
    mask="value_mask",
    mode="token-mean",
    waits=True,
  )


def make_member(
  fns: Any,
  training: Training,
  settings: UpdateSettings,
  mesh: jax.sharding.Mesh,
) -> Member:
  """Makes a member on a mesh.

  Args:
    fns: functions of the model, as in `Member`.
    training: training of the model.
    settings: update settings.
    mesh: mesh of the model; `sharding.PARAMETERS` shards its parameters.
  """
  schedule = optimizer_lib.make_schedule(settings)
  optimizer = optimizer_lib.make_optimizer(
    schedule, **dataclasses.asdict(settings)
  )
  if getattr(fns, "owner", ""):
    optimizer = optimizer_lib.independent(optimizer)
  whole = jax.eval_shape(fns.init, jax.random.key(0))
  _check_frozen(whole, settings.frozen)
  base, trained = partition(whole, settings.frozen)
  create = functools.partial(
    optimizer_lib.create_train_state, optimizer=optimizer
  )
  shardings = sharding.tree_shardings(jax.eval_shape(create, trained), mesh)
  create = jax.jit(create, out_shardings=shardings, donate_argnums=0)
  everywhere = sharding.replicated(mesh)
  return Member(
    fns=fns,
    training=training,
    create_state=create,
    score=jax.jit(training.score, out_shardings=everywhere),
    update=update.make_update(
      training.objective,
      optimizer,
      schedule,
      out_shardings=(shardings, everywhere),
    ),
    shapes=create.eval_shape(trained),
    base=_on_mesh(base, mesh).eval_shape(base),
    settings=settings,
  )


def _check_frozen(params: Any, frozen: tuple[str, ...]) -> None:
  for part in frozen:
    base, trained = partition(params, (part,))
    if not (base and trained):
      which = "every parameter" if base else "no parameter"
      raise InputError(
        f"config.optimizer: frozen={part!r} matches {which}; choose from"
        f" {', '.join(sorted(params))}, or parts of paths such as 'layers/mlp'"
      )
