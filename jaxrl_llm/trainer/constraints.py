"""Constraints between settings that are valid on their own, by topic.

This file has the constraints on data and rollouts; `learner_constraints` has
those on models, estimators, losses and updates.
"""

from jaxrl_llm import config as config_lib
from jaxrl_llm import rewards
from jaxrl_llm.config import Settings
from jaxrl_llm.data import sources
from jaxrl_llm.data.prompt_source import PROMPT_SOURCES, PromptSource
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.parts import leaves_of
from jaxrl_llm.trainer import learner_constraints as of_learner
from jaxrl_llm.trainer.learner_constraints import Rules


def rules(config: Settings, algorithm: Algorithm) -> Rules:
  """Returns all constraints of a run, most important first."""
  topics = [
    orders,
    exclusions,
    sizes,
    unread,
    windows,
    replay,
    streaming,
    of_learner.groups,
    of_learner.off_policy,
    of_learner.adapters,
    of_learner.critics,
    of_learner.corrections,
    of_learner.losses,
  ]
  return [rule for topic in topics for rule in topic(config, algorithm)]


# fmt: off

_NEEDS_WHOLE = (
  "needs the whole batch before the first gradient; switch one of them off")
_WHOLE_BATCH = ("schedule.stop", "schedule.window", "schedule.streaming")
# A setting, others that must have their defaults while it is on, and why.
_EXCLUDED = (
  ("schedule.replay", _WHOLE_BATCH,
    "only whole groups of a whole batch are replayed; use {key}={value!r}"),
  ("schedule.streaming",
    ("schedule.lag", "schedule.window", "schedule.stop",
     "schedule.dynamic_sampling"),
    "streaming needs a whole batch from the newest weights; switch one of"
    " them off"),
  ("schedule.streaming", ("run.replay_every",),
    "a streamed batch is not kept for a second update; switch one of them"
    " off"),
  ("schedule.streaming", ("estimator.normalize", "loss.nll_coefficient"),
    _NEEDS_WHOLE),
  ("sampler.engine",
    ("schedule.stop", "schedule.streaming", "environment.name",
     "sampler.drafter", "model.replay_routing"),
    "only the built-in engine does this; use {key}={value!r}"),
  ("sampler.drafter", ("schedule.stop", "schedule.streaming"),
    "drafting depends on measured times, which would decide which responses"
    " end first; switch one off to keep the run reproducible"),
  ("sampler.exact",
    ("sampler.engine",
     "sampler.drafter",  # Draft tokens are verified in another shape.
     "schedule.lag",  # No token is from the newest weights.
     "schedule.streaming",  # The engine is busy.
     # An update would drop choices, or round less than the sampler.
     "model.expert_capacity", "model.sampler_dtype", "model.cache_dtype",
     "model.sampler_matmul"),
    "the log-probs of sampler and trainer would not be equal; use"
    " sampler.exact=False or {key}={value!r}"),
)
def orders(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks prompt sources with further draws per batch."""
  make = algorithm.prompts or PROMPT_SOURCES[config.data.order]
  make = getattr(make, "func", make)  # The class in a functools.partial.
  again = getattr(make, "again", PromptSource.again) is not PromptSource.again
  key = "method.use" if algorithm.prompts else "data.order"
  return [
    *(_excluded(config, key, _WHOLE_BATCH,
      "this prompt source draws again once a complete batch has been judged;"
      " use {key}={value!r}") if again else ()),
    *(_excluded(config, "method.use", _WHOLE_BATCH[1:],
      "a stage changes complete batches; use {key}={value!r}")
      if algorithm.stages else ()),
  ]


def exclusions(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks settings that exclude others, or methods."""
  sampler = config.sampler
  return [
    (sampler.engine and algorithm.processors, "sampler.engine, method.use",
      "only the built-in engine has logits processors; use engine=''"),
    (sampler.exact and algorithm.processors,
      "sampler.exact, method.use",
      "the log-probs of sampler and trainer would not be equal; use"
      " sampler.exact=False"),
    *(rule
      for feature, keys, advice in _EXCLUDED if config_lib.get(config, feature)
      for rule in _excluded(config, feature, keys, advice)),
  ]


def _excluded(config, feature, keys, advice) -> Rules:
  """Returns a rule for each key, which must have its default value."""
  usual = {key: config_lib.KEYS[key].default for key in keys}
  return [
    (config_lib.get(config, key) != value, f"{feature}, {key}",
      advice.format(key=key, value=value))
    for key, value in usual.items()
  ]


def sizes(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the sizes of batches and meshes, and the order of the rewards."""
  batch, slots = config_lib.batch_size(config), config.sampler.slots
  mesh = config.sampler.mesh
  # With windows the number of ended responses varies: any size is allowed.
  roles = ("policy", "value") if algorithm.critic else ("policy",)
  critic = algorithm.critic and not config.schedule.window
  return [
    (config.reward.correct <= config.reward.incorrect,
      "reward.correct, reward.incorrect",
      "a correct response must be worth more than an incorrect one"),
    *((batch % (config.optimizer[role].mini_batch
          or config.optimizer[role].updates_per_step),
      f"optimizer.{role}.mini_batch, optimizer.{role}.updates_per_step",
      f"must divide the batch of {batch} = data.prompts_per_step *"
      " data.group_size")
      for role in (("policy", "value") if critic else ("policy",))),
    *((config.optimizer[role].mini_batch
        and config.optimizer[role].updates_per_step > 1,
      f"optimizer.{role}.mini_batch, optimizer.{role}.updates_per_step",
      "both set the size of an update; use mini_batch=0 or updates_per_step=1")
      for role in ("policy", "value")),
    *((config.run.steps * config.optimizer[role].epochs * batch
        >= 2**31 * config_lib.mini_batch(config, role),
      f"run.steps, optimizer.{role}.epochs, optimizer.{role}.mini_batch,"
      f" optimizer.{role}.updates_per_step",
      "a run must have fewer than 2^31 updates; lower run.steps")
      for role in roles),
    (0 < slots < max(config.data.group_size, config.eval.samples),
      "sampler.slots, data.group_size, eval.samples",
      "raise sampler.slots: the slots must hold at least one group"),
    (not all(isinstance(n, int) and 1 <= n <= config.eval.samples
        for n in config.eval.pass_k),
      "eval.pass_k, eval.samples",
      "each n of pass@n must be an integer, 1 to eval.samples"),
    (mesh.data == 0 and max(mesh.fsdp, mesh.tensor, mesh.expert) > 1,
      "sampler.mesh.data, sampler.mesh.fsdp, sampler.mesh.tensor,"
      " sampler.mesh.expert",
      "data=0 shares the trainer's mesh; set it to -1 or at least 1"),
  ]


def unread(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks settings that the chosen parts do not read."""
  split = config.data.split != config_lib.KEYS["data.split"].default
  read = sources.reads(config.data.source)
  return [
    (config.data.path and "path" not in read, "data.path, data.source",
      "this source reads no files; set data.source='jsonl', or leave data.path"
      " out"),
    (split and "split" not in read, "data.split, data.source",
      "this source has no splits; set data.path to the training files and"
      " eval.path to the evaluation files"),
    (config.reward.path and config.reward.name not in rewards.OF_FILES,
      "reward.path, reward.name",
      f"only {' and '.join(rewards.OF_FILES)} read functions of a file; choose"
      " one of them, or leave reward.path out"),
    *((used and replaced, f"method.use, {key}",
      f"a method replaces it; leave {key} out")
      for key, used, replaced in (
        ("data.order", config.data.order != "shuffled", algorithm.prompts),
        ("data.order_settings", config.data.order_settings, algorithm.prompts),
        ("reward.group", config.reward.group, algorithm.group_reward))),
    (config.environment.settings and not config.environment.name,
      "environment.settings, environment.name",
      "there is no environment; choose one, or leave the settings out"),
    (config.sampler.engine_settings and not config.sampler.engine,
      "sampler.engine_settings, sampler.engine",
      "the built-in engine has no settings; choose another engine or leave them"
      " out"),
  ]


def windows(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks T-PPO's windows and over-provisioning."""
  schedule, estimator = config.schedule, config.estimator
  windowed = schedule.window > 0
  compares = of_learner.compares_groups(algorithm.advantages)
  whole = schedule.stop == "all" and not schedule.dynamic_sampling
  return [
    (windowed and (compares or not algorithm.critic),
      f"schedule.window, {of_learner.chosen(config, 'estimator.name')}",
      "group baselines need whole groups, but windows end their responses in"
      " different steps; use a critic, or schedule.window=0"),
    (schedule.window > config.sampler.max_response_length,
      "schedule.window, sampler.max_response_length",
      "the window must not exceed the maximum response length"),
    (windowed and (config.reward.group or algorithm.group_reward),
      f"schedule.window, {of_learner.chosen(config, 'reward.group')}",
      "responses of a group end in different steps; switch one of them off"),
    (windowed and schedule.dynamic_sampling,
      "schedule.window, schedule.dynamic_sampling",
      "unfinished groups have no rewards to filter by; switch one of them off"),
    (schedule.over_provision > 1 and whole,
      "schedule.over_provision, schedule.stop",
      "the surplus groups would be discarded; use schedule.stop='first_groups'"
      " or schedule.dynamic_sampling=True"),
    # The rest applies to responses cut by a window, not to ended ones.
    (windowed and estimator.normalize == "whiten",
      "schedule.window, estimator.normalize",
      "centering shifts the zero advantage at a cut; use 'scale' or 'none'"),
    (windowed and estimator.boundary == "zero",
      "schedule.window, estimator.boundary",
      "a cut response continues, so the value there is not 0; use 'repeat' or"
      " 'bootstrap'"),
    (windowed and estimator.boundary == "repeat" and estimator.gamma < 1,
      "estimator.boundary, estimator.gamma",
      "a discount would penalize every cut; use gamma=1 or 'bootstrap'"),
    (windowed and config.loss.overlong_filter,
      "schedule.window, loss.overlong_filter",
      "earlier windows are trained before a response is known to be overlong;"
      " switch one of them off"),
  ]


def replay(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks the replay of earlier groups."""
  schedule = config.schedule
  most = config_lib.replayed_groups(config)
  return [
    (schedule.replay and not most, "schedule.replay, data.prompts_per_step",
      "less than one group of a batch would be replayed; raise one of them"),
    (schedule.replay and schedule.replay_capacity < most,
      "schedule.replay, schedule.replay_capacity",
      f"the store must hold the {most} groups that a batch replays"),
  ]


def streaming(config: Settings, algorithm: Algorithm) -> Rules:
  """Checks streaming: gradients accumulated while other groups are sampled."""
  if not config.schedule.streaming:
    return []
  batch = config_lib.batch_size(config)
  roles = ("policy", "value") if algorithm.critic else ("policy",)
  compares = "example_id" in leaves_of(["advantages"], algorithm.parts)
  own = {"nll", "kl", "entropy"}
  over = "policy_mask", algorithm.mode
  whole = {
    "estimator.name": compares and not config.method.use,
    # A loss over other tokens is divided by their number in the whole batch.
    "method.use": algorithm.whole_batch or algorithm.step_scale or compares
      or any(name not in own and (x.mask, x.mode) != over
        for name, x in algorithm.auxiliary.items()),
  }
  return [
    *((config_lib.mini_batch(config, role) != batch
        or config.optimizer[role].epochs > 1,
      f"schedule.streaming, optimizer.{role}.mini_batch,"
      f" optimizer.{role}.updates_per_step, optimizer.{role}.epochs",
      "streaming makes one update per batch; use mini_batch=0,"
      " updates_per_step=1 and epochs=1")
      for role in roles),
    *((needed, f"schedule.streaming, {key}", _NEEDS_WHOLE)
      for key, needed in whole.items()),
  ]


# fmt: on
