"""Packed attention equals that of `jax.nn`, paged attention a naive softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention

B, T, D = 2, 11, 6
HEADS = [(6, 2), (3, 1), (4, 4)]  # (query heads, key heads).
# One row with padding inside; one where 2 and 3 see 1 before them.
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
  """bool [B, T, T], one pair of positions at a time."""
  visible = np.zeros((B, T, T), bool)
  for b, t, s in np.ndindex(B, T, T):
    seen = {segments[b, t]} | ({prefixes[b, t]} - {0})
    visible[b, t, s] = s <= t and segments[b, s] in seen
  return visible


def _value_and_grad(function, qkv, pull):
  """Compiled anew on every call, since tests change the block size."""

  def total(*qkv):
    out = function(*qkv)
    return jnp.sum(out * pull), out

  grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*qkv)
  return out, grads


def _packed(segments=SEGMENTS, prefixes=PREFIXES):
  return lambda q, k, v: attention.packed_attention(q, k, v, segments, prefixes)


def _library(visible):
  return lambda q, k, v: jax.nn.dot_product_attention(
    q, k, v, mask=visible[:, None]
  )


@functools.cache
def _expected(heads, kv_heads):
  qkv, pull = _inputs(heads, kv_heads)
  visible = _visible(SEGMENTS, PREFIXES)
  return _value_and_grad(_library(visible), qkv, pull)


def _assert_close(got, expected):
  jax.tree.map(
    lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=2e-6),
    got,
    expected,
  )


class TestPackedAttention:
  # Rows at once, in blocks that do not divide them, and in blocks that do.
  @pytest.mark.parametrize(
    "heads, kv_heads, block",
    [(6, 2, 512), (3, 1, 512), (6, 2, 4), (6, 2, 1)],
  )
  def test_equals_jax_nn_in_value_and_gradient(
    self, heads, kv_heads, block, monkeypatch
  ):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    qkv, pull = _inputs(heads, kv_heads)
    got = _value_and_grad(_packed(), qkv, pull)
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
    out, grads = _value_and_grad(_packed(), (q, k, v), pull)
    other_out, other = _value_and_grad(
      _packed(), (q, change(k), change(v)), pull
    )
    two = SEGMENTS == 2
    np.testing.assert_array_equal(out[two], other_out[two])
    jax.tree.map(np.testing.assert_array_equal, grads, other)
    assert not any(np.any(np.asarray(g)[~own]) for g in grads)
    assert np.all(np.any(np.asarray(grads[2])[own] != 0, axis=-1))

  def test_huge_scores_stay_finite(self):
    (q, k, v), pull = _inputs()
    out = _value_and_grad(_packed(), (q * 1e4, k * 1e4, v), pull)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))

  def test_bfloat16_stays_near_and_keeps_its_dtype(self):
    qkv, _ = _inputs()
    half = [x.astype(jnp.bfloat16) for x in qkv]
    out = _packed()(*half)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, _packed()(*qkv), atol=0.05)


def _layout(lengths, *, shards, page, spare, seed):
  """Pages in random places, each slot's own, and `spare` that are free.

  Returns:
    A `BlockTables`, and the number of pages on a shard.
  """
  rng = np.random.default_rng(seed)
  share = len(lengths) // shards
  blocks = -(-np.asarray(lengths) // page)
  count = int(blocks.reshape(shards, share).sum(axis=1).max()) + spare
  table = np.full((len(lengths), blocks.max() + 1), count, np.int32)
  free = [list(rng.permutation(count)) for _ in range(shards)]
  for slot, needed in enumerate(blocks):
    for block in range(needed):
      table[slot, block] = free[slot // share].pop()
  tables = attention.make_block_tables(
    table, shards=shards, pages=count, page_size=page
  )
  return tables, count


def _segmented(keys, values):
  """A paged layer, its pages in as many arrays as there are segments."""
  cuts = np.cumsum(attention.segment_sizes(keys.shape[1]))[:-1]
  return tuple(zip(*(jnp.split(x, cuts, axis=1) for x in (keys, values))))


_paged = jax.jit(attention.paged_attention)
_write = jax.jit(attention.write_paged)


class TestPagedAttention:
  SLOTS, PAGE = 4, 4
  LENGTHS = np.array([9, 1, 0, 12])  # The third slot is idle.

  def _case(self, heads, kv_heads, queries, shards, garbage=1e6):
    """Dense keys and values, and the cache that `write_paged` makes."""
    keys = jax.random.split(jax.random.key(2), 3)
    total = self.LENGTHS.max()
    shape = (self.SLOTS, total, kv_heads, D)
    k, v = (jax.random.normal(key, shape) for key in keys[:2])
    q = jax.random.normal(keys[2], (self.SLOTS, queries, heads, D))
    tables, count = _layout(
      self.LENGTHS, shards=shards, page=self.PAGE, spare=2, seed=heads
    )
    # What nobody wrote to holds anything, within pages in use any number.
    free = np.ones((shards, count), bool)
    for slot, pages in enumerate(tables.page_indices):
      free[slot * shards // self.SLOTS, pages[pages < count]] = False
    fill = np.where(free, garbage, 1e3)[:, :, None, None, None]
    fill = fill.astype(np.float32)
    size = (shards, count, kv_heads)
    kv_cache = _segmented(
      jnp.broadcast_to(fill, (*size, D, self.PAGE)),
      jnp.broadcast_to(fill, (*size, self.PAGE, D)),
    )
    positions = np.broadcast_to(
      np.arange(total, dtype=np.int32), (self.SLOTS, total)
    )
    writing = positions < self.LENGTHS[:, None]
    kv_cache = _write(kv_cache, k, v, tables, positions, writing)
    last = self.LENGTHS[:, None] - queries + np.arange(queries)
    return q, k, v, kv_cache, tables, np.maximum(last, 0).astype(np.int32)

  def _naive(self, q, k, v, positions):
    """One slot, query and head at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for s, i, h in np.ndindex(*q.shape[:3]):
      seen = slice(positions[s, i] + 1)
      if self.LENGTHS[s]:
        scores = k[s, seen, h // group] @ q[s, i, h] / np.sqrt(D)
        weights = np.exp(scores - scores.max())
        out[s, i, h] = weights @ v[s, seen, h // group] / weights.sum()
    return out

  # All pages in one array, and in eight.
  @pytest.mark.parametrize("segment", [32, 1])
  @pytest.mark.parametrize("shards", [1, 2])
  @pytest.mark.parametrize("queries", [1, 3])
  @pytest.mark.parametrize("heads, kv_heads", HEADS)
  def test_equals_a_softmax_per_slot(
    self, heads, kv_heads, queries, shards, segment, monkeypatch
  ):
    monkeypatch.setattr(attention, "_MIN_SEGMENT", segment)
    q, k, v, *rest = self._case(heads, kv_heads, queries, shards)
    got = _paged(q, *rest)
    expected = self._naive(q, k, v, rest[-1])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)
    assert not np.any(got[2])  # The idle slot.

  def test_where_pages_lie_is_no_matter(self, monkeypatch):
    q, *_, kv_cache, tables, positions = self._case(6, 2, 1, 1)
    expected = _paged(q, kv_cache, tables, positions)
    (kv_cache,) = kv_cache
    count = kv_cache[0].shape[1]
    order = np.random.default_rng(0).permutation(count + 1)
    order[order == count], order[count] = order[count], count
    moved = [np.zeros_like(x) for x in kv_cache]
    for new, old in zip(moved, kv_cache):
      new[:, order[:count]] = old
    other = attention.make_block_tables(
      order[tables.page_indices].astype(np.int32),
      shards=1,
      pages=count,
      page_size=self.PAGE,
    )
    monkeypatch.setattr(attention, "_MIN_SEGMENT", 1)
    got = _paged(q, _segmented(*moved), other, positions)
    np.testing.assert_array_equal(got, expected)

  def test_segments_without_a_page_in_use_are_left_out(self, monkeypatch):
    monkeypatch.setattr(attention, "_MIN_SEGMENT", 1)
    q, *_, kv_cache, tables, positions = self._case(6, 2, 1, 1)
    sizes = [keys.shape[1] for keys, _ in kv_cache]
    owner = tables.page_owner.copy()
    owner[:, sum(sizes[:-1]) :] = self.SLOTS  # What was there is not seen.
    tables = tables._replace(page_owner=owner)
    broken = jax.tree.map(lambda x: x * np.nan, kv_cache[-1])
    expected = _paged(q, kv_cache, tables, positions)
    got = _paged(q, (*kv_cache[:-1], broken), tables, positions)
    np.testing.assert_array_equal(got, expected)

  @pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
  def test_free_pages_may_hold_what_is_no_number(self, garbage):
    q, _, _, *rest = self._case(6, 2, 1, 2)
    other = self._case(6, 2, 1, 2, garbage)[3:]
    np.testing.assert_array_equal(_paged(q, *other), _paged(q, *rest))

  def test_large_scores_stay_finite(self):
    q, _, _, kv_cache, tables, positions = self._case(6, 2, 1, 1)
    out = _paged(q * 1e4, kv_cache, tables, positions)
    assert np.isfinite(out).all()

  def test_bfloat16_stays_near_and_keeps_its_dtype(self):
    q, _, _, kv_cache, tables, positions = self._case(6, 2, 3, 1)
    half = lambda x: x.astype(jnp.bfloat16)
    got = _paged(half(q), jax.tree.map(half, kv_cache), tables, positions)
    assert got.dtype == jnp.bfloat16
    expected = _paged(q, kv_cache, tables, positions)
    np.testing.assert_allclose(got, expected, atol=0.05)


class TestWritePaged:
  def test_leaves_everything_else_as_it_was(self, monkeypatch):
    tables, count = _layout([5, 3], shards=2, page=4, spare=1, seed=0)
    size = (2, count, 1)
    monkeypatch.setattr(attention, "_MIN_SEGMENT", 1)
    kv_cache = _segmented(
      jnp.full((*size, D, 4), 7.0), jnp.full((*size, 4, D), 7.0)
    )
    k = np.arange(4.0).reshape(2, 2, 1, 1) * np.ones(D, np.float32)
    # The first slot has no page for position 8, the second does not write.
    positions = np.array([[4, 8], [0, 2]], np.int32)
    writing = np.array([[True, True], [False, True]])
    written = _write(kv_cache, k, -k, tables, positions, writing)
    keys, values = (np.concatenate(x, axis=1) for x in zip(*written))
    expected = np.full((*size, 4), 7.0)
    expected[0, tables.page_indices[0, 1], 0, 0] = 0.0
    expected[1, tables.page_indices[1, 0], 0, 2] = 3.0
    np.testing.assert_array_equal(keys[..., 0, :], expected)
    expected = np.where(expected == 7.0, 7.0, -expected)
    np.testing.assert_array_equal(values[..., 0], expected)
