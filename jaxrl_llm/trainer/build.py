"""Builds the components of a run from a config."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import base_models, checkpoint, digest, models, rewards, sharding
from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Settings
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.replay import Replay
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, located
from jaxrl_llm.evaluate import Evaluator, check_metric
from jaxrl_llm.learner import core, members, providers
from jaxrl_llm.learner.algorithm import Algorithm, Critic
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import UpdateSettings
from jaxrl_llm.learner.state import LearnerSettings
from jaxrl_llm.models import hf
from jaxrl_llm.rewards.groups import GroupReward
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.engine import RolloutEngine
from jaxrl_llm.rollout.pipeline import Pipeline
from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.rollout.turns import ConversationConfig
from jaxrl_llm.rollout.worker import RolloutWorker, run_key
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import SamplingSettings, score
from jaxrl_llm.trainer import data, meshes, sampler, validation
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.trainer.value_pretraining import FOLDER, ValuePretraining

# Independent streams of randomness under the run's seed.
ROLLOUTS, EVALUATION, PRETRAINING = 1, 2, 3


def make_run(config: Settings) -> Run:
  """Builds the components of a run; loads no weights and compiles nothing.

  Raises:
    InputError: The config, the model's files or the data cannot be used.
  """
  validation.validate(config)
  config = config_lib.with_absolute_paths(config)
  algorithm = core.make_algorithm(config)
  both = meshes.make_meshes(config)
  path = base_models.model_path(config)
  model_config, tokenizer = hf.read_config(path), Tokenizer(path)
  data.check_context(config, model_config, tokenizer)
  unused = _with_unused(model_config, tokenizer)
  fns = make_fns(config, unused, both, algorithm.critic)
  if hf.is_model(config.value.init_from):
    tokenizer.check_same(Tokenizer(config.value.init_from))
  view = algorithm.critic and algorithm.critic.view
  before = view.tokens if view else 0
  data.check_context(config, fns[1].config, tokenizer, before=before)
  frozen, frozen_inputs = _make_frozen(config, algorithm, tokenizer, both)
  source, problems = data.make_prompts(config, tokenizer, algorithm)
  _check_columns(source, algorithm)
  judge = _make_judge(config, tokenizer)
  turn_taking = data.make_conversation_config(config, tokenizer)
  engine = sampler.make_engine(
    config, fns[0], tokenizer, both.sampler, algorithm.processors
  )
  shapes = members.make_shapes(fns[0], both.trainer)
  transfer = sampler.make_transfer(fns[0], shapes, both)
  # The sampler has no expert capacity, so parity is checked without one.
  dropless = _make_policy_fns(config, fns[0].config, both, expert_capacity=0)
  learner = make_learner(
    config,
    algorithm,
    fns,
    path,
    both.trainer,
    column=source.column,
    frozen=frozen,
    views=_make_views(algorithm, source, tokenizer),
    sampler_logprobs=_make_exact_score(config, engine, transfer),
  )
  worker = make_worker(config, engine, source, judge, turn_taking, algorithm)
  return Run(
    config=config,
    source=source,
    worker=worker,
    pipeline=_make_pipeline(config),
    learner=learner,
    transfer=transfer,
    parity_check=sampler.make_parity_check(config, dropless, both, transfer),
    check_batch=sampler.make_batch_check(
      config, fns[0], both, tokenizer, algorithm
    ),
    pretraining=_make_pretraining(config, worker, learner),
    critic_params=functools.partial(
      _critic_params, learner, init_from=config.value.init_from
    ),
    evaluators=_make_evaluators(config, worker.writer, problems),
    judge=judge,
    tokenizer=tokenizer,
    inputs=data.digests(config) | frozen_inputs,
    notes=data.notes(source),
  )


def _make_judge(config: Settings, tokenizer: Tokenizer) -> Judge:
  reward = config.reward
  with located("config.reward"):
    pool = rewards.RewardPool(
      rewards.get_reward(reward.name, reward.path, reward.function),
      grading=rewards.Grading(dict(reward.weights), reward.threshold),
      **_limits(reward),
    )
  return Judge(
    tokenizer.decode,
    pool,
    name=reward.name,
    correct=reward.correct,
    incorrect=reward.incorrect,
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


def _make_exact_score(config, engine, transfer) -> Callable | None:
  """Makes `Scorer.sampler_logprobs` for exact sampling."""
  if not config.sampler.exact:
    return None
  settings = _sampling_settings(config)

  def exact_score(params, rollout):
    # Sends the parameters again, to detect wrong ones in the sampler.
    sent = transfer.send(params, 0).params
    return score(engine, sent, rollout, settings=settings)

  return exact_score


def _make_pipeline(config: Settings) -> Pipeline:
  schedule = config.schedule
  return Pipeline(
    lag=schedule.lag,
    overlap=schedule.overlap,
    max_staleness=config_lib.most_staleness(config) - schedule.lag,
    streaming=schedule.streaming,
  )


def _sampling_settings(config: Settings) -> SamplingSettings:
  return SamplingSettings(
    temperature=config.sampler.temperature,
    max_new_tokens=config.sampler.max_response_length,
  )


def make_fns(
  config: Settings,
  model_config: models.ModelConfig,
  both: meshes.Meshes,
  critic: Critic | None = None,
) -> tuple[models.ModelFns, models.ValueFns]:
  """Makes the functions of policy and critic, with their adapters.

  Those of a critic are made in any case, for accounts of its sizes.

  Raises:
    InputError: An adapter target matches no layer, or no layer has an adapter.
  """
  linear = models.linear_layers(model_config)
  for target in config.model.lora_targets:
    if not any(target in path for path in linear):
      raise InputError(
        f"config.model.lora_targets: {target!r} is not part of any linear"
        f" layer's path; choose from {', '.join(linear)}, or parts of these"
      )
  adapted = models.adapted(config, model_config)
  value_config = models.critic_config(config, model_config)
  for made in (adapted, value_config):
    own, paths = made.adapters, models.linear_layers(made)
    # Without any adapter, all parameters would be trained.
    if own and not any(map(own.targets_layer, paths)):
      raise InputError(
        "config.model.lora_targets: 'mlp' does not include the router, so no"
        " layer of this model would have an adapter; add another target"
      )
  replay = config.model.replay_routing
  policy = _make_policy_fns(config, adapted, both, replay_routing=replay)
  value = models.make_value(
    value_config,
    reads_logprobs=config.value.reads_logprobs,
    head=critic.head if critic else models.SCALAR,
    **_trainer_settings(config, value_config, both),
  )
  if critic and critic.wrap_fns:
    value = critic.wrap_fns(value)
  return policy, value


def _with_unused(model_config, tokenizer) -> models.ModelConfig:
  unused = tokenizer.unused(model_config.vocab_size)
  return dataclasses.replace(model_config, unused=unused)


def _trainer_settings(config, model_config, both) -> dict[str, Any]:
  return {
    "numerics": models.Numerics(
      activations=jnp.dtype(config.model.dtype), matmul=config.model.matmul
    ),
    "remat_policy": config.model.remat_policy,
    "kernels": config.model.kernels,
    "expert_capacity": config.model.expert_capacity,
    "sharding": sharding.packed_kv_sharding(
      both.trainer, model_config.num_kv_heads
    ),
  }


def _make_policy_fns(config, model_config, both, **settings) -> models.ModelFns:
  sampled = jnp.dtype(config.model.sampler_dtype or config.model.dtype)
  return models.make_policy(
    model_config,
    sampler=models.Numerics.all(
      sampled,
      kv=jnp.dtype(config.model.cache_dtype or sampled),
      matmul=config.model.sampler_matmul or config.model.matmul,
    ),
    head_chunk=config.model.head_chunk,
    head_sharding=sharding.head_sharding(both.trainer, model_config.vocab_size),
    sampler_sharding=sharding.slot_sharding(
      both.sampler, model_config.num_kv_heads
    ),
    kv_block=config.sampler.kv_block,
    **(_trainer_settings(config, model_config, both) | settings),
  )


def make_learner(
  config: Settings,
  algorithm: Algorithm,
  fns: tuple[models.ModelFns, models.ValueFns],
  path: str,
  mesh: jax.sharding.Mesh,
  **given: Any,
) -> Learner:
  """Makes the learner.

  Args:
    config: settings of the run.
    algorithm: the algorithm that they choose.
    fns: functions of policy and critic.
    path: directory of the initial weights.
    mesh: mesh of all models.
    **given: further attributes of the learner, see `Scorer`.
  """
  policy_fns, critic_fns = fns
  of = functools.partial(update_settings, config)
  training = members.policy_training(policy_fns, algorithm)
  policy = members.make_member(policy_fns, training, of("policy"), mesh)
  found = {"policy": policy}
  if algorithm.critic is not None:
    training = members.critic_training(critic_fns, algorithm)
    critic = members.make_member(critic_fns, training, of("value"), mesh)
    if policy_fns.config.adapters and critic_fns.config.adapters:
      critic = dataclasses.replace(critic, shares_base=True, base=policy.base)
    found["critic"] = critic
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
      read_policy_params,
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
    tokenizer.check_same(Tokenizer(path))
    model_config = hf.read_config(path)
    data.check_context(config, model_config, tokenizer)
    model_config = _with_unused(model_config, tokenizer)
    # A capacity is for training: a score must not depend on other tokens.
    fns = _make_policy_fns(config, model_config, both, expert_capacity=0)
    read_params = functools.partial(
      read_policy_params, path, model_config=model_config
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
  engine: RolloutEngine,
  source: PromptSource,
  judge: Judge,
  turn_taking: ConversationConfig | None,
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
  key, samples = run_key(config.run.seed, ROLLOUTS), config.data.group_size
  sampled = _sampling_settings(config)
  writer = ResponseWriter(engine, sampled, key, samples, judge, turn_taking)
  replay = None
  if schedule.replay:
    replay = (algorithm.replay or Replay)(
      groups=config_lib.replayed_groups(config),
      capacity=schedule.replay_capacity,
      keep=schedule.replay_keep,
      seed=config.run.seed,
      feed=algorithm.feed and algorithm.feed(),
    )
  group_reward = _make_group_reward(config, judge, algorithm)
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
  key = run_key(config.run.seed, PRETRAINING)
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
    seed=(config.run.seed, PRETRAINING),
  )


def _make_evaluators(config, writer, problems) -> list[Evaluator]:
  """Makes an evaluator per set; their sampling parameters are config.eval's."""
  temperature, top_p = config.eval.temperature, config.eval.top_p
  writer = dataclasses.replace(
    writer,
    settings=dataclasses.replace(
      writer.settings, temperature=temperature, top_p=top_p
    ),
    key=run_key(config.run.seed, EVALUATION),
    group_size=config.eval.samples,
  )
  evaluators = [Evaluator(**one._asdict(), writer=writer) for one in problems]
  if best := config.checkpoint.best:
    tries = config.eval.samples, *config.eval.pass_k
    check_metric(best, evaluators, tries, greedy=config.eval.greedy)
  return evaluators


def read_policy_params(
  path: str, shapes: Any, model_config: models.ModelConfig, *, seed: int = 0
) -> Any:
  """Reads the parameters of a model with the shardings of `shapes`.

  Adapters, if any, are newly initialized with the seed.
  """
  adapters = model_config.adapters
  places = jax.tree.map(lambda x: x.sharding, shapes)
  dtype = models.BASE_DTYPES[adapters.base_dtype] if adapters else "float32"
  params = hf.read_params(path, model_config, dtype=dtype, places=places)
  if adapters is None:
    return params
  begin = functools.partial(models.with_adapters, config=model_config)
  begin = jax.jit(begin, out_shardings=places, donate_argnums=0)
  return begin(params, jax.random.key(seed))


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


def _limits(reward) -> dict[str, Any]:
  """Returns the number of workers and the time limits of rewards."""
  return {
    "workers": reward.workers,
    "deadline_s": reward.deadline_s,
    "batch_deadline_s": reward.batch_deadline_s or math.inf,
  }


def _make_group_reward(config, judge, algorithm) -> GroupReward | None:
  reward = config.reward
  fn = algorithm.group_reward or rewards.GROUP_REWARDS[reward.group]
  if fn is None:
    return None
  grading = rewards.Grading(threshold=reward.threshold)
  return GroupReward(fn, judge, grading=grading, **_limits(reward))
