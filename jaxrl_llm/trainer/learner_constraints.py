"""Constraints between settings of models, estimators, losses and updates."""

import inspect
from typing import Any

from jaxrl_llm import config as config_lib
from jaxrl_llm import rewards
from jaxrl_llm.learner import choices
from jaxrl_llm.learner.choices import correction_of, has_critic, make_part
from jaxrl_llm.learner.parts import Part
from jaxrl_llm.masked import NORM_MODES
from jaxrl_llm.models.numerics import FORMATS

# (whether a config violates the rule, incompatible keys, advice)
Rules = list[tuple[Any, str, str]]


def compares_groups(estimator: Part) -> bool:
  """Returns whether advantages depend on other responses to the prompt."""
  return not {"groups", "example_id"}.isdisjoint(estimator.reads)


# Each rule: its condition and keys on the first lines, then the advice.
# fmt: off

def groups(config: Any) -> Rules:
  """Checks group baselines and the pretraining of a critic."""
  estimator, size = config.estimator, config.data.group_size
  name, center, pivot = estimator.name, estimator.center, estimator.drop_pivot
  part, read = make_part(choices.ESTIMATORS, "estimator", estimator.to_dict())
  uncentered = "center" in read and center == "none"
  grouped = compares_groups(part) and not (has_critic(config) or uncentered)
  has_pivot = (name, center) == ("group", "median")
  negative = {
    "reward.incorrect": config.reward.incorrect < 0,
    "reward.overlong_buffer": config.reward.overlong_buffer,
    "loss.kl_reward_coefficient": config.loss.kl_reward_coefficient,
  }
  return [
    ("gamma" not in read and estimator.gamma < 1,
      "estimator.gamma, estimator.name",
      "this estimator has no discount; use gamma=1 or 'reward_to_go'"),
    (grouped and size < 2, "data.group_size, estimator.name",
      "a group baseline needs data.group_size=2 or more"),
    (config.schedule.dynamic_sampling and size < 2,
      "data.group_size, schedule.dynamic_sampling",
      "dynamic sampling needs data.group_size=2 or more"),
    ((name, center) == ("group", "none"), "estimator.name, estimator.center",
      "this estimator needs a baseline; use 'mean', 'median' or"
      " 'leave_one_out'"),
    *((name == "maxrl" and below, f"estimator.name, {key}",
      "'maxrl' divides by the mean reward, so rewards must not be negative;"
      f" use {key}=0")
      for key, below in negative.items()),
    (name == "turn_gae" and (estimator.gamma, estimator.lambda_value) != (1, 1),
      "estimator.name, estimator.gamma, estimator.lambda_value",
      "returns of 'turn_gae' are sums of rewards; use gamma=1 and"
      " lambda_value=1"),
    (pivot and not has_pivot,
      "estimator.drop_pivot, estimator.name, estimator.center",
      "the pivot is a group's median; use name='group' and center='median'"),
    (pivot and has_pivot and size % 2 == 0,
      "estimator.drop_pivot, data.group_size",
      "only groups of odd size have a median response; change data.group_size"),
    *((config.value[key] and not has_critic(config),
      f"value.{key}, estimator.name",
      "this estimator has no critic to pretrain; set the steps to 0")
      for key in ("pretrain_steps", "reward_model_steps")),
  ]


def off_policy(config: Any) -> Rules:
  """Checks the proximal policy against the loss."""
  proximal, name = config.off_policy.proximal, config.loss.name
  loss, _ = make_part(choices.POLICY_LOSSES, "loss", config.loss.to_dict())
  no_ratio = proximal == "none"
  corrected = proximal != "recompute" or correction_of(config)[0] != "none"
  compares = {
    "policy": "proximal_logprobs" in loss.reads or config.loss.kl_coefficient,
    "value": config.loss.clip_value and has_critic(config),
  }
  return [
    *((config.model.expert_capacity and compared
        and config.optimizer[role].epochs > 1,
      f"model.expert_capacity, optimizer.{role}.epochs",
      "a later epoch's mini-batches drop other tokens than those that were"
      " scored; use epochs=1 or expert_capacity=0")
      for role, compared in compares.items()),
    (proximal == "ewma" and name not in ("clip", "cispo"),
      "off_policy.proximal, loss.name",
      "'ewma' needs a ratio per token; use loss.name='clip' or 'cispo'"),
    (no_ratio and "proximal_logprobs" in loss.reads,
      "loss.name, off_policy.proximal",
      "this loss takes a ratio; use proximal='recompute', or"
      " loss.name='likelihood'"),
    (no_ratio and correction_of(config)[0] != "none",
      "off_policy.correction, off_policy.proximal",
      "a correction needs a proximal policy; use correction='none'"),
    (proximal == "stored" and name == "policy_gradient",
      "loss.name, off_policy.proximal",
      "this loss has no ratio and needs no proximal policy; use 'recompute'"),
    (config.sampler.processors and not corrected,
      "sampler.processors, off_policy.correction",
      "they change the sampling distribution, but the trainer scores the"
      " policy's; use correction='truncate' or 'mask'"),
  ]


def adapters(config: Any) -> Rules:
  """Checks low-rank adapters."""
  model, groups = config.model, {"policy": "model", "value": "value"}
  ranks = {role: config[group].lora_rank for role, group in groups.items()}
  full = not ranks["policy"] or (has_critic(config) and not ranks["value"])
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


def critics(config: Any) -> Rules:
  """Checks the bins of a categorical critic, and critics of several models."""
  value, reward = config.value, config.reward
  worst = reward.incorrect
  worst -= reward.overlong_factor if reward.overlong_buffer else 0.0
  covered = value.low < worst < reward.correct < value.high
  several = value.ensemble and has_critic(config)
  falls = config.optimizer.value.learning_rate_schedule != "constant"
  longer = has_critic(config) and value.pretrain_steps > config.run.steps
  return [
    (falls and longer,
      "optimizer.value.learning_rate_schedule, value.pretrain_steps, run.steps",
      "value pretraining would reach the end of the learning-rate schedule"
      " after run.steps batches; use 'constant', or raise run.steps"),
    (config.loss.clip_value and value.head == "categorical",
      "value.head, loss.clip_value",
      "a distribution over bins cannot be clipped; use clip_value=None or"
      " head='scalar'"),
    (value.head == "categorical" and has_critic(config) and not covered,
      "value.low, value.high",
      f"the bins must cover the rewards, {worst:g} to {reward.correct:g}, with"
      " a margin"),
    (config.loss.clip_value and several, "value.ensemble, loss.clip_value",
      "the mean of the critics is not the old value of any of them; use"
      " clip_value=None"),
    (value.answer_format and "{answer}" not in value.answer_format,
      "value.answer_format", "the text has no {answer}; add it, or use ''"),
    (config.estimator.agree_share and not several,
      "estimator.agree_share, value.ensemble",
      "one critic cannot disagree; set ensemble='halves', or agree_share=0"),
  ]


def kept_weights(config: Any) -> Rules:
  """Checks the weights that are kept to separate mismatch from staleness."""
  settings = config.off_policy
  kept = settings.keep_weights
  return [
    (kept and settings.proximal != "recompute",
      "off_policy.keep_weights, off_policy.proximal",
      "staleness is measured from the policy at the start of the update; use"
      " proximal='recompute' or keep_weights=''"),
    (kept and settings.correction == "none",
      "off_policy.keep_weights, off_policy.correction",
      "only a correction uses kept weights; use correction='auto' or"
      " keep_weights=''"),
    (kept and not config_lib.most_staleness(config),
      "off_policy.keep_weights, schedule.lag, schedule.stop",
      "all tokens are from the newest weights; set a lag, stop='first_groups'"
      " or keep_weights=''"),
  ]


def corrections(config: Any) -> Rules:
  """Checks the importance weights of off-policy tokens."""
  proximal, level = config.off_policy.proximal, config.off_policy.level
  correction, _ = correction_of(config)
  mixed, clips = proximal == "interpolate", config.loss.name == "clip"
  mixes_with = correction == "none" or (correction, level) == (
    "truncate", "token")
  return [
    (proximal == "ewma" and correction == "none",
      "off_policy.proximal, off_policy.correction",
      "'ewma' needs the weight proximal/behavior for a correct policy gradient;"
      " use correction='auto'"),
    (proximal == "stored" and correction != "none",
      "off_policy.correction, off_policy.proximal",
      "the ratio to the sampler's log-probs is the correction; use"
      " correction='none' or proximal='recompute'"),
    (mixed and not clips, "off_policy.proximal, loss.name",
      "'interpolate' is defined for loss.name='clip' only"),
    (mixed and clips and not mixes_with,
      "off_policy.proximal, off_policy.correction, off_policy.level",
      "'interpolate' supports correction='none', or 'truncate' with"
      " level='token'"),
  ]


def losses(config: Any) -> Rules:
  """Checks the terms of the loss and of the reward."""
  loss, environment = config.loss, config.environment
  reward = rewards.REWARDS[config.reward.name]
  counts_turns = "conversation" in inspect.signature(reward).parameters
  estimator, _ = make_part(
    choices.ESTIMATORS, "estimator", config.estimator.to_dict())
  _, read = make_part(choices.POLICY_LOSSES, "loss", loss.to_dict())
  shaped = {
    "reward.overlong_buffer": config.reward.overlong_buffer,
    "loss.kl_reward_coefficient": loss.kl_reward_coefficient,
  }
  return [
    *((used and "token_rewards" not in estimator.reads,
      f"estimator.name, {key}",
      f"this estimator does not read the reward that {key} changes; set it"
      " to 0")
      for key, used in shaped.items()),
    (loss.kl_coefficient and loss.kl_reward_coefficient,
      "loss.kl_coefficient, loss.kl_reward_coefficient",
      "use the KL as a loss or in the reward; set one of them to 0"),
    (loss.kl == "k1", "loss.kl",
      "the expected gradient of 'k1' is 0, so as a loss it regularizes nothing;"
      " use 'k1+', which has its value, or loss.kl_reward_coefficient"),
    (loss.dual_clip and "dual_clip" not in read,
      "loss.dual_clip, loss.name",
      "this loss has no dual clip; use dual_clip=None, or 'clip' or 'hapo'"),
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
