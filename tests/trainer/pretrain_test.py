"""Pretraining depends only on its settings; the shipped base models."""

import json
import pathlib

import jax
import numpy as np
import pretraining
import pytest
from helpers import programs, tiny_run

import jaxrl_llm
from jaxrl_llm import models
from jaxrl_llm.data import tasks
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.files import hf

ASSETS = pathlib.Path(jaxrl_llm.__file__).parent / "assets"
TASKS = tuple(pretraining.TASKS)


def train(tokenizer, **changes):
  """Trains the tiny model briefly; returns (params, losses)."""
  small = {"steps": 60, "warmup_steps": 2, "learning_rate": 1e-2}
  small |= {"batch_size": 16, "micro_batch_size": 4, "max_prompt_length": 6}
  small |= {"task_settings": {"max_ops": 2, "eval_size": 20}}
  small |= {"max_response_length": 24}
  settings = pretraining.TASKS[TASKS[0]]._replace(**small | changes)
  losses = []
  params = pretraining.pretrain(
    models.make_policy(tiny_run.model_config()),
    tokenizer,
    settings,
    log=lambda _, loss: losses.append(loss),
  )
  return params, losses


@pytest.fixture(scope="module")
def tokenizer(model):
  return Tokenizer(model)


@pytest.mark.slow
def test_pretraining_learns_and_repeats_itself(tokenizer):
  params, (first, last) = train(tokenizer)
  assert first > 2.7 and last < 0.6 * first  # log(19 tokens) = 2.9.
  again, _ = train(tokenizer)
  jax.tree.map(np.testing.assert_array_equal, params, again)
  _, (other, _) = train(tokenizer, seed=1, steps=4)
  assert other != first


@pytest.mark.slow
def test_three_steps_of_the_script_at_full_size(tmp_path):
  task = TASKS[-1]  # All have this size; the first one is the default.
  flags = [f"--task={task}", f"--out={tmp_path / 'base'}", "--steps=3"]
  shown, _ = programs.finish(
    "scripts/dev/pretraining.py", *flags, "--warmup_steps=1"
  )
  assert "334,272 parameters" in shown
  fns, params = models.load(str(tmp_path / "base"))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  assert fns.config == hf.read_config(ASSETS / f"{task}_base")


@pytest.mark.parametrize("task", TASKS)
def test_shipped_base_is_what_the_settings_say(task):
  settings = pretraining.TASKS[task]
  directory = ASSETS / f"{task}_base"
  config = hf.read_config(directory)
  assert config.num_layers == settings.num_layers
  assert config.hidden_size == settings.hidden_size
  assert config.max_position_embeddings == settings.max_position_embeddings
  assert models.num_params(config) == 334_272
  size = sum(file.stat().st_size for file in directory.iterdir())
  assert size < 1_000_000
  names = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
  assert names["eos_token"] == "<eos>"  # The name that transformers reads.
  # Compared as JSON: indentation differs between versions of the library.
  written = json.loads((directory / "tokenizer.json").read_text("utf-8"))
  assert written == json.loads(
    pretraining.character_tokenizer_json(tasks.CHARACTERS)
  )


def test_steps_within_the_warm_up_are_one_line():
  settings = pretraining.Settings(steps=50)
  with pytest.raises(InputError, match="--steps=50 must be over"):
    pretraining.pretrain(None, None, settings, log=None)
