"""Pairs of features, trained for three steps and resumed after the first.

A case is a method with features that its config accepts; together, the cases
cover every method and every pair of features that some method accepts. SFT and
distillation are methods that meet every feature that they accept. In all cases,
metrics are finite, no update is skipped, each response reaches each of its
losses exactly once per step, losses are over tokens that the policy wrote (in
SFT, the data), their weights sum to the value of the loss mode, learning rates
decay to the last step, and a resumed run repeats the uninterrupted one.
"""

import collections
import itertools
import pathlib
import zlib

import numpy as np
import pytest
import reference
from helpers import configs, tiny_experts, tiny_run

from jaxrl_llm import register, rewards
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import core, members
from jaxrl_llm.learner import learner as learner_lib
from jaxrl_llm.rollout.worker import RolloutWorker
from jaxrl_llm.trainer import build, loop, validation
from jaxrl_llm.types import Origin

STEPS = 3
PROMPTS, GROUP = 4, 4
BATCH = PROMPTS * GROUP

# Name -> settings that switch the feature on.
FEATURES = {
  "window": {"schedule.window": 5},
  "lag": {"schedule.lag": 1},
  "streaming": {"schedule.streaming": True},
  "first_groups": {
    "schedule.stop": "first_groups",
    "schedule.over_provision": 1.5,
    "schedule.max_staleness": 2,
  },
  "dynamic_sampling": {"schedule.dynamic_sampling": True},
  "environment": {
    "environment.name": "calculator",
    "environment.max_observation_tokens": 4,
    "sampler.stop": ("=",),
  },
  "drafter": {
    "sampler.drafter": "prompt_lookup",
    "sampler.num_draft_tokens": 1,  # A decode program less.
  },
  "epochs": {"optimizer.policy.epochs": 2, "optimizer.value.epochs": 2},
  "mini_batches": {
    "optimizer.policy.mini_batch": BATCH // 2,
    "optimizer.value.mini_batch": BATCH // 4,
  },
  "mesh": {
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "optimizer.policy.micro_batch_size": 4,
    "optimizer.value.micro_batch_size": 4,
  },
  "reads_logprobs": {"value.reads_logprobs": True},
  "average": {"method.use": ("ppo_ewma",)},
  "kept_weights": {"method.use": ("kept_weights",)},
  "reward_model_start": {"value.reward_model_steps": 1},
  "frozen": {
    "optimizer.policy.frozen": ("embed",),
    "optimizer.value.frozen": ("layers/mlp",),
  },
  "adapters": {
    "model.lora_rank": 4,
    "value.lora_rank": 4,
    "model.base_dtype": "int8",
  },
  "experts": {"model.replay_routing": True},  # Of another model.
  "categorical": {"method.use": ("hl_gauss",)},
  "curriculum": {"method.use": ("dps",), "data.pool": 40},
  "replay": {
    "schedule.replay": 0.5,
    "schedule.replay_keep": "all",
    "schedule.replay_capacity": 9,
  },
}
OF_CRITICS = {"reads_logprobs", "reward_model_start", "categorical"}
# Methods whose cases have every feature that they accept.
WITH_ALL = ("sft", "distill")
CASES = [
  line.split()
  for line in """\
areal drafter kept_weights
gspo dynamic_sampling first_groups frozen kept_weights
tppo adapters average drafter window
vapo average categorical curriculum drafter dynamic_sampling environment \
  epochs experts frozen lag mesh mini_batches reads_logprobs replay \
  reward_model_start
vc_ppo adapters categorical curriculum environment epochs experts \
  first_groups kept_weights lag mesh mini_batches reads_logprobs \
  reward_model_start window
vc_ppo categorical curriculum environment experts frozen mesh reads_logprobs \
  reward_model_start streaming
asyppo average first_groups frozen window
sft adapters drafter epochs experts mesh mini_batches
sft frozen
distill adapters average curriculum drafter dynamic_sampling environment \
  epochs experts lag mesh mini_batches replay
distill first_groups frozen
distill adapters streaming
""".splitlines()
]
# Methods that are not combined with features: 'sgpo' needs a profile, and
# 'replay', 'dart' and 'ppo_ewma' are features.
# 'grpo', 'dr_grpo' and 'rloo' differ from 'mc_grpo', 'ppo' from 'vc_ppo' and
# 'reinforce_pp_baseline' from 'reinforce_pp', in a few settings only
# (method_configs_test.py).
# Further parts are trained and resumed in tests/methods: curricula (including
# adhint's hints and scope's repairs) in curricula_test.py, token losses and
# mixed advantages in features_test.py, and teachers, probes and shared
# responses in separate files.
OTHERS = {"sgpo", "replay", "dart", "ppo_ewma"}
OTHERS |= {"grpo", "dr_grpo", "rloo", "ppo", "reinforce_pp_baseline"}
OTHERS |= {"dots", "dps", "gdro", "majority", "nudge", "xrpo"}
OTHERS |= {"adhint", "dars", "scope", "arrol", "poise", "sapo"}
OTHERS |= {"dppo", "evpo", "maxrl", "sao", "sapo_gate"}
PLAIN = sorted({*configs.METHODS} - OTHERS - {case[0] for case in CASES})


def looks_right(prompt, response):
  """A verdict from a hash, correct for half of all random texts."""
  return zlib.crc32(f"{prompt}{response}".encode()) % 2 == 0


@pytest.fixture(scope="module", autouse=True)
def registered(model):
  tiny_run.write_model(_with_experts(model), tiny_experts.RUN_CONFIG)
  register.reward("looks_right", looks_right)
  yield
  del rewards.REWARDS["looks_right"]


def _with_experts(model):
  """Returns the directory of a model with experts."""
  return model.with_name("experts")


def make_config(model, method, *features):
  """Makes a small config of a method with features switched on."""
  own, group = configs.load(method), GROUP + (method == "mc_grpo")
  prompts, use = PROMPTS, own.method.use
  if method == "sft":
    prompts, group = BATCH, 1
  if "experts" in features:
    model = _with_experts(model)
  settings = {
    "reward.name": "looks_right",
    "value.pretrain_steps": 0,
    "data.prompts_per_step": prompts,
    "data.group_size": group,
    "eval.every": STEPS,
    # As in a step, so that both use the same programs.
    "eval.problems": prompts,
    "eval.samples": group,
    "sampler.parity_check_every": 0,  # Rows show a difference.
    "run.steps": STEPS,
    "run.samples_every": 0,
    "checkpoint.keep": STEPS + 1,
  }
  for role in ("policy", "value"):
    settings[f"optimizer.{role}.mini_batch"] = prompts * group
    settings[f"optimizer.{role}.warmup_steps"] = 0
    settings[f"optimizer.{role}.learning_rate_schedule"] = "linear"
  if method == "sft":
    settings["sampler.max_response_length"] = 24  # Of all answers.
  if own.reward.overlong_buffer:
    settings["reward.overlong_buffer"] = 4
  if method == "distill":
    settings["method.distill.teachers"] = str(model)
  for feature in ("window", *features) if own.schedule.window else features:
    settings |= FEATURES[feature]
    added = FEATURES[feature].get("method.use", ())
    use += tuple(name for name in added if name not in use)
  settings["method.use"] = use
  return tiny_run.make_config(model, method, **settings)


def accepts(method, *features):
  """Returns whether a method's config accepts the features together."""
  config = make_config(pathlib.Path("unused"), method, *features)
  try:
    validation.validate(config)
  except InputError as error:
    assert "\n" not in str(error)
    return False
  critic = core.compose(config).critic
  return bool(critic) or OF_CRITICS.isdisjoint(features)


class Recorder:
  """Records the batches of a run, and every mini-batch that a loss reads."""

  def __init__(self, run, monkeypatch):
    self.batches, self.losses = [], collections.defaultdict(list)
    collect, experience = RolloutWorker.collect, learner_lib.Learner._experience

    def recorded_collect(worker, *args, **kwargs):
      collected = collect(worker, *args, **kwargs)
      if worker is run.worker:
        self.batches.append(collected.batch.responses)
      return collected

    def recorded_experience(learner, responses, scores, version, *args, **kw):
      inputs = experience(learner, responses, scores, version, *args, **kw)
      if learner is not run.learner:
        return inputs
      rows = len(responses.rewards)
      inputs["test_sample_id"] = responses.rollout.sample_id
      inputs["test_version"] = np.full(rows, version)
      return inputs

    monkeypatch.setattr(RolloutWorker, "collect", recorded_collect)
    monkeypatch.setattr(learner_lib.Learner, "_experience", recorded_experience)
    prepare = members.Training.prepare

    def recorded_prepare(training, inputs, batch, size=None):
      packed = prepare(training, inputs, batch, size)
      # Value pretraining has its own learner, whose inputs are not recorded.
      for name, member in run.learner.members.items():
        if member.training is training and "test_version" in inputs:
          self.losses[name].append((inputs, packed, size))
      return packed

    monkeypatch.setattr(members.Training, "prepare", recorded_prepare)

  def counts(self, loss):
    """Counts uses of each response in a loss: {(update, sample id): times}."""
    found = collections.Counter()
    for inputs, _, _ in self.losses[loss]:
      versions, ids = inputs["test_version"], inputs["test_sample_id"]
      found.update(zip(versions.tolist(), ids.tolist()))
    return found


def check_each_response_once(run, recorder):
  """Checks that the policy sees each row once, the critic each ended row."""
  epochs = run.config.optimizer.policy.epochs
  expected = collections.Counter()
  for step, responses in enumerate(recorder.batches[:STEPS]):
    for number in responses.rollout.sample_id.tolist():
      expected[step, number] += epochs
  assert max(expected.values()) == epochs, "a response twice in a batch"
  assert recorder.counts("policy") == expected
  if run.learner.critic is None:
    assert not recorder.losses["critic"]
    return
  seen = collections.Counter()
  for (_, number), times in recorder.counts("critic").items():
    seen[number] += times
  ended = [
    number
    for responses in recorder.batches[:STEPS]
    for number in responses.rollout.sample_id[responses.ended].tolist()
  ]
  twice = collections.Counter(ended)
  if not run.config.schedule.replay:
    assert set(twice.values()) == {1}, "a response ended twice"
  seen = {k: n / run.config.optimizer.value.epochs for k, n in seen.items()}
  assert all(n <= twice[number] for number, n in seen.items())
  # The remaining ones wait until a mini-batch is full.
  size = run.config.optimizer.value.mini_batch
  assert len(ended) - sum(seen.values()) == len(ended) % size


def check_masks(run, recorder):
  """Checks that losses are over written tokens, each trained in one step."""
  rows = {
    (step, number): row
    for step, responses in enumerate(recorder.batches)
    for row, number in enumerate(responses.rollout.sample_id.tolist())
  }
  filtered = run.learner.algorithm.masks
  new = collections.Counter()
  sft = "sft" in run.config.method.use
  author = int(Origin.FOREIGN if sft else Origin.POLICY)
  for inputs, _, _ in recorder.losses["policy"]:
    for row, mask in enumerate(inputs["policy_mask"]):
      step = int(inputs["test_version"][row])
      number = int(inputs["test_sample_id"][row])
      rollout = recorder.batches[step].rollout
      at = rows[step, number]
      place = np.arange(mask.size)
      own = (rollout.origin[at] == author) & (place < rollout.lengths[at])
      fresh = own & (place >= rollout.window_start[at])
      assert not (mask & ~fresh).any()
      if not filtered:
        np.testing.assert_array_equal(mask, fresh)
      new.update((number, t) for t in np.flatnonzero(mask).tolist())
  epochs = run.config.optimizer.policy.epochs
  most = epochs * (STEPS if run.config.schedule.replay else 1)
  assert max(new.values()) <= most, "a token trained in two steps"


def check_weights(run, recorder):
  """Checks that weights sum to the reduction of a loss of 1 everywhere."""
  algorithm = run.learner.algorithm
  for inputs, packed, size in recorder.losses["policy"]:
    mask = np.asarray(inputs["policy_mask"])
    # Partial sums, which are divided by the entire batch's size at the end.
    parts = 1 if size is None else reduction_size(mask, algorithm.mode)
    ones = np.ones(mask.shape, np.float32)
    if algorithm.correction is not None:
      ones = np.asarray(algorithm.correction(inputs).weights)
    expected = parts * reference.aggregate(
      ones, mask, algorithm.mode, algorithm.norm
    )
    got = np.sum(packed.inputs["weights"], dtype=np.float64)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def reduction_size(mask, mode):
  """Returns the number of tokens or sequences, or 1."""
  if mode == "token-mean":
    return mask.sum()
  return 1 if mode.endswith("-norm") else mask.any(axis=1).sum()


def check_schedules(run, workdir):
  """Checks that learning rates decay linearly to zero in the last step."""
  rows = tiny_run.comparable(workdir)
  assert [row["step"] for row in rows] == list(range(STEPS + 1))
  # Sampler and trainer agree on the first responses.
  assert rows[1].get("sampler_trainer/logprob_diff_max", 0) <= 1e-4
  for row in rows[1:]:
    assert all(map(np.isfinite, row.values())), row
    assert row["policy/skipped"] == row.get("value/skipped", 0) == 0
    for role in ("policy", "value"):
      rate = run.config.optimizer[role].learning_rate
      left = row.get(f"{role}/lr", rate * (1 - row["step"] / STEPS)) / rate
      assert 0 <= left - (1 - row["step"] / STEPS) <= 1 / STEPS + 1e-6


def check_resumed(run, whole):
  """Checks that the run resumed after step 1 ends with the same bits."""
  resumed = tiny_run.resume(run, whole)
  once, again = map(tiny_run.comparable, (whole, resumed))
  if run.config.sampler.drafter:
    check_same_but_for_rounding(once, again)
    return
  assert again == once
  tiny_run.assert_same_checkpoints(run, whole, resumed)


def check_same_but_for_rounding(once, again):
  """Compares up to rounding: a drafter runs only if it measurably pays off."""
  measured = ("rollout/decode_steps", "rollout/idle", "sampler_trainer/")
  for first, second in zip(once, again, strict=True):
    assert first.keys() == second.keys()
    for key in (k for k in first if not k.startswith(measured)):
      assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), key


def check(model, case, tmp_path, monkeypatch):
  run = build.make_run(make_config(model, *case))
  with monkeypatch.context() as patched:
    recorder = Recorder(run, patched)
    loop.train(run, tmp_path / "whole")
  check_each_response_once(run, recorder)
  check_masks(run, recorder)
  check_weights(run, recorder)
  check_schedules(run, tmp_path / "whole")
  check_resumed(run, tmp_path / "whole")


class TestPairs:
  def test_all_that_some_method_accepts_are_there(self):
    pairs = set(itertools.combinations(sorted(FEATURES), 2))
    for _, *features in CASES:
      pairs -= set(itertools.combinations(sorted(features), 2))
    for pair in pairs:
      assert not [m for m in configs.METHODS if accepts(m, *pair)], pair
    for method in WITH_ALL:
      seen = {name for case in CASES if case[0] == method for name in case[1:]}
      lacks = FEATURES.keys() - seen
      assert not [name for name in lacks if accepts(method, name)]

  @pytest.mark.parametrize("case", CASES[:2], ids="-".join)
  def test_quick(self, model, case, tmp_path, monkeypatch):
    check(model, case, tmp_path, monkeypatch)

  @pytest.mark.slow(minutes=0.2)
  @pytest.mark.parametrize("method", PLAIN)
  def test_other_methods(self, model, method, tmp_path, monkeypatch):
    check(model, [method], tmp_path, monkeypatch)

  @pytest.mark.slow(minutes=0.3)
  @pytest.mark.parametrize("case", CASES[2:], ids="-".join)
  def test_slow(self, model, case, tmp_path, monkeypatch):
    check(model, case, tmp_path, monkeypatch)
