"""GPU kernels, interpreted on a CPU: results, and blocks that they skip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted
from helpers.interpreted import (
  assert_equal,
  attend_to_pages,
  block_tables,
  make_kind,
  prefill_in_chunks,
  with_gradients,
)

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import attention, backends
from jaxrl_llm.models.kernels import flash_gpu, gpu

BLOCK, PAGE = 16, 4


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
  interpreted.interpret_gpu(monkeypatch)
  monkeypatch.setattr(flash_gpu, "_BLOCK", BLOCK)
  monkeypatch.setattr(gpu, "_PARTITION", BLOCK)


def _rows(*rows):
  """Makes segments and prefixes from rows of (tokens, segment, prefix)."""
  columns = [
    [np.repeat([part[i] for part in row], [part[0] for part in row])]
    for i in (1, 2)
    for row in rows
  ]
  return np.stack(columns).reshape(2, len(rows), -1).astype(np.int32)


def _random(*shapes, dtype=np.float32):
  rng = np.random.default_rng(0)
  return [
    rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes
  ]


def _backends(kind):
  return gpu.Pallas(kind, sharding=None), backends.Xla(kind)


class TestPackedAttention:
  # Neither 92 tokens nor their parts are multiples of 16.
  ROWS = _rows(
    [(92, 1, 0)],
    [(30, 1, 0), (1, 2, 0), (17, 3, 0), (40, 4, 0), (4, 0, 0)],
    # A prompt with three responses, a sample, a prompt with one response.
    [(20, 1, 0), (9, 2, 1), (20, 3, 1), (10, 4, 1)]
    + [(8, 5, 0), (3, 6, 0), (12, 7, 6), (10, 0, 0)],
    [(5, 1, 0), (87, 0, 0)],
    # Unordered segments in several pieces, before and after their prefix.
    [(20, 3, 0), (20, 1, 2), (20, 2, 0), (20, 1, 2), (12, 3, 1)],
  )

  @pytest.mark.parametrize(
    "heads, kv_heads, size", [(4, 2, 64), (2, 2, 16), (3, 1, 128)]
  )
  def test_equals_xla_for_all_layouts_of_rows(self, heads, kv_heads, size):
    count, time = self.ROWS.shape[1:]
    shape = lambda heads: (count, time, heads, size)
    q, k, v, g = _random(*map(shape, (heads, kv_heads, kv_heads, heads)))
    ours = gpu.make_packed_attention(make_kind(), sharding=None).attend
    assert_equal(ours, attention.packed_attention, q, k, v, *self.ROWS, g)

  def test_bfloat16_is_as_near_as_its_rounding(self):
    shapes = [(5, 92, heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, g = _random(*shapes, dtype=jnp.bfloat16)
    ours = gpu.make_packed_attention(make_kind(), sharding=None).attend
    exact = [np.asarray(x, np.float32) for x in (q, k, v, *self.ROWS, g)]
    exact[3:5] = self.ROWS
    for got, expected in zip(
      with_gradients(ours, q, k, v, *self.ROWS, g),
      with_gradients(attention.packed_attention, *exact),
    ):
      assert got.dtype == jnp.bfloat16
      atol = 0.01 * np.abs(expected).max()
      np.testing.assert_allclose(got.astype(np.float32), expected, atol=atol)

  def test_a_response_reads_its_prompt_and_itself(self):
    """Blocks: a prompt of 2, three responses of 2, another sample of 1."""
    row = [(32, 1, 0), (32, 2, 1), (32, 3, 1), (32, 4, 1), (16, 5, 0)]
    segments, prefixes = _rows(row)
    index = np.arange(segments.size, dtype=np.int32)[None]
    queries = np.stack([index, segments, np.where(prefixes, 1, -1)], axis=1)
    *_, key_ranges, query_range = jax.jit(
      flash_gpu.find_blocks, static_argnums=(2, 3)
    )(queries.astype(np.int32), segments, BLOCK, None)
    far, near = (key_ranges[0, :, i : i + 2].tolist() for i in (0, 2))
    assert far[:2] == [[0, 0]] * 2 and far[2:8] == [[0, 2]] * 6
    assert near[:2] == [[0, 1], [0, 2]] and near[6:] == [[6, 1], [6, 2], [8, 1]]
    assert far[8][1] == 0
    assert query_range[0, ::2].tolist() == (
      [[0, 8], [2, 2], [4, 2], [6, 2], [8, 1]]
    )

  @pytest.mark.parametrize("window", [2, 20, 40])
  def test_windows_equal_xla_within_segments(self, window):
    # Without prefixes, with padding of keys and queries.
    segments, _ = self.ROWS[:, 1:4]
    prefixes = np.zeros_like(segments)
    shapes = [(*segments.shape, heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, g = _random(*shapes)
    ours = gpu.make_packed_attention(
      make_kind(window=window), sharding=None
    ).attend
    xla = functools.partial(attention.packed_attention, window=window)
    assert_equal(ours, xla, q, k, v, segments, prefixes, g)


class TestPrefill:
  # Chunks and sequences that fill blocks or do not.
  @pytest.mark.parametrize("heads, chunk", [(3, 16), (4, 20)])
  def test_equals_xla_chunk_by_chunk(self, heads, chunk):
    kind, time = make_kind(heads, heads // 3 or 1, 16), 3 * chunk
    q, k, v = _random(
      (2, time, heads, 16), *[(2, time, kind.num_kv_heads, 16)] * 2
    )

    got, expected = (
      jax.jit(lambda *qkv, x=x: prefill_in_chunks(x, *qkv, chunk)[0])(q, k, v)
      for x in _backends(kind)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)


class TestDecode:
  # Some slots fill several partitions; the third is idle.
  LENGTHS, PAGES, WIDTH = np.array([70, 1, 0, 33]), 40, 18

  def _tables(self, seed=0, slots=4):
    sizes = {"pages": self.PAGES, "width": self.WIDTH, "page_size": PAGE}
    return block_tables(self.LENGTHS[:slots], seed=seed, **sizes)

  def _run(self, backend, tables, *qkv, dtype=None):
    lengths = self.LENGTHS[: len(qkv[0])]
    run = functools.partial(
      attend_to_pages, backend, tables, lengths, PAGE, dtype=dtype
    )
    return np.asarray(jax.jit(run)(*qkv))

  def _qkv(self, heads, kv_heads, size, queries):
    time = self.LENGTHS.max()
    return _random((4, queries, heads, size), *[(4, time, kv_heads, size)] * 2)

  # One query row per slot, and more than a block of them.
  @pytest.mark.parametrize(
    "heads, kv_heads, size, queries, window",
    [
      (4, 2, 64, 1, None),
      (4, 4, 128, 1, None),
      (6, 2, 16, 7, None),
      (4, 2, 256, 1, 20),
      (6, 2, 16, 7, 4),
      (6, 2, 16, 7, 34),
    ],
  )
  def test_equals_xla_over_several_partitions(
    self, heads, kv_heads, size, queries, window
  ):
    kind = make_kind(heads, kv_heads, size, window)
    qkv = self._qkv(heads, kv_heads, size, queries)
    got, expected = (
      self._run(x, self._tables(), *qkv) for x in _backends(kind)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)
    assert not np.any(got[2])

  @pytest.mark.parametrize("tokens, partitions", [(0, 5), (17, 3), (128, 1)])
  def test_a_partition_is_the_next_power_of_two(
    self, tokens, partitions, monkeypatch
  ):
    grids, call = [], flash_gpu.pallas_call
    spy = lambda body, grid, *rest: (
      grids.append(grid) or call(body, grid, *rest)
    )
    qkv = self._qkv(4, 2, 64, 1)
    expected = self._run(backends.Xla(make_kind()), self._tables(), *qkv)
    backend = gpu.Pallas(make_kind(), sharding=None, kv_block=tokens)
    monkeypatch.setattr(flash_gpu, "pallas_call", spy)
    got = self._run(backend, self._tables(), *qkv)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)
    assert grids[0][1] == partitions

  def test_other_slots_and_places_of_pages_change_no_bit(self):
    backend = gpu.Pallas(make_kind(), sharding=None)
    qkv = self._qkv(4, 2, 64, 1)
    expected = self._run(backend, self._tables(), *qkv)
    moved = self._run(backend, self._tables(1), *qkv)
    np.testing.assert_array_equal(moved, expected)
    alone = self._run(backend, self._tables(2, 1), *(x[:1] for x in qkv))
    np.testing.assert_array_equal(alone, expected[:1])

  def test_blocks_before_the_window_are_not_read(self):
    backend = gpu.Pallas(make_kind(window=20), sharding=None)
    q, k, v = self._qkv(4, 2, 64, 1)
    expected = self._run(backend, self._tables(), q, k, v)
    k[0, :48] = v[0, :48] = np.nan
    got = self._run(backend, self._tables(), q, k, v)
    np.testing.assert_array_equal(got, expected)

  @pytest.mark.parametrize("window", [None, 20])
  def test_slots_share_the_pages_of_a_prompt(self, window):
    backend = gpu.Pallas(make_kind(window=window), sharding=None)
    q, k, v = self._qkv(4, 2, 64, 1)
    for x in (k, v):
      x[3, :32] = x[0, :32]
    expected = self._run(backend, self._tables(), q, k, v)
    tables = self._tables()
    tables.page_indices[3, :8] = tables.page_indices[0, :8]
    np.testing.assert_array_equal(self._run(backend, tables, q, k, v), expected)

  def test_a_cache_of_eight_bits_is_read_as_the_numbers_it_holds(self):
    backend = gpu.Pallas(make_kind(), sharding=None)
    table, (q, k, v) = self._tables(), self._qkv(4, 2, 64, 1)
    got = self._run(backend, table, q, k, v, dtype=jnp.float8_e4m3fn)
    k, v = (x.astype(jnp.float8_e4m3fn).astype(np.float32) for x in (k, v))
    np.testing.assert_array_equal(got, self._run(backend, table, q, k, v))

  def test_a_cache_beyond_32_bit_offsets_is_refused(self):
    backend = gpu.Pallas(make_kind(), sharding=None)
    with pytest.raises(InputError, match="reduce sampler.kv_pages"):
      jax.eval_shape(lambda: backend.init_paged(1, 2**17, 64, jnp.bfloat16))
