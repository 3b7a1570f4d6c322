"""Constraints between settings that are valid on their own, by topic."""

import inspect
from typing import Any

import jax

from jaxrl_llm import config as config_lib
from jaxrl_llm import rewards
from jaxrl_llm.data import sources
from jaxrl_llm.learner.build_algorithm import make_algorithm
from jaxrl_llm.learner.choices import correction_of, has_critic
from jaxrl_llm.learner.parts import leaves_of
from jaxrl_llm.masked import NORM_MODES

Wrong = dict[str, str]  # Keys that do not go together -> what to do.


def broken(config: Any) -> Wrong:
  """Returns the constraints that a config violates, most important first."""
  wrong: Wrong = {}
  for topic in (
    sizes,
    files,
    windows,
    streaming,
    drafts,
    groups,
    off_policy,
    corrections,
    losses,
    several_processes,
  ):
    topic(config, wrong)
  return wrong


def sizes(config: Any, wrong: Wrong) -> None:
  """Checks the sizes of batches and meshes, and the order of the rewards."""
  if config.reward.correct <= config.reward.incorrect:
    wrong["reward.correct, reward.incorrect"] = (
      "a correct response must be worth more than an incorrect one"
    )
  batch, slots = config_lib.batch_size(config), config.sampler.slots
  # With windows the number of ended responses varies, so the critic takes any.
  critic = has_critic(config) and not config.schedule.window
  for role in ("policy", "value") if critic else ("policy",):
    if batch % config.optimizer[role].mini_batch:
      wrong[f"optimizer.{role}.mini_batch"] = (
        f"must divide the batch of {batch} = data.prompts_per_step *"
        " data.group_size"
      )
  if 0 < slots < max(config.data.group_size, config.eval.samples):
    wrong["sampler.slots, data.group_size, eval.samples"] = (
      "raise sampler.slots: they must hold at least one group"
    )
  mesh = config.sampler.mesh
  if mesh.data == 0 and max(mesh.fsdp, mesh.tensor) > 1:
    wrong["sampler.mesh.data, sampler.mesh.fsdp, sampler.mesh.tensor"] = (
      "data=0 shares the trainer's mesh; set it to -1 or at least 1"
    )


def files(config: Any, wrong: Wrong) -> None:
  """Checks settings that the data source may not have."""
  data = config.data
  given = data.split != config_lib.KEYS["data.split"].default
  if given and "split" not in sources.reads(data.source):
    wrong["data.split, data.source"] = (
      "this source has no splits; set data.path to the training files and"
      " eval.path to the evaluation files"
    )


def windows(config: Any, wrong: Wrong) -> None:
  """Checks T-PPO's windows and over-provisioning."""
  schedule, estimator = config.schedule, config.estimator
  windowed = schedule.window > 0
  if windowed and not has_critic(config):
    wrong["schedule.window, estimator.name"] = (
      "group estimators need whole groups, but windows end their responses in"
      " different steps; use estimator.name='gae' or schedule.window=0"
    )
  if schedule.window > config.sampler.max_response_length:
    wrong["schedule.window, sampler.max_response_length"] = (
      "the window must not exceed the maximum response length"
    )
  if windowed and schedule.dynamic_sampling:
    wrong["schedule.window, schedule.dynamic_sampling"] = (
      "unfinished groups have no rewards to filter by; switch one of them off"
    )
  whole = schedule.stop == "all" and not schedule.dynamic_sampling
  if schedule.over_provision > 1 and whole:
    wrong["schedule.over_provision, schedule.stop"] = (
      "the surplus groups would be discarded; use schedule.stop='first_groups'"
      " or schedule.dynamic_sampling=True"
    )
  # The rest applies to responses cut by a window, not to ended ones.
  if windowed and estimator.normalize == "whiten":
    wrong["schedule.window, estimator.normalize"] = (
      "centering shifts the zero advantage at a cut; use 'scale' or 'none'"
    )
  if windowed and estimator.boundary == "zero":
    wrong["schedule.window, estimator.boundary"] = (
      "a cut response continues, so the value there is not 0; use 'repeat' or"
      " 'bootstrap'"
    )
  if windowed and estimator.boundary == "repeat" and estimator.gamma < 1:
    wrong["estimator.boundary, estimator.gamma"] = (
      "a discount would penalize every cut; use gamma=1 or 'bootstrap'"
    )
  if windowed and config.loss.overlong_filter:
    wrong["schedule.window, loss.overlong_filter"] = (
      "earlier windows are trained before a response is known to be overlong;"
      " switch one of them off"
    )


def streaming(config: Any, wrong: Wrong) -> None:
  """Checks streaming: gradients accumulated while other groups are sampled."""
  schedule = config.schedule
  if not schedule.streaming:
    return
  plain = {"lag": 0, "window": 0, "stop": "all", "dynamic_sampling": False}
  for key, value in plain.items():
    if schedule[key] != value:
      wrong[f"schedule.streaming, schedule.{key}"] = (
        "streaming needs a whole batch from the newest weights; switch one of"
        " them off"
      )
  batch = config_lib.batch_size(config)
  for role in ("policy", "value") if has_critic(config) else ("policy",):
    settings = config.optimizer[role]
    if settings.mini_batch != batch or settings.epochs > 1:
      key = f"optimizer.{role}"
      wrong[f"schedule.streaming, {key}.mini_batch, {key}.epochs"] = (
        f"streaming makes one update per batch; use mini_batch={batch} and"
        " epochs=1"
      )
  if config.run.replay_every:
    wrong["schedule.streaming, run.replay_every"] = (
      "a streamed batch is not kept for a second update; switch one of them off"
    )
  read = leaves_of(["advantages"], make_algorithm(config).parts)
  whole = {
    "estimator.name": "example_id" in read,  # Compares groups of a prompt.
    "estimator.normalize": config.estimator.normalize != "none",
    "loss.name": config.loss.name == "hapo",
    "loss.nll_coefficient": config.loss.nll_coefficient > 0,
    "off_policy.ess_scale": config.off_policy.ess_scale,
    "off_policy.proximal": config.off_policy.proximal == "ewma",
  }
  for key in (key for key, needed in whole.items() if needed):
    wrong[f"schedule.streaming, {key}"] = (
      "needs the whole batch before the first gradient; switch one of them off"
    )


def drafts(config: Any, wrong: Wrong) -> None:
  """Checks drafting against batches that depend on the order of completion."""
  for key, plain in (("stop", "all"), ("streaming", False)):
    if config.sampler.drafter and config.schedule[key] != plain:
      wrong[f"sampler.drafter, schedule.{key}"] = (
        "drafting depends on measured times, which would decide which responses"
        " end first; switch one off to keep the run reproducible"
      )


def groups(config: Any, wrong: Wrong) -> None:
  """Checks group baselines and the pretraining of a critic."""
  estimator, size = config.estimator, config.data.group_size
  name, center = estimator.name, estimator.center
  of_wholes = name in ("group", "token_group", "optimal_baseline")
  if of_wholes and estimator.gamma < 1:
    wrong["estimator.gamma, estimator.name"] = (
      "this estimator has no discount; use gamma=1 or 'reward_to_go'"
    )
  grouped = of_wholes or (name == "reward_to_go" and center != "none")
  if grouped and size < 2:
    wrong["data.group_size, estimator.name"] = (
      "a group baseline needs data.group_size=2 or more"
    )
  if config.schedule.dynamic_sampling and size < 2:
    wrong["data.group_size, schedule.dynamic_sampling"] = (
      "dynamic sampling needs data.group_size=2 or more"
    )
  if (name, center) == ("group", "none"):
    wrong["estimator.name, estimator.center"] = (
      "this estimator needs a baseline; use 'mean', 'median' or 'leave_one_out'"
    )
  if estimator.drop_pivot and (name, center) != ("group", "median"):
    wrong["estimator.drop_pivot, estimator.name, estimator.center"] = (
      "the pivot is a group's median; use name='group' and center='median'"
    )
  elif estimator.drop_pivot and size % 2 == 0:
    wrong["estimator.drop_pivot, data.group_size"] = (
      "only groups of odd size have a median response; change data.group_size"
    )
  for key in ("pretrain_steps", "reward_model_steps"):
    if config.value[key] and not has_critic(config):
      wrong[f"value.{key}, estimator.name"] = (
        "this estimator has no critic to pretrain; set the steps to 0"
      )


def off_policy(config: Any, wrong: Wrong) -> None:
  """Checks the proximal policy against the loss and other readers of scores."""
  proximal, name = config.off_policy.proximal, config.loss.name
  if proximal == "ewma" and name not in ("clip", "cispo"):
    wrong["off_policy.proximal, loss.name"] = (
      "'ewma' needs a ratio per token; use loss.name='clip' or 'cispo'"
    )
  if proximal not in ("stored", "interpolate"):
    return
  if name == "policy_gradient":
    wrong["loss.name, off_policy.proximal"] = (
      "this loss has no ratio and needs no proximal policy; use 'recompute'"
    )
  scored = {
    "off_policy.ess_scale": config.off_policy.ess_scale,
    "estimator.name": config.estimator.name == "optimal_baseline",
    "sampler.entropy_tau": config.sampler.entropy_tau,
    "loss.name": name == "hapo",
  }
  for key in filter(scored.get, scored):
    wrong[f"{key}, off_policy.proximal"] = (
      "needs the log-probs or entropies of the trainer's scoring pass; use"
      " proximal='recompute'"
    )


def corrections(config: Any, wrong: Wrong) -> None:
  """Checks the importance weights of off-policy tokens."""
  proximal, level = config.off_policy.proximal, config.off_policy.level
  correction, _ = correction_of(config)
  if config.off_policy.keep_weights:
    kept_weights(config, wrong)
  if proximal == "ewma" and correction == "none":
    wrong["off_policy.proximal, off_policy.correction"] = (
      "'ewma' needs the weight proximal/behavior for a correct policy gradient;"
      " use correction='auto'"
    )
  if proximal == "stored" and correction != "none":
    wrong["off_policy.correction, off_policy.proximal"] = (
      "the ratio to the sampler's log-probs is the correction; use"
      " correction='none' or proximal='recompute'"
    )
  if proximal == "interpolate" and config.loss.name != "clip":
    wrong["off_policy.proximal, loss.name"] = (
      "'interpolate' is defined for loss.name='clip' only"
    )
  elif proximal == "interpolate" and correction != "none":
    if (correction, level) != ("truncate", "token"):
      wrong["off_policy.proximal, off_policy.correction, off_policy.level"] = (
        "'interpolate' supports correction='none', or 'truncate' with"
        " level='token'"
      )


def kept_weights(config: Any, wrong: Wrong) -> None:
  """Checks the weights that are kept to separate mismatch from staleness."""
  if config.off_policy.proximal != "recompute":
    wrong["off_policy.keep_weights, off_policy.proximal"] = (
      "staleness is measured from the policy at the start of the update; use"
      " proximal='recompute' or keep_weights=''"
    )
  if config.off_policy.correction == "none":
    wrong["off_policy.keep_weights, off_policy.correction"] = (
      "only a correction uses kept weights; use correction='auto' or"
      " keep_weights=''"
    )
  if not config_lib.most_staleness(config):
    wrong["off_policy.keep_weights, schedule.lag, schedule.stop"] = (
      "all tokens are from the newest weights; set a lag, stop='first_groups'"
      " or keep_weights=''"
    )


def losses(config: Any, wrong: Wrong) -> None:
  """Checks the terms of the loss and of the reward."""
  loss = config.loss
  if loss.kl_coefficient and loss.kl_reward_coefficient:
    wrong["loss.kl_coefficient, loss.kl_reward_coefficient"] = (
      "use the KL as a loss or in the reward; set one of them to 0"
    )
  if loss.dual_clip and loss.name in ("gspo", "cispo", "policy_gradient"):
    wrong["loss.dual_clip, loss.name"] = (
      "this loss has no dual clip; use dual_clip=None, or 'clip' or 'hapo'"
    )
  if loss.norm and loss.mode not in NORM_MODES:
    wrong["loss.norm, loss.mode"] = (
      f"only {' and '.join(map(repr, NORM_MODES))} read loss.norm; set it to 0"
    )
  if config.reward.overlong_buffer > config.sampler.max_response_length:
    wrong["reward.overlong_buffer, sampler.max_response_length"] = (
      "the buffer must not be longer than the response"
    )
  if config.reward.name == "environment" and not config.environment.name:
    wrong["reward.name, environment.name"] = (
      "this reward comes from an environment; choose one or another reward"
    )
  reward = rewards.REWARDS[config.reward.name]
  counts_turns = "conversation" in inspect.signature(reward).parameters
  if config.environment.rewards != "end" and not counts_turns:
    wrong["environment.rewards, reward.name"] = (
      "this reward ignores the rewards of turns; use reward.name='environment'"
      " or your own with an argument `conversation`"
    )


def several_processes(config: Any, wrong: Wrong) -> None:
  """Checks settings whose results depend on timing, with several processes."""
  if jax.process_count() == 1:
    return
  if config.schedule.lag and config.schedule.overlap:
    wrong["schedule.lag, schedule.overlap"] = (
      "several processes must alternate; use schedule.overlap=False"
    )
  for key, other in (
    ("schedule.streaming", False),
    ("sampler.drafter", ""),
    ("environment.name", ""),
    ("run.replay_every", 0),
  ):
    if config_lib.get(config, key) != other:
      wrong[key] = f"not supported with several processes; set it to {other!r}"
