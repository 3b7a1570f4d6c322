"""Settings that would hang, fill the memory or mean nothing: one line each."""

import pytest
from helpers import tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build

_INF, _NAN = float("inf"), float("nan")
_HUGE = 10**9
_SETTINGS = {
  "chain_sum": [
    *({"min_ops": 3, "max_ops": _HUGE}, {"min_ops": _HUGE, "max_ops": _HUGE}),
    *({"min_ops": 4, "max_ops": 3}, {"min_ops": 0}, {"min_ops": None}),
    *({"max_ops": 2, "eval_size": _HUGE}, {"eval_size": 10**7}),
    *({"eval_size": 0}, {"nope": 1}, {"seed": 5}, {"split": "x"}),
    *({"max_ops": x} for x in (1e30, "9", 2.5, True, _INF, _NAN)),
  ],
  "remainder": [
    *({"max_ops": x} for x in (_HUGE, 0)),
    *({"tail": x} for x in (1e9, -1, _NAN, "1")),
  ],
  "sums": [
    *({"digits": x} for x in (_HUGE, 3, "2")),
    *({"eval_size": x} for x in (_HUGE, 8100, -1)),
  ],
}
# Key -> values that its type allows.
_VALUES = {
  "data.group_size": [0, -1, 10**9],
  "data.prompts_per_step": [0, 10**9],
  "data.max_prompt_length": [0, 10**9],
  "data.holdout": [-0.1, 1.0, _NAN],
  "sampler.max_response_length": [0, 10**9],
  "sampler.temperature": [-1.0, _NAN, _INF],
  "sampler.slots": [-1, 10**9, 10**12],
  "sampler.mesh.data": [-2],
  "sampler.mesh.tensor": [0],
  "sampler.parity_check_every": [-1],
  "sampler.kv_pages": [-1, 10**9, 10**12],
  "data.source": ["nope"],
  "estimator.boundary": ["none"],
  "estimator.gamma": [-0.1, 1.1, _NAN],
  "estimator.lambda_policy": [1.01],
  "estimator.lambda_value": [-0.1, 1.1, _NAN],
  "estimator.name": ["nope"],
  "estimator.alpha": [0.0, -1.0, _NAN],
  "loss.clip_low": [-0.1, 1.1, _NAN],
  "loss.clip_value": [0.0],
  "loss.dual_clip": [0.5],
  "loss.kl": ["k4"],
  "loss.name": ["nope"],
  "loss.clip_high": [-0.1, _NAN, _INF],
  "loss.mode": ["mean"],
  "optimizer.policy.learning_rate": [-1e-6, _NAN, _INF],
  "off_policy.ewma_decay": [1.0],
  "optimizer.max_tokens_per_row": [-1],
  "optimizer.policy.mini_batch": [-1, 33],
  "optimizer.policy.updates_per_step": [0, 2],
  "optimizer.value.learning_rate_schedule": ["step"],
  "optimizer.value.micro_batch_size": [0, -1],
  "reward.name": ["nope"],
  "reward.correct": [_NAN, _INF],
  "reward.deadline_s": [0.0, -1.0, _NAN],
  "reward.workers": [-1],
  "mesh.data": [0, 10**6],
  "schedule.max_staleness": [0],
  "schedule.over_provision": [0.5],
  "schedule.window": [-1],
  "schedule.stop": ["some", "window"],
  "run.seed": [-1, 2**31],
  "run.steps": [-1, None],
  "run.trackers": [("tensorboard", "mlflow")],
  "run.stuck_after_s": [-1.0, _NAN, _INF],
  "checkpoint.keep": [0, 1],
  "eval.top_p": [0.0, 1.1, _NAN],
  "eval.pass_k": [(0,), ("1",), None],
  "estimator.settings": [None],
  "model.dtype": ["int8"],
}


def one_line(config):
  with pytest.raises(InputError) as error:
    build.make_run(config)
  said = str(error.value)
  assert said.isprintable() and len(said) < 500
  return said


@pytest.mark.parametrize(
  ("source", "settings"),
  [(name, case) for name, cases in _SETTINGS.items() for case in cases],
)
def test_settings_of_a_task(model, source, settings):
  config = tiny_run.make_config(model)
  config.data.source, config.data.settings = source, settings
  said = one_line(config)
  assert "data.settings" in said and any(name in said for name in settings)


@pytest.mark.parametrize(
  ("key", "value"),
  [(key, value) for key, values in _VALUES.items() for value in values],
)
def test_values_of_a_key(model, key, value):
  config = tiny_run.make_config(model)
  config.update_from_flattened_dict({key: value})
  shown = "mesh" if key.startswith("mesh.") else key  # Its sizes together.
  said = one_line(config)
  assert f"config.{shown}" in said
  allowed = config_lib.KEYS[key].allowed
  values = value if isinstance(value, tuple) else (value,)
  if allowed is not None and any(one not in allowed for one in values):
    assert said == f"config.{key}={value!r} must be {allowed}"
