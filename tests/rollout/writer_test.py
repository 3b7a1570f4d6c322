"""Tests of the code that all writers of responses share; no model."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.writer import Arrivals, ResponseWriter
from jaxrl_llm.sampling import EngineConfig, SamplingSettings
from jaxrl_llm.sampling.requests import SamplingParams, make_requests
from jaxrl_llm.types import Origin, Status


class Engine:
  """Sizes only; nothing else is read here."""

  config = EngineConfig(
    slots=8, max_prompt_length=4, max_response_length=6, stop_tokens=[1]
  )


def prompt(number):
  return Prompt(
    id=f"row-{number}",
    question="?",
    answer="!",
    source="test",
    example_id=number,
    group_id=10 + number,
    tokens=(2,) * number,
  )


KEY = jax.random.key(3)
WRITER = ResponseWriter(Engine(), SamplingSettings(top_p=0.5), KEY, 2)


def test_a_prompt_has_as_many_responses_as_it_is_given_numbers():
  begun = WRITER.begin([prompt(3), prompt(1)], [[7], [4, 9]])
  np.testing.assert_array_equal(begun.sample_id, [7, 4, 9])
  np.testing.assert_array_equal(begun.prompt_lengths, [3, 1, 1])
  np.testing.assert_array_equal(begun.example_id, [3, 1, 1])
  np.testing.assert_array_equal(begun.group_id, [13, 11, 11])
  assert not begun.lengths.any() and begun.tokens.shape == (3, 6)


def test_a_response_begins_with_its_opening():
  opened = dataclasses.replace(prompt(3), opening=(4, 5))
  begun = WRITER.begin([opened, prompt(1)], [[7, 8], [4]])
  np.testing.assert_array_equal(begun.lengths, [2, 2, 0])
  np.testing.assert_array_equal(
    begun.tokens[:, :3], [[4, 5, 0]] * 2 + [[0] * 3]
  )
  assert (begun.origin[:2, :2] == Origin.FOREIGN).all()
  assert (begun.origin == Origin.FOREIGN).sum() == 4 and not begun.mask.any()
  assert (begun.status == Status.TRUNCATED).all()
  long = dataclasses.replace(opened, opening=(4,) * 6)
  with pytest.raises(InputError, match="'row-3' has an opening of 6 .* only 5"):
    WRITER.begin([long], [[9]])
  short = dataclasses.replace(opened, demonstrated=(True,))
  with pytest.raises(
    InputError, match="'row-3' has a response of 2 .* marks 1"
  ):
    WRITER.begin([short], [[9]])


def test_a_response_of_several_turns_arrives_once():
  begun = WRITER.begin([prompt(1)], [[7, 8, 9]])
  params = SamplingParams(WRITER.settings, None, group_size=3)
  requests = make_requests(begun, params, np.full(3, 6), 6)
  arrived = []
  hook = Arrivals({11: 3}, lambda rows: arrived.append(rows.sample_id.tolist()))
  first, *others = requests
  for _ in range(3):  # It leaves its slot after each turn.
    hook([first])
  for request, left in ((first, []), *([r, [r]] for r in others)):
    assert not arrived
    request.row.status[0] = int(Status.FINISHED)
    hook(left)
  assert arrived == [[7, 8, 9]]
