"""Methods of this folder with features of a run, for three steps."""

import zlib

import numpy as np
import pytest
from helpers import recipes, tiny_run

from jaxrl_llm import register, rewards
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, validation

_CALCULATOR = {
  "environment.name": "calculator",
  "environment.max_observation_tokens": 4,
  "sampler.stop": ("=",),
}
_FIRST_GROUPS = {
  "schedule.stop": "first_groups",
  "schedule.over_provision": 1.5,
  "schedule.max_staleness": 2,
}
_ADAPTERS = {"model.lora_rank": 4, "value.lora_rank": 4}
_STREAMING = {"schedule.streaming": True}
_SINGLE = {"data.prompts_per_step": 16, "data.group_size": 1}
_STORED = {"off_policy.proximal": "stored"}
_GDPO = {
  "method.use": ("gdpo",),
  "method.gdpo.parts": {"right": 1.0, "short": 0.5},
  "estimator.normalize": "whiten",
}
# Name -> config and settings. Losses, estimators and schedules are independent,
# so each run has one of each.
CASES = {
  "SAO, single, lag 3, calculator, windows": (
    "sao",
    _SINGLE | {"schedule.lag": 3, "schedule.window": 5} | _CALCULATOR,
  ),
  "MaxRL, SAPO's gate, streaming": (
    "maxrl",
    {"method.use": ("maxrl", "sapo_gate")} | _STREAMING,
  ),
  "EVPO, KPop, first groups": (
    "evpo",
    {"method.use": ("evpo", "kpop")} | _STORED | _FIRST_GROUPS,
  ),
  "GDPO, V3.2, lag, adapters": (
    "grpo",
    _GDPO
    | {"method.use": ("gdpo", "deepseek_v3_2"), "loss.kl_coefficient": 0.04}
    | {"schedule.lag": 1}
    | _STORED
    | _ADAPTERS,
  ),
  "turns, calculator, windows": (
    "vapo",
    {"method.use": ("turn_gae",), "schedule.window": 5} | _CALCULATOR,
  ),
  "turns, streaming": (
    "vapo",
    {"method.use": ("turn_gae",), "loss.nll_coefficient": 0.0} | _STREAMING,
  ),
  "segments, DPPO-KL, windows, lag": (
    "tppo",
    {
      "method.use": ("sae", "dppo"),
      "method.dppo.divergence": "kl",
      "schedule.window": 5,
      "schedule.lag": 1,
    }
    | _STORED,
  ),
}
QUICK = ("SAO, single, lag 3, calculator, windows",)


def right_and_short(prompt, response):
  """Two components; the first is 1 for half of all random texts, by hash."""
  right = zlib.crc32(f"{prompt}{response}".encode()) % 2
  return {"right": float(right), "short": 0.1 * (len(response) < 12)}


@pytest.fixture(scope="module", autouse=True)
def registered():
  register.reward("right_and_short", right_and_short)
  yield
  del rewards.REWARDS["right_and_short"]


def make_config(model, method, changes):
  settings = {
    "reward.name": "right_and_short",
    "data.prompts_per_step": 4,
    "data.group_size": 4,
    "sampler.max_response_length": 12,
    "run.samples_every": 0,
    **{f"optimizer.{role}.mini_batch": 16 for role in ("policy", "value")},
  }
  return recipes.make_config(method, model, **settings | changes)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name, marks=[] if name in QUICK else [pytest.mark.slow(minutes=0.2)]
    )
    for name in CASES
  ],
)
def test_three_steps(model, name, tmp_path):
  run = build.make_run(make_config(model, *CASES[name]))
  loop.train(run, tmp_path / "run")
  rows = tiny_run.comparable(tmp_path / "run")
  assert len(rows) == 4
  for row in rows[1:]:
    assert all(map(np.isfinite, row.values())), row
    assert row["policy/skipped"] == row.get("value/skipped", 0) == 0
  # Zero in the first step of windows: a new critic, and no ended response.
  assert rows[-1]["policy/grad_norm"] > 0


@pytest.mark.parametrize(
  ("method", "changes", "said"),
  [
    ("sao", _SINGLE | _STREAMING, "schedule.streaming.*schedule.lag"),
    (
      "sao",
      _SINGLE | _STREAMING | {"schedule.lag": 0},
      "schedule.streaming.*optimizer.value.epochs",
    ),
    ("sao", _ADAPTERS, "optimizer.value.frozen.*value.lora_rank"),
    ("evpo", {"schedule.window": 5}, "schedule.window.*estimator.name"),
    ("grpo", _GDPO | {"schedule.window": 5}, "schedule.window"),
    ("grpo", _GDPO | _SINGLE, "data.group_size.*estimator.name"),
  ],
)
def test_what_cannot_work_is_refused_in_a_line(method, changes, said):
  with pytest.raises(InputError, match=said) as error:
    validation.validate(make_config("unused", method, changes))
  assert "\n" not in str(error.value)


def test_the_attention_of_saos_critic_is_frozen(model):
  run = build.make_run(make_config(model, "sao", _SINGLE))
  base, trained = run.learner.critic.params
  assert {*base["layers"]} == {"attention"}
  assert "attention" not in trained["layers"]
  assert {"mlp"} < {*trained["layers"]}
