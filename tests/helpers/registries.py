"""Registries of parts; tests register additional ones."""

import contextlib

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import prompt_source
from jaxrl_llm.learner import build_algorithm, choices, optimizer, providers
from jaxrl_llm.rollout import engine, schedule, turns

REGISTRIES = (
  choices.ESTIMATORS,
  choices.POLICY_LOSSES,
  choices.OWN_MASKS,
  choices.AUXILIARY,
  choices.METRICS,
  choices.MEMBERS,
  providers.PROVIDERS,
  optimizer.OPTIMIZERS,
  build_algorithm._OWN_INPUTS,
  prompt_source.TEMPLATES,
  prompt_source.PROMPT_SOURCES,
  choices.LOGITS_PROCESSORS,
  engine.ENGINES,
  schedule.STOPS,
  turns.ENVIRONMENTS,
  rewards.REWARDS,
  rewards.GROUP_REWARDS,
)


@contextlib.contextmanager
def registered():
  """Removes parts on exit that were registered in this context."""
  for table in REGISTRIES:  # Load methods/ before the snapshot.
    list(map(table.__getitem__, table))
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
