"""A response cut anywhere and continued equals the uncut one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm import models, sharding
from jaxrl_llm.sampling import Engine, SamplingSettings
from jaxrl_llm.types import Origin, Rollout, Status

P, T = 12, 20  # The pool's ladder of key-value lengths is 16, 24, 32.
N, G = 4, 4
STOP = (3, 11, 42, 60)
KEY = jax.random.key(5)
PROMPTS = [
  np.random.default_rng(i).integers(0, 67, length).tolist()
  for i, length in enumerate([12, 1, 5, 10])
]
IDS = 100 + np.arange(N * G).reshape(N, G)
PROMPT_IDS = np.array([70, 50, 30, 10])
SETTINGS = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95)
PLAIN = SamplingSettings()
COMPILED = []  # Durations of all compilations of this process.


def _listen(event, duration, **_):
  if event == "/jax/core/compile/backend_compile_duration":
    COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


def _make_engine(*, slots=16, **settings):
  return Engine(
    tiny.tiny_policy()[0],
    slots=slots,
    max_prompt_length=P,
    max_response_length=T,
    stop_tokens=STOP,
    **settings,
  )


@functools.cache
def _engine():
  """Shared by all: cut rows are prefilled two at a time."""
  return _make_engine()


@functools.cache
def _weights(which=0):
  """(trainer's, sampler's) parameters, of two policies not far apart."""
  fns, params = tiny.tiny_policy()
  for _ in range(which):
    noise = tiny.widen(params, jax.random.key(9))
    params = jax.tree.map(lambda x, y: x + 0.3 * (y - x), params, noise)
  return params, fns.for_sampling(params)


def _window(
  unfinished=None,
  which=range(0),
  *,
  ids=None,
  window,
  engine=None,
  params=None,
  settings=SETTINGS,
  version=0,
  **more,
):
  """One call that starts the prompts `which`, with all of their ids if None."""
  which = list(which)
  call = {
    "prompts": [PROMPTS[i] for i in which],
    "sample_ids": [IDS[i] for i in which] if ids is None else ids,
    "prompt_ids": PROMPT_IDS[which],
    "group_size": G,
    "key": KEY,
  }
  return (engine or _engine()).generate_window(
    _weights()[1] if params is None else params,
    unfinished=unfinished,
    window=window,
    settings=settings,
    version=version,
    **call | more,
  )


@functools.cache
def _uncut():
  return _engine().generate(
    _weights()[1],
    PROMPTS,
    sample_ids=IDS,
    key=KEY,
    settings=SETTINGS,
    prompt_ids=PROMPT_IDS,
  )


def _rows(rollout, which) -> Rollout:
  return jax.tree.map(lambda x: np.asarray(x)[which], rollout)


def _cut(rollout):
  """The rows that go on, None if there is none."""
  rows = np.flatnonzero(rollout.status == Status.TRUNCATED)
  return _rows(rollout, rows) if len(rows) else None


def _to_the_end(out, **call):
  """All rows by sample id once every one has ended."""
  ended = []
  while out is not None:
    ended.append(_rows(out, out.status != Status.TRUNCATED))
    rest = _cut(out)
    out = None if rest is None else _window(rest, **call)
  joined = jax.tree.map(lambda *x: np.concatenate(x), *ended)
  return _rows(joined, np.argsort(joined.sample_id))


def _assert_same_responses(got, expected):
  """Row for row; log-probs to rounding, since products have other shapes."""
  for name in (
    "sample_id",
    "prompt_id",
    "prompt_tokens",
    "prompt_lengths",
    "tokens",
    "lengths",
    "mask",
    "status",
    "origin",
  ):
    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
  np.testing.assert_allclose(
    got.behavior_logprobs, expected.behavior_logprobs, rtol=0, atol=1e-5
  )


class TestUncut:
  """Windows under the same weights put no seam into a response."""

  @pytest.mark.parametrize("window", [1, 3, 5])
  def test_windows_equal_one_call(self, window):
    out = _to_the_end(_window(None, range(N), window=window), window=window)
    _assert_same_responses(out, _uncut())
    assert {Status.FINISHED, Status.OVERLONG} == set(out.status)

  def test_a_first_window_is_the_start_of_the_uncut(self):
    out, full = _window(None, range(N), window=5), _uncut()
    lengths = np.minimum(full.lengths, 5)
    mask = np.arange(T)[None] < lengths[:, None]
    np.testing.assert_array_equal(out.lengths, lengths)
    np.testing.assert_array_equal(out.mask, mask)
    np.testing.assert_array_equal(out.tokens, np.where(mask, full.tokens, 0))
    # A stop token as the last one of the window is an end.
    status = np.where(full.lengths > 5, Status.TRUNCATED, full.status)
    np.testing.assert_array_equal(out.status, status)
    assert {Status.FINISHED, Status.TRUNCATED} == set(out.status)

  @pytest.mark.parametrize("window", [T, T + 1, 10**6])
  def test_a_window_that_never_closes_equals_generate_to_the_bit(self, window):
    out = _window(None, range(N), window=window)
    jax.tree.map(np.testing.assert_array_equal, out, _uncut())

  def test_a_wide_window_with_a_lower_limit_and_idle_slots(self):
    settings = dataclasses.replace(SETTINGS, max_new_tokens=6)
    out = _window(None, [2, 0], window=6, settings=settings)
    expected = _engine().generate(
      _weights()[1],
      [PROMPTS[2], PROMPTS[0]],
      sample_ids=IDS[[2, 0]],
      key=KEY,
      settings=settings,
      prompt_ids=PROMPT_IDS[[2, 0]],
    )
    jax.tree.map(np.testing.assert_array_equal, out, expected)

  def test_cut_and_new_rows_in_one_call_equal_calls_of_their_own(self):
    rest = _cut(_window(None, [0, 3], window=4))
    mixed = _window(rest, [1, 2], window=7)
    count = len(rest.lengths)
    assert count > 2  # More than one batch.
    alone = _window(rest, window=7)
    _assert_same_responses(_rows(mixed, slice(count)), alone)
    fresh = _window(None, [1, 2], window=7)
    _assert_same_responses(_rows(mixed, slice(count, None)), fresh)

  def test_a_prompt_may_start_some_responses_later(self):
    ids = [IDS[0, :1], IDS[1], IDS[2, 1:3]]
    first = _window(None, range(3), ids=ids, window=6)
    assert len(first.lengths) == 7
    ids = [IDS[0, 1:], IDS[2, [0, 3]], IDS[3]]
    second = _window(_cut(first), [0, 2, 3], ids=ids, window=6)
    out = [_rows(first, first.status != Status.TRUNCATED)]
    out.append(_to_the_end(second, window=6))
    out = jax.tree.map(lambda *x: np.concatenate(x), *out)
    _assert_same_responses(_rows(out, np.argsort(out.sample_id)), _uncut())

  def test_more_prompts_than_are_prefilled_at_a_time(self):
    ids = IDS.reshape(-1, 1)
    prompts = [p for p in PROMPTS for _ in range(G)]
    out = _window(
      window=T,
      prompts=prompts,
      ids=ids,
      prompt_ids=np.arange(len(ids)),
    )
    names = ("sample_id", "tokens", "lengths", "status")
    for name in names:
      np.testing.assert_array_equal(getattr(out, name), getattr(_uncut(), name))

  def test_order_of_the_unfinished_and_ladder_do_not_matter(self):
    rest = _cut(_window(None, range(N), window=4))
    expected = _window(rest, window=7)
    order = np.random.default_rng(0).permutation(len(rest.lengths))
    engine = _make_engine()
    engine._buckets = [32]
    out = _window(_rows(rest, order), window=7, engine=engine)
    _assert_same_responses(out, _rows(expected, order))

  def test_mesh_of_eight_devices(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    fns, params = tiny.tiny_policy()
    placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
    engine = _make_engine(sharding=sharding.along_batch(mesh))
    engine._buckets = [32]
    call = {"engine": engine, "params": fns.for_sampling(placed), "window": 6}

    def run():
      first = _window(None, range(3), **call)
      return first, _window(_cut(first), [3], **call)

    first, second = run()
    expected = _window(None, range(3), window=6)
    _assert_same_responses(first, expected)
    expected = _window(_cut(expected), [3], window=6)
    _assert_same_responses(second, expected)
    count = len(COMPILED)
    run()
    assert len(COMPILED) == count


class TestRecord:
  def test_windows_record_their_versions_and_starts(self):
    first = _window(None, [0, 1], window=4, version=6)
    rest = _cut(first)
    out = _window(rest, [2], window=3, version=8)
    count = len(rest.lengths)
    start = np.concatenate([np.full(count, 4), np.zeros(G)])
    np.testing.assert_array_equal(out.window_start, start)
    column, start = np.arange(T)[None], start[:, None]
    version = np.where(column < start, 6, 8)
    np.testing.assert_array_equal(out.version, np.where(out.mask, version, 0))
    assert np.all(out.lengths > out.window_start)
    assert set(out.origin.flat) == {Origin.POLICY}
    # What was there is as it was.
    for name in ("tokens", "behavior_logprobs", "version"):
      np.testing.assert_array_equal(
        getattr(out, name)[:count, :4], getattr(rest, name)[:, :4]
      )
    for name in ("prompt_tokens", "prompt_lengths", "sample_id", "prompt_id"):
      np.testing.assert_array_equal(
        getattr(out, name)[:count], getattr(rest, name)
      )
    assert {x.dtype for x in jax.tree.leaves(out)} == {
      np.dtype(t) for t in ("int32", "float32", "bool")
    }

  def test_rows_of_a_prompt_share_a_group(self):
    first = _window(
      None, [3, 0], ids=[IDS[3, :2], IDS[0, :1]], window=1, settings=PLAIN
    )
    assert set(first.status) == {Status.TRUNCATED}
    np.testing.assert_array_equal(first.group, [0, 0, 1])
    rest = _rows(first, [2, 0, 1])
    out = _window(
      rest, [1, 0, 3], ids=[IDS[1], IDS[0, 1:], IDS[3, 3:]], window=1
    )
    np.testing.assert_array_equal(
      out.prompt_id, [70, 10, 10, 50, 50, 50, 50, 70, 70, 70, 10]
    )
    np.testing.assert_array_equal(out.group, [0, 1, 1, 2, 2, 2, 2, 0, 0, 0, 1])

  def test_arrays_of_the_device_may_come_back(self):
    rest = _cut(_window(None, [0, 1], window=4))
    out = _window(jax.device_put(rest), window=4)
    jax.tree.map(np.testing.assert_array_equal, out, _window(rest, window=4))
    assert isinstance(out.prompt_tokens, np.ndarray)


class TestEnds:
  def test_a_stop_token_first_in_a_window_finishes(self):
    full = _uncut()
    row = np.flatnonzero((full.status == Status.FINISHED) & (full.lengths > 1))[
      0
    ]
    length = full.lengths[row]
    ids = [full.sample_id[row : row + 1]]
    rest = _window(None, [row // G], ids=ids, window=length - 1)
    assert rest.status.tolist() == [Status.TRUNCATED]
    out = _window(rest, window=5)
    assert out.lengths.tolist() == [length]
    assert out.window_start.tolist() == [length - 1]
    assert out.status.tolist() == [Status.FINISHED]

  def test_the_limit_wins_over_the_window(self):
    settings = dataclasses.replace(SETTINGS, max_new_tokens=6)
    call = {"settings": settings, "window": 3}
    first = _window(None, range(N), **call)
    open_ = first.status == Status.TRUNCATED
    np.testing.assert_array_equal(first.lengths[open_], 3)
    second = _window(_cut(first), **call)
    assert Status.TRUNCATED not in second.status
    overlong = second.status == Status.OVERLONG
    assert overlong.any()
    np.testing.assert_array_equal(second.lengths[overlong], 6)

  def test_a_window_beyond_the_limit_stops_there(self):
    rest = _cut(_window(None, range(N), window=T - 2))
    out = _window(rest, window=50)
    assert Status.TRUNCATED not in out.status
    np.testing.assert_array_equal(out.lengths[out.status == Status.OVERLONG], T)


class TestNewWeights:
  def test_change_later_tokens_alone_and_agree_with_the_trainer(self):
    fns, _ = tiny.tiny_policy()
    params, sampler_params = _weights(1)
    call = {"settings": PLAIN, "window": 6}
    rest = _cut(_window(None, range(N), version=1, **call))
    same = _window(rest, version=1, **call)
    out = _window(rest, params=sampler_params, version=2, **call)
    np.testing.assert_array_equal(out.tokens[:, :6], same.tokens[:, :6])
    assert np.any(out.tokens[:, 6:] != same.tokens[:, 6:])

    def logprobs(params):
      """log π of each response token by one forward over all of it."""
      count = len(out.lengths)
      tokens, where = np.zeros((count, P + T), np.int32), np.arange(T)[None]
      where = out.prompt_lengths[:, None] + where
      for row, length in enumerate(out.prompt_lengths):
        tokens[row, :length] = out.prompt_tokens[row, :length]
        tokens[row, length : length + T] = out.tokens[row]
      logits = fns.logits(params, tokens, np.ones(tokens.shape, bool))
      rows = np.arange(count)[:, None]
      law = np.asarray(jax.nn.log_softmax(logits))[rows, where - 1]
      return np.take_along_axis(law, out.tokens[..., None], axis=-1)[..., 0]

    new = out.mask & (np.arange(T)[None] >= out.window_start[:, None])
    old = out.mask & ~new
    assert new.any() and old.any()
    got = out.behavior_logprobs
    now, before = logprobs(params), logprobs(_weights()[0])
    np.testing.assert_allclose(got[new], now[new], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[old], before[old], rtol=0, atol=1e-5)
    assert np.abs(now - before)[out.mask].max() > 0.01


class TestCompilation:
  def test_a_second_pass_compiles_nothing(self):
    def run(version, settings, window):
      rest = _cut(_window(None, [0, 1, 2], window=3, version=version))
      return _to_the_end(
        _window(rest, [3], window=window, version=version, settings=settings),
        window=window,
      )

    run(0, SETTINGS, 5)
    count = len(COMPILED)
    run(1, SETTINGS, 5)
    run(2, dataclasses.replace(SETTINGS, temperature=0.7), 5)
    assert len(COMPILED) == count > 0

  def test_programs_are_bounded_by_the_ladder(self, monkeypatch):
    engine, spans, grown = _make_engine(), set(), set()
    engine._buckets = [6, 16, 32]

    def admit(params, pool, *arguments, whole=engine._admit):
      spans.add((arguments[1].shape, models.cache_length(pool.cache)))
      return whole(params, pool, *arguments)

    def grow(pool, bucket, whole=engine._grow):
      grown.add((models.cache_length(pool.cache), bucket))
      return whole(pool, bucket=bucket)

    monkeypatch.setattr(engine, "_admit", admit)
    monkeypatch.setattr(engine, "_grow", grow)
    for window in (2, 5, 9):
      # The new prompt is longer than some of the contexts that go on.
      rest = _cut(_window(None, [1, 2], window=window, engine=engine))
      out = _window(rest, [0], window=window, engine=engine)
      _to_the_end(out, window=window, engine=engine)
    # Two cut rows, four prompts at a time; a span has its cache.
    assert spans == {
      ((2, 6), 6),
      ((2, 16), 16),
      ((2, 32), 32),
      ((4, 6), 6),
      ((4, 12), 16),
    }
    assert engine._advance._cache_size() <= len(engine._buckets)
    assert grown == {(6, 16), (16, 32)}

  def test_lowers_the_prefill_of_cut_responses_if_asked(self):
    params = jax.eval_shape(lambda: _weights()[1])
    call = {"prompts": 4, "group_size": G}
    assert len(_engine().lower(params, **call)) == 2
    lowered = _engine().lower(params, **call, window=True)
    assert set(lowered) == {
      "sampler admit",
      "sampler advance",
      "sampler admit cut responses",
    }
    text = lowered["sampler admit cut responses"].as_text()
    assert f"tensor<2x{P + T}xi32>" in text


class TestBadInput:
  @pytest.mark.parametrize(
    "call, message",
    [
      ({"window": 0}, "window must be >= 1, got 0"),
      ({"group_size": 0}, r"group_size must be 1..16 \(the slots\), got 0"),
      ({"group_size": 17}, "group_size must be 1..16 .*got 17"),
      ({"which": []}, r"1..16 \(the slots\) together, got 0"),
      ({"ids": [IDS[0]]}, "each of the 2 prompts, got 1 and 2"),
      ({"prompt_ids": [1]}, "each of the 2 prompts, got 2 and 1"),
      ({"prompt_ids": [5, 5]}, r"must differ, got \[5\] more than once"),
      ({"ids": [IDS[0], []]}, r"1..4 .*shape \(0,\) for prompt 50"),
      ({"ids": IDS.reshape(2, 8)}, r"1..4 .*shape \(8,\) for prompt 70"),
      ({"ids": [[7, 8], [8]]}, r"sample ids must differ, got \[8\]"),
      ({"prompts": [[1], []]}, r"1..12, got 0..1"),
      ({"settings": SamplingSettings(top_k=-1)}, "top_k must be >= 0, got -1"),
    ],
  )
  def test_a_wrong_request_raises(self, call, message):
    call = {"which": [0, 1], "window": 3} | call
    with pytest.raises(ValueError, match=message):
      _window(None, **call)

  def test_more_rows_than_slots_raise(self):
    rest = _cut(_window(None, range(N), window=1))
    with pytest.raises(ValueError, match=r"1..16 \(the slots\) together, got"):
      _window(rest, range(N), window=1, ids=IDS + 1000)

  def test_a_response_that_goes_on_does_not_start_too(self):
    rest = _cut(_window(None, [0], window=1))
    with pytest.raises(ValueError, match="sample ids must differ, got"):
      _window(rest, [0], window=1)

  @pytest.mark.parametrize(
    "change, message",
    [
      ({"status": [2, 2, 1, 2]}, "TRUNCATED.*got <Status.OVERLONG.*in row 2"),
      ({"status": [0, 2, 2, 2]}, "TRUNCATED.*got <Status.FINISHED.*in row 0"),
      ({"lengths": [1, 1, 1, 20]}, "1..19 response .*got 20 in row 3"),
      ({"lengths": [1, 0, 1, 1]}, "1..19 response .*got 0 in row 1"),
      ({"tokens": np.zeros((4, 21))}, r"\[rows, 20\] .* shape \(4, 21\)"),
      ({"prompt_tokens": np.zeros((4, 5))}, r"\[rows, 12\] .* shape \(4, 5\)"),
    ],
  )
  def test_a_row_that_cannot_go_on_raises(self, change, message):
    rest = _rows(_window(None, [0], window=1, settings=PLAIN), slice(4))
    rest = rest.replace(status=np.full(4, Status.TRUNCATED))
    change = {name: np.asarray(x, np.int32) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
      _window(rest.replace(**change), window=1)

  def test_a_row_at_a_lower_limit_raises(self):
    rest = _cut(_window(None, [0, 1], window=4))
    settings = dataclasses.replace(SETTINGS, max_new_tokens=4)
    with pytest.raises(ValueError, match="1..3 response .*got 4 in row 0"):
      _window(rest, window=1, settings=settings)
