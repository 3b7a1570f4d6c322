"""One run and its histories for all tests of T-PPO."""

import pytest
from helpers import tiny_run
from helpers.tiny_tppo import STEPS, WINDOW, record


@pytest.fixture(scope="session")
def run(model):
  """T-PPO with a window of a quarter; other windows compile nothing new."""
  return tiny_run.make_run(
    model,
    schedule__window=WINDOW,
    # A critic that says something soon.
    optimizer__value__learning_rate=1e-2,
  )


@pytest.fixture(scope="session")
def history(run):
  return record(run, STEPS)[0]
