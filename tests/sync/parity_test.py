"""Log-prob parity: both paths agree, and differences are detected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny
from helpers.tiny_experience import MASK, make_rollout

from jaxrl_llm import models, sync
from jaxrl_llm.types import Origin

TOKENS = sync.parity_tokens(67, rows=4, length=10)  # Three pages per row.
ROW_0 = np.zeros(MASK.shape, int)
ROW_0[0] = 1


def _fns(dtype, cache=None):
  dtype, cache = jnp.dtype(dtype), cache and jnp.dtype(cache)
  return models.make_policy(
    tiny.tiny_config(),
    numerics=models.Numerics.all(dtype),
    sampler=models.Numerics.all(dtype, kv=cache),
    head_chunk=8,
  )


def _make_check(fns, dtype):
  return sync.make_parity_check(
    fns,
    TOKENS,
    tolerance=sync.tolerance(jnp.dtype(dtype).name, platforms=["cpu"]).fixed,
    page_size=4,
  )


def _check(dtype):
  fns = _fns(dtype)
  _, params = tiny.tiny_policy()
  transfer = sync.WeightTransfer(
    fns.for_sampling, jax.eval_shape(lambda: params)
  )
  return _make_check(fns, dtype), transfer, params


class TestParityCheck:
  def test_float32_agrees_and_a_small_change_is_found(self):
    check, transfer, params = _check(jnp.float32)
    assert check(params, transfer.send(params, 0)) <= 1e-5
    scale = params["final_norm"]["scale"].at[2].multiply(1.01)
    moved = transfer.send(params | {"final_norm": {"scale": scale}}, 1)
    with pytest.raises(sync.SyncError, match="version 1 differ .* than 1e-05"):
      check(params, moved)
    scale = scale.at[2].set(jnp.nan)
    broken = transfer.send(params | {"final_norm": {"scale": scale}}, 1)
    with pytest.raises(sync.SyncError, match=r"nan \(relative\), more"):
      check(params, broken)

  @pytest.mark.parametrize(
    ("dtype", "cache", "least", "most"),
    [("bfloat16", None, 0, 2e-2), ("float32", "float8_e4m3fn", 2e-3, 7e-2)],
  )
  def test_few_bits_agree_and_other_weights_are_found(
    self, dtype, cache, least, most
  ):
    _, transfer, params = _check(dtype)
    check = _make_check(_fns(dtype, cache), cache or dtype)
    assert least < check(params, transfer.send(params, 0)) <= most
    other = tiny.widen(params, jax.random.key(1))
    with pytest.raises(sync.SyncError, match=f"version 3 differ .* {most}"):
      check(params, transfer.send(other, 3))

  def test_is_compiled_once(self):
    _, transfer, params = _check(jnp.float32)
    fns, traced = _fns(jnp.float32), []

    def noted(name):
      return lambda *args: traced.append(name) or getattr(fns, name)(*args)

    names = "decode", "logprobs"
    spies = fns._replace(**{name: noted(name) for name in names})
    check = _make_check(spies, jnp.float32)
    weights = transfer.send(params, 0)
    first = check(params, weights)
    seen = len(traced)
    weights = transfer.send(params, 1, replaces=weights)
    assert check(params, weights) == first
    assert set(traced) == {*names} and len(traced) == seen

  def test_a_decoder_that_means_something_else_is_found(self):
    _, transfer, params = _check(jnp.float32)
    fns = _fns(jnp.float32)

    def one_late(sampled, memory, pages, tokens, positions, writing):
      late = jnp.maximum(positions - 1, 0)
      return fns.decode(sampled, memory, pages, tokens, late, writing)

    def forgetful(sampled, memory, pages, tokens, positions, writing):
      # Only the first page is read.
      first = pages.page_start == 0
      pages = pages._replace(page_owner=np.where(first, pages.page_owner, 4))
      return fns.decode(sampled, memory, pages, tokens, positions, writing)

    for broken in (one_late, forgetful):
      check = _make_check(fns._replace(decode=broken), jnp.float32)
      with pytest.raises(sync.SyncError, match="version 0 differ"):
        check(params, transfer.send(params, 0))

  def test_tokens_are_fixed_and_in_the_vocabulary(self):
    again = sync.parity_tokens(67, rows=4, length=10)
    assert (again == TOKENS).all() and TOKENS.dtype == "int32"
    assert TOKENS.min() >= 0 and TOKENS.max() < 67


class TestSampled:
  """The log-probs of sampled tokens, each and on average."""

  def check(self, theirs, ours=-1.0, *, scored=True, name="float32", **fields):
    rollout = make_rollout()
    shape = rollout.mask.shape
    rollout = rollout.replace(
      behavior_logprobs=np.where(rollout.mask, theirs, np.nan), **fields
    )
    sync.check_sampled(
      rollout,
      np.full(shape, ours),
      np.broadcast_to(scored, shape[0]),
      version=0,
      tolerance=sync.tolerance(name, platforms=["cpu"]),
      engine="engine 'x'",
      decode=lambda tokens: f"<{tokens[0]}>",
    )

  def one_off(self, by):
    rollout = make_rollout()
    theirs = np.full(rollout.mask.shape, -1.0)
    theirs[0, 2] += by
    return theirs

  @pytest.mark.parametrize("by", [0.02, -0.19, np.nan, -np.inf])
  def test_names_the_token_with_the_largest_difference(self, by):
    token = make_rollout().tokens[0, 2]
    with pytest.raises(sync.SyncError) as error:
      self.check(self.one_off(by))
    said = str(error.value)
    assert "step 1: the log-probs of engine 'x' differ" in said
    assert f"token {token} ('<{token}>') at position 2 of response" in said
    assert "\n" not in said and f"{-1.0 + by:.5g} and -1 (" in said

  def test_rounding_passes(self):
    self.check(self.one_off(1e-3))
    self.check(self.one_off(0.3), name="bfloat16")
    # Relative to the log-prob of an improbable token.
    self.check(-30.02, -30.0)
    with pytest.raises(sync.SyncError, match="mean 0.002, limit 0.001"):
      self.check(-1.002)
    with pytest.raises(sync.SyncError, match="engine 'x'"):
      self.check(0.0, -30.0)  # Not filled in.

  @pytest.mark.parametrize(
    "fields",
    [
      {"scored": [False, True, True]},
      {"version": 1 * ROW_0},
      {"origin": int(Origin.FOREIGN) * ROW_0},
      {"origin": int(Origin.OTHER) * ROW_0},
    ],
  )
  def test_other_tokens_may_differ(self, fields):
    self.check(self.one_off(-3.0), **fields)
    self.check(np.nan, scored=False)


class TestTolerance:
  def test_is_that_of_the_coarsest_dtype(self):
    tolerance = lambda *names: sync.tolerance(*names, platforms=["cpu"]).fixed
    assert tolerance("float32") == tolerance("float32", "float32") == 1e-5
    assert tolerance("float32", "bfloat16") == tolerance("bfloat16") == 2e-2

  def test_accelerators_multiply_in_fewer_bits(self):
    for platforms in (["tpu"], {"cpu", "gpu"}):
      assert sync.tolerance("float32", platforms=platforms).fixed == 2e-2
