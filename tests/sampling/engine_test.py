"""A response depends on weights, prompt and sample_id, and on nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm import sharding
from jaxrl_llm.sampling import Engine, SamplingSettings
from jaxrl_llm.types import Origin, Status

P, T = 12, 20  # The pool's ladder of key-value lengths is 16, 24, 32.
N, G = 5, 4
STOP = (3, 11, 42, 60)
KEY = jax.random.key(5)
PROMPTS = [
  np.random.default_rng(i).integers(0, 67, length).tolist()
  for i, length in enumerate([12, 1, 5, 10, 7])
]
IDS = 100 + np.arange(N * G).reshape(N, G)
SETTINGS = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95)
COMPILED = []  # Durations of all compilations of this process.


def _listen(event, duration, **_):
  if event == "/jax/core/compile/backend_compile_duration":
    COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


def _make_engine(fns=None, *, slots=8, stop=STOP, **settings):
  return Engine(
    fns or tiny.tiny_policy()[0],
    slots=slots,
    max_prompt_length=P,
    max_response_length=T,
    stop_tokens=stop,
    **settings,
  )


@functools.cache
def _engine():
  """Shared by all tests that can use it: waves of 2, 2 and 1 groups."""
  return _make_engine()


@functools.cache
def _sampler_params():
  fns, params = tiny.tiny_policy()
  return fns.for_sampling(params)


def _generate(
  engine=None, prompts=PROMPTS, ids=IDS, settings=SETTINGS, key=KEY, **more
):
  return (engine or _engine()).generate(
    _sampler_params(),
    prompts,
    sample_ids=ids,
    key=key,
    settings=settings,
    **more,
  )


@functools.cache
def _expected():
  return _generate()


def _assert_same_responses(got, expected):
  """Row for row; log-probs to rounding, since products have other shapes."""
  for name in ("sample_id", "tokens", "lengths", "mask", "status"):
    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
  np.testing.assert_allclose(
    got.behavior_logprobs, expected.behavior_logprobs, rtol=0, atol=1e-5
  )


def _rows(rollout, order):
  return jax.tree.map(lambda x: x[order], rollout)


class TestRollout:
  def test_holds_what_its_fields_say(self):
    out = _generate(prompt_ids=[7, 5, 3, 1, 9], version=6)
    assert {x.shape[0] for x in jax.tree.leaves(out)} == {N * G}
    np.testing.assert_array_equal(out.prompt_id, np.repeat([7, 5, 3, 1, 9], G))
    np.testing.assert_array_equal(out.group, np.repeat(np.arange(N), G))
    np.testing.assert_array_equal(out.sample_id, IDS.reshape(-1))
    np.testing.assert_array_equal(out.window_start, 0)
    assert set(out.origin.flat) == {Origin.POLICY}
    for row, prompt in enumerate(np.repeat(np.arange(N), G)):
      length = out.prompt_lengths[row]
      assert out.prompt_tokens[row, :length].tolist() == PROMPTS[prompt]
      assert not out.prompt_tokens[row, length:].any()
    assert {x.dtype for x in jax.tree.leaves(out)} == {
      np.dtype(t) for t in ("int32", "float32", "bool")
    }

  def test_present_tokens_have_versions_log_probs_and_a_mask(self):
    out = _generate(version=6)
    present = np.arange(T)[None] < out.lengths[:, None]
    np.testing.assert_array_equal(out.mask, present)
    np.testing.assert_array_equal(out.version, np.where(present, 6, 0))
    assert np.all(out.behavior_logprobs[present] < 0)
    assert not np.any(out.behavior_logprobs[~present])
    assert not np.any(out.tokens[~present])

  def test_a_finished_response_ends_with_its_only_stop_token(self):
    out = _expected()
    finished = out.status == Status.FINISHED
    assert finished.any() and not finished.all()
    is_stop = np.isin(out.tokens, STOP) & out.mask
    last = np.arange(T)[None] == out.lengths[:, None] - 1
    np.testing.assert_array_equal(is_stop, last & finished[:, None])

  def test_a_response_of_maximum_length_is_overlong(self):
    out = _expected()
    overlong = out.status == Status.OVERLONG
    assert overlong.any()
    np.testing.assert_array_equal(out.lengths[overlong], T)
    assert set(out.status) <= {Status.FINISHED, Status.OVERLONG}

  def test_a_lower_limit_cuts_the_same_responses(self):
    full = _expected()
    limited = dataclasses.replace(SETTINGS, max_new_tokens=5)
    out = _generate(settings=limited)
    lengths = np.minimum(full.lengths, 5)
    np.testing.assert_array_equal(out.lengths, lengths)
    mask = np.arange(T)[None] < lengths[:, None]
    np.testing.assert_array_equal(out.tokens, np.where(mask, full.tokens, 0))
    cut = full.lengths > 5  # A stop token at the limit itself is an end.
    np.testing.assert_array_equal(
      out.status, np.where(cut, Status.OVERLONG, full.status)
    )

  def test_a_stop_token_may_come_first(self, monkeypatch):
    full, engine = _expected(), _engine()
    stop = full.tokens[[0, 5, 9, 14], 0]
    monkeypatch.setattr(engine, "_stop", stop)
    out = _generate(engine)
    first = np.isin(full.tokens[:, 0], stop)
    assert first.sum() >= 4
    np.testing.assert_array_equal(out.lengths == 1, first)
    assert set(out.status[first]) == {Status.FINISHED}
    np.testing.assert_array_equal(out.tokens[first, 0], full.tokens[first, 0])
    np.testing.assert_array_equal(out.mask[first].sum(axis=1), 1)
    assert not out.tokens[first, 1:].any()


class TestIndependence:
  def test_the_same_call_twice_is_identical(self):
    jax.tree.map(np.testing.assert_array_equal, _generate(), _expected())

  def test_order_of_prompts(self):
    order = np.array([3, 0, 4, 2, 1])
    out = _generate(prompts=[PROMPTS[i] for i in order], ids=IDS[order])
    rows = np.arange(N * G).reshape(N, G)[np.argsort(order)].reshape(-1)
    _assert_same_responses(_rows(out, rows), _expected())

  def test_batch_composition(self):
    # Other neighbours, and idle slots beside a lone group.
    for i in range(N):
      out = _generate(prompts=[PROMPTS[i]], ids=IDS[i : i + 1])
      rows = np.arange(i * G, (i + 1) * G)
      _assert_same_responses(out, _rows(_expected(), rows))

  def test_slot_within_a_group(self):
    out = _generate(ids=IDS[:, ::-1])
    rows = np.arange(N * G).reshape(N, G)[:, ::-1].reshape(-1)
    _assert_same_responses(_rows(out, rows), _expected())

  def test_group_size_so_that_one_prefill_equals_one_each(self):
    prompts = [p for p in PROMPTS for _ in range(G)]
    out = _generate(prompts=prompts, ids=IDS.reshape(-1, 1))
    _assert_same_responses(out, _expected())

  @pytest.mark.parametrize(
    "slots, ladder",
    [(4, [32]), (23, [13, 15, 32])],  # Five waves, and one.
  )
  def test_number_of_slots_and_room_in_the_cache(self, slots, ladder):
    engine = _make_engine(slots=slots)
    engine._buckets = ladder
    _assert_same_responses(_generate(engine), _expected())

  def test_cuts_of_the_decoding(self, monkeypatch):
    engine, calls = _engine(), []

    def three_steps(*arguments, whole=engine._advance):
      calls.append(None)
      return whole(*arguments[:-1], np.int32(3))

    monkeypatch.setattr(engine, "_advance", three_steps)
    jax.tree.map(np.testing.assert_array_equal, _generate(), _expected())
    assert len(calls) > 15

  def test_mesh_of_eight_devices(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    fns, params = tiny.tiny_policy()
    placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
    engine = _make_engine(sharding=sharding.along_batch(mesh))
    engine._buckets = [16, 32]
    run = lambda: engine.generate(
      fns.for_sampling(placed),
      PROMPTS,
      sample_ids=IDS,
      key=KEY,
      settings=SETTINGS,
    )
    _assert_same_responses(run(), _expected())
    count = len(COMPILED)
    _assert_same_responses(run(), _expected())
    assert len(COMPILED) == count

  def test_other_sample_ids_and_keys_give_other_responses(self):
    base = _expected()
    for other in (
      _generate(ids=IDS + 10_000),
      _generate(key=jax.random.key(6)),
    ):
      same = np.all(other.tokens == base.tokens, axis=1)
      assert same.mean() < 0.2
    texts = {tuple(row) for row in base.tokens}
    assert len(texts) > 0.9 * len(base.tokens)


class TestPrefill:
  def test_is_done_once_a_prompt_and_no_stop_tokens_stop_nothing(self):
    fns, _ = tiny.tiny_policy()
    shapes = []

    def prefill(params, tokens, lengths):
      shapes.append(tokens.shape)
      return fns.prefill(params, tokens, lengths)

    engine = _make_engine(fns._replace(prefill=prefill), stop=())
    limited = dataclasses.replace(SETTINGS, max_new_tokens=3)
    out = _generate(engine, PROMPTS[:2], IDS[:2], limited)
    assert shapes == [(2, P)]
    np.testing.assert_array_equal(out.lengths, 3)
    assert set(out.status) == {Status.OVERLONG}
    assert np.isin(out.tokens, STOP).any()


class TestLaw:
  """The log-probs of the sampler are those of the trainer."""

  def _sequences(self, out):
    """Prompt and response without a gap, [B, P + T]; response positions."""
    tokens = np.zeros((N * G, P + T), np.int32)
    where = np.zeros((N * G, T), int)
    for row, length in enumerate(out.prompt_lengths):
      tokens[row, :length] = out.prompt_tokens[row, :length]
      tokens[row, length : length + T] = out.tokens[row]
      where[row] = length + np.arange(T)
    return tokens, where

  @pytest.mark.parametrize("temperature", [1.0, 0.7])
  def test_sampler_equals_trainer(self, temperature):
    settings = SamplingSettings(temperature=temperature)
    out = _generate(settings=settings)
    tokens, where = self._sequences(out)
    rows = np.arange(N * G)[:, None]
    total = (out.prompt_lengths + out.lengths)[:, None]
    present = (np.arange(P + T)[None] < total).astype(np.int32)
    mask = np.zeros((N * G, P + T), bool)
    mask[rows, where - 1] = out.mask
    fns, params = tiny.tiny_policy()
    trainer = fns.logprobs(
      params,
      tokens,
      np.roll(tokens, -1, axis=1),
      mask,
      present,
      np.broadcast_to(np.arange(P + T, dtype=np.int32), tokens.shape),
      temperature=jnp.float32(temperature),
    ).logprobs
    got = np.asarray(trainer)[rows, where - 1]
    np.testing.assert_allclose(
      np.where(out.mask, got, 0), out.behavior_logprobs, rtol=0, atol=1e-5
    )

  def test_greedy_is_the_argmax_of_the_full_forward(self):
    out = _generate(settings=SamplingSettings(temperature=0.0))
    tokens, where = self._sequences(out)
    fns, params = tiny.tiny_policy()
    logits = fns.logits(params, tokens, np.ones(tokens.shape, bool))
    best = np.asarray(logits).argmax(-1)[np.arange(N * G)[:, None], where - 1]
    np.testing.assert_array_equal(best[out.mask], out.tokens[out.mask])
    np.testing.assert_array_equal(out.behavior_logprobs, 0.0)
    # All samples of a prompt are the same then.
    assert len(np.unique(out.tokens, axis=0)) <= N

  def test_top_k_one_is_greedy(self):
    greedy = _generate(settings=SamplingSettings(temperature=0.0))
    narrow = _generate(settings=SamplingSettings(top_k=1))
    _assert_same_responses(narrow, greedy)


class TestTempering:
  """A temperature of each token's own, chosen from its logits."""

  def test_follows_the_control_and_is_absent_without_one(self):
    def tempering(logits, temperature, control):
      assert logits.shape == (8, 67)
      return temperature * control

    engine = _make_engine(tempering=tempering)
    _assert_same_responses(_generate(engine), _expected())
    got = _generate(engine, control=np.float32(0.5))
    halved = dataclasses.replace(SETTINGS, temperature=0.45)
    _assert_same_responses(got, _generate(settings=halved))


class TestCompilation:
  def test_new_settings_compile_nothing(self):
    key = jax.random.key(77)
    _expected()
    count = len(COMPILED)
    for settings in (
      SamplingSettings(),
      SamplingSettings(temperature=0.0),
      SamplingSettings(temperature=1.5, top_k=7, min_p=0.1),
      SamplingSettings(top_p=0.5, max_new_tokens=3),
    ):
      _generate(settings=settings, key=key, ids=IDS + 500, version=8)
    assert len(COMPILED) == count
    assert count > 0  # The listener does hear.

  def test_one_program_per_length_of_the_cache(self):
    engine = _engine()
    for ids in (IDS, IDS + 7, IDS + 8):
      _generate(ids=ids)
    assert engine._advance._cache_size() <= len(engine._buckets) == 3

  def test_lowers_at_the_largest_shapes_without_running(self):
    params = jax.eval_shape(lambda: _sampler_params())
    lowered = _make_engine().lower(params, prompts=2, group_size=G)
    assert set(lowered) == {"sampler admit", "sampler advance"}


class TestBadInput:
  @pytest.mark.parametrize(
    "settings, message",
    [
      ({"temperature": -0.1}, "temperature must be .*>= 0, got -0.1"),
      ({"temperature": float("nan")}, "temperature must be .*got nan"),
      ({"temperature": float("inf")}, "temperature must be .*got inf"),
      ({"top_k": -1}, "top_k must be >= 0, got -1"),
      ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
      ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
      ({"min_p": 1.0}, r"min_p must be in \[0, 1\), got 1.0"),
      ({"max_new_tokens": 0}, "max_new_tokens must be 1..20, got 0"),
      ({"max_new_tokens": 21}, "max_new_tokens must be 1..20, got 21"),
    ],
  )
  def test_a_setting_out_of_range_raises(self, settings, message):
    with pytest.raises(ValueError, match=message):
      _generate(settings=SamplingSettings(**settings))

  @pytest.mark.parametrize(
    "prompts, ids, message",
    [
      ([[1]], IDS[:2], r"N = 1 prompts, got shape \(2, 4\)"),
      ([[1]], IDS[0], r"N = 1 prompts, got shape \(4,\)"),
      ([], IDS[:0], r"got sample_ids of shape \(0, 4\)"),
      ([[1]], IDS[:1, :0], r"got sample_ids of shape \(1, 0\)"),
      ([[1]], np.arange(9)[None], r"1..8 responses .* shape \(1, 9\)"),
      ([[1], []], IDS[:2], r"1..12, got 0..1"),
      ([[1] * 13], IDS[:1], r"1..12, got 13..13"),
    ],
  )
  def test_a_wrong_request_raises(self, prompts, ids, message):
    with pytest.raises(ValueError, match=message):
      _generate(prompts=prompts, ids=ids)

  def test_a_pool_without_room_raises(self):
    with pytest.raises(ValueError, match=">= 1, got 0, 12, 20"):
      _make_engine(slots=0)
