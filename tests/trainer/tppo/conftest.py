"""A run and its recorded steps for all tests of T-PPO."""

import pytest
from helpers import tiny_run
from helpers.tiny_tppo import STEPS, WINDOW, record


@pytest.fixture(scope="session")
def run(model):
  """T-PPO with windows of a quarter; other windows need no compilation."""
  return tiny_run.make_run(
    model,
    schedule__window=WINDOW,
    # A critic that learns quickly.
    optimizer__value__learning_rate=1e-2,
  )


@pytest.fixture(scope="session")
def history(run):
  return record(run, STEPS)[0]
