"""Packed attention equals attention of `jax.nn`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.models import attention, context

B, T, D = 2, 11, 6
# One row with padding inside; one in which 2 and 3 attend to prefix 1.
SEGMENTS = np.array(
  [[1, 1, 1, 2, 2, 0, 0, 3, 3, 3, 3], [1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4]],
  np.int32,
)
PREFIXES = np.array([[0] * T, [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]], np.int32)


def _inputs(heads=6, kv_heads=2):
  keys = jax.random.split(jax.random.key(1), 4)
  q = jax.random.normal(keys[0], (B, T, heads, D))
  k = jax.random.normal(keys[1], (B, T, kv_heads, D))
  v = jax.random.normal(keys[2], (B, T, kv_heads, D))
  return (q, k, v), jax.random.normal(keys[3], q.shape)


def _visible(segments, prefixes):
  """Computes bool [B, T, T], one pair of positions at a time."""
  visible = np.zeros((B, T, T), bool)
  for b, t, s in np.ndindex(B, T, T):
    seen = {segments[b, t]} | ({prefixes[b, t]} - {0})
    visible[b, t, s] = s <= t and segments[b, s] in seen
  return visible


def _value_and_grad(function, qkv, pull):
  """Recompiles on every call, since tests change the block size."""

  def total(*qkv):
    out = function(*qkv)
    return jnp.sum(out * pull), out

  grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)
  return out, grads


def _packed(q, k, v):
  return attention.packed_attention(q, k, v, SEGMENTS, PREFIXES)


def _library(visible):
  return lambda q, k, v: jax.nn.dot_product_attention(
    q, k, v, mask=visible[:, None]
  )


@functools.cache
def _expected(heads, kv_heads):
  qkv, pull = _inputs(heads, kv_heads)
  visible = _visible(SEGMENTS, PREFIXES)
  return _value_and_grad(_library(visible), qkv, pull)


_assert_close = functools.partial(
  chex.assert_trees_all_close, rtol=1e-5, atol=2e-6
)


class TestPackedAttention:
  @pytest.mark.parametrize("block", [512, 1])
  def test_tokens_of_a_row_on_several_devices(self, block, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    time = 8  # Two on each of four devices.
    mesh = sharding.make_mesh(data=1, fsdp=1, context=4, tensor=2)
    qkv, pull = _inputs()
    qkv, pull = [x[:, :time] for x in qkv], pull[:, :time]
    segments, prefixes = SEGMENTS[:, :time], PREFIXES[:, :time]
    place = sharding.packed_kv_sharding(mesh, qkv[1].shape[2])
    deal = lambda x: context.zigzag_shard(x, 4)

    def ours(q, k, v):
      arrays = map(deal, (q, k, v, segments, prefixes))
      out = attention.packed_attention(*arrays, sharding=place)
      return context.zigzag_unshard(out, 4, time)

    visible = _visible(SEGMENTS, PREFIXES)[:, :time, :time]
    _assert_close(
      _value_and_grad(ours, qkv, pull),
      _value_and_grad(_library(visible), qkv, pull),
    )

  # Full rows, blocks that do not divide them, and blocks that do.
  @pytest.mark.parametrize(
    "heads, kv_heads, block",
    [(6, 2, 512), (3, 1, 512), (6, 2, 4), (6, 2, 1)],
  )
  def test_equals_jax_nn_in_value_and_gradient(
    self, heads, kv_heads, block, monkeypatch
  ):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    qkv, pull = _inputs(heads, kv_heads)
    got = _value_and_grad(_packed, qkv, pull)
    _assert_close(got, _expected(heads, kv_heads))

  def test_blocks_keep_memory_linear(self, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 4)
    time, heads = 101, 3
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    segments = jax.ShapeDtypeStruct((1, time), jnp.int32)
    q, kv = shape(1, time, heads, 2), shape(1, time, 1, 2)
    total = lambda *args: attention.packed_attention(*args).sum()
    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(
      q, kv, kv, segments, segments
    )
    assert f"x4x{time}x" in text.as_text()
    assert f"x{time}x{time}x" not in text.as_text()

  def test_other_segments_have_no_influence_and_no_gradient(self):
    (q, k, v), pull = _inputs()
    pull = pull * (SEGMENTS == 2)[..., None, None]
    own = (SEGMENTS == 2) | (SEGMENTS == 1) & np.array([[False], [True]])
    change = lambda x: jnp.where(own[..., None, None], x, 100.0)
    out, grads = _value_and_grad(_packed, (q, k, v), pull)
    other_out, other = _value_and_grad(_packed, (q, change(k), change(v)), pull)
    two = SEGMENTS == 2
    np.testing.assert_array_equal(out[two], other_out[two])
    jax.tree.map(np.testing.assert_array_equal, grads, other)
    assert not any(np.any(np.asarray(g)[~own]) for g in grads)
    assert np.all(np.any(np.asarray(grads[2])[own] != 0, axis=-1))

  def test_huge_scores_stay_finite(self):
    (q, k, v), pull = _inputs()
    out = _value_and_grad(_packed, (q * 1e4, k * 1e4, v), pull)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))

  def test_bfloat16_stays_near_and_keeps_its_dtype(self):
    qkv, _ = _inputs()
    half = [x.astype(jnp.bfloat16) for x in qkv]
    out = _packed(*half)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, _packed(*qkv), atol=0.05)


class TestContext:
  def test_the_first_and_the_last_piece_are_one_device_s(self):
    np.testing.assert_array_equal(
      context.zigzag_order(12, 3), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    )
    np.testing.assert_array_equal(context.zigzag_order(3, 1), [[0, 1, 2]])

  def test_all_attend_to_as_many_tokens(self):
    before = context.zigzag_order(96, 4).sum(axis=1)
    assert set(before) == {sum(range(96)) / 4}
