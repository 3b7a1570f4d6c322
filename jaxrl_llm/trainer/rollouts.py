"""Builds the components of a run that generate and judge responses."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxrl_llm import base_models, models, rewards, sync
from jaxrl_llm.config import Settings
from jaxrl_llm.config.keys import Reward
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import located
from jaxrl_llm.evaluate import Evaluator
from jaxrl_llm.learner import members
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.models.files import hf
from jaxrl_llm.rewards.groups import GroupReward
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rollout.engine import RolloutEngine
from jaxrl_llm.rollout.worker import run_key
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import SamplingSettings
from jaxrl_llm.trainer import data, meshes, model_fns, sampler

# Independent streams of randomness under the run's seed.
ROLLOUTS, EVALUATION, PRETRAINING = 1, 2, 3


class RolloutComponents(NamedTuple):
  """The components that generate and judge responses, and evaluate with them.

  Training adds the learner and the training prompts, see `build.make_run`.
  """

  meshes: meshes.Meshes
  policy: models.ModelFns
  tokenizer: Tokenizer
  engine: RolloutEngine
  transfer: sync.WeightTransfer  # From the policy to the sampler.
  writer: ResponseWriter

  def critic_fns(
    self, config: Settings, algorithm: Algorithm
  ) -> models.ValueFns | None:
    """Makes the functions of the critic, with its adapters; None without one.

    Raises:
      InputError: Its model cannot read the samples, or no layer has an adapter.
    """
    if algorithm.critic is None:
      return None
    if hf.is_model(config.value.init_from):
      self.tokenizer.check_same(Tokenizer(config.value.init_from))
    bare, critic = self.policy.config.base, algorithm.critic
    made = model_fns.make_critic_fns(config, critic, bare, self.meshes)
    before = critic.view.tokens if critic.view else 0
    data.check_context(config, made.config, self.tokenizer, before=before)
    return made

  def evaluators(
    self, config: Settings, problems: Iterable[data.Problems]
  ) -> list[Evaluator]:
    """Makes an evaluator per set, with the sampling parameters of `eval`."""
    writer = dataclasses.replace(
      self.writer,
      settings=dataclasses.replace(
        self.writer.settings,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
      ),
      key=run_key(config.run.seed, EVALUATION),
      group_size=config.eval.samples,
    )
    return [Evaluator(**one._asdict(), writer=writer) for one in problems]


def make_components(
  config: Settings, algorithm: Algorithm
) -> RolloutComponents:
  """Builds the components that generate and judge; loads no weights.

  Args:
    config: a validated config with absolute paths.
    algorithm: its algorithm.

  Raises:
    InputError: As in `build.make_run`.
  """
  both = meshes.make_meshes(config)
  path = base_models.model_path(config)
  model_config, tokenizer = model_fns.read_model(config, path)
  policy = model_fns.make_policy_fns(config, model_config, both)
  engine = sampler.make_engine(
    config, policy, tokenizer, both.sampler, algorithm.processors
  )
  shapes = members.make_shapes(policy, both.trainer)
  writer = ResponseWriter(
    engine,
    SamplingSettings(
      temperature=config.sampler.temperature,
      max_new_tokens=config.sampler.max_response_length,
    ),
    run_key(config.run.seed, ROLLOUTS),
    config.data.group_size,
    _make_judge(config, tokenizer),
    data.make_conversation_config(config, tokenizer),
  )
  transfer = sampler.make_transfer(policy, shapes, both)
  return RolloutComponents(both, policy, tokenizer, engine, transfer, writer)


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


def make_group_reward(
  config: Settings, judge: Judge, algorithm: Algorithm
) -> GroupReward | None:
  """Makes the reward of whole groups; None without one."""
  reward = config.reward
  fn = algorithm.group_reward or rewards.GROUP_REWARDS[reward.group]
  if fn is None:
    return None
  grading = rewards.Grading(threshold=reward.threshold)
  return GroupReward(fn, judge, grading=grading, **_limits(reward))


def _limits(reward: Reward) -> dict[str, Any]:
  """Returns the number of workers and the time limits of rewards."""
  return {
    "workers": reward.workers,
    "deadline_s": reward.deadline_s,
    "batch_deadline_s": reward.batch_deadline_s or math.inf,
  }
