"""Registries of parts; tests register additional ones."""

import contextlib

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import prompt_source
from jaxrl_llm.learner import core, optimizer
from jaxrl_llm.rollout import engine, schedule, turns

REGISTRIES = (
  core.ESTIMATORS,
  core.LOSSES,
  core.MASKS,
  core.INPUTS,
  core.METHODS,
  optimizer.OPTIMIZERS,
  prompt_source.TEMPLATES,
  prompt_source.PROMPT_SOURCES,
  engine.ENGINES,
  schedule.STOPS,
  turns.ENVIRONMENTS,
  rewards.REWARDS,
  rewards.GROUP_REWARDS,
)


@contextlib.contextmanager
def registered():
  """Removes parts on exit that were registered in this context."""
  before = [dict(table) for table in REGISTRIES]
  try:
    yield
  finally:
    for table, known in zip(REGISTRIES, before):
      table.clear()
      table.update(known)


@pytest.fixture
def registries():
  with registered():
    yield
