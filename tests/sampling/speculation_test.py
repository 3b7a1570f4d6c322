"""Draft tokens save steps and change no result, for any drafter."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_engine, tiny_window
from helpers.tiny_engine import STOP, T, assert_same_responses

from jaxrl_llm.sampling import (
  Drafter,
  SamplingSettings,
  prompt_lookup,
  quantized_copy,
  speculation,
)
from jaxrl_llm.sampling.speculation import AdaptiveSpeculation

PROMPTS, IDS = tiny_engine.PROMPTS[:3], tiny_engine.IDS[:3]
SETTINGS = SamplingSettings(temperature=0.9, top_k=40, min_new_tokens=2)


def make_engine(drafter=None, num_draft_tokens=0, **sizes):
  sizes = {"num_draft_tokens": num_draft_tokens, "page_size": 32} | sizes
  engine = tiny_engine.make_engine(drafter=drafter, **sizes)  # Few programs.
  # These tests are about results: draft even if it does not pay off.
  engine._speculation.choose = lambda active: num_draft_tokens
  return engine


def generate(engine, settings=SETTINGS):
  return tiny_engine.generate(engine, PROMPTS, IDS, settings)


@functools.cache
def expected():
  return generate(make_engine())


def fixed(draft):
  """Makes a drafter without a cache from (state, count) -> int32 [S, count]."""

  def propose(params, kv_cache, block_tables, state, active, draw, *, count):
    del params, block_tables, active, draw
    return draft(state, count).astype(jnp.int32), kv_cache

  return Drafter(propose=propose)


def constant(token):
  return fixed(lambda state, count: jnp.full((len(state.length), count), token))


@functools.cache
def oracle():
  """Drafts the tokens that will be drawn, from the expected responses."""
  rollout = expected()
  order = np.argsort(rollout.sample_id)
  tokens, ids = rollout.tokens[order], rollout.sample_id[order]

  def draft(state, count):
    row = jnp.searchsorted(jnp.asarray(ids), state.sample_id)
    at = state.length[:, None] + jnp.arange(count)[None]
    known = jnp.asarray(tokens)[jnp.minimum(row, len(ids) - 1)]
    return jnp.take_along_axis(known, jnp.minimum(at, T - 1), axis=1)

  return fixed(draft)


DRAFTERS = {
  "stops too early": constant(STOP[0]),
  "prompt lookup": prompt_lookup(ngram=1),
  "quantized copy": quantized_copy(tiny.tiny_policy()[0]),
}


class TestResponses:
  @pytest.mark.parametrize("name", DRAFTERS)
  def test_are_the_same_with_any_drafter(self, name):
    assert_same_responses(generate(make_engine(DRAFTERS[name], 3)), expected())

  def test_are_the_same_with_more_draft_tokens_than_room(self):
    assert_same_responses(generate(make_engine(oracle(), T + 3)), expected())

  def test_are_the_same_in_few_slots_and_small_pages(self):
    engine = make_engine(oracle(), 3, slots=3, page_size=4)
    assert_same_responses(generate(engine), expected())

  @pytest.mark.slow
  def test_may_be_turned_on_and_off_at_every_step(self):
    engine = make_engine(DRAFTERS["quantized copy"], 2, page_size=4)
    numbers = iter([2, 0] * 100)
    engine._speculation.choose = lambda active: next(numbers)
    assert_same_responses(generate(engine), expected())

  def test_cut_by_windows(self):
    engine = make_engine(DRAFTERS["quantized copy"], 3)
    call = {"engine": engine, "window": 3}
    rollout = tiny_window.write_window(None, range(tiny_window.N), **call)
    rollout = tiny_window.to_the_end(rollout, **call)
    assert_same_responses(rollout, tiny_window.uncut())


class TestSteps:
  def test_an_oracle_saves_all_it_can(self):
    engine = make_engine(oracle(), 3, slots=12)
    rollout = generate(engine)
    assert engine.last_stats.decode_steps == -(-int(rollout.lengths.max()) // 4)
    assert engine.last_stats.tokens == rollout.lengths.sum()

  def test_no_draft_saves_nothing(self):
    engine = make_engine(constant(-1), 3, slots=12)
    rollout = generate(engine)
    assert_same_responses(rollout, expected())
    assert rollout.lengths.max() == engine.last_stats.decode_steps

  @pytest.mark.slow
  def test_a_copy_in_eight_bits_saves_most(self):
    engine = make_engine(DRAFTERS["quantized copy"], 3, slots=12)
    generate(engine)
    plain = make_engine(slots=12)
    generate(plain)
    assert engine.last_stats.decode_steps < 0.6 * plain.last_stats.decode_steps


class TestPromptLookup:
  @pytest.mark.parametrize(
    ("history", "ngram", "wanted"),
    [
      ([1, 2, 3, 4, 1, 2], 2, [3, 4, 1]),  # After the earlier 1 2.
      ([1, 2, 9, 1, 2, 8, 1, 2], 2, [8, 1, 2]),  # The last match.
      ([1, 2, 3, 4], 2, [-1, -1, -1]),  # No match.
      ([5, 5, 5], 1, [5, -1, -1]),  # Nothing after the end.
      ([7], 2, [-1, -1, -1]),  # Too short.
      ([0, 0, 4, 0], 2, [-1, -1, -1]),  # Zeros are padding.
    ],
  )
  def test_drafts_what_followed(self, history, ngram, wanted):
    room = np.zeros((2, 10), np.int32)
    room[0, : len(history)] = history
    position = jnp.asarray([len(history) - 1, 0])
    state = types.SimpleNamespace(history=jnp.asarray(room), position=position)
    got, _ = prompt_lookup(ngram=ngram).propose(
      (), (), None, state, None, None, count=3
    )
    assert got[0].tolist() == wanted

  def test_refuses_no_token(self):
    with pytest.raises(ValueError, match=r"ngram=0, expected .* in \[1, inf\)"):
      prompt_lookup(ngram=0)


class TestQuantize:
  def test_error_is_at_most_half_a_step_of_the_column(self):
    x = jax.random.normal(jax.random.key(0), (3, 16, 5)).at[..., 2].set(0.0)
    quantized = speculation.quantize({"a": x, "b": x[0, 0]})
    assert quantized["a"].values.dtype == jnp.int8
    out = speculation.dequantize(quantized)
    step = jnp.max(jnp.abs(x), axis=1, keepdims=True) / 127
    assert jnp.all(jnp.abs(out["a"] - x) <= 0.5001 * step)
    np.testing.assert_array_equal(out["b"], x[0, 0])


class TestAdaptiveSpeculation:
  def test_tries_all_then_keeps_the_fastest(self):
    adaptive = AdaptiveSpeculation(4)
    for way, rate in ((4, 70), (2, 100), (0, 50)):
      assert adaptive.choose(8) == way
      adaptive.observe(8, way, 1, 1.0)  # Compiles; not counted.
      assert adaptive.choose(8) == way
      adaptive.observe(8, way, rate, 1.0)
    assert [adaptive.choose(8) for _ in range(5)] == [2] * 5

  def test_turns_off_what_does_not_pay_and_looks_again(self):
    adaptive = AdaptiveSpeculation(4, retry=10)
    for way, rate in ((4, 20), (2, 30), (0, 50)):
      for _ in range(2):
        adaptive.observe(8, way, rate, 1.0)
    choices = [adaptive.choose(8) for _ in range(20)]
    assert choices == [0] * 9 + [4] + [0] * 9 + [2]

  def test_few_and_many_are_told_apart(self):
    adaptive = AdaptiveSpeculation(4)
    for active, slow, fast in ((2, 0, 4), (64, 4, 0)):
      for _ in range(2):
        adaptive.observe(active, 2, 5, 1.0)
        adaptive.observe(active, slow, 10, 1.0)
        adaptive.observe(active, fast, 20, 1.0)
    assert adaptive.choose(2) == 4
    assert adaptive.choose(64) == 0

  def test_without_draft_tokens_never(self):
    assert AdaptiveSpeculation(0).choose(3) == 0

  def test_one_bad_measurement_does_not_count(self):
    adaptive = AdaptiveSpeculation(1)
    for way, rates in ((1, (20, 20, 1, 20)), (0, (10, 10, 10, 10))):
      for rate in rates:
        adaptive.observe(8, way, rate, 1.0)
    assert adaptive.choose(8) == 1


class TestBadInput:
  def test_a_drafter_and_draft_tokens_belong_together(self):
    for drafter, count in ((None, 2), (constant(1), 0)):
      with pytest.raises(ValueError, match="requires num_draft_tokens"):
        make_engine(drafter, count)
    with pytest.raises(ValueError, match="num_draft_tokens=-1, expected"):
      make_engine(constant(1), -1)
