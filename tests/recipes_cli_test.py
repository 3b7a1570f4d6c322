"""Contradictory settings are rejected before a run starts."""

import itertools

import pytest
from helpers.configs import METHODS, keys, load, value

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import presets
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.choices import has_critic
from jaxrl_llm.trainer import build, constraints, learner_constraints
from jaxrl_llm.trainer.validation import validate

BATCH = config_lib.batch_size(load("vapo"))
# Abbreviations in the table below that stand for several settings.
SHORT = {
  "window": "schedule.window=16",
  "no_critic": "value.pretrain_steps=0",
  "grouped": "estimator.name=group value.pretrain_steps=0",
  "single": "data.group_size=1 data.prompts_per_step=512",
  "streaming": "schedule.streaming=True loss.nll_coefficient=0.0"
  f" optimizer.policy.mini_batch={BATCH} optimizer.value.mini_batch={BATCH}",
}
# Changes of VAPO's config, each valid alone | parts of the error message.
TABLE = """\
sampler.mesh.fsdp=2: sampler.mesh.data, sampler.mesh.fsdp
window grouped: schedule.window, estimator.name
window estimator.name=reward_to_go no_critic: schedule.window, estimator.name
window estimator.name=evpo: schedule.window, estimator.name, whole groups
schedule.window=65: schedule.window, sampler.max_response_length, exceed
window schedule.dynamic_sampling=True: \
  schedule.window, schedule.dynamic_sampling
reward.name=environment: reward.name, environment.name
streaming schedule.lag=1: schedule.streaming, schedule.lag
streaming run.replay_every=5: \
  schedule.streaming, run.replay_every, second update
streaming optimizer.value.epochs=2: \
  schedule.streaming, optimizer.value.epochs, one update
streaming estimator.name=evpo: \
  schedule.streaming, estimator.name, whole batch
streaming estimator.normalize=whiten: \
  schedule.streaming, estimator.normalize, whole batch
grouped estimator.gamma=0.9: estimator.gamma, estimator.name, has no discount
loss.name=gspo loss.dual_clip=3.0: loss.dual_clip, loss.name, no dual clip
estimator.name=maxrl no_critic: estimator.name, reward.incorrect, mean reward
estimator.name=maxrl no_critic reward.incorrect=0.0 reward.overlong_buffer=9: \
  estimator.name, reward.overlong_buffer, mean reward
estimator.name=maxrl no_critic reward.incorrect=0.0 \
  loss.kl_reward_coefficient=0.1: \
  estimator.name, loss.kl_reward_coefficient, mean reward
estimator.name=distillation no_critic reward.overlong_buffer=9: \
  estimator.name, reward.overlong_buffer, does not read the reward
estimator.name=distillation no_critic loss.kl_reward_coefficient=0.1: \
  estimator.name, loss.kl_reward_coefficient, does not read the reward
estimator.name=turn_gae estimator.lambda_value=0.9: \
  estimator.name, estimator.lambda_value
streaming sampler.drafter=prompt_lookup: sampler.drafter, schedule.streaming
sampler.drafter=quantized_copy schedule.stop=first_groups: \
  sampler.drafter, schedule.stop
environment.name=calculator environment.rewards=turns: \
  environment.rewards, reward.name
schedule.over_provision=1.5: schedule.over_provision, schedule.stop
window estimator.normalize=whiten: schedule.window, estimator.normalize
window estimator.boundary=zero: schedule.window, estimator.boundary
window estimator.gamma=0.99: estimator.boundary, estimator.gamma
window loss.overlong_filter=True: schedule.window, loss.overlong_filter
grouped single: data.group_size, estimator.name
single estimator.name=reward_to_go no_critic: data.group_size, estimator.name
single schedule.dynamic_sampling=True: \
  data.group_size, schedule.dynamic_sampling
grouped estimator.center=none: estimator.name, estimator.center
estimator.drop_pivot=True estimator.center=median: \
  estimator.drop_pivot, estimator.name
grouped estimator.drop_pivot=True: estimator.drop_pivot, estimator.center
grouped estimator.drop_pivot=True estimator.center=median: \
  estimator.drop_pivot, data.group_size
estimator.name=group: value.pretrain_steps, estimator.name
grouped value.reward_model_steps=3: value.reward_model_steps, estimator.name
off_policy.correction=truncate off_policy.proximal=stored: \
  off_policy.correction, off_policy.proximal
off_policy.proximal=interpolate loss.name=gspo: off_policy.proximal, loss.name
off_policy.proximal=interpolate off_policy.correction=mask: \
  off_policy.proximal, off_policy.correction
off_policy.proximal=interpolate \
  off_policy.correction=truncate off_policy.level=sequence: \
  off_policy.proximal, off_policy.level
off_policy.correction=none off_policy.proximal=ewma: \
  off_policy.correction, off_policy.proximal
off_policy.keep_weights=float32 schedule.lag=1 \
  off_policy.proximal=interpolate: off_policy.keep_weights, off_policy.proximal
off_policy.keep_weights=float32 schedule.lag=1 off_policy.correction=none: \
  off_policy.keep_weights, off_policy.correction
off_policy.keep_weights=float32 schedule.lag=0: \
  off_policy.keep_weights, schedule.lag
loss.name=gspo off_policy.proximal=ewma: loss.name, off_policy.proximal
loss.name=policy_gradient off_policy.proximal=stored: \
  loss.name, off_policy.proximal
off_policy.proximal=none: loss.name, off_policy.proximal
off_policy.proximal=none loss.name=likelihood off_policy.correction=truncate: \
  off_policy.correction, off_policy.proximal
loss.kl_coefficient=0.1 loss.kl_reward_coefficient=0.2: \
  loss.kl_coefficient, loss.kl_reward_coefficient
loss.norm=100: loss.norm, loss.mode
loss.kl=k1 loss.kl_coefficient=0.1: loss.kl, use 'k1+'
model.expert_capacity=1.25 optimizer.policy.epochs=2: \
  model.expert_capacity, optimizer.policy.epochs
reward.overlong_buffer=65: reward.overlong_buffer, sampler.max_response_length
"""


def read(text):
  """Returns the settings in a row of the table; a key's last value counts."""
  words = " ".join(SHORT.get(word, word) for word in text.split()).split()
  return {
    key: value(text) for key, _, text in (w.partition("=") for w in words)
  }


def changed(changes, base="vapo"):
  config = load(base)
  config.update_from_flattened_dict(changes)
  return config


CONTRADICTIONS = [
  (read(changes), said.strip())
  for changes, _, said in (row.partition(":") for row in TABLE.splitlines())
]


def refusal(config):
  with pytest.raises(InputError) as error:
    validate(config)
  text = str(error.value)
  assert "\n" not in text and text.startswith("config.")
  return text


class TestRefused:
  @pytest.mark.parametrize(("changes", "parts"), CONTRADICTIONS)
  def test_constraints_name_both_settings(self, changes, parts):
    config = changed(changes)
    text = refusal(config)
    for part in parts.split(", "):
      if part in config_lib.KEYS:
        part = f"config.{part}={config_lib.get(config, part)!r}"
      assert part in text, text

  def test_every_constraint_is_tried(self):
    """The table above violates each constraint at least once, and no other."""
    tried, known = set(), set(config_lib.KEYS)
    for changes, _ in CONTRADICTIONS:
      ((keys, why),) = constraints.broken(changed(changes)).items()
      assert set(keys.split(", ")) <= known and "\n" not in why
      tried.add(why)
    # Sizes, critics, replay, pruning and user-defined parts have separate
    # tests.
    apart = (
      constraints.sizes,
      constraints.unread,
      learner_constraints.adapters,
      learner_constraints.critics,
      constraints.replay,
      constraints.pruning,
    )
    # Rules of a setting exist only while it is on.
    streamed = {"schedule.streaming": True, "sampler.drafter": "prompt_lookup"}
    streamed = changed(streamed)
    advice = lambda rules: {text for _, _, text in rules}
    known = advice(constraints.rules(streamed))
    known -= advice(rule for topic in apart for rule in topic(streamed))
    # One mesh rule is tried too; two need user-defined parts: see doors/.
    assert len(tried) == len(known) + 1 - 2


class TestConfigs:
  @pytest.mark.parametrize("method", METHODS)
  def test_is_valid_at_every_scale(self, method):
    for preset in presets.SCALES:
      config = load(method, preset)
      if config.data.source == "jsonl":
        config.data.path = "questions.jsonl"  # These presets need it.
      validate(config)
      assert config.is_locked
      assert sorted(keys(config)) == sorted(config_lib.KEYS)
      mini_batch = config_lib.mini_batch(config, "policy")
      assert mini_batch % config.data.group_size == 0
    with pytest.raises(InputError, match="preset 'nope' is unknown"):
      load(method, "nope")

  @pytest.mark.parametrize("method", METHODS)
  @pytest.mark.parametrize("preset", ["gsm8k", "one-gpu-0.5b", "one-gpu-1.5b"])
  def test_a_usual_run_of_gsm8k(self, method, preset):
    config = load(method, preset)
    groups, size = config.data.prompts_per_step, config.data.group_size
    alone = dict.fromkeys(("ppo", "vc_ppo", "sao", "sft", "distill"), (1024, 1))
    own = {"mc_grpo": (128, 9), "poise": (512, 2)} | alone
    assert (groups, size) == own.get(method, (128, 8))
    updates = build.update_settings(config, "policy").updates
    once = method in ("rloo", "vcpo"), method == "mc_grpo"
    assert updates == 175 * (1 if once[0] else 2 if once[1] else 4)
    assert config_lib.max_tokens_per_row(config) == 512 + 512
    assert config.schedule.window in (0, 128)
    assert config.reward.overlong_buffer in (0, 128)
    # The batch can be changed without changing another key.
    config.data["prompts_per_step" if method == "sft" else "group_size"] += 4
    config.data.path = "questions.jsonl"
    validate(config)

  @pytest.mark.parametrize("method", METHODS)
  def test_warmups_are_twenty_rollouts(self, method):
    # Adapters use the schedule of the preset gsm8k, which has no warm-up.
    long = {x for x in presets.SCALES if "qwen" in x and "lora" not in x}
    found = [load(method, name) for name in sorted(long)]
    for config, role in itertools.product(found, ("policy", "value")):
      if role == "value" and not has_critic(config):
        continue
      optimizer = config.optimizer[role]
      updates = build.update_settings(config, role).updates
      assert optimizer.warmup_steps * config.run.steps == 20 * updates
      # So that their number can be changed, also on the command line.
      optimizer.mini_batch = config_lib.mini_batch(config, role) // 2
      optimizer.updates_per_step = 1
      updates = build.update_settings(config, role).updates
      assert optimizer.warmup_steps * config.run.steps == 20 * updates
      optimizer.update(mini_batch=0, updates_per_step=6)
      assert optimizer.warmup_steps == 20 * 6 * optimizer.epochs
      optimizer.warmup_steps = 3
      assert optimizer.warmup_steps == 3
