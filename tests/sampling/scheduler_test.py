"""Slots are kept busy, and all of their pages are freed at the end."""

import jax
import numpy as np
from helpers import scripted

from jaxrl_llm.sampling import (
  EngineConfig,
  SamplingSettings,
  buckets,
  continuous_batching,
)
from jaxrl_llm.sampling.paged_cache import PagedCache, Programs
from jaxrl_llm.sampling.requests import (
  SamplingParams,
  make_requests,
  new_requests,
)
from jaxrl_llm.sampling.scheduler import Scheduler
from jaxrl_llm.sampling.slots import DecodeOutput
from jaxrl_llm.sampling.speculation import AdaptiveSpeculation
from jaxrl_llm.types import Status, take_rows


def _totals(count, low, high, seed=0):
  return np.random.default_rng(seed).integers(low, high, count).tolist()


def _prompts(totals):
  return [scripted.prompt(total, i) for i, total in enumerate(totals)]


def _assert_empty(engine):
  """Checks that no request is left and only kept contexts have pages."""
  assert not engine.requests() and not any(engine._slots)
  allocator = engine._cache.allocator
  readers = np.zeros_like(allocator._readers)
  for shard, pages in allocator._kept.values():
    readers[shard, pages] += 1
  np.testing.assert_array_equal(allocator._readers, readers)
  for shard, free in enumerate(allocator._free):
    assert sorted(free) == np.flatnonzero(readers[shard] == 0).tolist()


class TestNothingLeaks:
  def test_over_five_hundred_requests(self, monkeypatch):
    monkeypatch.setattr(buckets, "_MIN_SLOTS", 1)  # 16, 4 and 1 slots.
    prompts = _prompts(_totals(500, 2, 14))
    out = scripted.generate(prompts)
    scripted.check(out, prompts)
    _assert_empty(scripted.engine())
    stats = scripted.engine().last_stats
    assert stats.tokens == out.lengths.sum()

  def test_of_responses_that_pause_when_pages_are_few(self):
    engine = scripted.make_engine(slots=16, page_size=8, kv_pages=9)
    prompts = _prompts(_totals(30, 20, 50))
    out = scripted.generate(prompts, own=engine, window=6)
    while (out.status == Status.TRUNCATED).any():
      _assert_empty(engine)
      out = take_rows(out, out.status == Status.TRUNCATED)
      call = {"settings": scripted.GREEDY, "key": jax.random.key(0)}
      out = engine.generate_window(
        (), out, version=0, group_size=1, window=6, **call
      )
    _assert_empty(engine)


class TestSharedPages:
  """Uses a fake decoder that only counts: CPUs have no page-sharing kernels."""

  def test_count_once(self):
    config = EngineConfig(
      slots=4,
      max_prompt_length=8,
      max_response_length=2,
      stop_tokens=(),
      page_size=2,
      kv_pages=12,  # Each response reads 5 pages, 3 of them shared.
    )

    def decode(params, kv_cache, tables, slots, active, *_, **__):
      active = np.asarray(active)
      last = np.arange(len(active)), np.asarray(slots.position) // 2
      written = np.asarray(tables.page_indices)[last][active]
      assert len({*written.tolist()}) == active.sum()  # These are not shared.
      zeros = np.zeros((len(active), 2), np.int32)
      count, over = active.astype(np.int32), np.zeros(len(active), np.int32)
      running.append(int(count.sum()))
      return kv_cache, DecodeOutput(
        zeros, zeros * 1.0, count, count, over > 0, over
      )

    running, programs = [], Programs(*[lambda kv_cache, *_: kv_cache] * 6)
    programs = programs._replace(
      init_kv_cache=lambda: [[np.zeros((1, 12))]], decode=decode
    )
    scheduler = Scheduler(
      config,
      PagedCache(programs, config, sharding=None, shares_pages=True),
      speculation=AdaptiveSpeculation(0),
      detokenize=None,
    )
    rollout = new_requests([[1] * 8], np.arange(4)[None], [0], config)
    params = SamplingParams(SamplingSettings(), None, group_size=4)
    requests = make_requests(rollout, params, np.full(4, 2), window=2)
    scheduler.enqueue(requests)
    scheduler.run(requests, continuous_batching)
    assert running == [4] and (rollout.status == Status.FINISHED).all()
    _assert_empty(scheduler)


class TestGivenUp:
  def test_the_others_are_written_and_no_page_is_lost(self):
    prompts = _prompts(_totals(60, 30, 50))

    def every_third(view):
      """Aborts every third row; rows that have already left have no effect."""
      old = view.active & (view.lengths >= 8)
      third = np.arange(old.size) % 3 == 0
      stop = np.flatnonzero((old | view.ended) & third).tolist()
      return continuous_batching(view)._replace(stop=stop)

    out = scripted.generate(prompts, rule=every_third)
    stopped = np.arange(60) % 3 == 0
    np.testing.assert_array_equal(out.status == Status.STOPPED, stopped)
    assert (out.lengths[stopped] >= 8).all()
    for i, prompt in enumerate(prompts):
      length, (tokens, _) = out.lengths[i], scripted.response(prompt)
      assert out.tokens[i, :length].tolist() == tokens[:length]
      assert stopped[i] == (length < len(tokens))
    _assert_empty(scripted.engine())
    assert scripted.engine().last_stats.tokens == out.lengths.sum()

  def test_room_that_was_made_is_taken(self):
    prompts = _prompts([40] * 40)
    # All responses with slots are aborted at once, repeatedly.
    rule = lambda view: continuous_batching(view)._replace(
      stop=np.flatnonzero(view.active & (view.lengths > 0)).tolist()
    )
    out = scripted.generate(prompts, rule=rule)
    assert (out.status == Status.STOPPED).all() and (out.lengths > 0).all()
    _assert_empty(scripted.engine())


class TestBusy:
  # One sequence in each wave is five times as long as the others.
  TOTALS = [54 if i % 16 == 5 else 10 for i in range(160)]

  def test_a_long_tail_does_not_hold_slots_up(self):
    engine, prompts = scripted.engine(), _prompts(self.TOTALS)
    out = scripted.generate(prompts)
    scripted.check(out, prompts)
    waves = out.lengths.reshape(-1, engine.config.slots)
    static = waves.max(axis=1).sum()
    best = out.lengths.sum() / engine.config.slots
    steps = engine.last_stats.decode_steps
    assert best <= steps < 0.55 * static
    assert steps < 1.5 * best + out.lengths.max()
    # The cache follows the sum of lengths.
    longest = engine.config.slots * (scripted.P + scripted.T)
    peak = max(call.kv_capacity for call in engine.trace)
    assert peak < 0.65 * longest

  def test_the_last_ones_have_a_small_batch_for_themselves(self, monkeypatch):
    monkeypatch.setattr(buckets, "_MIN_SLOTS", 1)
    engine = scripted.engine()
    scripted.generate(_prompts([54] + [6] * 50))
    first, *_, last = engine.trace
    assert first.slots == engine.config.slots and last.slots == 1
    assert last.kv_capacity < first.kv_capacity


class TestShapes:
  def test_slots_shrink_by_four_within_every_shard(self):
    assert buckets.slot_buckets(512, 1) == [512, 128, 32, 8]
    assert buckets.slot_buckets(512, 4) == [512, 128, 32]
    assert buckets.slot_buckets(62, 2) == [62]  # Seven are too few to pay off.
    assert buckets.slot_buckets(1, 1) == [1]
