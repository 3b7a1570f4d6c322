"""Builds an algorithm from settings."""

import collections
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable

import jax

from jaxrl_llm import estimators, losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import choices, estimates, providers
from jaxrl_llm.learner.algorithm import OF_THE_UPDATE, Algorithm
from jaxrl_llm.learner.choices import Groups, Settings
from jaxrl_llm.learner.parts import Auxiliary, Part, part, then
from jaxrl_llm.masked import NORM_MODES

# Inputs that every method computes in the same way.
_ALWAYS = {
  "own_lengths": part(estimates.own_lengths),
  "truncated": part(estimates.truncated),
  "groups": part(estimates.groups),
  "trainable": part(estimates.trainable),
  "policy_mask": part(estimates.in_window),
  "value_mask": part(estimates.value_mask),
  "positive_mask": part(estimates.positive_mask),
  "old_values": part(estimates.same, x="values"),
}
_OWN_INPUTS: dict[str, Callable[..., jax.Array]] = {}  # By `add_token_input`.


def make_algorithm(config: Groups) -> Algorithm:
  """Returns the algorithm of a validated config.

  Args:
    config: groups reward, environment, sampler, schedule, estimator, loss,
      off_policy and value are read.

  Raises:
    KeyError: a name is not in its table (validation refuses it before).
    InputError: a user-defined part reads an input or a setting that does not
      exist, or no part reads a custom setting.
  """
  loss, estimator = (
    choices.ReadSettings(x, config[x]) for x in ("loss", "estimator")
  )
  config = {**config, "loss": loss, "estimator": estimator}
  policy_loss, corrections = _loss_and_corrections(config)
  # These may import a file of `methods/`, which may add inputs of its own.
  step_scale = choices.STEP_SCALES.switched_on(config["off_policy"])
  processors = choices.logits_processors(config["sampler"])
  pruning = choices.PRUNINGS[config["schedule"]["prune"]](config["schedule"])
  rollout_reads = frozenset([pruning.reads] if pruning else [])
  providers.needs_of(rollout_reads)
  norm = None
  if loss["mode"] in NORM_MODES:
    norm = float(loss["norm"] or config["sampler"]["max_response_length"])
  parts, value_loss = _ALWAYS | _chosen_parts(config), None
  if "returns" in parts:
    value = config["value"]
    value_loss = choices.VALUE_LOSSES[value["head"]](config)
    if value["ensemble"]:
      value_loss = choices.ENSEMBLES[value["ensemble"]].loss(value_loss)
  for name in _OWN_INPUTS:
    _check_free(name, parts)
  both = collections.ChainMap(estimator, loss)
  own = {name: part(fn, both) for name, fn in _OWN_INPUTS.items()}
  algorithm = Algorithm(
    parts=parts | own,
    policy_loss=policy_loss,
    auxiliary=_auxiliary(loss, norm),
    value_loss=value_loss,
    corrections=corrections,
    step_scale=step_scale,
    processors={k: x for k, x in processors.items() if x.state is not None},
    loss_mode=loss["mode"],
    loss_norm=norm,
    rollout_reads=rollout_reads,
    metrics={name: make(both) for name, make in choices.METRICS.items()},
  )
  for settings in (estimator, loss):
    settings.check_read()
  algorithm = _with_members(algorithm)
  _check_leaves(algorithm, config)
  return algorithm


def _with_members(algorithm: Algorithm) -> Algorithm:
  """Adds the models that provide inputs, recursively with their own inputs."""
  needs = providers.needs_of(algorithm.leaves | algorithm.rollout_reads)
  members = {k: x.reads for k, x in choices.MEMBERS.items() if k in needs}
  if members.keys() <= algorithm.members.keys():
    return algorithm
  return _with_members(dataclasses.replace(algorithm, members=members))


def _check_leaves(algorithm: Algorithm, config: Groups) -> None:
  """Raises if a user-defined part reads an input that has no provider."""
  parts, known = algorithm.parts, {"policy", "reference", *algorithm.members}
  known |= choices.COMPANIONS.keys() | choices.FROZEN.keys()
  known |= {"critic"} if algorithm.value_loss else set()
  readers = {
    **{f"token input {name!r}": parts[name].reads for name in _OWN_INPUTS},
    "loss.name": algorithm.policy_loss.reads,
    "estimator.name": parts["advantages"].reads,
    "loss.masks": parts["unwindowed_policy_mask"].reads,
    **{
      f"auxiliary loss {name!r}": (*term.loss.reads, term.mask)
      for name, term in algorithm.auxiliary.items()
    },
    **{f"member {name!r}": x for name, x in algorithm.members.items()},
    **{f"metric {k!r}": x.reads for k, x in algorithm.metrics.items()},
    "schedule.prune": algorithm.rollout_reads,
  }
  for name, processor in algorithm.processors.items():
    readers[f"logits processor {name!r}"] = processor.state.reads
  for leaf in sorted(algorithm.leaves | algorithm.rollout_reads):
    lacks = [
      x
      for x in providers.needs_of([leaf])
      if not (x in known or providers.gives(x))
    ]
    if providers.gives(leaf) and not lacks:
      continue
    names = [name for name, reads in readers.items() if leaf in reads]
    where, why = names[0] if names else "the method", ""
    group, _, key = where.partition(".")
    if group in config:
      where = f"config.{where}={config[group][key]!r}"
    if lacks:
      why = f" (it needs {lacks[0]!r})"
    elif near := difflib.get_close_matches(
      leaf, [*parts, *providers.OF_THE_BATCH, *providers.PROVIDERS], 1, 0.8
    ):
      why = f" (did you mean {near[0]!r}?)"
    raise InputError(
      f"{where}: this part reads {leaf!r}, which the method does not have{why};"
      " rename the argument, or add the input with register.token_input or"
      " register.leaf"
    )


def _chosen_parts(config: Groups) -> dict[str, Part]:
  """Returns the inputs whose computation depends on the method."""
  estimator, loss = config["estimator"], config["loss"]
  advantages = choices.ESTIMATORS[estimator["name"]](estimator)
  advantages = _per_token("estimator.name", advantages)
  lambda_rule = choices.LAMBDA_RULES[estimator["lambda_schedule"]]
  normalize = choices.NORMALIZATIONS[estimator["normalize"]]
  if normalize is not None:
    advantages = then(advantages, part(normalize, mask="policy_mask"))
  mask = part(estimates.same, x="trainable")
  masks = [choices.OWN_MASKS[name] for name in loss["masks"]]
  both = collections.ChainMap(estimator, loss)
  masks += [choices.MASKS[name] for name in choices.MASKS if both[name]]
  for without in masks:
    mask = _per_token("loss.masks", then(mask, part(without, both)))
  if masks:
    mask = then(mask, part(estimates.still_trainable))
  proximal = choices.PROXIMALS[config["off_policy"]["proximal"]]
  chosen = {
    "advantages": advantages,
    "policy_lambda": lambda_rule(estimator),
    "unwindowed_policy_mask": mask,
    **_rewards(config),
  }
  if proximal:
    chosen["proximal_logprobs"] = part(estimates.same, x=proximal)
  if estimator["name"] in choices.VALUE_MASKS:
    chosen["value_mask"] = part(choices.VALUE_MASKS[estimator["name"]])
  if "values" in advantages.reads:  # A critic.
    chosen["returns"] = _returns(estimator["gamma"], estimator["lambda_value"])
  return chosen


def _per_token(key: str, chosen: Part) -> Part:
  """Refuses results of a user's part that are not per token."""

  def checked(made, trainable):
    shape = getattr(made, "shape", type(made).__name__)
    if shape != trainable.shape:
      raise InputError(
        f"config.{key}: this part returned {shape}, not an array of shape"
        f" {trainable.shape}; return a value for every token, such as"
        " x[:, None] * mask"
      )
    return made

  return then(chosen, part(checked))


def _rewards(config: Groups) -> dict[str, Part]:
  """Returns rewards with the overlong penalty, and per token with the KL."""
  shaped, reward = part(estimates.same, x="rewards"), config["reward"]
  if reward["overlong_buffer"]:
    settings = {
      "max_length": config["sampler"]["max_response_length"],
      "buffer": reward["overlong_buffer"],
      "factor": reward["overlong_factor"],
    }
    shaped = part(estimates.soft_overlong, settings)
  on_tokens = part(choices.TOKEN_REWARDS[config["environment"]["rewards"]])
  coefficient = config["loss"]["kl_reward_coefficient"]
  if coefficient:
    settings = {"coefficient": coefficient}
    penalize = part(estimators.penalize_kl, settings, logprobs="old_logprobs")
    on_tokens = then(on_tokens, penalize)
  return {"shaped_rewards": shaped, "token_rewards": on_tokens}


def _loss_and_corrections(config: Groups) -> tuple[Part, dict[str, Part]]:
  """Returns the policy loss and its corrections, if it does not contain one."""
  loss, off_policy = config["loss"], config["off_policy"]
  name, high = choices.correction_of(config)
  correction, low = choices.CORRECTIONS[name], off_policy["low"]
  if off_policy["proximal"] in choices.PROXIMAL_LOSSES:
    bounds = {"cap": None, "floor": 0.0}
    if correction is not None:
      bounds = {"cap": high, "floor": low}
    make = choices.PROXIMAL_LOSSES[off_policy["proximal"]]
    return make(collections.ChainMap(bounds, loss)), {}
  policy_loss = choices.POLICY_LOSSES[loss["name"]](loss)
  if correction is None:
    return policy_loss, {}
  bounds = {"level": off_policy["level"], "high": high, "low": low}
  weights = functools.partial(part, correction, mask="policy_mask")
  if not off_policy["keep_weights"]:
    return policy_loss, {"importance": weights(bounds)}
  return policy_loss, {
    "mismatch": weights(
      bounds | {"high": off_policy["mismatch_high"]},
      proximal_logprobs="writer_logprobs",
    ),
    "staleness": weights(bounds, behavior_logprobs="writer_logprobs"),
  }


def _auxiliary(loss: Settings, norm: float | None) -> dict[str, Auxiliary]:
  """Returns the auxiliary losses with a nonzero coefficient."""
  over_all = "policy_mask", loss["mode"], norm
  terms = {
    "nll": (part(losses.nll), "positive_mask", "token-mean"),
    "kl": (part(choices.KL_ESTIMATES[loss["kl"]]), *over_all),
    "entropy": (part(losses.entropy_bonus), *over_all),
  }
  coefficients = {name: loss[f"{name}_coefficient"] for name in terms}
  for name, coefficient in loss["auxiliary"].items():
    if name not in choices.AUXILIARY:
      known = ", ".join(map(repr, choices.AUXILIARY)) or "none is registered"
      raise InputError(
        f"config.loss.auxiliary: there is no auxiliary loss {name!r} ({known});"
        " add it with register.auxiliary"
      )
    if not isinstance(coefficient, (int, float)):
      raise InputError(
        f"config.loss.auxiliary: the coefficient of {name!r} is"
        f" {coefficient!r}; give a number"
      )
    make, mask, mode = choices.AUXILIARY[name]
    terms[name] = (make(loss), mask, mode)
    coefficients[name] = coefficient
  return {
    name: Auxiliary(terms[name][0], coefficient, *terms[name][1:])
    for name, coefficient in coefficients.items()
    if coefficient
  }


def _returns(gamma: float, lambda_: float) -> Part:
  """Returns the critic's targets at its own λ; λ = 1 is Monte Carlo."""
  settings = {"gamma": gamma, "lambda_": lambda_}
  return part(estimators.lambda_returns, settings)


def with_monte_carlo_returns(
  algorithm: Algorithm, *, gamma: float
) -> Algorithm:
  """Returns the algorithm with λ = 1 targets for value pretraining (VAPO, 4.1).

  λ is 1 here even if later training uses another λ: bootstrapped targets would
  come from the untrained value head itself.
  """
  parts = {**algorithm.parts, "returns": _returns(gamma, 1.0)}
  return dataclasses.replace(algorithm, parts=parts)


def as_reward_model(algorithm: Algorithm) -> Algorithm:
  """Returns the algorithm with a critic trained only at the last token.

  Such a critic is an outcome reward model, the initial critic of VC-PPO and
  VAPO. Its values of prefixes are uncalibrated; value pretraining removes this
  bias.
  """
  last = {"value_mask": part(estimates.last_value_mask)}
  return dataclasses.replace(algorithm, parts={**algorithm.parts, **last})


def add_leaf(name: str, provider: providers.Provider) -> None:
  """Adds an input that a model provides, see `register`.

  Raises:
    ValueError: the name is taken.
  """
  # A string names the file in methods/ that is being imported.
  if not isinstance(dict.get(providers.PROVIDERS, name), str):
    _check_free(name, {*_ALWAYS, *_OWN_INPUTS})
  providers.PROVIDERS[name] = provider


def add_token_input(name: str, fn: Callable[..., jax.Array]) -> None:
  """Adds an input that user-defined parts may read, see `register`.

  Raises:
    ValueError: the name is taken.
  """
  _check_free(name, {*_ALWAYS, *_OWN_INPUTS})
  _OWN_INPUTS[name] = fn


def _check_free(name: str, parts: Iterable[str]) -> None:
  """Raises ValueError if an input of this name exists."""
  if name in {*parts, *OF_THE_UPDATE} or providers.gives(name):
    raise ValueError(f"an input {name!r} already exists; use another name")
