"""Contradictory settings are rejected before a run starts."""

import ast
import inspect
import itertools
import traceback

import pytest
from helpers import cases
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


_CASES = cases.load("refusals")
CONTRADICTIONS = [
  (read(changes), said) for changes, said in _CASES["constraints"]
]
REFUSED = []
for _changes, _said in _CASES["methods"]:
  _names, *_rest = _changes.split()
  _use = {"method.use": tuple(_names.split(","))}
  REFUSED.append((_use | read(" ".join(_rest)), _said))


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
