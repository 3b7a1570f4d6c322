"""Settings that forbid, favour or stop tokens have exact distributions."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.tiny_engine import (
  SETTINGS,
  STOP,
  T,
  assert_same_responses,
  detokenize,
  engine,
  expected,
  generate,
  go_on,
  law,
)

from jaxrl_llm.sampling import (
  Engine,
  EngineConfig,
  SamplingSettings,
  new_requests,
)
from jaxrl_llm.sampling.requests import SamplingParams, make_requests
from jaxrl_llm.sampling.stops import first_stop
from jaxrl_llm.types import Origin, Status

PLAIN = SamplingSettings()


def _assert_log_probs(out, law):
  """Checks recorded log-probs against the unnormalised `law`, [B, T, V]."""
  law = law - np.log(np.sum(np.exp(law), axis=-1, keepdims=True))
  law = np.take_along_axis(law, out.tokens[..., None], axis=-1)[..., 0]
  got = np.where(out.mask, out.behavior_logprobs, 0)
  np.testing.assert_allclose(got, np.where(out.mask, law, 0), rtol=0, atol=1e-5)


class TestLogitBias:
  def test_minus_infinity_takes_tokens_out_of_the_law(self):
    plain = generate(settings=PLAIN)
    forbidden = [*np.bincount(plain.tokens[plain.mask]).argsort()[-5:], 3]
    bias = {int(token): -np.inf for token in forbidden}
    out = generate(settings=SamplingSettings(logit_bias=bias))
    assert np.isin(plain.tokens[plain.mask], forbidden).any()
    assert not np.isin(out.tokens[out.mask], forbidden).any()
    log_probs = law(out)
    log_probs[..., forbidden] = -np.inf
    _assert_log_probs(out, log_probs)

  def test_is_added_to_the_logits_before_the_temperature(self):
    bias = {7: 2.5, 9: -1.5, 42: 1.0}
    settings = SamplingSettings(logit_bias=bias, temperature=0.7)
    out = generate(settings=settings)
    log_probs = law(out)
    log_probs[..., list(bias)] += list(bias.values())
    _assert_log_probs(out, log_probs / 0.7)
    many = np.isin(out.tokens[out.mask], [7]).mean()
    assert many > np.isin(expected().tokens[expected().mask], [7]).mean()


class TestMinNewTokens:
  def test_no_stop_token_comes_before(self):
    settings = SamplingSettings(min_new_tokens=5)
    out = generate(settings=settings)
    assert generate(settings=PLAIN).lengths.min() < 5
    log_probs = law(out)
    log_probs[:, :5, list(STOP)] = -np.inf
    _assert_log_probs(out, log_probs)
    assert out.lengths.min() == 6  # The sixth may be one.
    assert Status.FINISHED in out.status

  def test_is_over_all_windows(self):
    settings = dataclasses.replace(SETTINGS, min_new_tokens=9)
    whole = generate(settings=settings)
    first = generate(settings=settings, window=6)
    assert Status.TRUNCATED in first.status
    cut = first.status == Status.TRUNCATED
    out = go_on(first, settings=settings)
    assert_same_responses(out, jax.tree.map(lambda x: x[cut], whole))

  def test_as_many_as_there_may_be(self):
    settings = SamplingSettings(min_new_tokens=7, max_new_tokens=7)
    out = generate(settings=settings)
    np.testing.assert_array_equal(out.lengths, 7)
    assert set(out.status) == {Status.OVERLONG}
    assert not np.isin(out.tokens, STOP).any()


class TestStopStrings:
  def test_end_a_response_with_the_token_that_completes_one(self):
    full = expected()
    # A token is a letter; all pairs of letters are repeated in responses.
    texts = [detokenize(r[:n]) for r, n in zip(full.tokens, full.lengths)]
    long = [text for text in texts if len(text) > 6]
    strings = (*(text[4:6] for text in long[:4]), long[0][2])
    ends = [first_stop(x, strings, "".join, before=0) for x in texts]
    lengths = [end or len(text) for end, text in zip(ends, texts)]
    assert 4 <= np.sum(lengths < full.lengths) < len(lengths)
    settings = dataclasses.replace(SETTINGS, stop_strings=strings)
    out = generate(settings=settings)
    np.testing.assert_array_equal(out.lengths, lengths)
    status = [
      Status.FINISHED if end else old for end, old in zip(ends, full.status)
    ]
    np.testing.assert_array_equal(out.status, status)
    mask = np.arange(T)[None] < out.lengths[:, None]
    np.testing.assert_array_equal(out.mask, mask)
    for name in ("tokens", "version"):
      np.testing.assert_array_equal(out[name], np.where(mask, full[name], 0))
    assert not out.behavior_logprobs[~mask].any()

  def test_are_searched_only_after_the_tokens_of_others(self):
    own, tokens = engine(), [5, 6, 7, 8, 6, 7, 9]
    rollout = new_requests([[5]], [[0]], [0], own.config)
    rollout.tokens[0, :7], rollout.origin[0, :3] = tokens, Origin.FOREIGN
    settings = SamplingSettings(stop_strings=(detokenize([6, 7]),))
    params = SamplingParams(settings, None, group_size=1)
    (request,) = make_requests(rollout, params, np.array([T]), window=T)
    rollout.lengths[0] = 4
    assert not own._stopped(request, before=3)
    rollout.lengths[0] = 7
    assert own._stopped(request, before=4)
    assert rollout.lengths[0] == 6 and rollout.status[0] == Status.FINISHED

  def test_need_a_text(self):
    own = Engine(engine().fns, engine().config)
    with pytest.raises(ValueError, match="stop_strings=.*with detokenize"):
      generate(own, settings=SamplingSettings(stop_strings=("a",)))


class TestContinuedPerPrefill:
  """The number of continued responses in one prefill is limited by memory."""

  def config(self, **changes):
    sizes = {"slots": 64, "max_prompt_length": 8, "max_response_length": 120}
    return EngineConfig(stop_tokens=[1], page_size=8, **sizes | changes)

  def test_an_eighth_of_the_slots(self):
    assert self.config().continued_per_prefill(shards=1) == 8
    assert self.config().continued_per_prefill(shards=4) == 8

  def test_few_pages_have_room_for_few(self):
    # 8 x 128 tokens per eighth of the cache; with two shards; with fewer pages.
    pages = 8 * 128 // 8 * 4
    assert self.config(kv_pages=pages).continued_per_prefill(shards=1) == 4
    assert self.config(kv_pages=pages).continued_per_prefill(shards=2) == 4
    assert self.config(kv_pages=pages // 8).continued_per_prefill(shards=2) == 2
