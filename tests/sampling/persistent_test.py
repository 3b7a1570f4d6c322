"""Requests that persist over steps: preempted, extended, aborted."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import scripted, tiny_engine, tiny_window
from helpers.tiny_engine import KEY, SETTINGS, G

from jaxrl_llm import sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling import new_requests
from jaxrl_llm.types import Origin, Status


def add(engine, prompts, **more):
  """Adds prompts of the scripted model; returns their rows and requests."""
  rollout = new_requests(
    prompts,
    np.arange(len(prompts))[:, None],
    np.arange(len(prompts)),
    engine.config,
  )
  how = {"key": KEY, "settings": scripted.GREEDY, "group_size": 1} | more
  return rollout, engine.add(rollout, **how)


def finish(engine):
  """Steps until no request is left; returns requests as they ended."""
  left = []
  while engine.requests():
    left += engine.step()
  return left


def in_slots(engine):
  return [r for r in engine.requests() if r.slot is not None]


def go_on_after(engine, requests, given):
  """Continues after given tokens; checks the rest; returns prefilled tokens."""
  before = engine.stats
  for request, tokens in zip(requests, given):
    request.pause_at = request.max_tokens
    engine.answer(request, tokens, Origin.FOREIGN)
  begun = [(r.length, r.context().tolist()) for r in requests]
  finish(engine)
  for request, (start, context) in zip(requests, begun):
    tokens = request.row.tokens[0, start : request.length].tolist()
    assert tokens == scripted.response(context)[0]
  return (engine.stats - before).prefill_tokens


def _prompts(count, low=8, high=56, seed=0):
  totals = np.random.default_rng(seed).integers(low, high, count).tolist()
  return [scripted.prompt(total, i) for i, total in enumerate(totals)]


class TestStep:
  def test_requests_come_while_others_are_written(self):
    engine, prompts = scripted.engine(), _prompts(60, seed=1)
    engine.set_params((), 3)
    parts, added, left, busy = [], [], [], []
    for start in range(0, 60, 10):
      rollout, requests = add(engine, prompts[start : start + 10])
      parts.append(rollout)
      added += requests
      left += engine.step()
      busy.append(len(in_slots(engine)))
    left += finish(engine)
    assert max(busy) > 10  # Those of several calls are decoded together.
    assert set(left) == set(added) and len(left) == 60
    for i, rollout in enumerate(parts):
      scripted.check(rollout, prompts[10 * i : 10 * i + 10])
      np.testing.assert_array_equal(rollout.version[rollout.mask], 3)

  def test_other_sampling_params_wait_their_turn(self):
    engine, prompts = scripted.engine(), _prompts(30)
    engine.set_params((), 0)
    both = [add(engine, prompts)[0]]
    left = engine.step(3)
    assert len(left) + len(in_slots(engine)) == 3
    both.append(add(engine, prompts, key=jax.random.key(1))[0])
    while engine.requests():
      engine.step()
      assert len({id(r.params) for r in in_slots(engine)}) < 2
    for rollout in both:
      scripted.check(rollout, prompts)


class TestPreemption:
  def test_a_small_budget_gives_the_same_responses(self):
    # Sixteen full slots need 112 pages, one response at most seven.
    engine = scripted.make_engine(slots=16, page_size=8, kv_pages=7)
    prompts = _prompts(60)
    scripted.check(scripted.generate(prompts, own=engine), prompts)
    assert engine.stats.preemptions > 0
    assert max(call.kv_capacity for call in engine.trace) <= 8 * 7

  def test_of_a_model_that_rounds_gives_the_same_tokens(self):
    own = tiny_engine.make_engine(page_size=4, kv_pages=9)
    out = tiny_engine.generate(own)
    tiny_engine.assert_same_responses(out, tiny_engine.expected())
    assert own.last_stats.preemptions > 9

  def test_the_youngest_go_first(self):
    engine = scripted.make_engine(slots=4, page_size=8, kv_pages=8)
    engine.set_params((), 0)
    _, requests = add(engine, [[54]] * 4)
    while len(engine.requests()) == 4:
      oldest = [r.slot is not None for r in requests]
      assert oldest == sorted(oldest, reverse=True)
      assert engine.step() in ([], requests[:1])

  def test_a_budget_below_one_response_is_refused(self):
    with pytest.raises(InputError, match="sampler.kv_pages=6 .* at least 7$"):
      scripted.make_engine(slots=16, page_size=8, kv_pages=6)


class TestShards:
  def test_preempts_keeps_and_extends_on_each(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    # Four shards of four slots and nine pages.
    engine = scripted.make_engine(slots=16, page_size=8, kv_pages=36, mesh=mesh)
    prompts = _prompts(40)
    scripted.check(scripted.generate(prompts, own=engine), prompts)
    assert engine.stats.preemptions > 0
    prompts = [[50 - i, 4, i + 3] for i in range(6)]
    _, requests = add(engine, prompts, window=12)
    finish(engine)
    assert go_on_after(engine, requests, [[7, 8, 9]] * 6) >= 3 * 6

  def test_a_full_one_does_not_block_the_others(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    engine = scripted.make_engine(slots=16, page_size=8, kv_pages=36, mesh=mesh)
    engine.set_params((), 0)
    engine._cache.allocator.allocate(0, 9)
    add(engine, [[8]] * 4)
    assert [request.shard for request in engine.step()] == [1, 1, 2, 3]


class TestPrefill:
  """The number of prefilled tokens."""

  def test_responses_share_that_of_their_prompt_and_its_full_pages(self):
    engine = scripted.make_engine(slots=8, page_size=2)
    prompts = [[40, 5, 6, 7, 8], [30, 9], [20]]

    ids = np.arange(9).reshape(3, 3)
    call = {"key": KEY, "settings": scripted.GREEDY}
    out = tiny_engine.write(engine, (), prompts, ids, **call)
    scripted.check(out, [p for p in prompts for _ in range(3)])
    # One response to the third prompt had no slot at first.
    assert engine.last_stats.prefill_tokens == 5 + 2 + 1 + 1

  @pytest.mark.parametrize("count, calls", [(2, 1), (3, 2), (8, 4), (9, 1)])
  def test_has_as_much_padding_as_prompts_at_most(self, count, calls):
    prompts = _prompts(count)
    scripted.check(scripted.generate(prompts), prompts)
    # Each is for 2 prompts or for 16.
    assert scripted.engine().last_stats.prefill_calls == calls

  def test_goes_on_without_one_and_with_one_under_new_weights(self):
    engine = tiny_window.window_engine()
    engine.reset()  # Nothing is cached.
    call = {"engine": engine, "window": 5}
    first = tiny_window.write_window(None, range(4), **call)
    prompts = sum(map(len, tiny_window.PROMPTS))
    assert engine.last_stats.prefill_tokens == prompts
    rest = tiny_window.cut(first)
    second = tiny_window.write_window(rest, **call)
    assert engine.last_stats.prefill_tokens == 0
    rest = tiny_window.cut(second)
    same = jax.tree.map(lambda x: x, tiny_window.weights()[1])  # A copy.
    tiny_window.write_window(rest, params=same, **call)
    contexts = (rest.prompt_lengths + rest.lengths).sum()
    assert engine.last_stats.prefill_tokens == contexts


class TestExtend:
  def test_goes_on_after_given_tokens_and_prefills_these_alone(self):
    engine, prompts = scripted.engine(), [[50, 4], [45], [53, 9, 9]]
    engine.set_params((), 0)
    rollout, requests = add(engine, prompts, window=12)
    left = finish(engine)
    assert left == requests and set(rollout.status) == {Status.TRUNCATED}
    given = [[7, 8, 9], [5] * 11, [6]]  # One exceeds a page.
    prefilled = go_on_after(engine, requests, given)
    assert prefilled == sum(map(len, given))
    place, lengths = np.arange(scripted.T), rollout.lengths[:, None]
    ends = 12 + np.array([[len(tokens)] for tokens in given])
    foreign = (12 <= place) & (place < ends)
    np.testing.assert_array_equal(rollout.mask, (place < lengths) & ~foreign)
    np.testing.assert_array_equal(rollout.origin == Origin.FOREIGN, foreign)
    assert set(rollout.status) == {Status.FINISHED}

  @pytest.mark.parametrize("extendable", [True, False])
  def test_what_ended_is_kept_where_it_may_be_extended(self, extendable):
    engine = scripted.engine()
    engine.set_params((), 0)
    _, (request,) = add(engine, [[20, 4]], extendable=extendable)
    finish(engine)
    assert request.row.status[0] == Status.FINISHED
    length = request.context_length
    prefilled = go_on_after(engine, [request], [[40, 8]])
    assert prefilled == (2 if extendable else length + 2)

  def test_equals_a_prefill_of_the_whole(self):
    engine, runs = tiny_window.window_engine(), []
    for new_weights in (False, True):
      engine.set_params(tiny_engine.params(), 0)
      rollout = new_requests(
        tiny_window.PROMPTS, tiny_window.IDS, range(4), engine.config
      )
      requests = engine.add(
        rollout, key=KEY, settings=SETTINGS, group_size=G, window=4
      )
      finish(engine)
      open_ = [r for r in requests if r.row.status[0] == Status.TRUNCATED]
      for request in open_:
        request.pause_at = request.max_tokens
        engine.answer(request, [17, 23, 5], Origin.FOREIGN)
      if new_weights:
        engine.set_params(dict(tiny_engine.params()), 0)
      before = engine.stats
      finish(engine)
      prefilled = (engine.stats - before).prefill_tokens
      assert prefilled >= 3 * len(open_)
      assert (prefilled == 3 * len(open_)) != new_weights
      runs.append(rollout)
    tiny_engine.assert_same_responses(*runs)

  def test_refuses_what_is_being_written_and_what_does_not_fit(self):
    engine = scripted.engine()
    engine.set_params((), 0)
    _, (request,) = add(engine, [[50]], window=12)
    with pytest.raises(ValueError, match="ended or paused"):
      engine.answer(request, [5], Origin.FOREIGN)
    finish(engine)
    with pytest.raises(ValueError, match="1..37 tokens, got 38"):
      engine.answer(request, [5] * 38, Origin.FOREIGN)
    with pytest.raises(ValueError, match="1..37 tokens, got 0"):
      engine.answer(request, [], Origin.FOREIGN)


class TestAbort:
  def test_gives_slots_and_pages_to_others(self):
    engine, prompts = scripted.engine(), [[54]] * 20
    engine.set_params((), 0)
    rollout, requests = add(engine, prompts)
    engine.step()
    given_up = [*requests[:8], requests[-1]]
    engine.abort(given_up)
    assert not set(given_up) & set(engine.requests())
    finish(engine)
    aborted = rollout.status == Status.TRUNCATED
    assert np.flatnonzero(aborted).tolist() == [*range(8), 19]
    scripted.check(tiny_engine.rows(rollout, ~aborted), prompts[8:19])
    rest = tiny_engine.rows(rollout, aborted)
    engine.add(rest, key=KEY, settings=scripted.GREEDY, group_size=1)
    finish(engine)
    scripted.check(rest, [prompts[i] for i in np.flatnonzero(aborted)])


class TestSetParams:
  def test_between_steps_equals_a_cut_and_a_window_under_them(self):
    engine = tiny_engine.make_engine(slots=4, page_size=4)
    old, new = (tiny_window.weights(i)[1] for i in range(2))
    engine.set_params(old, 1)
    rollout = new_requests(
      tiny_window.PROMPTS, tiny_window.IDS, range(4), engine.config
    )
    engine.add(rollout, key=KEY, settings=SETTINGS, group_size=G)
    engine.step(), engine.step()
    open_ = rollout.status == Status.TRUNCATED
    cut = jax.tree.map(np.array, tiny_engine.rows(rollout, open_))
    assert cut.lengths.any() and not cut.lengths.all()
    engine.set_params(new, 2)
    finish(engine)
    cut = dataclasses.replace(cut, window_start=cut.lengths)
    wanted = tiny_window.write_window(
      cut, window=tiny_engine.T, params=new, version=2
    )
    got = tiny_engine.rows(rollout, open_)
    tiny_engine.assert_same_responses(got, wanted)
    np.testing.assert_array_equal(got.version, wanted.version)
