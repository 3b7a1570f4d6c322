"""Constraints between settings of models, estimators, losses and updates."""

import inspect
from typing import Any

from jaxrl_llm import rewards
from jaxrl_llm.config import Settings
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.core import correction_of
from jaxrl_llm.learner.parts import Part
from jaxrl_llm.masked import NORM_MODES
from jaxrl_llm.models.numerics import FORMATS

# (whether a config violates the rule, incompatible keys, advice)
Rules = list[tuple[Any, str, str]]


def compares_groups(estimator: Part) -> bool:
  """Returns whether advantages depend on other responses to the prompt."""
  return not {"groups", "example_id"}.isdisjoint(estimator.reads)


def chosen(config: Settings, key: str) -> str:
  """Returns the keys that have chosen a part: methods may replace it."""
  return f"{key}, method.use" if config.method.use else key


# Each rule: its condition and keys on the first lines, then the advice.
# fmt: off

def groups(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks group baselines and the pretraining of a critic."""
  estimator, size = config.estimator, config.data.group_size
  advantages, critic = algorithm.advantages, algorithm.critic
  grouped = compares_groups(advantages) and not critic
  center = "center" in advantages.settings and estimator.center
  name = chosen(config, "estimator.name")
  return [
    ("gamma" not in advantages.settings and estimator.gamma < 1,
      f"estimator.gamma, {name}",
      "this estimator has no discount; use gamma=1, or GAE"),
    (grouped and size < 2, f"data.group_size, {name}",
      "a group baseline needs data.group_size=2 or more"),
    (config.schedule.dynamic_sampling and size < 2,
      "data.group_size, schedule.dynamic_sampling",
      "dynamic sampling needs data.group_size=2 or more"),
    (center == "none", f"{name}, estimator.center",
      "this estimator needs a baseline; use 'mean', 'median' or"
      " 'leave_one_out'"),
    *((config.value[key] and not algorithm.critic,
      f"value.{key}, {name}",
      "this estimator has no critic to pretrain; set the steps to 0")
      for key in ("pretrain_steps", "reward_model_steps")),
  ]


def off_policy(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the proximal policy against the loss."""
  reads = algorithm.policy_loss.reads
  corrected = algorithm.corrections or algorithm.proximal != "old_logprobs"
  stateless = algorithm.processors.keys() - algorithm.stateful_processors.keys()
  compares = {
    "policy": "proximal_logprobs" in reads or config.loss.kl_coefficient,
    "value": config.loss.clip_value and algorithm.critic,
  }
  return [
    *((config.model.expert_capacity and compared
        and config.optimizer[role].epochs > 1,
      f"model.expert_capacity, optimizer.{role}.epochs",
      "a later epoch's mini-batches drop other tokens than those that were"
      " scored; use epochs=1 or expert_capacity=0")
      for role, compared in compares.items()),
    (stateless and not corrected,
      "method.use, off_policy.correction",
      "they change the sampling distribution, but the trainer scores the"
      " policy's; use correction='truncate' or 'mask'"),
  ]


def adapters(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks low-rank adapters."""
  model, groups = config.model, {"policy": "model", "value": "value"}
  ranks = {role: config[group].lora_rank for role, group in groups.items()}
  full = not ranks["policy"] or (algorithm.critic and not ranks["value"])
  return [
    (model.base_dtype != "float32" and full,
      "model.base_dtype, model.lora_rank, value.lora_rank",
      "only frozen weights under adapters can be stored in fewer bits; set"
      " lora_rank of policy and critic, or base_dtype='float32'"),
    (model.base_dtype in FORMATS and (model.matmul or model.sampler_matmul),
      "model.matmul, model.sampler_matmul, model.base_dtype",
      "a quantised base has its own matrix products; use '', or"
      " base_dtype='bfloat16'"),
    (any(ranks.values()) and not model.lora_targets,
      "model.lora_targets", "name a target, such as 'attention' or 'mlp/up'"),
    (ranks["value"] and config.value.init_from,
      "value.lora_rank, value.init_from",
      "a critic with adapters is made for the policy's base; use"
      " value.init_from='' or value.lora_rank=0"),
    *((ranks[role] and config.optimizer[role].frozen,
      f"optimizer.{role}.frozen, {group}.lora_rank",
      "adapters freeze all other weights already; leave frozen empty")
      for role, group in groups.items()),
  ]


def critics(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the pretraining of a critic."""
  falls = config.optimizer.value.learning_rate_schedule != "constant"
  longer = algorithm.critic and config.value.pretrain_steps > config.run.steps
  return [
    (falls and longer,
      "optimizer.value.learning_rate_schedule, value.pretrain_steps, run.steps",
      "value pretraining would reach the end of the learning-rate schedule"
      " after run.steps batches; use 'constant', or raise run.steps"),
  ]


def corrections(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the importance weights of off-policy tokens."""
  del algorithm
  stored = config.off_policy.proximal == "stored"
  return [
    (stored and correction_of(config)[0] != "none",
      "off_policy.correction, off_policy.proximal",
      "the ratio to the sampler's log-probs is the correction; use"
      " correction='none' or proximal='recompute'"),
  ]


def losses(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the terms of the loss and of the reward."""
  loss, environment = config.loss, config.environment
  reward = rewards.REWARDS[config.reward.name]
  counts_turns = "conversation" in inspect.signature(reward).parameters
  shaped = {
    "reward.overlong_buffer": config.reward.overlong_buffer,
    "loss.kl_reward_coefficient": loss.kl_reward_coefficient,
  }
  return [
    *((used and "token_rewards" not in algorithm.advantages.reads,
      f"{chosen(config, 'estimator.name')}, {key}",
      f"this estimator does not read the reward that {key} changes; set it"
      " to 0")
      for key, used in shaped.items()),
    (loss.kl_coefficient and loss.kl_reward_coefficient,
      "loss.kl_coefficient, loss.kl_reward_coefficient",
      "use the KL as a loss or in the reward; set one of them to 0"),
    (loss.kl == "k1", "loss.kl",
      "the expected gradient of 'k1' is 0, so as a loss it regularizes nothing;"
      " use 'k1+', which has its value, or loss.kl_reward_coefficient"),
    (loss.dual_clip and "dual_clip" not in algorithm.policy_loss.settings,
      f"loss.dual_clip, {chosen(config, 'loss.name')}",
      "this loss has no dual clip; use dual_clip=None, or the loss 'clip'"),
    (loss.norm and loss.mode not in NORM_MODES, "loss.norm, loss.mode",
      f"only {' and '.join(map(repr, NORM_MODES))} read loss.norm; set it to"
      " 0"),
    (config.reward.overlong_buffer > config.sampler.max_response_length,
      "reward.overlong_buffer, sampler.max_response_length",
      "the buffer must not be longer than the response"),
    (config.reward.name == "environment" and not environment.name,
      "reward.name, environment.name",
      "this reward comes from an environment; choose an environment or another"
      " reward"),
    (environment.rewards != "end" and not counts_turns,
      "environment.rewards, reward.name",
      "this reward ignores the rewards of turns; use reward.name='environment'"
      " or a custom reward with an argument `conversation`"),
  ]

# fmt: on
