"""POISE: the crossed baseline, and the probe in a run."""

import numpy as np
import pytest
from helpers import doors, registries

from jaxrl_llm import register
from jaxrl_llm.methods import poise


def advantages(rewards, values, groups):
  ones = np.ones((len(rewards), 1), bool)
  column = lambda x: np.asarray(x, np.float32)[:, None]
  found = poise.cross_probe(
    column(rewards), column(values), ones, np.asarray(groups)
  )
  return np.asarray(found)[:, 0]


def test_the_baseline_reads_the_others_alone():
  found = advantages([1, 0, 1, 5], [0.5, 0.25, 0.75, 9], [0, 0, 0, 1])
  np.testing.assert_allclose(
    found, [1 - 0.5, 0 - 0.625, 1 - 0.375, 0], atol=1e-6
  )


def test_its_gradient_is_unbiased():
  """Case: two-armed bandit, reward equal to the arm, perfect probe."""
  p, crossed = 0.3, 0.0
  for first in (0, 1):
    for second in (0, 1):
      chance = (p if first else 1 - p) * (p if second else 1 - p)
      score = first - p  # d log pi / d logit of arm 1.
      (advantage, _) = advantages([first, second], [first, second], [0, 0])
      crossed += chance * score * advantage
  # With a baseline of its own features, all advantages would be 0.
  assert crossed == pytest.approx(p * (1 - p))


@pytest.mark.slow
def test_trains_and_resumes_bit_for_bit(model, tmp_path):
  with registries.registered():
    register.reward("length", lambda tokens: len(tokens) / 10)
    rows = doors.train(
      model,
      tmp_path / "run",
      method__use=("poise",),
      optimizer__policy__mini_batch=16,
      reward__name="length",
      schedule__lag=1,
    )
  # The first prediction is 0. Responses count equally, whatever their length.
  mean, std = (rows[1][f"reward/{x}"] for x in ("mean", "std"))
  assert rows[1]["poise/loss"] == pytest.approx(mean**2 + std**2, rel=1e-5)
  assert 0 < rows[2]["poise/loss"] < rows[1]["poise/loss"]
  assert rows[2]["poise/grad_norm"] > 0
