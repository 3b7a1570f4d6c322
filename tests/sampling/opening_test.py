"""Responses that begin with given tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_engine
from helpers.tiny_engine import IDS, PROMPTS, G, N, go_on

from jaxrl_llm.sampling import Engine, new_requests, prompt_lookup
from jaxrl_llm.types import Origin

CONFIG = tiny_engine.engine().config


def with_openings(tokens, lengths):
  """Makes new responses to the prompts that begin with tokens [B, T]."""
  rows = new_requests(PROMPTS, IDS, range(N), CONFIG)
  place = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
  rows.tokens[place], rows.lengths[:] = tokens[place], lengths
  rows.origin[place] = int(Origin.FOREIGN)
  return rows


class TestOpening:
  @pytest.mark.parametrize("drafts", [0, 3])
  def test_the_rest_of_a_response_is_as_it_was(self, drafts):
    # Its randomness depends on its token indices.
    whole = tiny_engine.expected()
    given = whole.lengths // 2
    own = Engine(
      tiny_engine.engine().fns,
      dataclasses.replace(CONFIG, num_draft_tokens=drafts),
      drafter=prompt_lookup() if drafts else None,
    )
    rest = go_on(with_openings(whole.tokens, given), own)
    tiny_engine.assert_same_responses(
      rest.replace(mask=whole.mask, behavior_logprobs=whole.behavior_logprobs),
      whole,
    )
    place = np.arange(whole.tokens.shape[1])[None]
    opened = place < given[:, None]
    own = ~opened & (place < whole.lengths[:, None])
    np.testing.assert_array_equal(rest.mask, own)
    np.testing.assert_array_equal(rest.origin == Origin.FOREIGN, opened)
    np.testing.assert_array_equal(rest.window_start, given)
    np.testing.assert_allclose(
      rest.behavior_logprobs,
      np.where(own, whole.behavior_logprobs, 0),
      rtol=0,
      atol=1e-5,
    )

  def test_one_opening_is_prefilled_once(self):
    opening = np.full((N * G, CONFIG.max_response_length), 7)
    rows = with_openings(opening, [5] * (N * G))
    rows.tokens[0, 2] = 8  # Changed in the first response.
    engine = tiny_engine.make_engine(slots=N * G)
    go_on(rows, engine)
    contexts = sum(len(prompt) + 5 for prompt in PROMPTS)
    assert engine.last_stats.prefill_tokens == contexts + len(PROMPTS[0]) + 5
    # A single row has the same result.
    alone = go_on(jax.tree.map(lambda x: x[7:8], rows))
    assert alone.lengths[0] > 5
