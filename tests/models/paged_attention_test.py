"""Paged attention equals a naive softmax for any placement of pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.interpreted import block_tables, free_pages

from jaxrl_llm.models import kv_cache as kv_cache_lib
from jaxrl_llm.models import paged_attention

D = 6
HEADS = [(6, 2), (3, 1), (4, 4)]  # (query heads, key heads).


def _segmented(keys, values):
  """Makes a paged layer with its pages in one array per segment."""
  cuts = np.cumsum(paged_attention.segment_sizes(keys.shape[1]))[:-1]
  return tuple(zip(*(jnp.split(x, cuts, axis=1) for x in (keys, values))))


_paged = jax.jit(paged_attention.paged_attention)
_write = jax.jit(paged_attention.write_paged)


class TestPagedAttention:
  SLOTS, PAGE = 4, 4
  LENGTHS = np.array([9, 1, 0, 12])  # The third slot is idle.

  def _case(self, heads, kv_heads, queries, shards):
    """Makes dense keys and values, and the cache from `write_paged`."""
    keys = jax.random.split(jax.random.key(2), 3)
    total = self.LENGTHS.max()
    shape = (self.SLOTS, total, kv_heads, D)
    k, v = (jax.random.normal(key, shape) for key in keys[:2])
    q = jax.random.normal(keys[2], (self.SLOTS, queries, heads, D))
    count = 9 if shards == 1 else 6  # Two are free.
    sizes = {"pages": count, "width": 4, "page_size": self.PAGE}
    tables = block_tables(self.LENGTHS, shards=shards, seed=heads, **sizes)
    # Free pages are NaN; unwritten positions of used pages are finite.
    fill = np.where(free_pages(tables), np.nan, 1e3)[:, :, None, None, None]
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
    """Computes attention per slot, query and head in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for s, i, h in np.ndindex(*q.shape[:3]):
      seen = slice(positions[s, i] + 1)
      if self.LENGTHS[s]:
        scores = k[s, seen, h // group] @ q[s, i, h] / np.sqrt(D)
        weights = np.exp(scores - scores.max())
        out[s, i, h] = weights @ v[s, seen, h // group] / weights.sum()
    return out

  # Every pair of values; all pages in one array, or in eight.
  @pytest.mark.parametrize(
    "queries, shards, segment", [(1, 1, 32), (3, 2, 32), (3, 1, 1), (1, 2, 1)]
  )
  @pytest.mark.parametrize("heads, kv_heads", HEADS)
  def test_equals_a_softmax_per_slot(
    self, heads, kv_heads, queries, shards, segment, monkeypatch
  ):
    monkeypatch.setattr(paged_attention, "_MIN_SEGMENT", segment)
    q, k, v, *rest = self._case(heads, kv_heads, queries, shards)
    got = _paged(q, *rest)
    expected = self._naive(q, k, v, rest[-1])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)
    assert not np.any(got[2])  # Idle slot.

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
    other = kv_cache_lib.make_block_tables(
      order[tables.page_indices].astype(np.int32),
      shards=1,
      pages=count,
      page_size=self.PAGE,
    )
    monkeypatch.setattr(paged_attention, "_MIN_SEGMENT", 1)
    got = _paged(q, _segmented(*moved), other, positions)
    np.testing.assert_array_equal(got, expected)

  # Few and many queries use two different implementations.
  @pytest.mark.parametrize("kv_heads, group, size", [(4, 1, 24), (2, 2, 64)])
  def test_any_bucket_that_covers_the_pages_gives_the_same_bits(
    self, kv_heads, group, size
  ):
    slots, page, pages, rng = 5, 32, 1024, np.random.default_rng(0)
    layer = tuple(
      tuple(
        rng.normal(size=(1, n, kv_heads, *shape)).astype(np.float32)
        for shape in ((size, page), (page, size))
      )
      for n in paged_attention.segment_sizes(pages)
    )
    q = rng.normal(size=(slots, 1, kv_heads * group, size)).astype(np.float32)
    positions = rng.integers(0, 4 * page, (slots, 1)).astype(np.int32)
    buckets = kv_cache_lib.page_buckets([layer])
    assert buckets[-1] == pages and len(buckets) > 3
    held = rng.permutation(buckets[0])[: 4 * slots].reshape(slots, 4)
    outs = []
    for i, bucket in enumerate(buckets, 1):
      tables = kv_cache_lib.make_block_tables(
        held.astype(np.int32), shards=1, pages=bucket, page_size=page
      )
      # Pages after the bucket are not read.
      unread = jax.tree.map(lambda x: x * np.nan, layer[i:])
      outs.append(_paged(q, (*layer[:i], *unread), tables, positions))
    for out in outs[1:]:
      np.testing.assert_array_equal(out, outs[0])
    jaxpr = str(jax.make_jaxpr(_paged)(q, layer, tables, positions))
    assert "cond[" not in jaxpr and "while[" not in jaxpr

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
