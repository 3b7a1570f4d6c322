"""A response cut anywhere and continued equals the uncut one."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_engine
from helpers.tiny_engine import SETTINGS, G, T, make_engine
from helpers.tiny_window import (
  IDS,
  PLAIN,
  N,
  assert_same_rows,
  cut,
  to_the_end,
  uncut,
  write_window,
)

from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling.rules import Decision
from jaxrl_llm.types import Origin, Status


class TestUncut:
  """Windows with the same weights do not change a response."""

  @pytest.mark.parametrize("window", [1, 3, 5])
  def test_windows_equal_one_call(self, window):
    out = to_the_end(write_window(None, range(N), window=window), window=window)
    assert_same_rows(out, uncut())
    assert {Status.FINISHED, Status.OVERLONG} == set(out.status)

  @pytest.mark.parametrize("window", [T, T + 1, 10**6])
  def test_a_window_that_never_closes_equals_generate_to_the_bit(self, window):
    out = write_window(None, range(N), window=window)
    jax.tree.map(np.testing.assert_array_equal, out, uncut())

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

  # In waves of three with pages of four positions; all at once.
  @pytest.mark.parametrize("slots, page_size", [(3, 4), (16, 64)])
  def test_order_slots_and_pages_do_not_matter(self, slots, page_size):
    rest = cut(write_window(None, range(N), window=4))
    expected = write_window(rest, window=7)
    order = np.random.default_rng(0).permutation(len(rest.lengths))
    out = write_window(
      tiny_engine.rows(rest, order),
      window=7,
      engine=make_engine(slots=slots, page_size=page_size),
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
      np.testing.assert_array_equal(
        getattr(out, name)[:count, :4], getattr(rest, name)[:, :4]
      )
    for name in (
      *("prompt_tokens", "prompt_lengths"),
      *("sample_id", "group_id", "example_id"),
    ):
      np.testing.assert_array_equal(
        getattr(out, name)[:count], getattr(rest, name)
      )
    assert {x.dtype for x in jax.tree.leaves(out)} == {
      np.dtype(t) for t in ("int8", "int32", "float32", "bool")
    }

  def test_rows_of_a_prompt_share_a_group(self):
    first = write_window(
      None, [3, 0], ids=[IDS[3, :2], IDS[0, :1]], window=1, settings=PLAIN
    )
    assert set(first.status) == {Status.TRUNCATED}
    np.testing.assert_array_equal(first.group, [0, 0, 1])
    rest = tiny_engine.rows(first, [2, 0, 1])
    out = write_window(
      rest, [1, 0, 3], ids=[IDS[1], IDS[0, 1:], IDS[3, 3:]], window=1
    )
    np.testing.assert_array_equal(
      out.group_id, [70, 10, 10, 50, 50, 50, 50, 70, 70, 70, 10]
    )
    np.testing.assert_array_equal(out.group, [0, 1, 1, 2, 2, 2, 2, 0, 0, 0, 1])

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

  def test_what_follows_a_stop_string_is_as_in_a_new_row(self):
    brought = self._with_holes()
    full = write_window(brought, window=T)
    ends = [
      tiny_engine.detokenize(row[length : length + 2])
      for row, length in zip(full.tokens, brought.lengths)
    ]
    settings = dataclasses.replace(SETTINGS, stop_strings=tuple(set(ends)))
    out = write_window(brought, window=T, settings=settings)
    assert (out.lengths < full.lengths).any()
    self._assert_kept(out, brought)

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
