"""Registers custom parts by name; for use in a `--plugin` file or a notebook.

A registered name becomes a value of its config key, like the names of the
package. Parts are plain functions: each positional argument receives the input
of the same name, each keyword-only argument the setting of the same name, and
unknown names are refused. What changes several parts of an algorithm, or adds a
model, a metric or an auxiliary loss, is a `method`.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jaxrl_llm import config, losses, rewards
from jaxrl_llm.config import zoo
from jaxrl_llm.data import oracles, sources
from jaxrl_llm.data import prompt_source as prompts
from jaxrl_llm.learner import core, providers
from jaxrl_llm.learner import optimizer as optimizers
from jaxrl_llm.learner.algorithm import OF_THE_UPDATE, Algorithm
from jaxrl_llm.learner.parts import part
from jaxrl_llm.models import families
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout import schedule as schedules
from jaxrl_llm.rollout import turns
from jaxrl_llm.rollout.engine import RolloutEngine
from jaxrl_llm.rollout.environments import Environment
from jaxrl_llm.rollout.tools import Tools

_OWN: set[tuple[str, str]] = set()  # (key, name) of user-defined parts.


def _add(table: dict, key: str, name: str, value: Any) -> None:
  """Adds a part; replaces a user-defined one, e.g. if a cell is run again."""
  of = value if isinstance(value, schedules.Stop) else [value]
  _check_callable(name, *of)
  if name in table and (key, name) not in _OWN:
    raise ValueError(f"config.{key}={name!r} already exists; use another name")
  _OWN.add((key, name))
  table[name] = value


def _check_callable(name: str, *functions: Any) -> None:
  for fn in functions:
    if not callable(fn):
      raise ValueError(
        f"{name!r}: {fn!r:.40} cannot be called; give a function"
      )


def _check_keywords(
  fn: Callable[..., Any],
  *groups: str,
  inputs: Collection[str] = (),
  defaults: bool = False,
) -> None:
  """Refuses keyword-only arguments that are misspelt settings of groups.

  Other names are custom settings, which are set by `estimator.settings` and
  `loss.settings`; other groups have no custom settings. With `defaults`, custom
  settings need a default.
  """
  _check_callable(groups[0], fn)
  bound = {*getattr(fn, "keywords", ()), *inputs}  # By functools.partial.
  known = [k.rpartition(".")[2] for k in config.KEYS if k.startswith(groups)]
  for p in inspect.signature(fn).parameters.values():
    if p.kind is not p.KEYWORD_ONLY or p.name in {*bound, *known}:
      continue
    meant = difflib.get_close_matches(p.name, known, 1, 0.8)
    if meant or not any(f"{group}.settings" in config.KEYS for group in groups):
      use = repr(meant[0]) if meant else "an existing setting"
      raise ValueError(
        f"config.{' or config.'.join(groups)} has no setting {p.name!r}; use"
        f" {use}, or bind the argument with functools.partial"
      )
    if defaults and p.default is p.empty:
      raise ValueError(f"give the custom setting {p.name!r} a default")


def reward(name: str, fn: rewards.RewardFn) -> None:
  """Registers a reward, selected by `reward.name=NAME`.

  Args:
    name: new name.
    fn: function whose argument names select its inputs: prompt (as the model
      reads it), question, messages (of a conversation), response (the text of
      the model; with an environment its turns, one per line), tokens (of that
      text), answer (called for each if the data has several; the best result
      counts), finished (whether it ended with a stop token), conversation
      (turns, and rewards by name, with an environment), source, id, columns
      (the row of the data), or a column. It returns a bool (correct or not), a
      number, numbers by part (the part 'right', or else the first one, decides
      whether the response is correct) or a `rewards.Verdict`. With an attribute
      `batched = True` it receives lists with all responses of a group and
      returns a list. With reward.workers it must be importable, as functions of
      a plugin are. Each call then runs in its own process, forked after the
      import and after `fn.prepare()`, if it exists, so that calls share no
      state.

  Raises:
    ValueError: The package has a part of this name. A user-defined part is
      replaced instead. This applies to all functions of this module.
  """
  _add(rewards.REWARDS, "reward.name", name, fn)


def group_reward(
  name: str,
  fn: Callable[[list[str], list[rewards.Verdict]], Sequence[Any]],
) -> None:
  """Registers a reward of whole groups, selected by `reward.group=NAME`.

  It replaces the verdicts in training, never in evaluation.

  Args:
    name: new name.
    fn: (texts, verdicts) of the judged responses to a prompt -> a result for
      each response, as a reward returns it. It runs where rewards run, with
      reward.workers in its own process.
  """
  _add(rewards.GROUP_REWARDS, "reward.group", name, fn)


def family(name: str, family: families.Family) -> None:
  """Registers a family of models, whose config.json has `model_type` NAME.

  Args:
    name: new name.
    family: model family, as defined by the files of
      `jaxrl_llm/models/families/`.
  """
  if not isinstance(family, families.Family):
    raise ValueError(f"family {name!r} is {family!r:.40}; give a Family")
  if name in families.names() and name not in families.REGISTERED:
    raise ValueError(f"family {name!r} already exists; use another name")
  families.REGISTERED[name] = family


def source(name: str, make: Callable[..., sources.Source]) -> None:
  """Registers a source of examples, selected by `data.source=NAME`.

  Args:
    name: new name.
    make: (*, path, split, seed, columns, **data.settings) -> source; it may
      take any of these arguments. Without `split`, some questions are held out
      for evaluation.
  """
  _add(sources.SOURCES, "data.source", name, make)


def template(name: str, make: Callable[..., prompts.Template]) -> None:
  """Registers a prompt template, selected by `data.template=NAME`.

  Args:
    name: new name.
    make: (tokenizer, *, **data.template_settings) -> (example -> tokens).
  """
  _add(prompts.TEMPLATES, "data.template", name, make)


def prompt_source(name: str, make: Callable[..., prompts.PromptSource]) -> None:
  """Registers a prompt source, such as a curriculum, for `data.order=NAME`.

  Args:
    name: new name.
    make: a class with the methods of `PromptSource`.
  """
  _add(prompts.PROMPT_SOURCES, "data.order", name, make)


def oracle(name: str, fn: oracles.Oracle) -> None:
  """Registers an oracle for SCOPE's `data.order_settings={'oracle': NAME}`.

  Args:
    name: new name.
    fn: (example, text of a wrong response) -> (text before its first wrong
      step, correct step), or None if it finds none.
  """
  _add(oracles.ORACLES, "data.order_settings.oracle", name, fn)


def schedule(name: str, stop: schedules.Stop) -> None:
  """Registers a rule for when a sampler call stops, by `schedule.stop=NAME`."""
  _add(schedules.STOPS, "schedule.stop", name, stop)


def engine(name: str, make: Callable[..., RolloutEngine]) -> None:
  """Registers an engine, such as a server, selected by `sampler.engine=NAME`.

  Args:
    name: new name.
    make: (fns, config, tokenizer, **sampler.engine_settings) -> engine, from
      the policy's `ModelFns`, an `EngineConfig` and the model's tokenizer.
  """
  _add(engines.ENGINES, "sampler.engine", name, make)


def environment(name: str, make: Callable[..., Environment]) -> None:
  """Registers an environment, selected by `environment.name=NAME`.

  Args:
    name: new name.
    make: (**environment.settings) -> environment; usually a class. It is
      called for every step; only the environment's `state` is kept.
  """
  _add(turns.ENVIRONMENTS, "environment.name", name, make)


def tools(name: str, *functions: Callable[..., Any]) -> None:
  """Registers functions as tools for a chat model, by `environment.name=NAME`.

  Args:
    name: new name.
    *functions: functions with typed arguments and a docstring that describes
      them and, in lines `name: text`, their arguments.
  """
  _check_callable(name, *functions)
  environment(name, functools.partial(Tools, functions))


def estimator(name: str, fn: Callable[..., jax.Array], **inputs: str) -> None:
  """Registers an advantage estimator, selected by `estimator.name=NAME`.

  Args:
    name: new name.
    fn: inputs -> advantages [B, T], with settings of config group `estimator`.
      A critic is trained if it reads `values`.
    **inputs: argument of `fn` -> name of its input, where the names differ.
  """
  _check_keywords(fn, "estimator", inputs=inputs)
  make = core.registered(fn, **inputs)
  _add(core.ESTIMATORS, "estimator.name", name, make)


def loss(
  name: str, fn: Callable[..., losses.ClippedPolicyLoss], **inputs: str
) -> None:
  """Registers a policy loss, selected by `loss.name=NAME`.

  Args:
    name: new name.
    fn: inputs -> per-token loss, with settings of config group `loss`; see
      `Algorithm.policy_loss` for its inputs.
    **inputs: argument of `fn` -> name of its input, where the names differ.
  """
  _check_keywords(fn, "loss", inputs=inputs)
  make = functools.partial(part, fn, **inputs)
  _add(core.LOSSES, "loss.name", name, make)


def mask(name: str, fn: Callable[..., jax.Array]) -> None:
  """Registers a mask of the policy loss, selected by `loss.masks`.

  Args:
    name: new name.
    fn: (mask [B, T], inputs) -> bool mask [B, T], with settings of config group
      `estimator`. Tokens that are not in `mask`, its first argument, stay out.
  """
  _check_callable(name, fn)
  if next(iter(inspect.signature(fn).parameters), "") != "mask":
    raise ValueError(
      f"mask {name!r}: its first argument must be `mask`, the tokens that are"
      " left"
    )
  _check_keywords(fn, "estimator")
  _add(core.MASKS, "loss.masks", name, fn)


def method(name: str, fn: Callable[..., Algorithm]) -> None:
  """Registers a method, selected by `method.use=NAME`.

  Args:
    name: new name.
    fn: (algorithm, settings of the run) -> algorithm, usually
      `algorithm.change(...)`. Settings of its own are keyword-only arguments
      with defaults; `functools.partial` gives them other values.
  """
  _check_callable(name, fn)
  if name in zoo.names():
    raise ValueError(
      f"config.method.use={name!r} already exists; use another name"
    )
  _add(core.METHODS, "method.use", name, fn)


def token_input(name: str, fn: Callable[..., jax.Array]) -> None:
  """Registers an input that estimators, losses and masks can read by its name.

  Args:
    name: new name.
    fn: other inputs -> [B, T] or [B], with settings of config groups `loss` and
      `estimator`; custom settings need a default. Inputs are fields of the
      batch, scores of models, results of parts, `part_NAME` (a part of the
      reward, [B]) and `column_NAME` (a number from the data, [B]).
  """
  _check_keywords(fn, "loss", "estimator", defaults=True)
  taken = {*providers.OF_THE_BATCH, *providers.PROVIDERS, *OF_THE_UPDATE}
  if name in taken | core.COMPUTED or name.startswith(providers.PREFIXES):
    raise ValueError(f"an input {name!r} already exists; use another name")
  _add(core.INPUTS, "token_input", name, fn)


def optimizer(name: str, make: Callable[..., Any]) -> None:
  """Registers an optimizer, for `optimizer.policy.name` and `.value.name`.

  Args:
    name: new name.
    make: (schedule, *, settings) -> optax transformation of gradients, which
      are already clipped. The schedule returns the learning rate of an update;
      keyword arguments receive the settings of their names in config group
      `optimizer.policy` or `optimizer.value`.
  """
  _check_keywords(make, "optimizer.policy")
  _add(optimizers.OPTIMIZERS, "optimizer.policy.name", name, make)
