"""Hints for command lines that a program rejects."""

import pytest
from parts import command_line


def explain(*arguments):
  return command_line.explain(ValueError("?"), ["train.py", *arguments])


@pytest.mark.parametrize(
  ("key", "hint"),
  [
    ("num_generations", "num_generations is data.group_size here: responses"),
    ("rollout.n", "rollout.n is data.group_size here"),
    ("actor_rollout_ref.rollout.n", "rollout.n is data.group_size here"),
    ("data.train_batch_size", "is data.prompts_per_step here"),
    ("train_batch_size", "data.train_batch_size is data.prompts_per_step here"),
    ("beta", "beta is loss.kl_coefficient here"),
    ("learning_rate", "is optimizer.policy.learning_rate here"),
    ("critic.optim.lr", "is optimizer.value.learning_rate here"),
    ("sampler.top_p", "top_p has no counterpart here: training samples from"),
    ("trainer.total_epochs", "has no counterpart here: set run.steps"),
    ("group_size", "did you mean data.group_size?"),
    ("mini_batch", "optimizer.policy.mini_batch or optimizer.value.mini"),
    ("data.group_sise", "did you mean data.group_size?"),
    ("schedule.name", "see --help_config"),
    ("optimiser.policy.lr", "actor.optim.lr is optimizer.policy.learning_rate"),
    ("loss.cliphigh", "did you mean loss.clip_high?"),
  ],
)
def test_a_key_that_no_config_has(key, hint):
  line = explain(f"--config.{key}=8")
  assert line.startswith(f"--config.{key}: no such key; ")
  assert hint in line and "\n" not in line


@pytest.mark.parametrize(
  ("argument", "as_read"),
  [
    ("--config.sampler.max_response_length=1e3", "=1000"),
    ("--config.run.steps=3e0", "=3"),
    ("--config.optimizer.policy.learning_rate=1e-6", "=1e-6"),
    ("--config.loss.norm=1e-3", "=1e-3"),
    ("--config.data.path=1e3", "=1e3"),
    ("--workdir=runs/a=b:1e3", "=runs/a=b:1e3"),
  ],
)
def test_whole_numbers(argument, as_read):
  (argument,) = command_line._prepared([argument])
  assert argument.endswith(as_read)
