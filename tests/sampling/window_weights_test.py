"""Windows with new weights, their programs, and rows that cannot continue."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import tiny_engine
from helpers.tiny_engine import COMPILED, SETTINGS, P, T
from helpers.tiny_window import (
  IDS,
  PLAIN,
  N,
  cut,
  to_the_end,
  weights,
  window_engine,
  write_window,
)

from jaxrl_llm.sampling import SamplingSettings
from jaxrl_llm.types import Status


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
      ({"which": []}, "at least one request, got none"),
      ({"ids": [IDS[0]]}, "each of the 2 prompts, got 1 and 2"),
      ({"group_ids": [1]}, "each of the 2 prompts, got 2 and 1"),
      ({"group_ids": [5, 5]}, r"must be unique, got \[5\] more than once"),
      ({"ids": [[7, 8], [8]]}, r"sample ids must be unique, got \[8\]"),
      ({"prompts": [[1], []]}, r"1..12, got 0..1"),
      (
        {"settings": SamplingSettings(top_k=-1)},
        r"top_k=-1, expected .*\[0, inf\)",
      ),
    ],
  )
  def test_a_wrong_request_raises(self, call, message):
    call = {"which": [0, 1], "window": 3} | call
    with pytest.raises(ValueError, match=message):
      write_window(None, **call)

  def test_a_response_that_goes_on_does_not_start_too(self):
    rest = cut(write_window(None, [0], window=1))
    with pytest.raises(ValueError, match="sample ids must be unique, got"):
      write_window(rest, [0], window=1)

  @pytest.mark.parametrize(
    "change, message",
    [
      ({"status": [2, 2, 1, 2]}, "TRUNCATED.*got <Status.OVERLONG.*in row 2"),
      ({"status": [0, 2, 2, 2]}, "TRUNCATED.*got <Status.FINISHED.*in row 0"),
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
