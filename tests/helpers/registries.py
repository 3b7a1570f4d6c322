"""The tables of parts, which tests register parts of their own in."""

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.data import prompt_source
from jaxrl_llm.learner import build_algorithm, choices, optimizer, providers
from jaxrl_llm.rollout import worker

REGISTRIES = (
  choices.ESTIMATORS,
  choices.POLICY_LOSSES,
  choices.OWN_MASKS,
  choices.AUXILIARY,
  choices.MEMBERS,
  providers.PROVIDERS,
  optimizer.OPTIMIZERS,
  build_algorithm._OWN_INPUTS,
  prompt_source.TEMPLATES,
  prompt_source.PROMPT_SOURCES,
  worker.STOPS,
  rewards.REWARDS,
)


@pytest.fixture
def registries():
  """What a test registers is gone afterwards."""
  for table in (choices.ESTIMATORS, choices.POLICY_LOSSES, providers.PROVIDERS):
    for name in table:
      assert table[name]  # What methods/ registers is no test's.
  before = [dict(r) for r in REGISTRIES]
  yield
  for registry, known in zip(REGISTRIES, before):
    registry.clear()
    registry.update(known)
