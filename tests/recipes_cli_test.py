"""Contradictory settings are rejected before a run starts."""

import ast
import inspect
import itertools
import traceback

import pytest
from helpers.configs import METHODS, keys, load, value

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import presets, zoo
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import core
from jaxrl_llm.trainer import build, constraints, learner_constraints
from jaxrl_llm.trainer.validation import validate

BATCH = config_lib.batch_size(load("vapo"))
# Abbreviations in the table below that stand for several settings.
SHORT = {
  "window": "schedule.window=16",
  "no_critic": "value.pretrain_steps=0",
  "grouped": "estimator.name=group value.pretrain_steps=0",
  "distill": "method.use=('distill',) method.distill.teachers=x"
  " value.pretrain_steps=0",
  "single": "data.group_size=1 data.prompts_per_step=512",
  "streaming": "schedule.streaming=True loss.nll_coefficient=0.0"
  f" optimizer.policy.mini_batch={BATCH} optimizer.value.mini_batch={BATCH}",
}
# Changes of VAPO's config, each valid alone | parts of the error message.
TABLE = """\
sampler.mesh.fsdp=2: sampler.mesh.data, sampler.mesh.fsdp
window grouped: schedule.window, estimator.name
window grouped method.use=('reinforce_pp',): schedule.window, estimator.name
window no_critic method.use=('hapo',): \
  schedule.window, estimator.name, method.use, a critic
window method.use=('evpo',): schedule.window, method.use, whole groups
schedule.window=65: schedule.window, sampler.max_response_length, exceed
window schedule.dynamic_sampling=True: \
  schedule.window, schedule.dynamic_sampling
window method.use=('majority',): schedule.window, method.use, different steps
sampler.exact=True grouped method.use=('hapo',): \
  sampler.exact, method.use, would not be equal
reward.name=environment: reward.name, environment.name
streaming schedule.lag=1: schedule.streaming, schedule.lag
streaming run.replay_every=5: \
  schedule.streaming, run.replay_every, second update
streaming optimizer.value.epochs=2: \
  schedule.streaming, optimizer.value.epochs, one update
streaming method.use=('evpo',): \
  schedule.streaming, method.use, whole batch
streaming estimator.normalize=whiten: \
  schedule.streaming, estimator.normalize, whole batch
grouped estimator.gamma=0.9: estimator.gamma, estimator.name, has no discount
method.use=('gspo',) loss.dual_clip=3.0: \
  loss.dual_clip, loss.name, method.use, no dual clip
distill reward.overlong_buffer=9: \
  method.use, reward.overlong_buffer, does not read the reward
distill loss.kl_reward_coefficient=0.1: \
  method.use, loss.kl_reward_coefficient, does not read the reward
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
single no_critic method.use=('reinforce_pp',): data.group_size, method.use
single schedule.dynamic_sampling=True: \
  data.group_size, schedule.dynamic_sampling
grouped estimator.center=none: estimator.name, estimator.center
estimator.name=group: value.pretrain_steps, estimator.name
method.use=('hapo',): value.pretrain_steps, method.use, no critic
grouped value.reward_model_steps=3: value.reward_model_steps, estimator.name
off_policy.correction=truncate off_policy.proximal=stored: \
  off_policy.correction, off_policy.proximal
loss.kl_coefficient=0.1 loss.kl_reward_coefficient=0.2: \
  loss.kl_coefficient, loss.kl_reward_coefficient
loss.norm=100: loss.norm, loss.mode
loss.kl=k1 loss.kl_coefficient=0.1: loss.kl, use 'k1+'
model.expert_capacity=1.25 optimizer.policy.epochs=2: \
  model.expert_capacity, optimizer.policy.epochs
reward.overlong_buffer=65: reward.overlong_buffer, sampler.max_response_length
"""
# Methods and changes of VAPO's config | parts of what the methods say.
OF_METHODS = """\
maxrl: reward.incorrect=0, mean reward
maxrl reward.incorrect=0.0 reward.overlong_buffer=9: \
  reward.overlong_buffer=0, mean reward
maxrl reward.incorrect=0.0 loss.kl_reward_coefficient=0.1: \
  loss.kl_reward_coefficient=0, mean reward
turn_gae estimator.lambda_value=0.9: estimator.lambda_value=1
turn_gae grouped: changes GAE
hapo,turn_gae: changes GAE
mc_grpo estimator.center=median: estimator.name='group'
mc_grpo grouped: estimator.center='median'
mc_grpo grouped estimator.center=median: data.group_size
a_3po,gspo: loss.name='clip' only
a_3po off_policy.proximal=stored: off_policy.proximal='recompute'
a_3po off_policy.correction=mask: off_policy.correction='none'
a_3po off_policy.correction=truncate off_policy.level=sequence: level='token'
ppo_ewma off_policy.correction=none: off_policy.correction='auto'
ppo_ewma off_policy.proximal=stored off_policy.correction=truncate: \
  off_policy.proximal='recompute'
ppo_ewma,gspo: ratio per token
gspo,ppo_ewma: ratio per token
kept_weights,a_3po schedule.lag=1: staleness is measured
a_3po,kept_weights schedule.lag=1: staleness is measured
kept_weights schedule.lag=1 off_policy.proximal=stored \
  off_policy.correction=truncate: staleness is measured
kept_weights schedule.lag=1 off_policy.correction=none: \
  off_policy.correction='auto'
kept_weights: schedule.lag, schedule.stop='first_groups'
kept_weights schedule.lag=1 schedule.replay=0.5: schedule.replay=0
kept_weights schedule.lag=1 sampler.exact=True: sampler.exact=False
rloo off_policy.proximal=stored: off_policy.proximal='recompute'
sft data.group_size=1 loss.nll_coefficient=0.0 \
  off_policy.correction=truncate: off_policy.correction='auto'
sft,dps data.group_size=1 loss.nll_coefficient=0.0: that draw prompts
evpo grouped: needs a critic
asyppo grouped: needs a critic
asyppo loss.clip_value=0.2: loss.clip_value=None, mean of the critics
hl_gauss grouped: needs a critic
hl_gauss loss.clip_value=0.2: loss.clip_value=None, cannot be clipped
hl_gauss method.hl_gauss.high=1.0: method.hl_gauss.low, must cover
privileged grouped: needs a critic
privileged method.privileged.answer_format=x: \
  method.privileged.answer_format has no {answer}
f_tis estimator.normalize=scale: estimator.normalize='none'
distill: method.distill.teachers, needs a teacher
gdpo: method.gdpo.parts
dart: schedule.replay above 0
dart schedule.replay=0.5 schedule.dynamic_sampling=True: \
  schedule.dynamic_sampling=False
mc_grpo,dart grouped estimator.center=median data.group_size=9 \
  schedule.replay=0.5: has no median
sapo method.sapo.replay_from=('x',): method.sapo.share_in, to a folder
sapo method.sapo.share_in=x: schedule.replay above 0
sapo method.sapo.share_in=x schedule.replay=0.5 environment.name=calculator: \
  environment.name, have no turns
arrol schedule.window=16: schedule.window=0, whole groups
arrol schedule.lag=1: schedule.overlap=False
"""


def read(text):
  """Returns the settings in a row of the table; a key's last value counts."""
  words = " ".join(SHORT.get(word, word) for word in text.split()).split()
  return {
    key: value(text) for key, _, text in (w.partition("=") for w in words)
  }


def broken(config):
  """Returns the violated constraints, keys -> advice."""
  rules = constraints.rules(config, core.compose(config))
  return {keys: advice for wrong, keys, advice in rules if wrong}


def changed(changes, base="vapo"):
  config = load(base)
  config.update_from_flattened_dict(changes)
  return config


def usable(config):
  """Gives a method's config the paths that it needs."""
  if config.data.source == "jsonl":
    config.data.path = "questions.jsonl"
  if "distill" in config.method.use:
    config.method.distill.teachers = "teacher"
  return config


CONTRADICTIONS = [
  (read(changes), said.strip())
  for changes, _, said in (row.partition(":") for row in TABLE.splitlines())
]
REFUSED = []
for _row in OF_METHODS.splitlines():
  _changes, _, _said = _row.partition(":")
  _names, *_rest = _changes.split()
  _use = {"method.use": tuple(_names.split(","))}
  REFUSED.append((_use | read(" ".join(_rest)), _said.strip()))


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
      ((keys, why),) = broken(changed(changes)).items()
      assert set(keys.split(", ")) <= known and "\n" not in why
      tried.add(why)
    # Sizes, critics, replay and user-defined parts have separate tests.
    apart = (
      constraints.sizes,
      constraints.unread,
      learner_constraints.adapters,
      learner_constraints.critics,
      constraints.replay,
    )
    # Rules of a setting exist only while it is on.
    streamed = {"schedule.streaming": True, "sampler.drafter": "prompt_lookup"}
    streamed = changed(streamed)
    advice = lambda rules: {text for _, _, text in rules}
    algorithm = core.compose(streamed)
    known = advice(constraints.rules(streamed, algorithm))
    known -= advice(
      rule for topic in apart for rule in topic(streamed, algorithm)
    )
    # One mesh rule is tried too; two need user-defined parts: see doors/.
    assert len(tried) == len(known) + 1 - 2

  @pytest.mark.parametrize(("changes", "parts"), REFUSED)
  def test_methods_say_what_to_change(self, changes, parts):
    text = refusal(changed(changes))
    assert text.startswith("config.method.use=")
    assert all(part in text for part in parts.split(", ")), text

  def test_every_refusal_of_a_method_is_tried(self):
    tried, known = set(), set()
    for name in zoo.names():
      fn = core.find(name)
      lines, start = inspect.getsourcelines(fn)
      for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Raise):
          known.add((fn.__code__.co_filename, start + node.lineno - 1))
    for changes, _ in REFUSED:
      with pytest.raises(InputError) as error:
        core.compose(changed(changes))
      *_, last = traceback.extract_tb(error.value.__cause__.__traceback__)
      tried.add((last.filename, last.lineno))
    assert known <= tried


class TestConfigs:
  @pytest.mark.parametrize("method", METHODS)
  def test_is_valid_at_every_scale(self, method):
    for preset in presets.SCALES:
      config = usable(load(method, preset))
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
    config = usable(load(method, preset))
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
    validate(config)

  @pytest.mark.parametrize("method", METHODS)
  def test_warmups_are_twenty_rollouts(self, method):
    # Adapters use the schedule of the preset gsm8k, which has no warm-up.
    long = {x for x in presets.SCALES if "qwen" in x and "lora" not in x}
    found = [usable(load(method, name)) for name in sorted(long)]
    for config, role in itertools.product(found, ("policy", "value")):
      if role == "value" and not core.compose(config).critic:
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
