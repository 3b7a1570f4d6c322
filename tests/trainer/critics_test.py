"""Runs with other critics: other heads, two models, further inputs."""

import json
import shutil

import chex
import convert
import jax
import numpy as np
import pytest
from helpers import packed, tiny_run

from jaxrl_llm import api, models, types, workdir
from jaxrl_llm.data import tasks
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, summary

STEPS = 3
_SHARE = {"method__asyppo__agree_share": 0.25}
_ADAPTERS = {"model__lora_rank": 4, "value__lora_rank": 2}
_PRIVILEGED = {
  "method__use": ("privileged",),
  "method__privileged__answer_format": "#{answer};",
  "method__privileged__answer_tokens": 5,
}
KINDS = {
  "categorical adapters": {"method__use": ("hl_gauss",), **_ADAPTERS},
  # T-PPO's windows bootstrap with V of the state after the last token.
  "categorical halves": {
    **_SHARE,
    "method__use": ("hl_gauss", "asyppo"),
    "schedule__window": 5,
    "estimator__boundary": "bootstrap",
  },
  "privileged halves of adapters": {
    **_SHARE,
    **_ADAPTERS,
    **_PRIVILEGED,
    "method__use": ("asyppo", "privileged"),
    "schedule__window": 5,
  },
}


def make_run(model, kind, **changes):
  settings = {"run__steps": STEPS, "eval__every": 2, **KINDS[kind]}
  settings |= tiny_run.EVALUATES_LIKE_A_STEP
  return build.make_run(tiny_run.make_config(model, **settings | changes))


def make_privileged(model, **changes):
  return build.make_run(tiny_run.make_config(model, **_PRIVILEGED | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in KINDS if "halves" in k])
def test_resumes_bit_for_bit(model, kind, tmp_path):
  run = make_run(model, kind)
  rows = tiny_run.check_resumes(run, tmp_path)
  # With windows the critic waits for a mini-batch of ended responses.
  step = next(i for i, row in enumerate(rows) if "value/loss" in row)
  assert rows[step]["value/grad_norm"] > 0
  whole = tmp_path / "whole"
  tiny_run.assert_same_checkpoints(run, whole, tmp_path / "parts")
  assert run.learner.critic.shares_base == ("value__lora_rank" in KINDS[kind])
  if kind == "privileged halves of adapters":
    halves = {"method__use": ("asyppo",)}
    halves["value__reads_logprobs"] = True
    _, learner = started_from(model, whole, **halves)
    assert learner.critic.trained.keys() == {"first", "second"}
  if kind == "categorical halves":  # For adapters, see adapters_test.py.
    check_mesh(model, kind, rows[: step + 1], tmp_path / "mesh")


def check_mesh(model, kind, rows, folder):
  """Checks that eight devices repeat the last of these steps of one device."""
  changes = {"run__steps": len(rows) - 1, **tiny_run.EIGHT_DEVICES}
  loop.train(make_run(model, kind, **changes), folder)
  sharded = tiny_run.comparable(folder)[-1]
  for key in ("value/loss", "value/grad_norm"):
    np.testing.assert_allclose(rows[-1][key], sharded[key], rtol=1e-3)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
  """The folder of a short run with a categorical critic."""
  folder = tmp_path_factory.mktemp("trained")
  settings = {"run__steps": 1, "value__reads_logprobs": False}
  settings["value__reward_model_steps"] = 1  # Moves the adapters.
  loop.train(make_run(model, "categorical adapters", **settings), folder)
  return folder


def started_from(model, path, **changes):
  """A run with value.init_from, and its first critic."""
  settings = {"method__use": ("hl_gauss",), "value__init_from": str(path)}
  settings["value__reads_logprobs"] = False
  config = tiny_run.make_config(model, **settings | changes)
  run = build.make_run(config)
  return run, loop.begin(run)[0].learner


def test_an_exported_critic_starts_another_run(model, trained, tmp_path):
  out = tmp_path / "critic"
  flags = [f"--checkpoint={trained}", f"--out={out}"]
  assert convert.main([*flags, "--critic"]) == 0
  fns, params = workdir.load_critic(trained, 1)
  assert fns.config.adapters is None  # They are merged.
  run, learner = started_from(model, out)
  chex.assert_trees_all_equal(learner.critic.trained, params)
  assert run.pretraining is None
  # Both critics start from it.
  run, learner = started_from(model, out, method__use=("hl_gauss", "asyppo"))
  assert "2 critics of the same size" in summary.describe(run)[1]
  for name in ("first", "second"):
    chex.assert_trees_all_equal(learner.critic.trained[name], params)


def test_a_pretrained_critic_with_adapters_starts_another_run(model, trained):
  _, params = workdir.load_critic(trained, 0)
  _, learner = started_from(model, trained)
  chex.assert_trees_all_close(learner.critic.trained, params, atol=1e-6)
  _, before = models.load(str(model))
  moved = learner.critic.trained["layers"]["mlp"]["up"]["kernel"]
  assert np.abs(moved - before["layers"]["mlp"]["up"]["kernel"]).max() > 1e-5


def test_the_critic_may_be_smaller_than_the_policy(model, tmp_path):
  small = models.ModelConfig(
    **vars(tiny_run.model_config()) | {"hidden_size": 16, "num_layers": 1}
  )
  path = tiny_run.write_model(tmp_path / "small", small)
  _, params = models.load(str(path))
  run, learner = started_from(model, path, run__steps=1)
  critic = learner.critic.trained
  chex.assert_trees_all_equal(critic["layers"], params["layers"])
  assert not critic["value_head"]["kernel"].any()
  assert run.pretraining is not None  # Its head is new.
  size = models.num_params(small)
  assert f", a critic of {size:,}, computed" in summary.describe(run)[1]
  loop.train(run, tmp_path / "run")
  api.load(tmp_path / "run").save_critic(tmp_path / "critic")
  assert models.files.hf.read_config(tmp_path / "critic") == small


def test_a_critic_that_is_not_of_a_directory_is_one_line(
  model, trained, tmp_path
):
  characters = tasks.CHARACTERS.replace("+", "*")
  other = tiny_run.write_model(tmp_path / "other", characters=characters)
  with pytest.raises(InputError, match="token"):
    started_from(model, other)
  with pytest.raises(InputError, match="give a run"):
    api.load(model).save_critic(tmp_path / "critic")
  run = shutil.copytree(trained, tmp_path / "run")
  config = run / "config.json"
  settings = json.loads(config.read_text())
  settings["method"]["use"] = ["asyppo"]
  config.write_text(json.dumps(settings))
  with pytest.raises(InputError, match="is several models, which"):
    api.load(run).save_critic(tmp_path / "critic")


def test_a_privileged_critic_reads_the_answer_before_the_prompt(model):
  run = make_privileged(model)
  rng = np.random.default_rng(0)
  rollout = tiny_run.random_rollout(rng, rows=6, vocab=19, group_size=2)
  learner = loop.begin(run)[0].learner
  draw = lambda x: jax.numpy.asarray(rng.normal(scale=0.3, size=x.shape))
  critic = jax.tree.map(draw, learner.critic.trained)
  learner = learner.with_model("critic", learner.critic.replace(trained=critic))
  batch = run.pretraining.learner.measure(
    learner, "critic", types.unjudged(rollout), rng
  )
  found = batch.experience["old_values"]
  score = jax.jit(run.learner.critic.fns.outputs)
  for row in range(6):
    answer = f"#{run.source.answer(int(rollout.example_id[row]))};"
    prompt = rollout.prompt_tokens[row, : rollout.prompt_lengths[row]]
    response = rollout.tokens[row, : rollout.lengths[row]]
    tokens = [*run.tokenizer.encode(answer)[:5], *prompt, *response]
    start, end = len(tokens) - len(response), len(tokens)
    logprobs = np.where(rollout.mask, rollout.behavior_logprobs, 0.0)[row]
    sampled = np.zeros(64, np.float32)
    sampled[start:end] = logprobs[: len(response)]
    rows = packed.rows(
      [np.pad(tokens, (0, 64 - end))],
      segments=(np.arange(64) < end).astype(np.int32)[None],
      logprobs=sampled[None],
    )
    values = score(critic, rows)[0]["values"][0, start - 1 : end - 1]
    np.testing.assert_allclose(found[row, : len(response)], values, atol=1e-4)


def test_an_answer_needs_a_place_and_room(model):
  with pytest.raises(InputError, match="answer_format has no {answer}"):
    make_privileged(model, method__privileged__answer_format="answer")
  with pytest.raises(InputError, match="view = 84 exceeds the model"):
    make_privileged(model, method__privileged__answer_tokens=60)
