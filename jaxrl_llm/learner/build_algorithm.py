"""From settings to an algorithm."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxrl_llm import estimators, losses
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import choices, estimates
from jaxrl_llm.learner.algorithm import OF_THE_UPDATE, Algorithm
from jaxrl_llm.learner.parts import Auxiliary, Part, part, then
from jaxrl_llm.masked import NORM_MODES
from jaxrl_llm.types import Rollout

# Inputs that are made in one way whatever the method.
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
# Leaves that a learner gives: of the batch, and of models that score it.
_GIVEN = {field.name for field in dataclasses.fields(Rollout)}
_GIVEN |= {"rewards", "correct", "judged", "update_version", "old_logprobs"}
_GIVEN |= {"entropies", "ref_logprobs", "gradient_norms", "writer_logprobs"}
_OF_A_CRITIC = {"values", "next_values"}


def make_algorithm(config: Any) -> Algorithm:
  """The algorithm of a validated config.

  Args:
    config: groups reward, environment, sampler, estimator, loss and off_policy
      are read.

  Raises:
    KeyError: a name is not in its dictionary (the config refuses it before).
    InputError: a part of one's own reads an input that nothing gives.
  """
  loss, off_policy = config.loss.to_dict(), config.off_policy
  limit = config.sampler.max_response_length
  policy_loss, corrections = _loss_and_corrections(config)
  # These may import a file of `methods/`, which may add inputs of its own.
  step_scale = choices.STEP_SCALES.switched_on(off_policy.to_dict())
  processors = choices.logits_processors(config.sampler.to_dict())
  value_loss = None
  if choices.has_critic(config):
    value_loss = part(losses.clipped_value_loss)
    if config.loss.clip_value is not None:
      value_loss = part(
        losses.clipped_value_loss, loss, old_values="old_values"
      )
  norm = float(loss["norm"] or limit) if loss["mode"] in NORM_MODES else None
  parts = _ALWAYS | _chosen_parts(config)
  for name in _OWN_INPUTS:
    _check_free(name, parts)
  settings = loss | config.estimator.to_dict()
  own = {name: part(fn, settings) for name, fn in _OWN_INPUTS.items()}
  algorithm = Algorithm(
    parts=parts | own,
    policy_loss=policy_loss,
    auxiliary=_auxiliary(loss, norm),
    value_loss=value_loss,
    corrections=corrections,
    step_scale=step_scale,
    follows_average=off_policy.proximal == "ewma",
    processors={k: x for k, x in processors.items() if x.state is not None},
    loss_mode=loss["mode"],
    loss_norm=norm,
  )
  _check_leaves(algorithm)
  return algorithm


def _check_leaves(algorithm: Algorithm) -> None:
  """Refuses a part of one's own that reads what the learner does not have."""
  given = _GIVEN | (_OF_A_CRITIC if algorithm.value_loss else set())
  parts = algorithm.parts
  readers = {f"token input {name!r}": parts[name] for name in _OWN_INPUTS} | {
    "config.loss.name": algorithm.policy_loss,
    "config.estimator.name": parts["advantages"],
    "config.loss.masks": parts["unwindowed_policy_mask"],
  }
  for name, processor in algorithm.processors.items():
    readers[f"logits processor {name!r}"] = processor.state
  for leaf in sorted(algorithm.leaves - given):
    reader = next(name for name, x in readers.items() if leaf in x.reads)
    raise InputError(
      f"{reader}: this part reads {leaf!r}, which the method does not have;"
      " rename the argument, or add the input with register.token_input"
    )


def _chosen_parts(config: Any) -> dict[str, Part]:
  """The inputs that a method makes in a way of its own."""
  estimator, loss = config.estimator.to_dict(), config.loss.to_dict()
  advantages = choices.ESTIMATORS[estimator["name"]](estimator)
  lambda_rule = choices.LAMBDA_RULES[estimator["lambda_schedule"]]
  normalize = choices.NORMALIZATIONS[estimator["normalize"]]
  if normalize is not None:
    advantages = then(advantages, normalize, "policy_mask")
  mask = part(estimates.same, x="trainable")
  settings = loss | estimator
  masks = [choices.OWN_MASKS[name] for name in loss["masks"]]
  masks += [choices.MASKS[name] for name in choices.MASKS if settings[name]]
  for without in masks:
    step = part(without, estimator)
    mask = then(mask, step.fn, *step.reads[1:])
  chosen = {
    "advantages": advantages,
    "policy_lambda": lambda_rule(estimator),
    "unwindowed_policy_mask": mask,
    "proximal_logprobs": part(
      estimates.same, x=choices.PROXIMALS[config.off_policy.proximal]
    ),
    **_rewards(config),
  }
  if choices.has_critic(config):
    chosen["returns"] = _returns(estimator["gamma"], estimator["lambda_value"])
  return chosen


def _rewards(config: Any) -> dict[str, Part]:
  """Rewards with their length punishment, and on tokens with their KL."""
  shaped = part(estimates.same, x="rewards")
  if config.reward.overlong_buffer:
    settings = {
      "max_length": config.sampler.max_response_length,
      "buffer": config.reward.overlong_buffer,
      "factor": config.reward.overlong_factor,
    }
    shaped = part(estimates.soft_overlong, settings)
  on_tokens = part(choices.TOKEN_REWARDS[config.environment.rewards])
  coefficient = config.loss.kl_reward_coefficient
  if coefficient:
    penalize = functools.partial(
      estimators.penalize_kl, coefficient=coefficient
    )
    reads = ("old_logprobs", "ref_logprobs", "mask")
    on_tokens = then(on_tokens, penalize, *reads)
  return {"shaped_rewards": shaped, "token_rewards": on_tokens}


def _loss_and_corrections(config: Any) -> tuple[Part, dict[str, Part]]:
  """The policy loss and what corrects it, which may be a part of it."""
  loss, off_policy = config.loss.to_dict(), config.off_policy
  name, high = choices.correction_of(config)
  correction = choices.CORRECTIONS[name]
  if off_policy.proximal in choices.PROXIMAL_LOSSES:
    bounds = {"cap": None, "floor": 0.0}
    if correction is not None:
      bounds = {"cap": high, "floor": off_policy.low}
    return choices.PROXIMAL_LOSSES[off_policy.proximal](loss | bounds), {}
  policy_loss = choices.POLICY_LOSSES[loss["name"]](loss)
  if correction is None:
    return policy_loss, {}
  bounds = {"level": off_policy.level, "high": high, "low": off_policy.low}
  weights = functools.partial(part, correction, mask="policy_mask")
  if not off_policy.keep_weights:
    return policy_loss, {"importance": weights(bounds)}
  return policy_loss, {
    "mismatch": weights(
      bounds | {"high": off_policy.mismatch_high},
      proximal_logprobs="writer_logprobs",
    ),
    "staleness": weights(bounds, behavior_logprobs="writer_logprobs"),
  }


def _auxiliary(
  loss: choices.Settings, norm: float | None
) -> dict[str, Auxiliary]:
  """The losses beside the surrogate whose coefficient is not 0."""
  over_all = "policy_mask", loss["mode"], norm
  terms = {
    "nll": (losses.nll, "positive_mask", "token-mean"),
    "kl": (choices.KL_ESTIMATES[loss["kl"]], *over_all),
    "entropy": (losses.entropy_bonus, *over_all),
  }
  return {
    name: Auxiliary(part(fn), loss[f"{name}_coefficient"], *reduction)
    for name, (fn, *reduction) in terms.items()
    if loss[f"{name}_coefficient"]
  }


def _returns(gamma: float, lambda_: float) -> Part:
  """Critic targets under a λ of the critic's own; λ = 1 is Monte Carlo."""
  settings = {"gamma": gamma, "lambda_": lambda_}
  return part(estimators.lambda_returns, settings)


def with_monte_carlo_returns(
  algorithm: Algorithm, *, gamma: float
) -> Algorithm:
  """The algorithm with targets of value pretraining, λ = 1 (VAPO, 4.1).

  Whatever λ the critic learns with later: a bootstrapped target would be the
  new head's own.
  """
  parts = {**algorithm.parts, "returns": _returns(gamma, 1.0)}
  return dataclasses.replace(algorithm, parts=parts)


def as_reward_model(algorithm: Algorithm, *, gamma: float) -> Algorithm:
  """The algorithm whose critic sees a response at its last token alone.

  It learns what becomes of whole responses, and nothing of their beginnings:
  a reward model, which VC-PPO and VAPO start their critics from. Its values of
  beginnings are whatever they are, the bias that value pretraining repairs.
  """
  algorithm = with_monte_carlo_returns(algorithm, gamma=gamma)
  last = {"value_mask": part(estimates.last_value_mask)}
  return dataclasses.replace(algorithm, parts={**algorithm.parts, **last})


def add_token_input(name: str, fn: Callable[..., jax.Array]) -> None:
  """Adds an input that parts of one's own may read, see `register`.

  Raises:
    ValueError: the name is taken.
  """
  _check_free(name, {*_ALWAYS, *_OWN_INPUTS})
  _OWN_INPUTS[name] = fn


def _check_free(name: str, parts: Iterable[str]) -> None:
  """Refuses the name of an input that there is."""
  if name in {*parts, *_GIVEN, *_OF_A_CRITIC, *OF_THE_UPDATE}:
    raise ValueError(f"there is an input {name!r} already; choose another name")
