"""sGPO: a profile of the data selects, orders and repeats prompts.

The initial policy answers every training question k times before the run
(scripts/evaluate.py --out). Let p be the solve rate of a question:

  * questions with p > 3/4 are left out, as are nine of ten with p = 0;
  * the others get min(8, max(2, 2^⌈log₂ 1/p⌉)) responses each;
  * they are ordered in thirds from easy to hard, each third shuffled.

Differs from DARS in that hard prompts are known before the run, so a step draws
each prompt only once.

Reference: Sudalairaj et al. 2026 (sGPO), arXiv:2606.08854.
"""

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from jaxrl_llm.config import Path
from jaxrl_llm.data import rows
from jaxrl_llm.data.curriculum import check_pool
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.sources import Source
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.learner import Algorithm, Settings

_EASY, _UNSOLVED_SHARE, _MOST, _THIRDS = 0.75, 0.1, 8, 3


def tries_of(rate: float) -> int:
  """Returns the number of responses to a question with a given solve rate."""
  if not rate:
    return _MOST
  return min(_MOST, max(2, 2 ** math.ceil(math.log2(1 / rate))))


def order_of(rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns the indices of the selected questions in order, int [n <= P].

  Args:
    rates: [P], solve rates.
    rng: selects unsolved questions, and shuffles.
  """
  unsolved = rng.permutation(np.flatnonzero(rates == 0))
  kept = np.flatnonzero((rates > 0) & (rates <= _EASY))
  kept = np.append(kept, unsolved[: round(_UNSOLVED_SHARE * unsolved.size)])
  kept = kept[np.argsort(-rates[kept], kind="stable")]
  return np.concatenate(
    [rng.permutation(third) for third in np.array_split(kept, _THIRDS)]
  )


class Profiled(PromptSource):
  """Draws prompts repeatedly in the order of a profile."""

  def __init__(self, *args: Any, profile: str, seed: int, **settings: Any):
    """Reads the profile.

    Args:
      *args: arguments of `PromptSource`.
      profile: JSON lines file with `question`, `correct` and `samples`.
      seed: seed of the order.
      **settings: arguments of `PromptSource`.

    Raises:
      InputError: The file cannot be read, lacks a question of the data, or
        leaves no question to train on.
    """
    import grain  # Only training draws prompts.

    super().__init__(*args, seed=seed, **settings)
    check_pool(self)
    self._rates = _read(profile, self._source)
    order = order_of(self._rates, np.random.default_rng(seed))
    if not order.size:
      raise InputError(f"{profile}: every question is easy or never solved")
    self._order = grain.MapDataset.source(order.tolist()).repeat()

  def prompt(self, example_id: int, group_id: int):
    prompt = super().prompt(example_id, group_id)
    tries = tries_of(self._rates[example_id])
    return prompt and dataclasses.replace(prompt, tries=tries)


def _read(profile: str, source: Source) -> np.ndarray:
  """Returns the solve rate of each example, [P]."""
  rates = {}
  for where, fields in rows.read_rows(pathlib.Path(profile)):
    wrong = f"{where}: not a line of a profile"
    advice = "write it with scripts/evaluate.py --out"
    with as_input_error(wrong, advice, KeyError, TypeError, ZeroDivisionError):
      rates[fields["question"]] = fields["correct"] / fields["samples"]
  asked = [source[i].question for i in range(len(source))]
  missing = [question for question in asked if question not in rates]
  if missing:
    raise InputError(
      f"{profile}: no line for {missing[0]!r} ({len(missing)} of {len(asked)}"
      " questions); profile the training data with scripts/evaluate.py --out"
    )
  return np.array([rates[question] for question in asked])


def sgpo(algorithm: Algorithm, s: Settings, *, profile: Path = "") -> Algorithm:
  """Selects, orders and repeats prompts by a profile of the data.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    profile: JSON lines file that scripts/evaluate.py --out wrote.
  """
  return algorithm.change(
    prompts=Profiled, prompt_settings={"profile": profile}
  )
