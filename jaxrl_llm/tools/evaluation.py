"""Evaluates an `api.Policy` with the evaluators of a run, without a learner."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, rewards, workdir
from jaxrl_llm.config import Settings
from jaxrl_llm.data import sources
from jaxrl_llm.errors import InputError, check_choice
from jaxrl_llm.evaluate import Evaluation
from jaxrl_llm.learner import core, members
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.rollout import search as searches
from jaxrl_llm.rollout.worker import run_key
from jaxrl_llm.system import plugin
from jaxrl_llm.trainer import build, data, model_fns, rollouts, validation
from jaxrl_llm.types import Responses, Rollout

# Lengths for a model directory, if its context is long enough.
_PROMPT_LENGTH, _RESPONSE_LENGTH = 1024, 2048


def make_config(
  policy: Any,
  datasets: str,
  changes: Mapping[str, Any],
  config: Settings = None,
) -> Any:
  """Returns the settings of an evaluation.

  Args:
    policy: the policy; a run has its own settings.
    datasets: as in `Policy.evaluate`.
    changes: values of dotted keys.
    config: settings for a model directory; None chooses lengths and template
      that fit the model.

  Raises:
    InputError: The settings of a run name code that is not trusted.
  """
  if policy.step is not None:
    config = workdir.read_config(policy.path)
  elif config is None:
    config = config_lib.method("vapo", "gsm8k-smoke")
    changes = _fitting_settings(policy) | changes
  config.model.path = policy.directory
  config_lib.update(config, changes)
  if policy.step is not None and not policy.trust_code:
    named = [("run.plugins", file) for file in config.run.plugins]
    named += [("method.use", file) for file in core.files(config)]
    if config.reward.name in rewards.OF_FILES:
      named.append(("reward.path", config.reward.path))
    unknown = [file for key, file in named if key not in changes]
    plugin.check_trusted(policy.path, unknown)
  # These may not fit a changed number of samples or other sets.
  config.eval.pass_k, config.checkpoint.best = (), ""
  if datasets:
    config_lib.update(config, {"eval.path": datasets})
    config = config_lib.with_absolute_paths(config)
    files = config.data.source in sources.FILES
    config.eval.source = "" if files else "jsonl"
  # Slots do not change responses, but must hold all those to a problem.
  slots = config.sampler.slots or config_lib.batch_size(config)
  config.sampler.slots = max(slots, config.eval.samples)
  return config


def _fitting_settings(policy: Any) -> dict[str, Any]:
  """Returns settings that fit a model: all problems, lengths and a template."""
  context = policy.model_config.max_position_embeddings
  prompt = min(_PROMPT_LENGTH, context // 2)
  fitting = {
    "eval.problems": 0,
    "data.max_prompt_length": prompt,
    "sampler.max_response_length": min(_RESPONSE_LENGTH, context - prompt),
  }
  if policy.tokenizer.chat_template is None:
    fitting |= {"data.template": "completion", "data.template_settings": {}}
  return fitting


def evaluations(
  policy: Any,
  config: Settings,
  *,
  seed: int | None = None,
  critic: bool = False,
  search: str = "",
) -> Iterator[Evaluation]:
  """Yields the evaluation of each set of the settings.

  Without a seed, it repeats the run's last evaluation exactly. Another seed
  changes the samples, not the problems.

  Args:
    policy: the policy.
    config: result of `make_config`.
    seed: seed of the sampling; None is the seed of the run.
    critic: whether the critic of the run's checkpoint scores the responses.
    search: as in `Policy.evaluate`.

  Raises:
    InputError: A setting cannot be used, or there is no critic.
  """
  for file in config.run.plugins:
    plugin.load(file)
  validation.validate(config)
  config = config_lib.with_absolute_paths(config)
  algorithm = core.make_algorithm(config)
  generating = rollouts.make_components(config, algorithm)
  key = run_key(config.run.seed if seed is None else seed, rollouts.EVALUATION)
  writer = generating.writer
  with contextlib.closing(writer.judge), contextlib.closing(writer):
    problems = data.make_problems(config, generating.tokenizer, algorithm)
    values = None
    if critic or search:
      values = _critic_values(policy, config, algorithm, generating)
    how = _make_search(config, search, values) if search else None
    read = _read_params(policy, generating, config.optimizer.policy.frozen)
    params = generating.transfer.send(read, 0).params
    # The sets share the engine and its programs.
    for one in generating.evaluators(config, problems):
      own = dataclasses.replace(one.writer, key=key)
      found = dataclasses.replace(one, writer=own, search=how)(params)
      if search:
        _check_rewards(config, generating, found.responses)
      if values is not None:
        rollout = found.responses.rollout
        found = dataclasses.replace(found, values=values(rollout))
      yield found


def _read_params(
  policy: Any, generating: rollouts.RolloutComponents, frozen: tuple[str, ...]
) -> Any:
  """Reads the policy's parameters, with the shardings of the trainer."""
  shapes = members.make_shapes(generating.policy, generating.meshes.trainer)
  if policy.step is None:
    return model_fns.read_policy_params(
      policy.directory, shapes, generating.policy.config
    )
  shapes = models.partition(shapes, frozen)
  return workdir.restore_params(policy.path, policy.step, "policy", shapes)


def _critic_values(
  policy: Any,
  config: Settings,
  algorithm: Algorithm,
  generating: rollouts.RolloutComponents,
) -> Callable[[Rollout], np.ndarray]:
  """Returns a function that maps responses to values at their last tokens."""
  if policy.step is None or algorithm.critic is None:
    raise InputError(f"{policy.path}: has no critic; give a run with one")
  if algorithm.critic.view:
    raise InputError(
      f"{policy.path}: its critic reads the answers, but the choice of a"
      " response must not depend on them"
    )
  learner = build.make_learner(
    config,
    algorithm,
    generating.policy,
    policy.directory,
    generating.meshes.trainer,
    critic=generating.critic_fns(config, algorithm),
  )
  params = workdir.restore_params(
    policy.path, policy.step, "critic", learner.critic.params
  )
  state = learner.alone("critic", params)

  def values(rollout: Rollout) -> np.ndarray:
    last = np.maximum(rollout.lengths - 1, 0)
    every = learner.read(state, "values", rollout)
    return every[np.arange(last.size), last]

  return values


def _check_rewards(
  config: Settings, generating: rollouts.RolloutComponents, responses: Responses
) -> None:
  """Reports rewards outside the interval that a search assumes."""
  low, high = config.reward.incorrect, config.reward.correct
  rewards = responses.rewards[responses.judged]
  if rewards.size and not low <= rewards.min() <= rewards.max() <= high:
    generating.writer.judge.tell(
      f"rewards are {rewards.min():.3g} to {rewards.max():.3g}, but the search"
      " read the critic's values as chances between"
      f" config.reward.incorrect={low:g} and config.reward.correct={high:g};"
      " set them to the rewards of wrong and right responses"
    )


def _make_search(
  config: Settings, name: str, values: Callable[[Rollout], np.ndarray]
) -> Callable[..., Rollout]:
  """Returns the search of an evaluation; see `Evaluator.search`."""
  check_choice("search", name, searches.SEARCHES)
  if config.environment.name:
    raise InputError("search does not support environments; leave it out")
  low, high = config.reward.incorrect, config.reward.correct

  def chance(rollout: Rollout) -> np.ndarray:
    return np.clip((values(rollout) - low) / (high - low), 0.01, 0.99)

  return lambda write, begun: searches.SEARCHES[name](write, chance, begun)
