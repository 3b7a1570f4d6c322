"""One run and its histories for all tests of T-PPO."""

import pytest
from helpers import tiny_run
from helpers.tiny_tppo import STEPS, WINDOW, patient_of, record

from jaxrl_llm.trainer import build


@pytest.fixture(scope="session")
def run(model):
  """T-PPO with a window of a quarter; other windows compile nothing new."""
  return build.make_run(
    tiny_run.make_config(
      model,
      schedule__window=WINDOW,
      value__pretrain_steps=0,
      run__samples_every=0,
      # A critic that says something soon.
      optimizer__value__learning_rate=1e-2,
    )
  )


@pytest.fixture(scope="session")
def history(run):
  return record(run, STEPS)[0]


@pytest.fixture(scope="session")
def patient(run):
  """The critic waits for many responses."""
  return record(patient_of(run), STEPS)[0]
