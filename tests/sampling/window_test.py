"""A response cut anywhere and continued equals the uncut one."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_engine
from helpers.tiny_engine import COMPILED, SETTINGS, G, P, T, make_engine
from helpers.tiny_window import (
  IDS,
  PLAIN,
  N,
  assert_same_rows,
  cut,
  to_the_end,
  uncut,
  weights,
  window_engine,
  write_window,
)

from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling.rules import Decision
from jaxrl_llm.types import Origin, Status


class TestUncut:
  """Windows with the same weights do not change a response."""

  @pytest.mark.parametrize("window", [1, 5, T, 10**6])
  def test_windows_equal_one_call(self, window):
    out = to_the_end(write_window(None, range(N), window=window), window=window)
    assert_same_rows(out, uncut())
    assert {Status.FINISHED, Status.OVERLONG} == set(out.status)

  def test_a_prompt_may_start_some_responses_later(self):
    ids = [IDS[0, :1], IDS[1], IDS[2, 1:3]]
    first = write_window(None, range(3), ids=ids, window=6)
    assert len(first.lengths) == 7
    ids = [IDS[0, 1:], IDS[2, [0, 3]], IDS[3]]
    second = write_window(cut(first), [0, 2, 3], ids=ids, window=6)
    out = [tiny_engine.rows(first, first.status != Status.TRUNCATED)]
    out.append(to_the_end(second, window=6))
    out = jax.tree.map(lambda *x: np.concatenate(x), *out)
    assert_same_rows(tiny_engine.rows(out, np.argsort(out.sample_id)), uncut())

  def test_order_slots_and_pages_do_not_matter(self):
    rest = cut(write_window(None, range(N), window=4))
    expected = write_window(rest, window=7)
    order = np.random.default_rng(0).permutation(len(rest.lengths))
    out = write_window(
      tiny_engine.rows(rest, order),
      window=7,
      engine=make_engine(slots=3, page_size=4),
    )
    assert_same_rows(out, tiny_engine.rows(expected, order))


class TestRecord:
  def test_windows_record_their_versions_and_starts(self):
    first = write_window(None, [0, 1], window=4, version=6)
    rest = cut(first)
    out = write_window(rest, [2], window=3, version=8)
    count = len(rest.lengths)
    start = np.concatenate([np.full(count, 4), np.zeros(G)])
    np.testing.assert_array_equal(out.window_start, start)
    column, start = np.arange(T)[None], start[:, None]
    version = np.where(column < start, 6, 8)
    np.testing.assert_array_equal(out.version, np.where(out.mask, version, 0))
    assert np.all(out.lengths > out.window_start)
    assert set(out.origin.flat) == {Origin.POLICY}
    # Existing tokens are unchanged.
    for name in ("tokens", "behavior_logprobs", "version"):
      np.testing.assert_array_equal(out[name][:count, :4], rest[name][:, :4])
    for name in ("prompt_tokens", "sample_id", "group_id", "example_id"):
      np.testing.assert_array_equal(out[name][:count], rest[name])

  def test_arrays_of_the_device_may_come_back(self):
    rest = cut(write_window(None, [0, 1], window=4))
    out = write_window(jax.device_put(rest), window=4)
    assert_same_rows(out, write_window(rest, window=4))
    assert isinstance(out.prompt_tokens, np.ndarray)


class TestMaskAndOrigin:
  """Mask and origin of existing tokens stay; new tokens are POLICY."""

  def _with_holes(self):
    """Makes truncated rows with tool tokens between the policy's tokens."""
    rest = cut(write_window(None, [0, 1], window=6))
    rest.mask[:, 1:3] = False
    rest.origin[:, 1:3] = int(Origin.FOREIGN)
    return rest

  def _assert_kept(self, out, brought):
    new = np.arange(T)[None] >= brought.lengths[:, None]
    written = new & (np.arange(T)[None] < out.lengths[:, None])
    for name, value in (("mask", written), ("origin", int(Origin.POLICY))):
      np.testing.assert_array_equal(
        out[name], np.where(new, value, brought[name])
      )

  def test_holes_and_origins_survive_further_windows(self):
    brought = self._with_holes()
    first = write_window(brought, window=3)
    assert (first.lengths > brought.lengths).all()
    self._assert_kept(first, brought)
    rest = cut(first)
    self._assert_kept(write_window(rest, window=T), rest)

  def test_a_row_that_gets_no_slot_keeps_them(self):
    brought = self._with_holes()
    out = write_window(brought, window=3, rule=lambda view: Decision(halt=True))
    for name in ("mask", "origin", "lengths"):
      np.testing.assert_array_equal(out[name], brought[name])

  def test_a_cut_clears_mask_and_origin(self):
    brought = self._with_holes()
    requests_lib.cut(brought, 0, 2, status=Status.FINISHED)
    assert brought.mask[0].tolist() == [True] + [False] * (T - 1)
    assert brought.origin[0, 2:].tolist() == [int(Origin.POLICY)] * (T - 2)
    assert brought.origin[0, 1] == int(Origin.FOREIGN)


class TestEnds:
  def test_the_limit_wins_over_the_window(self):
    settings = dataclasses.replace(SETTINGS, max_new_tokens=6)
    call = {"settings": settings, "window": 3}
    first = write_window(None, range(N), **call)
    open_ = first.status == Status.TRUNCATED
    np.testing.assert_array_equal(first.lengths[open_], 3)
    second = write_window(cut(first), **call)
    assert Status.TRUNCATED not in second.status
    overlong = second.status == Status.OVERLONG
    assert overlong.any()
    np.testing.assert_array_equal(second.lengths[overlong], 6)


class TestNewWeights:
  def test_change_later_tokens_alone_and_agree_with_the_trainer(self):
    params, sampler_params = weights(1)
    call = {"settings": PLAIN, "window": 6}
    rest = cut(write_window(None, range(N), version=1, **call))
    same = write_window(rest, version=1, **call)
    out = write_window(rest, params=sampler_params, version=2, **call)
    np.testing.assert_array_equal(out.tokens[:, :6], same.tokens[:, :6])
    assert np.any(out.tokens[:, 6:] != same.tokens[:, 6:])
    of = out.tokens[..., None]
    now, before = (
      np.take_along_axis(tiny_engine.law(out, trained), of, axis=-1)[..., 0]
      for trained in (params, weights()[0])
    )
    new = out.mask & (np.arange(T)[None] >= out.window_start[:, None])
    old = out.mask & ~new
    assert new.any() and old.any()
    got = out.behavior_logprobs
    np.testing.assert_allclose(got[new], now[new], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[old], before[old], rtol=0, atol=1e-5)
    assert np.abs(now - before)[out.mask].max() > 0.01


class TestCompilation:
  def test_a_second_pass_compiles_nothing(self):
    def run(version, settings, window):
      rest = cut(write_window(None, [0, 1, 2], window=3, version=version))
      return to_the_end(
        write_window(
          rest, [3], window=window, version=version, settings=settings
        ),
        window=window,
      )

    # Other lengths may need another bucket, but only once.
    other = dataclasses.replace(SETTINGS, temperature=0.7)
    run(0, SETTINGS, 5)
    run(0, other, 5)
    count = len(COMPILED)
    run(1, SETTINGS, 5)
    run(2, other, 5)
    assert len(COMPILED) == count > 0

  def test_lowers_the_prefill_of_cut_responses_if_asked(self):
    params = jax.eval_shape(lambda: weights()[1])
    assert len(window_engine().lower(params, prompts=4)) == 2
    lowered = window_engine().lower(params, prompts=4, window=True)
    assert set(lowered) == {
      "sampler prefill",
      "sampler decode",
      "sampler prefill cut responses",
    }
    text = lowered["sampler prefill cut responses"].as_text()
    assert f"tensor<2x{P + T}xi32>" in text


class TestBadInput:
  @pytest.mark.parametrize(
    "call, message",
    [
      ({"window": 0}, r"window=0, expected .* in \[1, inf\)"),
      ({"group_size": 0}, r"group_size=0, expected .* in \[1, inf\)"),
      ({"group_ids": [1]}, "each of the 2 prompts, got 2 and 1"),
      ({"group_ids": [5, 5]}, r"must be unique, got \[5\] more than once"),
      ({"ids": [[7, 8], [8]]}, r"sample ids must be unique, got \[8\]"),
    ],
  )
  def test_a_wrong_request_raises(self, call, message):
    call = {"which": [0, 1], "window": 3} | call
    with pytest.raises(ValueError, match=message):
      write_window(None, **call)

  @pytest.mark.parametrize(
    "change, message",
    [
      ({"status": [2, 2, 1, 2]}, "TRUNCATED.*got <Status.OVERLONG.*in row 2"),
      ({"lengths": [1, 1, 1, 20]}, "0..19 response .*got 20 in row 3"),
      ({"lengths": [1, -1, 1, 1]}, "0..19 response .*got -1 in row 1"),
      ({"tokens": np.zeros((4, 21))}, r"\[rows, 20\] .* shape \(4, 21\)"),
      ({"prompt_tokens": np.zeros((4, 5))}, r"\[rows, 12\] .* shape \(4, 5\)"),
    ],
  )
  def test_a_row_that_cannot_go_on_raises(self, change, message):
    rest = tiny_engine.rows(
      write_window(None, [0], window=1, settings=PLAIN), slice(4)
    )
    rest = rest.replace(status=np.full(4, Status.TRUNCATED))
    change = {name: np.asarray(x, np.int32) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
      write_window(rest.replace(**change), window=1)

  def test_a_row_at_a_lower_limit_raises(self):
    rest = cut(write_window(None, [0, 1], window=4))
    settings = dataclasses.replace(SETTINGS, max_new_tokens=4)
    with pytest.raises(ValueError, match="0..3 response .*got 4 in row 0"):
      write_window(rest, window=1, settings=settings)
