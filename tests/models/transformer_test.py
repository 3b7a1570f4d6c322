"""The decoder is consistent: cached, packed, padded, scanned, remat."""

import dataclasses
import functools
import re
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import packed, tiny
from jax.sharding import PartitionSpec as P

from jaxrl_llm import models, sharding
from jaxrl_llm.models import decoding, numerics, transformer

T = 11
CONFIG = tiny.tiny_config()
# One prompt length per row; decoding writes the rest of each row.
PROMPTS = np.array([1, 4, 6])


def _tokens():
  draw = np.random.default_rng(0).integers
  return draw(0, CONFIG.vocab_size, (3, T)).astype(np.int32)


def _ones(tokens):
  return np.ones(tokens.shape, bool)


def _close(got, expected, atol=2e-5):
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol)


class TestPages:
  """Slots 3, 0 and 2 of four have rows, with the page table below."""

  SLOTS = np.array([3, 0, 2])
  TABLE = np.array([[6, 0, 3], [12, 12, 12], [11, 4, 9], [1, 8, 2]], np.int32)

  @pytest.mark.parametrize("queries", [1, 2])
  def test_prefill_then_decode_equal_the_full_forward(self, queries):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    full = np.asarray(fns.logits(params, tokens, _ones(tokens)))
    sampler = fns.for_sampling(params)
    # The padding of a prompt may be arbitrary.
    padded = tokens[:, : PROMPTS.max()].copy()
    padded[np.arange(PROMPTS.max())[None] >= PROMPTS[:, None]] = 5
    # They are written among old values, to twelve pages of one shard.
    kv_cache = models.write_pages(
      jax.tree.map(lambda x: x + 7.0, fns.init_kv_cache(1, 12, 4)),
      fns.prefill(sampler, padded),
      self.TABLE[self.SLOTS, None, :2],
    )
    tables = models.make_block_tables(
      self.TABLE, shards=1, pages=12, page_size=4
    )
    position = np.zeros(4, np.int32)
    position[self.SLOTS] = PROMPTS - 1  # Reread the last token.
    for _ in range(-(-(T - PROMPTS.min() + 1) // queries)):
      at = position[:, None] + np.arange(queries, dtype=np.int32)
      writing = at < T
      writing[1] = False
      at = np.minimum(at, T - 1)
      step = np.full((4, queries), 9, np.int32)  # Arbitrary in slot 1.
      step[self.SLOTS] = np.take_along_axis(tokens, at[self.SLOTS], axis=1)
      logits, kv_cache = fns.decode(
        sampler, kv_cache, tables, step, at, writing
      )
      assert logits.shape == (4, queries, CONFIG.vocab_size)
      expected = np.take_along_axis(full, at[self.SLOTS][..., None], axis=1)
      _close(logits[self.SLOTS], expected)
      position += queries

  @pytest.mark.parametrize("chunk", [1, 4])
  def test_a_prefill_in_chunks_equals_one_at_once(self, chunk, monkeypatch):
    _, params = tiny.tiny_policy()
    fns, tokens = models.make_policy(CONFIG), _tokens()
    prefill = lambda: jax.jit(lambda *x: fns.prefill(*x))(
      fns.for_sampling(params), tokens
    )
    whole = prefill()
    monkeypatch.setattr(decoding, "_PREFILL_CHUNK", chunk)
    chex.assert_trees_all_close(prefill(), whole, rtol=0, atol=1e-5)

  def test_eight_bit_keys_out_of_range_are_clipped(self):
    numerics = models.Numerics(kv=jnp.float8_e4m3fn)
    keys = jnp.array([1e4, -449.0, 1.5])
    clipped = numerics.to_cache(keys).astype(numerics.kv)
    np.testing.assert_array_equal(clipped.astype(float), [448, -448, 1.5])
    assert np.isnan(keys.astype(numerics.kv).astype(float)[0])
    assert models.Numerics().to_cache(keys) is keys


class TestSamplerDtype:
  """The sampler's weights are bfloat16, but not its KV cache or the trainer."""

  def test_the_sampler_alone_computes_in_it(self):
    _, params = tiny.tiny_policy()
    numerics = models.Numerics.all(jnp.bfloat16, kv=jnp.float32)
    fns = models.make_policy(CONFIG, sampler=numerics)
    sampler = fns.for_sampling(params)
    kinds = lambda tree: {x.dtype.name for x in jax.tree.leaves(tree)}
    # On a CPU, the embedding is stored as bits of bfloat16 numbers.
    assert kinds(sampler) == {"bfloat16", "uint16"}
    assert kinds(fns.init_kv_cache(1, 2, 4)) == {"float32"}
    tokens = _tokens()
    logits = jax.jit(fns.logits)(params, tokens, _ones(tokens))
    exact = tiny.tiny_policy()[0].logits(params, tokens, _ones(tokens))
    np.testing.assert_array_equal(logits, exact)  # The trainer's.

  @pytest.mark.parametrize("tied", [True, False])
  def test_a_call_neither_converts_nor_transposes_the_embedding(
    self, tied, monkeypatch
  ):
    config = dataclasses.replace(
      CONFIG, vocab_size=5003, tie_word_embeddings=tied
    )
    fns = models.make_policy(
      config, sampler=models.Numerics.all(jnp.bfloat16, kv=jnp.float32)
    )
    params = jax.jit(fns.init)(jax.random.key(0))
    sampler = fns.for_sampling(params)
    monkeypatch.setattr(decoding, "platform_of", lambda sharding: "tpu")
    plain = fns.for_sampling(params)
    tokens = np.array([[0], [7], [5002]], np.int32)
    positions, writing = np.zeros_like(tokens), np.ones(tokens.shape, bool)
    tables = models.make_block_tables(
      np.arange(3, dtype=np.int32)[:, None], shards=1, pages=3, page_size=4
    )
    rest = fns.init_kv_cache(1, 3, 4), tables, tokens, positions, writing
    decode = jax.jit(lambda params: fns.decode(params, *rest)[0])
    expected, got = decode(plain), decode(sampler)
    np.testing.assert_allclose(got, expected, atol=1e-6)

    def whole_tables(params):
      text = decode.lower(params).compile().as_text()
      sizes = r"\[(?:5003,24|24,5003)\]\S*"
      return set(re.findall(rf"= \w+{sizes} ([\w-]+)\(", text))

    if jax.__version_info__ < (0, 12):  # Later XLA has bfloat16 gathers.
      assert "convert" in whole_tables(plain)  # The pattern works.
    assert whole_tables(sampler) == {"parameter"}

  def test_bfloat16_factors_are_summed_in_float32(self):
    draw = np.random.default_rng(0).normal
    x, kernel = (
      jnp.asarray(draw(size=size), jnp.bfloat16)
      for size in ((5, 300), (300, 7))
    )
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    got = jax.jit(numerics.matmul)(x, kernel)
    assert got.dtype == jnp.bfloat16
    # Only the sum is rounded to 8 bits.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)
    text = jax.jit(numerics.matmul).lower(x, kernel).as_text()
    assert "-> tensor<5x7xf32>" in text  # A fast matmul on CPUs.

  def test_gradients_of_bfloat16_factors(self):
    draw = np.random.default_rng(0).normal
    x, kernel, g = (
      jnp.asarray(draw(size=size), jnp.bfloat16)
      for size in ((2, 9, 6), (6, 4), (2, 9, 4))
    )
    d_x, d_kernel = jax.vjp(numerics.matmul, x, kernel)[1](g)
    assert d_x.dtype == d_kernel.dtype == jnp.bfloat16
    wide = lambda *xs: (np.asarray(x, np.float64) for x in xs)
    x, kernel, g, d_x, d_kernel = wide(x, kernel, g, d_x, d_kernel)
    close = lambda got, want: np.testing.assert_allclose(
      got, want, rtol=2**-8, atol=1e-6
    )
    close(d_x, g @ kernel.T)
    close(d_kernel, np.einsum("bti,bto->io", x, g))


class TestEmbed:
  def test_devices_exchange_embeddings_without_replicating_them(self, capfd):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    place = functools.partial(jax.sharding.NamedSharding, mesh)
    rows, columns = place(P(("data", "fsdp"))), place(P("tensor", "fsdp"))
    table = jnp.arange(48.0 * 24).reshape(48, 24) / 999
    tokens = np.arange(8 * 10, dtype=np.int32).reshape(8, 10) % 48

    def loss(table, tokens, once, at):
      params = {"embed": {"embedding": table}}
      x = transformer.embed(params, tokens, CONFIG, models.Numerics(), at)
      return jnp.sum(jnp.sin(x)) + 0 * once

    of = jax.jit(jax.value_and_grad(loss), static_argnums=(2, 3))
    # XLA warns when it compiles, so not if it finds the program in a cache.
    got = of(
      *jax.device_put((table, tokens), (columns, rows)), time.time(), rows
    )
    assert "full rematerialization" not in capfd.readouterr().err
    expected = of(table, tokens, 0.0, None)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


class TestHidden:
  def test_right_padding_changes_nothing(self):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    mask = np.arange(T)[None] < np.array([[11], [6], [0]])
    first = fns.logits(params, np.where(mask, tokens, 0), mask)
    second = fns.logits(params, np.where(mask, tokens, 9), mask)
    whole = fns.logits(params, tokens, _ones(tokens))
    assert np.isfinite(first).all()  # Also in an empty row.
    np.testing.assert_array_equal(first[mask], second[mask])
    _close(first[mask], whole[mask])


@functools.partial(jax.jit, static_argnames="fns")
def _loss_and_grads(params, rows, fns):
  def loss(params):
    out, _ = fns.logprobs(params, rows)
    return jnp.sum(out.logprobs) - 0.3 * jnp.sum(out.entropy)

  return jax.value_and_grad(loss)(params)


class TestRematAndDtype:
  """Compares one loss and its gradients for all parameters."""

  @staticmethod
  @functools.cache
  def _run(**settings):
    _, params = tiny.tiny_policy()
    fns = models.make_policy(CONFIG, head_chunk=8, **settings)
    tokens = _tokens()
    mask = np.arange(T)[None] < np.array([[10], [7], [3]])
    return _loss_and_grads(params, packed.rows(tokens, mask), fns)

  @pytest.mark.parametrize("policy", ["full", "dots"])
  def test_remat_changes_neither_value_nor_gradient(self, policy):
    loss, grads = self._run(remat_policy=policy)
    expected_loss, expected = self._run(remat_policy="none")
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda g, e: _close(g, e, atol=1e-4), grads, expected)

  def test_products_are_kept_in_the_dtype_of_activations(self):
    numerics = models.Numerics(activations=jnp.bfloat16)
    fns = models.make_policy(CONFIG, numerics=numerics, remat_policy="dots")
    rows = packed.rows(_tokens(), np.ones((3, T), bool))
    params = jax.eval_shape(fns.init, jax.random.key(0))
    backward = lambda params: jax.vjp(lambda x: fns.states(x, rows, 2), params)
    kept = jax.tree.leaves(jax.eval_shape(backward, params)[1])
    kept = [x for x in kept if x.shape[:3] == (2, 3, T)]
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    # Inputs of layers; q, k, v and outputs of attention; gate and up.
    sizes = (24, 32, 16, 16, 24, 40, 40)
    assert sum(x.size for x in kept) == 2 * 3 * T * sum(sizes)

  def test_every_parameter_has_a_gradient(self):
    _, grads = self._run(remat_policy="full")
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      assert np.isfinite(g).all() and np.any(np.asarray(g) != 0), name

  def test_bfloat16_stays_near_with_float32_gradients(self):
    loss, grads = self._run(
      remat_policy="full", numerics=models.Numerics(activations=jnp.bfloat16)
    )
    expected_loss, expected = self._run(remat_policy="full")
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected)):
      assert g.dtype == jnp.float32
      assert np.linalg.norm(g - e) < 0.1 * np.linalg.norm(e)


class TestParameters:
  def test_layers_and_keys_give_different_numbers(self):
    init = jax.jit(models.make_policy(CONFIG).init)
    first, second = init(jax.random.key(0)), init(jax.random.key(1))
    up = lambda params: params["layers"]["mlp"]["up"]["kernel"]
    assert np.any(up(first)[0] != up(first)[1])
    assert np.any(up(first) != up(second))


def _values(fns):
  return jax.jit(lambda *arguments: fns.outputs(*arguments)[0]["values"])


class TestValue:
  def test_starts_at_zero_from_a_copy_of_the_policy(self):
    _, params = tiny.tiny_policy()
    fns = models.make_value(CONFIG)
    critic = fns.from_policy(params)
    tokens = _tokens()
    values = _values(fns)(critic, packed.rows(tokens))
    np.testing.assert_array_equal(values, np.zeros(tokens.shape, np.float32))
    for mine, theirs in zip(
      jax.tree.leaves(critic["layers"]), jax.tree.leaves(params["layers"])
    ):
      assert mine.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()

  def test_reads_log_probs_of_what_was_written(self):
    _, params = tiny.tiny_policy()
    make = lambda fns: tiny.widen(fns.from_policy(params), jax.random.key(5))
    fns = models.make_value(CONFIG, reads_logprobs=True)
    critic, tokens = make(fns), _tokens()
    alone = {k: v for k, v in critic.items() if k != "surprise"}
    plain = models.make_value(CONFIG)
    without = _values(plain)(alone, packed.rows(tokens))

    score = _values(fns)

    def values(logprobs):
      return score(critic, packed.rows(tokens).replace(logprobs=logprobs))

    certain = np.zeros(tokens.shape, np.float32)
    expected = values(certain)
    _close(expected, without)
    # A surprising token changes values from its position on.
    place = tokens.shape[1] // 2
    certain[:, place] = -2.0
    changed = np.asarray(values(certain)) != np.asarray(expected)
    assert not changed[:, :place].any() and changed[:, place:].all()
    # Surprise is capped at 8 nats.
    certain[:, place] = -8.0
    most = values(certain)
    certain[:, place] = -np.inf
    np.testing.assert_array_equal(values(certain), most)
