"""With sampler.exact, sampler and trainer agree bit for bit in every step."""

import dataclasses

import jax.numpy as jnp
import pytest
from helpers import registries, tempered, tiny_run
from helpers.echo import Echo
from helpers.tiny_run import with_config

from jaxrl_llm import metrics, register, sync
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop

SHORT = {
  "sampler__exact": True,
  "value__pretrain_steps": 0,
  "run__steps": 3,
  "eval__every": 3,
  **tiny_run.EVALUATES_LIKE_A_STEP,
}
# Both data types have unfinished responses, which continue after a restart.
RUNS = {
  "windows": {
    "model__dtype": "bfloat16",
    "schedule__window": 3,
    "sampler__kv_pages": 12,
    "sampler__temperature": 0.7,
  },
  "turns by a sampler on four other devices": {
    "environment__name": "echo",
    "reward__name": "environment",
    "estimator__name": "group",
    "sampler__max_response_length": 24,
    "mesh__data": 4,
    "sampler__mesh__data": 2,
    "sampler__mesh__tensor": 2,
    "optimizer__policy__micro_batch_size": 8,
    "optimizer__value__micro_batch_size": 8,
  },
  "first groups on eight devices": {
    "estimator__name": "group",
    "schedule__stop": "first_groups",
    "schedule__over_provision": 1.5,
    **tiny_run.EIGHT_DEVICES,
  },
}


@pytest.fixture(scope="module", autouse=True)
def registered():
  with registries.registered():
    register.environment("echo", Echo)
    yield


def make_run(model, **changes):
  return build.make_run(tiny_run.make_config(model, **SHORT | changes))


@pytest.mark.slow(minutes=0.2)
@pytest.mark.parametrize("name", RUNS)
def test_no_token_of_a_run_differs(model, tmp_path, name):
  run = make_run(model, **RUNS[name])
  engine = run.worker.writer.engine
  # Stopped after two steps, and resumed.
  loop.train(with_config(run, run__steps=2), tmp_path)
  loop.train(run, tmp_path)
  first, *rows = metrics.read_rows(tmp_path / "metrics.jsonl")
  assert len(rows) == 3
  for row in rows:
    assert row["sampler_trainer/logprob_diff_mean"] == 0
    assert row["sampler_trainer/logprob_diff_max"] == 0
  # The packed program of the updates rounds differently.
  assert first["sampler_trainer/parity_error"] > 0
  assert engine.stats.prefill_calls == 0
  assert any(row["policy/grad_norm"] > 0 for row in rows)
  if name == "windows":
    assert any(row["rollout/truncated_fraction"] > 0 for row in rows)
  if name.startswith("turns"):
    assert any(row["rollout/turns_mean"] > 1 for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parity_check_demands_equality(model, dtype):
  run = make_run(model, model__dtype=dtype, estimator__name="group")
  states, weights = loop.begin(run)
  error = loop.check_sampler(run, states, weights)
  assert 0 < error["sampler_trainer/parity_error"] < 2e-2
  # Far below the tolerance of the default check.
  scale = weights.params["final_norm"]["scale"]
  moved = 1 + 4 * float(jnp.finfo(scale.dtype).eps)
  moved = weights.params | {"final_norm": {"scale": scale * moved}}
  wrong = dataclasses.replace(weights, params=moved)
  with pytest.raises(sync.SyncError, match="exact=True: .* differ by up to"):
    run.parity_check(states.learner.params("policy"), wrong)


def test_a_run_stops_at_a_difference(model, tmp_path):
  run = make_run(model, estimator__name="group")
  score = run.learner.sampler_logprobs
  wrong = lambda *given: score(*given) + 0.5
  learner = dataclasses.replace(run.learner, sampler_logprobs=wrong)
  run = dataclasses.replace(run, learner=learner)
  with pytest.raises(sync.SyncError, match=r"0\.5 nats, limit 0; .* a bug"):
    loop.train(run, tmp_path)
  # The step is neither in the log nor in a checkpoint.
  rows = metrics.read_rows(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in rows] == [0]


@pytest.mark.parametrize(
  "changes",
  [
    {"sampler__drafter": "prompt_lookup"},
    {"method__use": (tempered.METHOD,)},
    {"schedule__lag": 1},
    {"schedule__streaming": True, "loss__nll_coefficient": 0.0},
    {"model__expert_capacity": 2.0},
    {"model__sampler_dtype": "bfloat16"},
    {"model__cache_dtype": "float8_e4m3fn"},
    {"model__sampler_matmul": "int8"},
  ],
)
def test_refuses_what_cannot_be_exact(model, changes):
  key = next(iter(changes)).replace("__", ".")
  with pytest.raises(InputError, match=f"sampler.exact=True .*{key}=.*: "):
    make_run(model, **changes)
