"""Settings that are fine alone and do not go together, by topic."""

import inspect
from typing import Any

import jax

from jaxrl_llm import config as config_lib
from jaxrl_llm import rewards
from jaxrl_llm.data import sources
from jaxrl_llm.learner.choices import correction_of, has_critic
from jaxrl_llm.learner.methods import make_algorithm
from jaxrl_llm.learner.parts import leaves_of
from jaxrl_llm.masked import NORM_MODES

Wrong = dict[str, str]  # Keys that do not go together -> what to do.


def broken(config: Any) -> Wrong:
  """The constraints that a config breaks, the first to be told first."""
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
  """How many responses are trained on at a time, and what they are worth."""
  if config.reward.correct <= config.reward.incorrect:
    wrong["reward.correct, reward.incorrect"] = (
      "a right response must be worth more than a wrong one"
    )
  batch, slots = config_lib.batch_size(config), config.sampler.slots
  # Windows end any number of responses, so their critic takes what comes.
  critic = has_critic(config) and not config.schedule.window
  for role in ("policy", "value") if critic else ("policy",):
    if batch % config.optimizer[role].mini_batch:
      wrong[f"optimizer.{role}.mini_batch"] = (
        f"it must divide the batch of {batch} = data.prompts_per_step *"
        " data.group_size"
      )
  if 0 < slots < max(config.data.group_size, config.eval.samples):
    wrong["sampler.slots, data.group_size, eval.samples"] = (
      "the slots must hold one group"
    )
  mesh = config.sampler.mesh
  if mesh.data == 0 and max(mesh.fsdp, mesh.tensor) > 1:
    wrong["sampler.mesh.data, sampler.mesh.fsdp, sampler.mesh.tensor"] = (
      "data=0 shares the trainer's mesh; set data to 1 or more, or -1"
    )


def files(config: Any, wrong: Wrong) -> None:
  """What the source of the data has."""
  data = config.data
  given = data.split != config_lib.KEYS["data.split"].default
  if given and "split" not in sources.reads(data.source):
    wrong["data.split, data.source"] = (
      "this source has no splits; give the files of one by data.path, and"
      " those of another by eval.path"
    )


def windows(config: Any, wrong: Wrong) -> None:
  """Responses that are written in windows, and other schedules."""
  schedule, estimator = config.schedule, config.estimator
  windowed = schedule.window > 0
  if windowed and not has_critic(config):
    wrong["schedule.window, estimator.name"] = (
      "responses of a group end in different steps, so there is no group to"
      " compare with; use estimator.name='gae' or schedule.window=0"
    )
  if schedule.window > config.sampler.max_response_length:
    wrong["schedule.window, sampler.max_response_length"] = (
      "the window must be at most as long as a response"
    )
  if windowed and schedule.dynamic_sampling:
    wrong["schedule.window, schedule.dynamic_sampling"] = (
      "unfinished groups have no verdicts to filter on; switch one off"
    )
  whole = schedule.stop == "all" and not schedule.dynamic_sampling
  if schedule.over_provision > 1 and whole:
    wrong["schedule.over_provision, schedule.stop"] = (
      "more groups would be written than are trained on; use"
      " stop='first_groups' or dynamic_sampling=True"
    )
  # What a cut response, unlike an ended one, rules out.
  if windowed and estimator.normalize == "whiten":
    wrong["schedule.window, estimator.normalize"] = (
      "centering moves the zero advantage at a cut; use 'scale' or 'none'"
    )
  if windowed and estimator.boundary == "zero":
    wrong["schedule.window, estimator.boundary"] = (
      "what follows a cut is not worth nothing; use 'repeat' or 'bootstrap'"
    )
  if windowed and estimator.boundary == "repeat" and estimator.gamma < 1:
    wrong["estimator.boundary, estimator.gamma"] = (
      "a discount makes every cut a penalty; use gamma=1 or 'bootstrap'"
    )
  if windowed and config.loss.overlong_filter:
    wrong["schedule.window, loss.overlong_filter"] = (
      "earlier windows of an overlong response are trained before it is known"
      " to be one; switch one off"
    )


def streaming(config: Any, wrong: Wrong) -> None:
  """Gradients that are summed up while other groups are being written."""
  schedule = config.schedule
  if not schedule.streaming:
    return
  plain = {"lag": 0, "window": 0, "stop": "all", "dynamic_sampling": False}
  for key, value in plain.items():
    if schedule[key] != value:
      wrong[f"schedule.streaming, schedule.{key}"] = (
        "only a whole batch of the newest weights arrives group by group;"
        " switch one off"
      )
  batch = config_lib.batch_size(config)
  for role in ("policy", "value") if has_critic(config) else ("policy",):
    settings = config.optimizer[role]
    if settings.mini_batch != batch or settings.epochs > 1:
      key = f"optimizer.{role}"
      wrong[f"schedule.streaming, {key}.mini_batch, {key}.epochs"] = (
        f"gradients are summed up over the batch; use mini_batch={batch} and"
        " epochs=1"
      )
  if config.run.replay_every:
    wrong["schedule.streaming, run.replay_every"] = (
      "a batch that arrives group by group is not there to be learned from"
      " again; switch one off"
    )
  read = leaves_of(["advantages"], make_algorithm(config).parts)
  whole = {
    "estimator.name": "example_id" in read,  # To compare groups of a prompt.
    "estimator.normalize": config.estimator.normalize != "none",
    "loss.name": config.loss.name == "hapo",
    "loss.nll_coefficient": config.loss.nll_coefficient > 0,
    "off_policy.ess_scale": config.off_policy.ess_scale,
    "off_policy.proximal": config.off_policy.proximal == "ewma",
  }
  for key in (key for key, needed in whole.items() if needed):
    wrong[f"schedule.streaming, {key}"] = (
      "it needs the whole batch before the first gradient; switch one off"
    )


def drafts(config: Any, wrong: Wrong) -> None:
  """Batches that depend on which responses end first."""
  for key, plain in (("stop", "all"), ("streaming", False)):
    if config.sampler.drafter and config.schedule[key] != plain:
      wrong[f"sampler.drafter, schedule.{key}"] = (
        "measured times decide when to draft, and so which responses end"
        " first; a run would not repeat; switch one off"
      )


def groups(config: Any, wrong: Wrong) -> None:
  """Responses that are compared with others to the same prompt."""
  estimator, size = config.estimator, config.data.group_size
  name, center = estimator.name, estimator.center
  of_wholes = name in ("group", "token_group", "optimal_baseline")
  if of_wholes and estimator.gamma < 1:
    wrong["estimator.gamma, estimator.name"] = (
      "this estimator discounts nothing; use gamma=1 or 'reward_to_go'"
    )
  grouped = of_wholes or (name == "reward_to_go" and center != "none")
  if grouped and size < 2:
    wrong["data.group_size, estimator.name"] = (
      "a group baseline needs at least two responses to a prompt"
    )
  if config.schedule.dynamic_sampling and size < 2:
    wrong["data.group_size, schedule.dynamic_sampling"] = (
      "one response never has mixed verdicts; raise data.group_size"
    )
  if (name, center) == ("group", "none"):
    wrong["estimator.name, estimator.center"] = (
      "choose 'mean', 'median' or 'leave_one_out'"
    )
  if estimator.drop_pivot and (name, center) != ("group", "median"):
    wrong["estimator.drop_pivot, estimator.name, estimator.center"] = (
      "the pivot is the median of a 'group'"
    )
  elif estimator.drop_pivot and size % 2 == 0:
    wrong["estimator.drop_pivot, data.group_size"] = (
      "only a group of odd size has a median response"
    )
  for key in ("pretrain_steps", "reward_model_steps"):
    if config.value[key] and not has_critic(config):
      wrong[f"value.{key}, estimator.name"] = (
        "this estimator has no critic to pretrain; set the steps to 0"
      )


def off_policy(config: Any, wrong: Wrong) -> None:
  """Whose log-probs the loss is taken against."""
  proximal, name = config.off_policy.proximal, config.loss.name
  if proximal == "ewma" and name not in ("clip", "cispo"):
    wrong["off_policy.proximal, loss.name"] = (
      "the average needs a ratio per token; use loss.name='clip' or 'cispo'"
    )
  if proximal not in ("stored", "interpolate"):
    return
  if name == "policy_gradient":
    wrong["loss.name, off_policy.proximal"] = (
      "this loss has no ratio and reads no proximal policy; use 'recompute'"
    )
  scored = {
    "off_policy.ess_scale": config.off_policy.ess_scale,
    "estimator.name": config.estimator.name == "optimal_baseline",
    "sampler.entropy_tau": config.sampler.entropy_tau,
    "loss.name": name == "hapo",
  }
  for key in filter(scored.get, scored):
    wrong[f"{key}, off_policy.proximal"] = (
      "it reads old log-probs or entropies, which the trainer's scoring pass"
      " makes; use 'recompute'"
    )


def corrections(config: Any, wrong: Wrong) -> None:
  """What corrects a loss whose tokens another policy sampled."""
  proximal, level = config.off_policy.proximal, config.off_policy.level
  correction, _ = correction_of(config)
  if config.off_policy.keep_weights:
    kept_weights(config, wrong)
  if proximal == "ewma" and correction == "none":
    wrong["off_policy.proximal, off_policy.correction"] = (
      "without the weight proximal/behaviour the loss is no policy gradient;"
      " use 'auto'"
    )
  if proximal == "stored" and correction != "none":
    wrong["off_policy.correction, off_policy.proximal"] = (
      "with the sampler's log-probs as old ones the ratio corrects already;"
      " use correction='none' or proximal='recompute'"
    )
  if proximal == "interpolate" and config.loss.name != "clip":
    wrong["off_policy.proximal, loss.name"] = (
      "interpolation is defined for the clipped loss"
    )
  elif proximal == "interpolate" and correction != "none":
    if (correction, level) != ("truncate", "token"):
      wrong["off_policy.proximal, off_policy.correction, off_policy.level"] = (
        "interpolation goes with a token-level 'truncate' or none"
      )


def kept_weights(config: Any, wrong: Wrong) -> None:
  """Earlier weights, which two corrections are taken against."""
  if config.off_policy.proximal != "recompute":
    wrong["off_policy.keep_weights, off_policy.proximal"] = (
      "staleness is counted from the policy at the start of the update; use"
      " proximal='recompute' or keep_weights=''"
    )
  if config.off_policy.correction == "none":
    wrong["off_policy.keep_weights, off_policy.correction"] = (
      "only a correction reads what they say; use 'auto' or keep_weights=''"
    )
  if not config_lib.most_staleness(config):
    wrong["off_policy.keep_weights, schedule.lag, schedule.stop"] = (
      "every token is written by the weights that it trains; set a lag or"
      " stop='first_groups', or keep_weights=''"
    )


def losses(config: Any, wrong: Wrong) -> None:
  """Terms of the loss and of the reward."""
  loss = config.loss
  if loss.kl_coefficient and loss.kl_reward_coefficient:
    wrong["loss.kl_coefficient, loss.kl_reward_coefficient"] = (
      "the KL counts once; set one of them to 0"
    )
  if loss.dual_clip and loss.name in ("gspo", "cispo", "policy_gradient"):
    wrong["loss.dual_clip, loss.name"] = (
      "this loss has no dual clip; use dual_clip=None, or 'clip' or 'hapo'"
    )
  if loss.norm and loss.mode not in NORM_MODES:
    wrong["loss.norm, loss.mode"] = (
      f"only {' and '.join(map(repr, NORM_MODES))} have a constant length"
    )
  if config.reward.overlong_buffer > config.sampler.max_response_length:
    wrong["reward.overlong_buffer, sampler.max_response_length"] = (
      "the buffer is a part of the response"
    )
  if config.reward.name == "environment" and not config.environment.name:
    wrong["reward.name, environment.name"] = (
      "nobody gives the reward; choose an environment or another reward"
    )
  reward = rewards.REWARDS[config.reward.name]
  counts_turns = "conversation" in inspect.signature(reward).parameters
  if config.environment.rewards != "end" and not counts_turns:
    wrong["environment.rewards, reward.name"] = (
      "this reward does not count what turns were given; use 'environment', or"
      " one of your own that reads `conversation`"
    )


def several_processes(config: Any, wrong: Wrong) -> None:
  """What several processes would do in another order, or after a clock."""
  if jax.process_count() == 1:
    return
  if config.schedule.lag and config.schedule.overlap:
    wrong["schedule.lag, schedule.overlap"] = (
      "several processes train and write in turns; set overlap to False"
    )
  for key, other in (
    ("schedule.streaming", False),
    ("sampler.drafter", ""),
    ("environment.name", ""),
    ("run.replay_every", 0),
  ):
    if config_lib.get(config, key) != other:
      wrong[key] = f"several processes cannot; set it to {other!r}"
