"""Builds the components of a run from a config."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_llm import (
  base_models,
  checkpoint,
  digest,
  models,
  sharding,
)
from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Settings
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.replay import Replay
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, located
from jaxrl_llm.evaluate import check_metric
from jaxrl_llm.learner import core, members, providers
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import UpdateSettings
from jaxrl_llm.learner.state import LearnerSettings
from jaxrl_llm.models.files import hf
from jaxrl_llm.rollout.pipeline import Pipeline
from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.rollout.worker import RolloutWorker, run_key
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import score
from jaxrl_llm.trainer import (
  data,
  meshes,
  model_fns,
  rollouts,
  sampler,
  validation,
)
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.trainer.value_pretraining import FOLDER, ValuePretraining
from jaxrl_llm.types import Rollout


def make_run(config: Settings) -> Run:
  """Builds the components of a run; loads no weights and compiles nothing.

  Raises:
    InputError: The config, the model's files or the data cannot be used.
  """
  validation.validate(config)
  config = config_lib.with_absolute_paths(config)
  algorithm = core.make_algorithm(config)
  generating = rollouts.make_components(config, algorithm)
  both, policy, tokenizer, _, transfer, writer = generating
  frozen, frozen_inputs = _make_frozen(config, algorithm, tokenizer, both)
  source, problems = data.make_prompts(config, tokenizer, algorithm)
  _check_columns(source, algorithm)
  # The sampler has no expert capacity, so parity is checked without one.
  dropless = model_fns.make_model_fns(
    config, policy.config, both, expert_capacity=0
  )
  learner = make_learner(
    config,
    algorithm,
    policy,
    base_models.model_path(config),
    both.trainer,
    critic=generating.critic_fns(config, algorithm),
    column=source.column,
    frozen=frozen,
    views=_make_views(algorithm, source, tokenizer),
    sampler_logprobs=_make_exact_score(config, generating),
  )
  worker = make_worker(config, writer, source, algorithm)
  evaluators = generating.evaluators(config, problems)
  if best := config.checkpoint.best:
    tries = config.eval.samples, *config.eval.pass_k
    check_metric(best, evaluators, tries, greedy=config.eval.greedy)
  return Run(
    config=config,
    source=source,
    worker=worker,
    pipeline=_make_pipeline(config),
    learner=learner,
    transfer=transfer,
    parity_check=sampler.make_parity_check(config, dropless, both, transfer),
    check_batch=sampler.make_batch_check(
      config, policy, both, tokenizer, algorithm
    ),
    pretraining=_make_pretraining(config, worker, learner),
    critic_params=functools.partial(
      _critic_params, learner, init_from=config.value.init_from
    ),
    evaluators=evaluators,
    judge=writer.judge,
    tokenizer=tokenizer,
    inputs=data.digests(config) | frozen_inputs,
    notes=data.notes(source),
  )


def _check_columns(source: PromptSource, algorithm: Algorithm) -> None:
  """Reads the first row of each column of the data that is needed."""
  leaves = algorithm.leaves
  for leaf in leaves | algorithm.needs(leaves):
    if leaf.startswith(providers.COLUMN):
      source.column(leaf.removeprefix(providers.COLUMN), [0])


def _make_views(
  algorithm: Algorithm, source: PromptSource, tokenizer: Tokenizer
):
  """Returns the view of each member that has one, see `Scorer`."""
  view = algorithm.critic and algorithm.critic.view
  if not view:
    return {}
  return {"critic": functools.partial(view.fn, source.answer, tokenizer)}


def _make_exact_score(
  config: Settings, generating: rollouts.RolloutComponents
) -> Callable[..., Any] | None:
  """Makes `Scorer.sampler_logprobs` for exact sampling."""
  if not config.sampler.exact:
    return None

  def exact_score(params: models.Params, rollout: Rollout) -> np.ndarray:
    # Sends the parameters again, to detect wrong ones in the sampler.
    sent = generating.transfer.send(params, 0).params
    settings = generating.writer.settings
    return score(generating.engine, sent, rollout, settings=settings)

  return exact_score


def _make_pipeline(config: Settings) -> Pipeline:
  schedule = config.schedule
  return Pipeline(
    lag=schedule.lag,
    overlap=schedule.overlap,
    max_staleness=config_lib.most_staleness(config) - schedule.lag,
    streaming=schedule.streaming,
  )


def make_learner(
  config: Settings,
  algorithm: Algorithm,
  policy_fns: models.ModelFns,
  path: str,
  mesh: jax.sharding.Mesh,
  *,
  critic: models.ValueFns | None = None,
  **given: Any,
) -> Learner:
  """Makes the learner.

  Args:
    config: settings of the run.
    algorithm: the algorithm that they choose.
    policy_fns: functions of the policy.
    path: directory of the initial weights.
    mesh: mesh of all models.
    critic: functions of the critic; None without one.
    **given: further attributes of the learner, see `Scorer`.

  Raises:
    InputError: Micro-batches do not divide over the mesh.
  """
  _check_micro_batches(config, algorithm, mesh)
  of = functools.partial(update_settings, config)
  training = members.policy_training(policy_fns, algorithm)
  policy = members.make_member(policy_fns, training, of("policy"), mesh)
  found = {"policy": policy}
  if critic is not None:
    training = members.critic_training(critic, algorithm)
    member = members.make_member(critic, training, of("value"), mesh)
    if policy_fns.config.adapters and critic.config.adapters:
      member = dataclasses.replace(member, shares_base=True, base=policy.base)
    found["critic"] = member
  for name, member in algorithm.members.items():
    found[name] = member.make(policy, algorithm, mesh)
  view = algorithm.critic and algorithm.critic.view
  return Learner(
    algorithm,
    found,
    settings=LearnerSettings(
      seed=config.run.seed,
      max_tokens_per_row=config_lib.max_tokens_per_row(
        config, view.tokens if view else 0
      ),
      max_skipped=config.run.max_skipped,
      temperature=config.sampler.temperature,
    ),
    mesh=mesh,
    initial_params=functools.partial(
      model_fns.read_policy_params,
      path,
      models.merge(policy.params),
      policy_fns.config,
      seed=config.run.seed,
    ),
    companions={
      name: make(policy, mesh) for name, make in algorithm.companions.items()
    },
    **given,
  )


def _check_micro_batches(
  config: Settings, algorithm: Algorithm, mesh: jax.sharding.Mesh
) -> None:
  split = sharding.batch_size_of(mesh)
  for role in ("policy", "value") if algorithm.critic else ("policy",):
    rows = config.optimizer[role].micro_batch_size
    if rows % split:
      raise InputError(
        f"config.optimizer.{role}.micro_batch_size={rows} must be a multiple of"
        f" mesh data x fsdp = {split}"
      )


def _make_frozen(
  config: Settings,
  algorithm: Algorithm,
  tokenizer: Tokenizer,
  both: meshes.Meshes,
) -> tuple[dict[str, members.Frozen], dict[str, str]]:
  """Makes the models that only score, and the digests of their files.

  Raises:
    InputError: A model cannot be read, or its tokenizer is not the policy's.
  """
  made, read = {}, []
  for name, path in algorithm.frozen.items():
    model_config, own = model_fns.read_model(config, path)
    tokenizer.check_same(own)
    # A capacity is for training: a score must not depend on other tokens.
    fns = model_fns.make_model_fns(
      config, model_config, both, expert_capacity=0
    )
    read_params = functools.partial(
      model_fns.read_policy_params, path, model_config=model_config
    )
    made[name] = members.make_frozen(fns, read_params, both.trainer)
    read += sorted(pathlib.Path(path).glob("*.safetensors"))
  return made, {"method.use": digest.of_files(read)} if made else {}


def update_settings(config: Settings, role: str) -> UpdateSettings:
  """Returns the update settings of the 'policy' or the 'value' model."""
  settings = config.optimizer[role].to_dict()
  del settings["updates_per_step"]
  settings["mini_batch"] = size = config_lib.mini_batch(config, role)
  # At least one: value pretraining makes updates even if the run makes none.
  steps = max(config.run.steps, 1)
  batches = config_lib.batch_size(config) / size
  updates = round(steps * batches * settings["epochs"])
  return UpdateSettings(**settings, steps=steps, updates=updates)


def make_worker(
  config: Settings,
  writer: ResponseWriter,
  source: PromptSource,
  algorithm: Algorithm,
) -> RolloutWorker:
  """Makes the worker that samples the batches of training."""
  schedule = config.schedule
  with located("config.schedule"):
    settings = RolloutSettings(
      groups=config.data.prompts_per_step,
      group_size=config.data.group_size,
      in_flight=config_lib.groups_in_flight(config),
      stop=schedule.stop,
      dynamic_sampling=schedule.dynamic_sampling,
      window=schedule.window,
      max_staleness=schedule.max_staleness,
      max_rounds=schedule.max_rounds if schedule.dynamic_sampling else 1,
      pruning=algorithm.pruning,
    )
  replay = None
  if schedule.replay:
    replay = (algorithm.replay or Replay)(
      groups=config_lib.replayed_groups(config),
      capacity=schedule.replay_capacity,
      keep=schedule.replay_keep,
      seed=config.run.seed,
      feed=algorithm.feed and algorithm.feed(),
    )
  group_reward = rollouts.make_group_reward(config, writer.judge, algorithm)
  return RolloutWorker(
    writer, source, settings, group_reward, replay, algorithm.stages
  )


def _make_pretraining(config, worker, learner) -> ValuePretraining | None:
  """Makes the value pretraining, with a random stream of its own."""
  value, groups = config.value, config.data.prompts_per_step
  pretrains = value.pretrain_steps or value.reward_model_steps
  start = value.init_from
  reused = start and (not hf.is_model(start) or hf.is_critic(start))
  if learner.critic is None or reused or not pretrains:
    return None
  whole = RolloutSettings(
    groups=groups, group_size=config.data.group_size, in_flight=groups
  )
  key = run_key(config.run.seed, rollouts.PRETRAINING)
  writer = dataclasses.replace(worker.writer, key=key)
  algorithm = core.with_monte_carlo_returns(
    learner.algorithm, gamma=config.estimator.gamma
  )
  of = functools.partial(dataclasses.replace, learner)
  return ValuePretraining(
    learner=of(algorithm=algorithm),
    reward_model=of(algorithm=core.as_reward_model(algorithm)),
    worker=dataclasses.replace(
      worker, writer=writer, settings=whole, replay=None
    ),
    config=config,
    seed=(config.run.seed, rollouts.PRETRAINING),
  )


def _critic_params(learner: Learner, policy_params: Any, *, init_from: str):
  """Returns the critic of `init_from`, or the policy's body with a new head.

  A critic that shares the policy's base is returned without the base.

  Raises:
    InputError: The earlier run has no critic, or one of another model.
  """
  critic = learner.critic
  shapes = models.merge(critic.params)
  if hf.is_model(init_from):
    place = functools.partial(sharding.tree_shardings, mesh=learner.mesh)
    model = critic.fns.config, critic.fns.head
    policy_params = hf.read_critic(init_from, *model, place)
  elif init_from:
    return checkpoint.load_tree(pathlib.Path(init_from) / FOLDER, shapes)
  if critic.shares_base:
    shapes = critic.shapes.trained

  def init_critic(params):
    whole = critic.fns.from_policy(params)
    return critic.split(whole).trained if critic.shares_base else whole

  places = jax.tree.map(lambda x: x.sharding, shapes)
  return jax.jit(init_critic, out_shardings=places)(policy_params)
