"""Tables from the names in a config to parts of an algorithm.

A table maps a name to a maker (config group -> part) or to a function whose
settings are bound elsewhere; no other code depends on the choice. Tables of
type `Table` also contain the entries that files in `methods/` register.
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
  """A config group merged with its custom settings; records what is read."""

  def __init__(self, group: str, settings: Settings):
    self.group, self.own = group, settings.get("settings", {})
    self.read: set[str] = set()
    for name in {*self.own} & {*settings}:
      raise InputError(
        f"config.{group}.settings: {name!r} is not a custom setting; set"
        f" config.{group}.{name}"
      )
    super().__init__({**settings, **self.own})

  def __getitem__(self, name: str) -> Any:
    self.read.add(name)
    return super().__getitem__(name)

  def check_read(self) -> None:
    """Raises InputError if no part has read one of the custom settings."""
    for name in sorted({*self.own} - self.read):
      raise InputError(
        f"config.{self.group}.settings: no chosen part has a setting {name!r};"
        " a part reads the names of its keyword-only arguments"
      )


class OwnMember(NamedTuple):
  """A model other than policy and critic, and the inputs it is trained on."""

  make: Callable[..., Any]  # (policy, algorithm, mesh) -> `members.Member`.
  reads: tuple[str, ...]


class AuxiliaryLoss(NamedTuple):
  """A loss in addition to the policy loss; see `parts.Auxiliary`."""

  make: Callable[[Settings], Part]  # (config group loss) -> loss.
  mask: str
  mode: str


def maker_of(
  fn: Callable[..., Any], **inputs: str
) -> Callable[[Settings], Part]:
  """Returns (settings) -> the part made from a function; see `parts.part`."""
  return functools.partial(part, fn, **inputs)


# Name -> (config group estimator) -> advantages [B, T].
ESTIMATORS = Table(
  "estimator",
  # GAE with a λ per response; EGAE for unfinished responses.
  gae=maker_of(
    estimators.egae, lambda_="policy_lambda", next_values="next_values"
  ),
  group=maker_of(estimates.group_advantages),
)


def after(
  name: str, fn: Callable[..., jax.Array]
) -> Callable[[Settings], Part]:
  """Makes an estimator that modifies the advantages of another estimator.

  Args:
    name: name of the other estimator.
    fn: (advantages, further inputs) -> advantages.
  """
  return lambda settings: then(ESTIMATORS[name](settings), part(fn, settings))


# Estimator -> (inputs) -> bool [B, T], tokens that the critic trains on;
# estimators without an entry use all tokens of ended responses.
VALUE_MASKS = Table("value_mask")

# Name -> (config group estimator) -> λ per response [B] or per token [B, T].
LAMBDA_RULES = Table(
  "lambda_rule",
  constant=maker_of(estimates.policy_lambda),
  length_adaptive=maker_of(
    estimators.length_adaptive_lambda, lengths="own_lengths"
  ),
)

# Name -> function that places an environment's rewards on tokens, [B, T].
TOKEN_REWARDS: Mapping[str, Callable[..., jax.Array]] = {
  "end": estimates.token_rewards,
  "turns": estimates.turn_rewards_on_tokens,
}

# Name -> (advantages, policy_mask) -> advantages; None leaves them unchanged.
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

# User-defined masks of the policy loss: name -> (mask, inputs) -> mask.
OWN_MASKS: dict[str, Callable[..., jax.Array]] = {}
# User-defined metrics: name -> (settings) -> number of a batch.
METRICS: dict[str, Callable[[Settings], Part]] = {}


# Name -> (config group loss) -> `losses.ClippedPolicyLoss`.
POLICY_LOSSES = Table(
  "loss",
  clip=maker_of(losses.clipped_policy_loss, old_logprobs="proximal_logprobs"),
)

# Proximal policy with its own loss, which includes the off-policy correction ->
# (config group loss with `cap` and `floor` of the weight) ->
# `losses.ClippedPolicyLoss`.
PROXIMAL_LOSSES = Table("proximal")

# Setting that enables it -> (config group off_policy) -> factor of a
# mini-batch's update.
STEP_SCALES = Table("step_scale")

# Name -> (policy, mesh, config group off_policy and `versions`) ->
# `members.Companion`. A run has the companions that its providers need.
COMPANIONS = Table("companion")

# Name -> (config group estimator with its custom settings) -> directories of
# models that only score, by name. A run has the models that its providers need.
FROZEN = Table("frozen")

# Models other than policy and critic: name -> `OwnMember`.
MEMBERS: dict[str, OwnMember] = {}

# Name, which may be the setting that enables it -> (config group sampler) ->
# `ProcessorSpec`.
LOGITS_PROCESSORS = Table("logits_processor")

# Name in `loss.auxiliary` -> additional loss of the policy.
AUXILIARY: dict[str, AuxiliaryLoss] = {}

# Name -> (config group schedule) -> `types.Pruning`, or None.
PRUNINGS = Table("pruning", **{"": lambda schedule: None})

# Name -> critic-guided search for evaluation; see `methods.search.search`.
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


def make_part(
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
  estimator, _ = make_part(ESTIMATORS, "estimator", config["estimator"])
  return "values" in estimator.reads


def correction_of(config: Groups) -> tuple[str, float]:
  """Returns the off-policy correction of a config, and its upper bound."""
  settings, schedule = config["off_policy"], config["schedule"]
  averaged = settings["proximal"] == "ewma"
  # Responses are continued in later steps, or are trained on there.
  stale = schedule["stop"] != "all" or schedule["lag"] > 0
  stale |= schedule["replay"] > 0
  name = settings["correction"]
  if name == "auto":
    # A ratio to the sampler's log-probs is an off-policy correction already.
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
  """A critic made of several models."""

  fns: Callable[[ValueFns], ValueFns]  # (one critic) -> the ensemble.
  loss: Callable[[Part], Part]  # (loss of one critic) -> loss of the ensemble.


# Name -> `Ensemble`.
ENSEMBLES = Table("ensemble")

# Setting that enables it -> (config group value) -> view of the critic:
# (row of the data -> its answer, tokenizer, samples) -> samples as the critic
# reads them.
VIEWS = Table("view")

# Name -> input that the importance ratio is taken against; '' takes no ratio.
PROXIMALS: Mapping[str, str] = {
  "recompute": "old_logprobs",
  "stored": "behavior_logprobs",
  "interpolate": "behavior_logprobs",
  "ewma": "average_logprobs",
  "none": "",
}
