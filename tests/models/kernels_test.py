"""TPU and GPU kernels, interpreted on a CPU, equal plain XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_engine
from helpers.interpreted import (
  assert_equal,
  attend_to_pages,
  block_tables,
  interpret_gpu,
  make_kind,
  prefill_in_chunks,
  with_gradients,
)
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
)
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import models, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import attention, backends, context
from jaxrl_llm.models.kernels import flash_gpu, gpu, tpu
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings

PAGE, PAGES = 4, 9
LENGTHS = np.array([9, 1, 0, 12])  # The third slot is idle.


class _Loaded:
  """An array with the methods of a Ref that the kernel uses."""

  def __init__(self, array):
    self._array = array
    self.shape, self.dtype = array.shape, array.dtype

  def __getitem__(self, index):
    return self._array[index]

  def reshape(self, *shape):
    return _Loaded(self._array.reshape(*shape))

  def bitcast(self, dtype):
    """Packs rows of fewer bits into 32 bits, the first in the lowest bits."""
    count = jnp.dtype(dtype).itemsize // self.dtype.itemsize
    groups = self._array.reshape(-1, count, self.shape[1]).swapaxes(1, 2)
    return _Loaded(jax.lax.bitcast_convert_type(groups, dtype))


def _wait(self):
  """Reads everything: the interpreter lacks strides and shapes of Refs."""
  for copy in self._async_copies:
    copy.wait()
  return _Loaded(self._vmem_buf[...])


@pytest.fixture(params=["tpu", "gpu"], name="module")
def _module(request, monkeypatch):
  """Returns a platform's module with its kernels interpreted on a CPU.

  TPU kernels use two queries at a time: the interpreter rejects masked writes
  whose first axis, queries, is longer than the second, the query heads per key
  head.
  """
  monkeypatch.setattr(backends, "platform_of", lambda sharding: request.param)
  if request.param == "gpu":
    interpret_gpu(monkeypatch)
    yield gpu
    return
  monkeypatch.setattr(kernel.MultiPageAsyncCopyDescriptor, "wait", _wait)
  monkeypatch.setattr(tpu, "_DECODE_QUERIES", 2)
  monkeypatch.setattr(tpu, "_PREFILL_QUERIES", 2)
  with pltpu.force_tpu_interpret_mode():
    yield tpu


def _block_tables(shards):
  sizes = {"pages": PAGES, "width": 4, "page_size": PAGE}
  return block_tables(LENGTHS, shards=shards, **sizes)


def _qkv(config, queries, time, dtype=jnp.float32, count=4):
  keys = jax.random.split(jax.random.key(0), 3)
  of = lambda key, *shape: jax.random.normal(
    key, (count, *shape, config.head_dim)
  ).astype(dtype)
  return (
    of(keys[0], queries, config.num_heads),
    of(keys[1], time, config.num_kv_heads),
    of(keys[2], time, config.num_kv_heads),
  )


def _on_pages(backend, tables, q, k, v, dtype=None):
  return attend_to_pages(backend, tables, LENGTHS, PAGE, q, k, v, dtype)


def _both(module, run, config, *arguments, sharding=None):
  both = (
    module.Pallas(config, sharding=sharding),
    backends.Xla(config),
  )
  run = jax.jit(run, static_argnums=0)
  return [np.asarray(run(backend, *arguments)) for backend in both]


def _close(got, expected):
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)


def _on_pages_of_both(module, kind, qkv, shards=1, dtype=None, sharding=None):
  run = functools.partial(_on_pages, tables=_block_tables(shards), dtype=dtype)
  attend = lambda backend, q, k, v: run(backend, q=q, k=k, v=v)
  return _both(module, attend, kind, *qkv, sharding=sharding)


ON_TPU = pytest.mark.parametrize("module", ["tpu"], indirect=True)


class TestPallas:
  """Paged attention; kernels_gpu_test.py has GPU-only pages and prefills."""

  # Numbers of key heads that the kernel supports, and three, which it does not.
  @ON_TPU
  @pytest.mark.parametrize("window", [None, 1, 6])
  @pytest.mark.parametrize(
    "heads, kv_heads, size, queries, shards",
    [(4, 2, 64, 1, 1), (6, 3, 128, 3, 2)],
  )
  def test_attention_on_pages_equals_that_of_xla(
    self, module, heads, kv_heads, size, queries, shards, window
  ):
    kind = make_kind(heads, kv_heads, size, window=window)
    qkv = _qkv(kind, queries, LENGTHS.max())
    got, expected = _on_pages_of_both(module, kind, qkv, shards)
    _close(got, expected)
    assert not np.any(got[2])

  @pytest.mark.parametrize("tokens, pages", [(0, 4), (2 * PAGE + 1, 2), (1, 1)])
  def test_a_block_has_as_many_whole_pages_as_were_asked_for(
    self, tokens, pages, monkeypatch
  ):
    found, plain = (
      [],
      lambda q, *_, num_kv_pages_per_block, **__: (
        found.append(num_kv_pages_per_block) or q
      ),
    )
    monkeypatch.setattr(tpu.ragged, "ragged_paged_attention", plain)
    backend = tpu.Pallas(make_kind(), sharding=None, kv_block=tokens)
    _on_pages(backend, _block_tables(1), *_qkv(make_kind(), 1, LENGTHS.max()))
    assert found == [pages]

  @ON_TPU
  def test_pages_before_the_window_are_not_read(self, module):
    backend = module.Pallas(make_kind(window=4), sharding=None)
    q, k, v = map(np.array, _qkv(make_kind(), 1, LENGTHS.max()))
    tables = _block_tables(1)
    run = jax.jit(lambda *qkv: _on_pages(backend, tables, *qkv))
    expected = run(q, k, v)
    assert np.isfinite(expected).all()
    k[LENGTHS > 8, :4] = v[LENGTHS > 8, :4] = np.nan
    np.testing.assert_array_equal(run(q, k, v), expected)

  def test_bfloat16_is_as_near_as_its_rounding(self, module):
    kind = make_kind(2, 1)
    qkv = _qkv(kind, 2, LENGTHS.max(), jnp.bfloat16)
    got, expected = _on_pages_of_both(module, kind, qkv)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      got.astype(np.float32), expected.astype(np.float32), atol=0.02
    )

  @ON_TPU
  def test_eight_bit_pages_equal_those_of_xla(self, module):
    qkv = _qkv(make_kind(), 1, LENGTHS.max())
    _close(
      *_on_pages_of_both(module, make_kind(), qkv, dtype=jnp.float8_e4m3fn)
    )

  def test_eight_bit_pages_need_two_heads_on_a_device(self):
    backend = tpu.Pallas(make_kind(2, 1), sharding=None)
    with pytest.raises(InputError, match="needs two KV heads .* has 1 on 1"):
      backend.init_paged(1, PAGES, PAGE, jnp.float8_e4m3fn)

  @ON_TPU
  @pytest.mark.parametrize("window", [None, 5])
  def test_a_prefill_in_chunks_and_then_pages_equal_xla(self, module, window):
    config, time = make_kind(window=window), 12
    q, k, v = _qkv(config, time, time, count=2)

    def run(backend, q, k, v):
      out, layer = prefill_in_chunks(backend, q, k, v, 6)
      kv_cache = (backend.init_paged(1, 7, PAGE, jnp.float32),)
      table = np.array([[5, 0, 3], [1, 6, 2]], np.int32)
      kv_cache = models.write_pages(kv_cache, (layer,), table[:, None])
      tables = models.make_block_tables(
        table, shards=1, pages=7, page_size=PAGE
      )
      last = np.full((2, 1), time - 1, np.int32)
      decoded = backend.paged_attention(q[:, -1:], kv_cache[0], tables, last)
      return jnp.append(out, decoded, axis=1)

    got, expected = _both(module, run, config, q, k, v)
    _close(got, expected)
    _close(got[:, -1], got[:, -2])

  # Counts divisible by the devices or not; the same for heads.
  @pytest.mark.parametrize("shards", [2, 1])
  @pytest.mark.parametrize("heads_axis", [[], ["tensor"]])
  def test_shards_and_heads_are_read_where_they_lie(
    self, module, shards, heads_axis
  ):
    four = {"devices": jax.devices()[:4]}
    mesh = sharding.make_mesh(data=2, fsdp=1, tensor=2, **four)
    place = NamedSharding(mesh, PartitionSpec("data", *heads_axis))
    kind = make_kind(6, 2)
    qkv = _qkv(kind, 1, LENGTHS.max())
    _close(*_on_pages_of_both(module, kind, qkv, shards, sharding=place))

  @pytest.mark.slow
  def test_an_engine_writes_the_tokens_that_it_writes_with_xla(self, module):
    config = dataclasses.replace(tiny.tiny_config(), num_layers=1, head_dim=64)

    def write(name):
      # Equal settings would return another platform's cached functions.
      chunk = {tpu: 8, gpu: 16}[module]
      fns = models.make_policy(config, kernels=name, head_chunk=chunk)
      params = tiny.widen(fns.init(jax.random.key(0)), jax.random.key(1))
      sizes = EngineConfig(3, 5, 7, page_size=PAGE, stop_tokens=(3,))
      return tiny_engine.write(
        Engine(fns, sizes),
        fns.for_sampling(params),
        [[5, 4, 8], [7], [9, 9, 1, 2, 60]],
        np.arange(6).reshape(3, 2),
        key=jax.random.key(2),
        settings=SamplingSettings(),
      )

    got = write("pallas")
    tiny_engine.assert_same_responses(got, write("xla"))
    assert len({*map(tuple, got.tokens.tolist())}) > 4


class TestPackedAttention:
  """Attention of packed rows and its gradients equal plain XLA."""

  @pytest.fixture(params=["tpu", "gpu"])
  def module(self, request, monkeypatch):
    if request.param == "gpu":
      interpret_gpu(monkeypatch)
      monkeypatch.setattr(flash_gpu, "_BLOCK", 16)
      return gpu
    made = splash_attention_kernel._make_splash_attention
    interpreted = functools.partial(made, is_mqa=False, interpret=True)
    monkeypatch.setattr(tpu.splash, "make_splash_mha", interpreted)
    monkeypatch.setattr(tpu, "_ROW_BLOCK", 128)
    return tpu

  def _rows(self, config, time):
    """Makes q, k, v, segments, prefixes and a cotangent, padded at the end."""
    rng = np.random.default_rng(0)
    of = lambda heads: rng.standard_normal(
      (2, time, heads, config.head_dim), np.float32
    )
    q, k, v, g = map(
      of, [config.num_heads, *[config.num_kv_heads] * 2, config.num_heads]
    )
    segments = -np.sort(-rng.integers(0, 4, (2, time)), axis=1)
    segments = segments.astype(np.int32)
    return q, k, v, segments, np.zeros_like(segments), g

  # Sizes below a block, and of more than one block of 128. A window inside a
  # block, and one that skips entire blocks.
  @pytest.mark.parametrize(
    "heads, kv_heads, size, time, window",
    [
      (4, 2, 64, 40, None),
      (4, 1, 128, 130, None),
      (4, 2, 64, 40, 7),
      (4, 1, 256, 520, 50),
    ],
  )
  @ON_TPU
  def test_equals_xla(self, module, heads, kv_heads, size, time, window):
    config = make_kind(heads, kv_heads, size, window=window)
    rows = self._rows(config, time)
    ours = module.make_packed_attention(config, sharding=None).attend
    xla = functools.partial(attention.packed_attention, window=window)
    assert_equal(ours, xla, *rows)

  # Per device: a full row, a part smaller than a block, or several blocks.
  @pytest.mark.parametrize(
    "fsdp, parts, time, window",
    [(2, 1, 40, None), (2, 2, 40, 9), (1, 4, 1032, None), (1, 4, 1032, 150)],
  )
  def test_rows_tokens_and_heads_stay_on_their_devices(
    self, module, fsdp, parts, time, window
  ):
    config = make_kind(4, 2, 64, window=window)
    mesh = sharding.make_mesh(data=1, fsdp=fsdp, context=parts, tensor=2)
    rows = self._rows(config, time)
    place = sharding.packed_kv_sharding(mesh, config.num_kv_heads)
    attend = module.make_packed_attention(config, sharding=place).attend

    def ours(*arrays):
      out = attend(*(context.zigzag_shard(x, parts) for x in arrays))
      return context.zigzag_unshard(out, parts, time)

    xla = functools.partial(attention.packed_attention, window=window)
    assert_equal(ours, xla, *rows)

  def _assert_far_blocks_are_not_read(self, module, window, segments):
    """Checks that queries from 256 on and keys up to 128 skip each other."""
    kind = make_kind(2, 1, 64, window=window)
    q, k, v, _, prefixes, g = self._rows(kind, 512)
    attend = module.make_packed_attention(kind, sharding=None).attend
    run = lambda k, v, g: with_gradients(attend, q, k, v, segments, prefixes, g)
    clean = run(k, v, g)
    # NaN times a weight of 0 is NaN, if it is read.
    broken = np.where(np.arange(512)[:, None, None] < 128, np.nan, [k, v])
    for got, expected in zip(run(*broken.astype(k.dtype), g)[:2], clean):
      np.testing.assert_array_equal(got[:, 256:], expected[:, 256:])
      assert np.isnan(got[:, :128]).all()
    broken = np.where(np.arange(512)[:, None, None] < 256, g, np.nan)
    for got, expected in zip(run(k, v, broken.astype(g.dtype))[2:], clean[2:]):
      np.testing.assert_array_equal(got[:, :128], expected[:, :128])
      assert np.isnan(got[:, 256:]).all()

  def test_blocks_outside_the_window_are_not_read(self, module):
    segments = np.ones((2, 512), np.int32)
    self._assert_far_blocks_are_not_read(module, 64, segments)

  @ON_TPU
  def test_blocks_of_other_segments_are_not_read(self, module):
    # Two samples of 1.5 blocks each, and padding.
    segments = np.repeat([1, 2, 0], [192, 192, 128])[None].repeat(2, axis=0)
    self._assert_far_blocks_are_not_read(module, None, segments)

  @pytest.mark.parametrize("by_keys", [False, True])
  def test_a_skipped_block_prefetches_the_next_one(self, by_keys):
    info = splash_attention_kernel.mask_info_lib.MaskInfo(
      data_next=np.indices((1, 4, 4), np.int8)[1 if by_keys else 2],
      mask_next=None,
      block_mask=np.tri(4, dtype=np.int8)[None],
      partial_mask_blocks=None,
      q_sequence=None,
    )
    segments = splash_attention_kernel.SegmentIds(
      *[jnp.array([5, 5, 5, 4, 4, 4, 3, 3])] * 2
    )
    got = tpu._skip_blocks(info, segments, 2, by_keys=by_keys)
    mask = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(got.block_mask[0], mask)
    following = (
      [[0, 1, 2, 3], [1, 1, 2, 3], [0, 2, 2, 3], [0, 1, 2, 3]]
      if by_keys
      else [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 2, 1], [3, 3, 3, 3]]
    )
    np.testing.assert_array_equal(got.data_next[0], following)


class TestChoose:
  @pytest.mark.parametrize(
    "name, platform, chosen",
    [
      ("auto", "cpu", backends.XLA),
      ("auto", "gpu", gpu.PALLAS),
      ("auto", "tpu", tpu.PALLAS),
      ("xla", "gpu", backends.XLA),
      ("pallas", "gpu", gpu.PALLAS),
      ("pallas", "tpu", tpu.PALLAS),
    ],
  )
  def test_a_name_is_a_backend_by_platform(
    self, name, platform, chosen, monkeypatch
  ):
    monkeypatch.setattr(backends, "platform_of", lambda sharding: platform)
    kinds = [make_kind(), make_kind(window=512)]
    assert backends.choose(name, kinds) is chosen
    # No backend sees prefixes through a window, and TPUs none.
    seen = [
      chosen.make_packed_attention(kind, sharding=None).sees_prefixes
      for kind in kinds
    ]
    assert seen == [chosen is not tpu.PALLAS, False]

  def test_pallas_is_refused_where_it_cannot_serve(self, monkeypatch):
    with pytest.raises(InputError, match="are cpu; use 'auto' or 'xla'"):
      backends.choose("pallas", [make_kind()])
    for platform, needed in ("tpu", ">= 64"), ("gpu", r"in \(16, .*, 256\)"):
      monkeypatch.setattr(backends, "platform_of", lambda _, p=platform: p)
      with pytest.raises(InputError, match=f"head_dim {needed}, but .* has 8"):
        backends.choose("pallas", [make_kind(size=8)])

  def test_auto_says_that_it_falls_back(self, monkeypatch):
    monkeypatch.setattr(backends, "platform_of", lambda sharding: "tpu")
    said = "using kernels='xla': 'pallas' needs head_dim"
    with pytest.warns(UserWarning, match=said):
      assert backends.choose("auto", [make_kind(size=8)]) is backends.XLA

  def test_an_unknown_name_is_an_error(self):
    with pytest.raises(ValueError, match="kernels='triton', expected one"):
      backends.choose("triton", [make_kind()])
