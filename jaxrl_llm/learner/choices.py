"""The choices that a config names: from a name to a part.

Every table goes from name to a maker (config group -> part) or to a function
whose settings are bound elsewhere; it is the only place that knows the choice.
Tables of type `Table` also have the choices of the files in `methods/`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm import estimators, losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import estimates
from jaxrl_llm.learner.parts import Part, part, then
from jaxrl_llm.models import ValueFns
from jaxrl_llm.system.plugin import Table

Settings = Mapping[str, Any]  # A config group, such as `loss`.
Groups = Mapping[str, Settings]  # A config, or a plain dict of its groups.


class ReadSettings(dict[str, Any]):
  """A config group with the settings of one's own, which notes what is read."""

  def __init__(self, group: str, settings: Settings):
    self.group, self.own = group, settings.get("settings", {})
    self.read: set[str] = set()
    for name in {*self.own} & {*settings}:
      raise InputError(
        f"config.{group}.settings: {name!r} is a setting of its own; set"
        f" config.{group}.{name}"
      )
    super().__init__({**settings, **self.own})

  def __getitem__(self, name: str) -> Any:
    self.read.add(name)
    return super().__getitem__(name)

  def check_read(self) -> None:
    """Refuses settings of one's own that no part has read."""
    for name in sorted({*self.own} - self.read):
      raise InputError(
        f"config.{self.group}.settings: no chosen part has a setting {name!r};"
        " a part reads the names of its keyword-only arguments"
      )


class OwnMember(NamedTuple):
  """A model beside policy and critic, and the inputs that it learns from."""

  make: Callable[..., Any]  # (policy, algorithm, mesh) -> `members.Member`.
  reads: tuple[str, ...]


class AuxiliaryLoss(NamedTuple):
  """A loss beside the surrogate; see `parts.Auxiliary`."""

  make: Callable[[Settings], Part]  # (config group loss) -> its part.
  mask: str
  mode: str


def maker_of(
  fn: Callable[..., Any], **inputs: str
) -> Callable[[Settings], Part]:
  """(settings) -> the part of a function; see `parts.part`."""
  return functools.partial(part, fn, **inputs)


# Name -> (config group estimator) -> advantages [B, T].
ESTIMATORS = Table(
  "estimator",
  # GAE with a λ of each response's own; EGAE where one is unfinished.
  gae=maker_of(
    estimators.egae, lambda_="policy_lambda", next_values="next_values"
  ),
  group=maker_of(estimates.group_advantages),
)


def after(
  name: str, fn: Callable[..., jax.Array]
) -> Callable[[Settings], Part]:
  """Makes an estimator that changes the advantages of another one.

  Args:
    name: name of the other one.
    fn: (advantages, further inputs) -> advantages.
  """
  return lambda settings: then(ESTIMATORS[name](settings), part(fn, settings))


# Estimator -> (inputs) -> tokens of the critic [B, T], where they are not all
# tokens of ended responses.
VALUE_MASKS = Table("value_mask")

# Name -> (config group estimator) -> λ of each response [B] or token [B, T].
LAMBDA_RULES = Table(
  "lambda_rule",
  constant=maker_of(estimates.policy_lambda),
  length_adaptive=maker_of(
    estimators.length_adaptive_lambda, lengths="own_lengths"
  ),
)

# Name -> where the rewards of an environment lie, [B, T].
TOKEN_REWARDS: Mapping[str, Callable[..., jax.Array]] = {
  "end": estimates.token_rewards,
  "turns": estimates.turn_rewards_on_tokens,
}

# Name -> (advantages, policy_mask) -> advantages; None leaves them.
NORMALIZATIONS: Mapping[str, Callable[..., jax.Array] | None] = {
  "none": None,
  "whiten": estimators.whiten,
  "scale": functools.partial(estimators.whiten, center=False),
}

# Masks of the policy loss by the setting that enables them: (mask, inputs) ->
# mask.
MASKS = Table(
  "mask",
  overlong_filter=estimates.without_overlong,
  tail_drop=estimates.without_tail,
)

# Likewise of one's own: name -> (mask, inputs) -> mask.
OWN_MASKS: dict[str, Callable[..., jax.Array]] = {}


# Name -> (config group loss) -> `losses.ClippedPolicyLoss`.
POLICY_LOSSES = Table(
  "loss",
  clip=maker_of(losses.clipped_policy_loss, old_logprobs="proximal_logprobs"),
)

# Proximal policy that brings a loss of its own, which corrects by itself ->
# (config group loss, `cap` and `floor` of the weight) -> likewise.
PROXIMAL_LOSSES = Table("proximal")

# Setting that switches it on -> (config group off_policy) -> factor of a
# mini-batch's update.
STEP_SCALES = Table("step_scale")

# Name -> (policy, mesh, config group off_policy and `versions`) ->
# `members.Companion`. A run has those that a provider of its inputs needs.
COMPANIONS = Table("companion")

# Name -> (config group estimator and its own settings) -> directories of models
# that only score, by name. A run has those that a provider of its inputs needs.
FROZEN = Table("frozen")

# Models other than policy and critic: name -> `OwnMember`.
MEMBERS: dict[str, OwnMember] = {}

# Name, which may be the setting that switches it on -> (config group sampler)
# -> `ProcessorSpec`.
LOGITS_PROCESSORS = Table("logits_processor")

# Name in `loss.auxiliary` -> a further loss of the policy.
AUXILIARY: dict[str, AuxiliaryLoss] = {}

# Name -> (config group schedule) -> `types.Pruning`, or None.
PRUNINGS = Table("pruning", **{"": lambda schedule: None})

# Name -> search of an evaluation by a critic; see `methods.search.search`.
SEARCHES = Table("search")

# Name -> (logprobs, ref_logprobs, other inputs of the update) -> KL per token.
KL_ESTIMATES = Table(
  "kl",
  k1=losses.kl_k1,
  k2=losses.kl_k2,
  k3=losses.kl_k3,
  **{"k1+": losses.kl_k1_plus, "k3+": losses.kl_k3_plus},
)

CORRECTIONS: Mapping[str, Callable[..., losses.Correction] | None] = {
  "none": None,
  "truncate": losses.truncated_importance,
  "mask": losses.masked_importance,
}


def logits_processors(sampler: Settings) -> dict[str, Any]:
  """Returns the logits processors that config group `sampler` selects."""
  chosen = [
    name
    for name in LOGITS_PROCESSORS
    if name in sampler["processors"] or sampler.get(name)
  ]
  return {name: LOGITS_PROCESSORS[name](sampler) for name in chosen}


def made(
  table: Table, group: str, settings: Settings
) -> tuple[Part, frozenset[str]]:
  """Makes the part that a config group names.

  Args:
    table: `ESTIMATORS` or `POLICY_LOSSES`.
    group: name of the group, 'estimator' or 'loss'.
    settings: the group.

  Returns:
    The part, and the names of the settings that it reads.
  """
  noted = ReadSettings(group, settings)
  return table[settings["name"]](noted), frozenset(noted.read)


def has_critic(config: Groups) -> bool:
  """Returns whether the estimator reads values, which requires a critic."""
  estimator, _ = made(ESTIMATORS, "estimator", config["estimator"])
  return "values" in estimator.reads


def correction_of(config: Groups) -> tuple[str, float]:
  """Returns the off-policy correction of a config, and its upper bound."""
  settings, schedule = config["off_policy"], config["schedule"]
  averaged = settings["proximal"] == "ewma"
  # Responses go on in later steps, or are trained then.
  stale = schedule["stop"] != "all" or schedule["lag"] > 0
  stale |= schedule["replay"] > 0
  name = settings["correction"]
  if name == "auto":
    # With the sampler's log-probs as proximal ones the ratio corrects already.
    corrects = averaged or (stale and settings["proximal"] != "stored")
    name = "truncate" if corrects else "none"
  if settings["high"] is not None:
    return name, settings["high"]
  return name, 100.0 if averaged else 2.0


def _squared_error(config: Groups) -> Part:
  """Returns the squared error of values, clipped if the config says so."""
  loss = config["loss"]
  clips = {} if loss["clip_value"] is None else {"old_values": "old_values"}
  return part(losses.clipped_value_loss, loss, **clips)


# Head of the critic -> (config) -> `losses.ClippedValueLoss`.
VALUE_LOSSES = Table("value_loss", scalar=_squared_error)


class Ensemble(NamedTuple):
  """A critic of several models."""

  fns: Callable[[ValueFns], ValueFns]  # (one critic) -> all of them.
  loss: Callable[[Part], Part]  # (`Algorithm.value_loss` of one) -> of all.


# Name -> `Ensemble`.
ENSEMBLES = Table("ensemble")

# Setting that switches it on -> (config group value) -> view of the critic:
# (row of the data -> its answer, tokenizer, samples) -> what it reads of them.
VIEWS = Table("view")

# Whom the policy loss takes its ratio against: the input it begins with; ''
# takes none.
PROXIMALS: Mapping[str, str] = {
  "recompute": "old_logprobs",
  "stored": "behavior_logprobs",
  "interpolate": "behavior_logprobs",
  "ewma": "average_logprobs",
  "none": "",
}
