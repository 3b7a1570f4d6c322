"""A response depends only on weights, prompt and sample_id."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import scripted, tiny
from helpers.tiny_engine import (
  COMPILED,
  IDS,
  KEY,
  PROMPTS,
  SETTINGS,
  G,
  N,
  T,
  assert_same_responses,
  engine,
  expected,
  generate,
  law,
  make_engine,
  params,
  rows,
  write,
)

from jaxrl_llm import models, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling import SamplingSettings, buckets
from jaxrl_llm.sampling.rules import Decision
from jaxrl_llm.types import Origin, Status


class TestRollout:
  def test_holds_what_its_fields_say(self):
    out = generate(group_ids=[7, 5, 3, 1, 9], version=6)
    assert {x.shape[0] for x in jax.tree.leaves(out)} == {N * G}
    np.testing.assert_array_equal(out.group_id, np.repeat([7, 5, 3, 1, 9], G))
    np.testing.assert_array_equal(out.example_id, out.group_id)
    np.testing.assert_array_equal(out.group, np.repeat(np.arange(N), G))
    np.testing.assert_array_equal(out.sample_id, IDS.reshape(-1))
    np.testing.assert_array_equal(out.window_start, 0)
    assert set(out.origin.flat) == {Origin.POLICY}
    for row, prompt in enumerate(np.repeat(np.arange(N), G)):
      length = out.prompt_lengths[row]
      assert out.prompt_tokens[row, :length].tolist() == PROMPTS[prompt]
      assert not out.prompt_tokens[row, length:].any()
    assert {x.dtype for x in jax.tree.leaves(out)} == {
      np.dtype(t) for t in ("int8", "int32", "float32", "bool")
    }

  def test_present_tokens_have_versions_log_probs_and_a_mask(self):
    out = generate(version=6)
    present = np.arange(T)[None] < out.lengths[:, None]
    np.testing.assert_array_equal(out.mask, present)
    np.testing.assert_array_equal(out.version, np.where(present, 6, 0))
    assert np.all(out.behavior_logprobs[present] < 0)
    assert not np.any(out.behavior_logprobs[~present])
    assert not np.any(out.tokens[~present])

  def test_a_lower_limit_cuts_the_same_responses(self):
    full = expected()
    limited = dataclasses.replace(SETTINGS, max_new_tokens=5)
    out = generate(settings=limited)
    lengths = np.minimum(full.lengths, 5)
    np.testing.assert_array_equal(out.lengths, lengths)
    mask = np.arange(T)[None] < lengths[:, None]
    np.testing.assert_array_equal(out.tokens, np.where(mask, full.tokens, 0))
    cut = full.lengths > 5  # A stop token at the limit counts.
    np.testing.assert_array_equal(
      out.status, np.where(cut, Status.OVERLONG, full.status)
    )


class TestIndependence:
  def test_the_same_call_twice_is_identical(self):
    jax.tree.map(np.testing.assert_array_equal, generate(), expected())

  def test_order_of_prompts_and_of_a_group(self):
    order = np.array([3, 0, 4, 2, 1])
    ids = IDS[order, ::-1]
    out = generate(prompts=[PROMPTS[i] for i in order], ids=ids)
    assert_same_responses(rows(out, np.argsort(ids.reshape(-1))), expected())

  def test_batch_composition(self):
    # Other neighbours, and a single group next to idle slots.
    for i in range(N):
      out = generate(prompts=[PROMPTS[i]], ids=IDS[i : i + 1])
      which = np.arange(i * G, (i + 1) * G)
      assert_same_responses(out, rows(expected(), which))

  def test_group_size_so_that_one_prefill_equals_one_each(self):
    prompts = [p for p in PROMPTS for _ in range(G)]
    out = generate(prompts=prompts, ids=IDS.reshape(-1, 1))
    assert_same_responses(out, expected())

  # One slot that grows by pages of 4; more slots than responses.
  @pytest.mark.parametrize("slots, page_size", [(1, 4), (23, 64)])
  def test_slots_and_pages(self, slots, page_size):
    own = make_engine(slots=slots, page_size=page_size)
    assert_same_responses(generate(own), expected())

  def test_rule(self):
    """Inserts at most two at a time, with at most three busy slots."""

    def decide(view):
      return Decision(insert=min(2, 3 - int(np.sum(view.active))))

    assert_same_responses(generate(rule=decide), expected())

  def test_mesh_of_eight_devices(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    fns, trained = tiny.tiny_policy(mesh)
    placed = jax.device_put(trained, sharding.tree_shardings(trained, mesh))
    own = make_engine(fns)
    run = lambda: write(
      own, fns.for_sampling(placed), PROMPTS, IDS, key=KEY, settings=SETTINGS
    )
    assert_same_responses(run(), expected())
    count = len(COMPILED)
    assert_same_responses(run(), expected())
    assert len(COMPILED) == count

  def test_other_sample_ids_and_keys_give_other_responses(self):
    base = expected()
    for other in (generate(ids=IDS + 10_000), generate(key=jax.random.key(6))):
      same = np.all(other.tokens == base.tokens, axis=1)
      assert same.mean() < 0.2
    texts = {tuple(row) for row in base.tokens}
    assert len(texts) > 0.9 * len(base.tokens)


class TestEnds:
  """Sequences of every length from a model whose responses are known."""

  def test_lengths_from_one_token_to_all_there_is_room_for(self):
    longest = scripted.P + scripted.T
    prompts = [
      [total, *range(10, 10 + length - 1)]
      for length in (1, scripted.P)
      for total in range(length + 1, longest + 3)
    ]
    out = scripted.generate(prompts)
    scripted.check(out, prompts)
    assert set(out.lengths) == set(range(1, scripted.T + 1))
    full = out.lengths == scripted.T  # The last may be a stop token.
    assert set(out.status[full]) == {Status.FINISHED, Status.OVERLONG}
    assert (out.prompt_lengths + out.lengths).max() == longest


class TestDistribution:
  def test_greedy_is_the_argmax_of_the_full_forward(self):
    out = generate(settings=SamplingSettings(temperature=0.0))
    best = law(out).argmax(-1)
    np.testing.assert_array_equal(best[out.mask], out.tokens[out.mask])
    np.testing.assert_array_equal(out.behavior_logprobs, 0.0)
    # Then all samples of a prompt are equal.
    assert len(np.unique(out.tokens, axis=0)) <= N


class TestStats:
  def test_say_what_a_call_cost(self):
    own = engine()
    before, out = own.stats, generate()
    stats, trace = own.last_stats, own.trace
    assert stats.tokens == out.lengths.sum()
    assert stats.decode_calls == len(trace)
    assert stats.decode_steps == sum(call.steps for call in trace)
    assert stats.slot_steps == 8 * stats.decode_steps
    assert stats.tokens / 8 <= stats.decode_steps < stats.tokens
    assert 0 < stats.host_s < stats.wall_s
    difference = own.stats - before
    assert difference.tokens == stats.tokens
    assert before + stats == own.stats


class TestCompilation:
  def test_new_settings_compile_nothing(self):
    # One token each, so that the cache goes through the same sizes.
    generate(settings=SamplingSettings(max_new_tokens=1))
    count = len(COMPILED)
    for settings in (
      SamplingSettings(temperature=0.0),
      SamplingSettings(temperature=1.5, top_k=7, min_p=0.1),
      SamplingSettings(top_p=0.5),
      SamplingSettings(logit_bias={5: 1.0, 7: -2.0}, min_new_tokens=1),
      SamplingSettings(stop_strings=("ab", "c")),
    ):
      settings = dataclasses.replace(settings, max_new_tokens=1)
      generate(settings=settings, key=jax.random.key(77), version=8)
    assert len(COMPILED) == count
    assert count > 0  # The listener works.

  def test_a_long_tail_compiles_a_program_for_each_pair_of_buckets(self):
    own = scripted.make_engine(slots=64, page_size=8)
    sizes, calls, rng = [], [], np.random.default_rng(0)
    decode = own._cache.programs.decode

    def record(params, kv_cache, tables, slots, *rest, **settings):
      sizes[:] = models.page_buckets(kv_cache)
      calls.append((len(slots.position), tables.page_owner.shape[1]))
      return decode(params, kv_cache, tables, slots, *rest, **settings)

    own._cache.programs = own._cache.programs._replace(decode=record)
    for seed in range(3):  # Most are short; a few are long.
      totals = np.minimum(2 + rng.geometric(0.15, 200), 50)
      prompts = [scripted.prompt(n, seed) for n in totals]
      scripted.check(scripted.generate(prompts, own), prompts)
    assert {slots for slots, _ in calls} == set(buckets.slot_buckets(64, 1))
    assert {pages for _, pages in calls} <= set(sizes)
    # The pages of the last responses were moved to the front.
    assert {pages for slots, pages in calls if slots < 64} == {sizes[0]}
    assert decode._cache_size() == len(set(calls)) <= 3


class TestBadInput:
  @pytest.mark.parametrize(
    "settings, message",
    [
      ({"temperature": float("nan")}, r"temperature=nan, .* in \[0, inf\)"),
      ({"temperature": None}, "temperature=None, expected a number in"),
      ({"top_k": -1}, r"top_k=-1, expected .* in \[0, inf\)"),
      ({"top_k": 1.5}, "top_k=1.5, expected an integer in"),
      ({"top_p": 1.5}, r"top_p=1.5, expected .* in \(0, 1\]"),
      ({"min_p": 1.0}, r"min_p=1.0, expected .* in \[0, 1\)"),
      ({"max_new_tokens": 2.5}, "max_new_tokens=2.5, expected an integer in"),
      ({"max_new_tokens": 21}, r"max_new_tokens=21, .* in \[1, 20\]"),
      ({"min_new_tokens": 21}, r"min_new_tokens=21, .* in \[0, 20\]"),
      ({"min_new_tokens": 5, "max_new_tokens": 4}, r"tokens=5, .* in \[0, 4\]"),
      ({"logit_bias": {67: 1.0}}, "tokens 0..66 .*got 67: 1.0"),
      ({"logit_bias": {1.5: 1.0}}, "tokens 0..66 .*got 1.5: 1.0"),
      ({"logit_bias": {-1: 1.0}}, "tokens 0..66 .*got -1: 1.0"),
      ({"logit_bias": {3: np.inf}}, "below infinity, got 3: inf"),
      ({"logit_bias": {3: np.nan}}, "below infinity, got 3: nan"),
      *(
        ({"stop_strings": x}, "stop_strings must be a tuple of")
        for x in (("a", ""), (3,), "END", None)
      ),
    ],
  )
  def test_a_setting_out_of_range_raises(self, settings, message):
    with pytest.raises(ValueError, match=message):
      generate(settings=SamplingSettings(**settings))

  @pytest.mark.parametrize(
    "prompts, ids, message",
    [
      ([[1]], IDS[:2], r"each of the 1 prompts, got 2 and 1"),
      ([], IDS[:0], r"at least one request, got none"),
      ([[1], []], IDS[:2], r"1..12, got 0..1"),
      ([[1] * 13], IDS[:1], r"1..12, got 13..13"),
    ],
  )
  def test_a_wrong_request_raises(self, prompts, ids, message):
    with pytest.raises(ValueError, match=message):
      generate(prompts=prompts, ids=ids)

  @pytest.mark.parametrize("slots", [0, 1.5])
  def test_a_wrong_number_of_slots_raises(self, slots):
    with pytest.raises(ValueError, match=rf"slots={slots}, .* in \[1, inf\)"):
      make_engine(slots=slots)

  @pytest.mark.parametrize("temperature", [0.0, 0.9])
  def test_weights_that_are_no_numbers_raise(self, temperature):
    broken = jax.tree.map(lambda x: x * float("nan"), params())
    settings = dataclasses.replace(SETTINGS, temperature=temperature)
    with pytest.raises(InputError, match="logits are not finite"):
      write(engine(), broken, PROMPTS, IDS, key=KEY, settings=settings)
    assert engine().requests() == []
