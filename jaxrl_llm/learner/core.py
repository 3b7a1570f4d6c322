"""The core algorithms: PPO, VC-PPO, VAPO, T-PPO; GRPO, Dr. GRPO, DAPO.

`with_critic` and `grouped` make them from the settings of a run. A method is a
function (algorithm, settings of the run, *, its own settings) -> algorithm;
`make_algorithm` applies those that `method.use` names, in order.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm import estimators, losses
from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.learner import checks, estimates, providers
from jaxrl_llm.learner.algorithm import ALWAYS, Algorithm, Critic, Settings
from jaxrl_llm.learner.parts import Auxiliary, Part, part, then
from jaxrl_llm.masked import NORM_MODES
from jaxrl_llm.system import plugin

partial = functools.partial
_METHODS = "jaxrl_llm.methods"  # In a higher layer: imported only by name.

KL_ESTIMATES: dict[str, Callable[..., jax.Array]] = {
  "k1": losses.kl_k1,
  "k2": losses.kl_k2,
  "k3": losses.kl_k3,
  "k1+": losses.kl_k1_plus,
  "k3+": losses.kl_k3_plus,
}
# Added by `register`: estimators and losses are chosen by `estimator.name` and
# `loss.name`, masks by `loss.masks`, methods by `method.use`.
INPUTS: dict[str, Callable[..., jax.Array]] = {}
MASKS: dict[str, Callable[..., jax.Array]] = {}
METHODS: dict[str, Callable[..., Algorithm]] = {}


# Inputs that an algorithm computes, which a token input cannot be named.
COMPUTED = frozenset(ALWAYS) | {
  *("advantages", "returns", "policy_lambda", "unwindowed_policy_mask"),
  *("shaped_rewards", "token_rewards", "proximal_logprobs"),
}


def with_critic(s: Settings) -> Algorithm:
  """PPO, VC-PPO, VAPO and T-PPO, whose windows are a schedule of the rollouts.

  Args:
    s: settings of a run.
  """
  e = s.estimator
  gae = partial(estimators.egae, gamma=e.gamma, boundary=e.boundary)
  old = {} if s.loss.clip_value is None else {"old_values": "old_values"}
  value_loss = partial(losses.clipped_value_loss, clip_value=s.loss.clip_value)
  return Algorithm(
    advantages=part(gae, lambda_="policy_lambda", next_values="next_values"),
    policy_loss=LOSSES[s.loss.name](_own(s, "loss")),
    critic=Critic(returns(e.gamma, e.lambda_value), part(value_loss, **old)),
    **common(s),
  )


def grouped(s: Settings) -> Algorithm:
  """GRPO, Dr. GRPO and DAPO, whose dynamic sampling is a schedule."""
  return Algorithm(
    advantages=part(estimates.group_advantages, s.estimator),
    policy_loss=LOSSES[s.loss.name](_own(s, "loss")),
    **common(s),
  )


def clip(loss: Settings) -> Part:
  """PPO's clipped surrogate, with DAPO's decoupled bounds."""
  fn = losses.clipped_policy_loss
  return part(fn, loss, old_logprobs="proximal_logprobs")


def returns(gamma: float, lambda_: float) -> Part:
  """The critic's targets at their own λ (VC-PPO); λ = 1 is Monte Carlo."""
  return part(partial(estimators.lambda_returns, gamma=gamma, lambda_=lambda_))


def common(s: Settings) -> dict[str, Any]:
  """Returns what all algorithms share, as fields of `Algorithm`."""
  e, loss = s.estimator, s.loss
  norm = None
  if loss.mode in NORM_MODES:
    norm = float(loss.norm or s.sampler.max_response_length)
  own = {**_own(s, "loss"), **_own(s, "estimator")}
  masks = [part(MASKS[name], own) for name in loss.masks]
  if loss.overlong_filter:
    masks.append(part(estimates.without_overlong))
  if e.tail_drop:
    masks.append(part(estimates.without_tail, e))
  after = []
  if e.normalize != "none":
    whiten = partial(estimators.whiten, center=e.normalize == "whiten")
    after.append(part(whiten, mask="policy_mask"))
  if e.lambda_schedule == "constant":
    lambda_ = part(estimates.policy_lambda, e)
  else:  # VAPO, equation 5.
    rule = partial(estimators.length_adaptive_lambda, alpha=e.alpha)
    lambda_ = part(rule, lengths="own_lengths")
  kind, high = correction_of(s)
  corrected = (
    {} if kind == "none" else {"importance": importance(s, kind, high)}
  )
  stored = s.off_policy.proximal == "stored"
  return {
    "inputs": {
      "policy_lambda": lambda_,
      **_rewards(s),
      **{name: part(fn, own) for name, fn in INPUTS.items()},
    },
    "providers": providers.PROVIDERS,
    "masks": tuple(masks),
    "after": tuple(after),
    "auxiliary": _auxiliary(loss, norm),
    "corrections": corrected,
    "proximal": "behavior_logprobs" if stored else "old_logprobs",
    "mode": loss.mode,
    "norm": norm,
  }


def _rewards(s: Settings) -> dict[str, Part]:
  """Returns rewards with the overlong penalty, and per token with the KL."""
  shaped = part(estimates.same, x="rewards")
  if s.reward.overlong_buffer:  # DAPO, equation 13.
    shaped = part(
      partial(
        estimates.soft_overlong,
        max_length=s.sampler.max_response_length,
        buffer=s.reward.overlong_buffer,
        factor=s.reward.overlong_factor,
      )
    )
  turns = s.environment.rewards == "turns"
  fn = estimates.turn_rewards_on_tokens if turns else estimates.token_rewards
  on_tokens = part(fn)
  if coefficient := s.loss.kl_reward_coefficient:
    penalize = partial(estimators.penalize_kl, coefficient=coefficient)
    on_tokens = then(on_tokens, part(penalize, logprobs="old_logprobs"))
  return {"shaped_rewards": shaped, "token_rewards": on_tokens}


def _auxiliary(loss: Settings, norm: float | None) -> dict[str, Auxiliary]:
  """Returns the auxiliary losses with a nonzero coefficient."""
  over_all = "policy_mask", loss.mode, norm
  terms = {  # VAPO, equations 9 and 10: the mean over correct responses.
    "nll": (losses.nll, loss.nll_coefficient, "positive_mask", "token-mean"),
    "kl": (KL_ESTIMATES[loss.kl], loss.kl_coefficient, *over_all),
    "entropy": (losses.entropy_bonus, loss.entropy_coefficient, *over_all),
  }
  return {
    name: Auxiliary(part(fn), coefficient, *over)
    for name, (fn, coefficient, *over) in terms.items()
    if coefficient
  }


def correction_of(s: Settings, *, otherwise: float = 2.0) -> tuple[str, float]:
  """Returns the kind of the off-policy correction and its upper bound.

  Args:
    s: settings of a run.
    otherwise: upper bound if `off_policy.high` is None.
  """
  kind, high = s.off_policy.correction, s.off_policy.high
  if kind == "auto":
    # Responses are continued in later steps, or are trained on there. A ratio
    # to the sampler's log-probs is an off-policy correction already.
    stale = s.schedule.stop != "all" or s.schedule.lag > 0 or s.schedule.replay
    corrects = stale and s.off_policy.proximal != "stored"
    kind = "truncate" if corrects else "none"
  return kind, otherwise if high is None else high


def importance(s: Settings, kind: str, high: float, **inputs: str) -> Part:
  """Returns importance weights proximal/behavior within their bounds.

  Args:
    s: settings of a run.
    kind: 'truncate' (TIS) or 'mask' (IcePop).
    high: upper bound of a weight.
    **inputs: argument of the weight -> input that it reads instead.
  """
  fn = losses.masked_importance
  if kind == "truncate":
    fn = losses.truncated_importance
  bounds = {"level": s.off_policy.level, "high": high, "low": s.off_policy.low}
  return part(fn, bounds, mask="policy_mask", **inputs)


# Estimator -> (settings of a run) -> algorithm, and policy loss -> (config
# group loss) -> part; `register` adds to them.
ESTIMATORS: dict[str, Callable[[Settings], Algorithm]] = {
  "gae": with_critic,
  "group": grouped,
}
LOSSES: dict[str, Callable[[Any], Part]] = {"clip": clip}


def registered(fn: Callable[..., jax.Array], **inputs: str) -> Callable:
  """Returns an entry of `ESTIMATORS` with the advantages of a function.

  There is a critic if it reads `values`.
  """

  def make(s: Settings) -> Algorithm:
    advantages = part(fn, _own(s, "estimator"), **inputs)
    base = with_critic if "values" in advantages.reads else grouped
    return base(s).change(advantages=advantages)

  make.fn = fn
  return make


def _own(s: Settings, group: str) -> dict[str, Any]:
  """Returns a config group merged with its custom settings.

  Raises:
    InputError: a custom setting has the name of a setting.
  """
  settings, own = s[group], s[group].settings
  if taken := {*own} & {*settings}:
    name = min(taken)
    raise InputError(
      f"config.{group}.settings: {name!r} is not a custom setting; set"
      f" config.{group}.{name}"
    )
  return {**settings, **own}


def make_algorithm(s: Settings) -> Algorithm:
  """Returns the algorithm of the settings of a run.

  Raises:
    InputError: settings cannot be used together, or a user's part reads an
      input or a setting that does not exist.
  """
  algorithm = compose(s)
  _check_custom(s)
  checks.check_parts(algorithm, s, INPUTS)
  return algorithm


def compose(s: Settings) -> Algorithm:
  """Returns the algorithm of the settings before the checks of user's parts."""
  if len({*s.method.use}) < len(s.method.use):
    raise InputError(f"config.method.use={s.method.use!r}: give a method once")
  algorithm = base = ESTIMATORS[s.estimator.name](s)
  changed_by, undone = {}, ""
  for name in s.method.use:
    before, algorithm = algorithm, apply(name, algorithm, s)
    for field, lost in algorithm.changed(before).items():
      # A user's method may override on purpose, as in an ablation.
      if lost and field in changed_by and not _is_own(name):
        chosen = f"the {field} that {changed_by[field]!r} chose"
        undone = f"{name!r} replaces {chosen}; use one of them"
      changed_by[field] = name
  for name in INPUTS:
    changed = algorithm.inputs[name] is not base.inputs[name]
    if changed or name in algorithm.providers:
      raise InputError(
        f"config.method.use={s.method.use!r}: there is a token input {name!r}"
        " already; register it by another name"
      )
  with located(f"config.method.use={s.method.use!r}"):
    for check in algorithm.checks:
      check(algorithm)
    if undone:
      raise InputError(undone)
  return algorithm


def _is_own(name: str) -> bool:
  """Returns whether a method is a user's: registered, or of a file."""
  return name in METHODS or ":" in name


def apply(name: str, algorithm: Algorithm, s: Settings) -> Algorithm:
  """Applies a method with its settings in config group `method`.

  Raises:
    InputError: the method refuses the algorithm or the settings.
  """
  fn, what = find(name), f"config.method.use={name!r}"
  settings = dict(s.method.get(name, {}))
  advice = "its arguments must be (algorithm, settings), and others optional"
  with as_input_error(what, advice, TypeError, ValueError):
    inspect.signature(fn).bind(algorithm, s)
  known = inspect.signature(fn).parameters
  if unknown := settings.keys() - known.keys():
    raise InputError(
      f"config.method.{name}: no setting {min(unknown)!r}; choose from"
      f" {', '.join([*known][2:]) or 'none'}"
    )
  guard, code = contextlib.nullcontext(), getattr(fn, "__code__", None)
  if code and _is_own(name):
    guard = plugin.user_code(code.co_filename)
  with located(what), guard:
    made = fn(algorithm, s, **settings)
  if not isinstance(made, Algorithm):
    raise InputError(
      f"{what}: it returned {made!r:.40}; return an algorithm, such as"
      " algorithm.change(...)"
    )
  return made


def find(name: str) -> Callable[..., Algorithm]:
  """Returns a method: registered, NAME of methods/NAME.py, or of FILE.py:NAME.

  Raises:
    InputError: there is no such method.
  """
  if name in METHODS:
    return METHODS[name]
  file, _, function = name.rpartition(":")
  if file:
    module, where = plugin.load(file), file
  else:
    module, function = importlib.import_module(f"{_METHODS}.{name}"), name
    where = _METHODS
  if not callable(getattr(module, function, None)):
    raise InputError(
      f"config.method.use={name!r}: {where} has no function {function!r}"
    )
  return getattr(module, function)


def with_monte_carlo_returns(
  algorithm: Algorithm, *, gamma: float
) -> Algorithm:
  """Returns the algorithm with λ = 1 targets for value pretraining (VAPO, 4.1).

  λ is 1 here even if later training uses another λ: bootstrapped targets would
  come from the untrained value head itself.
  """
  monte_carlo = dataclasses.replace(
    algorithm.critic, returns=returns(gamma, 1.0)
  )
  return algorithm.change(critic=monte_carlo)


def as_reward_model(algorithm: Algorithm) -> Algorithm:
  """Returns the algorithm with a critic trained only at the last token.

  Such a critic is an outcome reward model, the initial critic of VC-PPO and
  VAPO. Its values of prefixes are uncalibrated; value pretraining removes this
  bias.
  """
  last = part(estimates.last_value_mask)
  return algorithm.change(
    critic=dataclasses.replace(algorithm.critic, mask=last)
  )


def files(s: Settings) -> list[str]:
  """Returns the files whose functions `method.use` names."""
  return [x.rpartition(":")[0] for x in s.method.use if ".py:" in x]


def _check_custom(s: Settings) -> None:
  """Raises InputError if no part has one of the custom settings."""
  masks = [MASKS[name] for name in s.loss.masks]
  fns = {
    "estimator": [getattr(ESTIMATORS[s.estimator.name], "fn", None), *masks],
    "loss": [getattr(LOSSES[s.loss.name], "args", [None])[0]],
  }
  for group, own in fns.items():
    known = {
      name
      for fn in (*own, *INPUTS.values())
      if fn is not None
      for name in inspect.signature(fn).parameters
    }
    if unread := {*s[group].settings} - known:
      raise InputError(
        f"config.{group}.settings: no chosen part has a setting"
        f" {min(unread)!r}; a part reads the names of its keyword-only"
        " arguments"
      )
