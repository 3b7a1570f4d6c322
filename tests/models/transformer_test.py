"""The decoder agrees with itself: cached, packed, padded, scanned, remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm import models
from jaxrl_llm.models import transformer

T = 11
CONFIG = tiny.tiny_config()
# One prompt length per row; the rest of each row is written by decode.
PROMPTS = np.array([1, 4, 6])


def _tokens(batch=3, time=T, seed=0):
  draw = np.random.default_rng(seed).integers
  return draw(0, CONFIG.vocab_size, (batch, time)).astype(np.int32)


def _ones(tokens):
  return np.ones(tokens.shape, bool)


def _positions(tokens):
  return np.broadcast_to(
    np.arange(tokens.shape[1], dtype=np.int32), tokens.shape
  )


def _close(got, expected, atol=2e-5):
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol)


class TestCache:
  def test_prefill_then_decode_equal_the_full_forward_everywhere(self):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    full = np.asarray(fns.logits(params, tokens, _ones(tokens)))
    sampler = fns.for_sampling(params)
    # Anything may stand in the padding of a prompt.
    padded = tokens[:, : PROMPTS.max()].copy()
    padded[np.arange(PROMPTS.max())[None] >= PROMPTS[:, None]] = 5
    logits, prefilled = fns.prefill(sampler, padded, PROMPTS)
    rows = np.arange(len(tokens))
    _close(logits, full[rows, PROMPTS - 1])
    # The rows move to other slots of a larger pool that holds old values.
    slots = np.array([3, 0, 2])
    pool = jax.tree.map(lambda x: x + 7.0, fns.init_cache(4, T))
    cache = models.write_cache(pool, slots, prefilled)
    position = np.zeros(4, np.int32)
    position[slots] = PROMPTS
    for _ in range(T - PROMPTS.min()):
      here = np.minimum(position, T - 1)  # Rows that are done repeat the last.
      step = np.zeros(4, np.int32)
      step[slots] = tokens[rows, here[slots]]
      logits, cache = fns.decode(sampler, cache, step, here)
      _close(logits[slots], full[rows, here[slots]])
      position += 1

  def test_growing_keeps_what_is_written(self):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    sampler = fns.for_sampling(params)
    _, cache = fns.prefill(sampler, tokens[:, :6], np.full(3, 6))
    cache = models.grow_cache(cache, T)
    assert models.cache_length(cache) == T
    full = fns.logits(params, tokens, _ones(tokens))
    for t in range(6, T):
      logits, cache = fns.decode(sampler, cache, tokens[:, t], np.full(3, t))
      _close(logits, full[:, t])

  def test_rows_out_of_range_are_dropped(self):
    fns, params = tiny.tiny_policy()
    _, rows = fns.prefill(
      fns.for_sampling(params), _tokens()[:, :6], np.full(3, 6)
    )
    pool = fns.init_cache(2, T)
    out = models.write_cache(pool, np.array([2, 1, 2]), rows)
    for (keys, values), (new_keys, new_values) in zip(out, rows):
      np.testing.assert_array_equal(keys[1, :, :, :6], new_keys[1])
      np.testing.assert_array_equal(values[1, :, :6], new_values[1])
      assert not np.any(keys[0]) and not np.any(values[0])

  def test_the_cache_may_have_another_dtype(self):
    _, params = tiny.tiny_policy()
    fns = models.make_policy(CONFIG, cache_dtype=jnp.bfloat16)
    tokens = _tokens()

    @jax.jit
    def run(params):
      sampler = fns.for_sampling(params)
      _, cache = fns.prefill(sampler, tokens[:, :6], jnp.full(3, 6))
      cache = models.grow_cache(cache, T)
      return fns.decode(sampler, cache, tokens[:, 6], jnp.full(3, 6))

    logits, cache = run(params)
    assert {x.dtype for x in jax.tree.leaves(cache)} == {np.dtype("bfloat16")}
    full = tiny.tiny_policy()[0].logits(params, tokens, _ones(tokens))
    np.testing.assert_allclose(logits, full[:, 6], atol=0.2)


class TestHidden:
  def _hidden(self, tokens, segments=None, positions=None, prefixes=None):
    _, params = tiny.tiny_policy()
    segments = np.ones_like(tokens) if segments is None else segments
    positions = _positions(tokens) if positions is None else positions
    prefixes = np.zeros_like(tokens) if prefixes is None else prefixes
    return _hidden(params, tokens, segments, positions, prefixes)

  def test_scanned_equals_unrolled(self):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    prefill = jax.jit(
      functools.partial(transformer.prefill, config=CONFIG, dtype=jnp.float32)
    )
    unrolled, _ = prefill(fns.for_sampling(params), tokens=tokens)
    _close(self._hidden(tokens), unrolled)

  def test_packed_equals_alone(self):
    a, b = _tokens(batch=2)[:, :5]
    packed = np.concatenate([a, b, [0]])[None]
    segments = np.repeat([1, 2, 0], [5, 5, 1])[None].astype(np.int32)
    positions = np.array([[*range(5), *range(5), 0]], np.int32)
    out = self._hidden(packed, segments, positions)
    alone = self._hidden(
      np.concatenate([[a, b], np.zeros((2, T - 5))], 1).astype(np.int32),
      np.repeat([[1, 0]], [5, T - 5], 1).repeat(2, 0).astype(np.int32),
    )
    _close(out[0, :5], alone[0, :5])
    _close(out[0, 5:10], alone[1, :5])
    assert np.isfinite(out).all()

  def test_a_shared_prompt_equals_a_prompt_each(self):
    # Prompt of 4, the last token of which opens each of two branches.
    a, b = _tokens(batch=2)[:, :7]
    b[:4] = a[:4]
    shared = np.concatenate([a[:3], a[3:], b[3:]])[None]
    out = self._hidden(
      shared,
      np.repeat([1, 2, 3], [3, 4, 4])[None].astype(np.int32),
      np.array([[*range(3), *range(3, 7), *range(3, 7)]], np.int32),
      np.repeat([0, 1, 1], [3, 4, 4])[None].astype(np.int32),
    )
    padded = np.zeros((2, T), np.int32)
    padded[:, :7] = a, b
    alone = self._hidden(padded)
    _close(out[0, :7], alone[0, :7])
    _close(out[0, 7:], alone[1, 3:7])

  def test_right_padding_changes_nothing(self):
    fns, params = tiny.tiny_policy()
    tokens = _tokens()
    mask = np.arange(T)[None] < np.array([[11], [6], [0]])
    first = fns.logits(params, np.where(mask, tokens, 0), mask)
    second = fns.logits(params, np.where(mask, tokens, 9), mask)
    whole = fns.logits(params, tokens, _ones(tokens))
    assert np.isfinite(first).all()  # An empty row too.
    np.testing.assert_array_equal(first[mask], second[mask])
    _close(first[mask], whole[mask])

  def test_a_token_sees_nothing_after_it(self):
    tokens = _tokens()
    changed = tokens.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % CONFIG.vocab_size
    before, after = self._hidden(tokens), self._hidden(changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(before[:, 6:] != after[:, 6:], axis=-1))

  def test_only_differences_of_positions_matter(self):
    tokens = _tokens()
    shifted = self._hidden(tokens, positions=_positions(tokens) + 13)
    _close(self._hidden(tokens), shifted, atol=1e-4)
    stretched = self._hidden(tokens, positions=_positions(tokens) * 2)
    assert np.abs(stretched - shifted).max() > 1e-2


@jax.jit
def _hidden(params, tokens, segments, positions, prefixes):
  return transformer.hidden(
    params,
    CONFIG,
    tokens,
    segments,
    positions,
    prefixes,
    dtype=jnp.float32,
    remat=False,
  )


@functools.partial(jax.jit, static_argnames="fns")
def _loss_and_grads(params, tokens, mask, fns):
  def loss(params):
    out = fns.logprobs(
      params,
      tokens,
      jnp.roll(tokens, -1, axis=1),
      mask,
      jnp.ones_like(tokens),
      jnp.broadcast_to(jnp.arange(T)[None], tokens.shape),
    )
    return jnp.sum(out.logprobs) - 0.3 * jnp.sum(out.entropy)

  return jax.value_and_grad(loss)(params)


class TestRematAndDtype:
  """Compared on one loss and its gradients over every parameter."""

  @staticmethod
  @functools.cache
  def _run(**settings):
    _, params = tiny.tiny_policy()
    fns = models.make_policy(CONFIG, head_chunk=8, **settings)
    tokens = _tokens()
    mask = np.arange(T)[None] < np.array([[10], [7], [3]])
    return _loss_and_grads(params, tokens, mask, fns)

  def test_remat_changes_neither_value_nor_gradient(self):
    loss, grads = self._run(remat=True)
    expected_loss, expected = self._run(remat=False)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda g, e: _close(g, e, atol=1e-4), grads, expected)

  def test_every_parameter_has_a_gradient(self):
    _, grads = self._run(remat=True)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      assert np.isfinite(g).all() and np.any(np.asarray(g) != 0), name

  def test_bfloat16_stays_near_with_float32_gradients(self):
    loss, grads = self._run(remat=True, dtype=jnp.bfloat16)
    expected_loss, expected = self._run(remat=True)
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected)):
      assert g.dtype == jnp.float32
      assert np.linalg.norm(g - e) < 0.1 * np.linalg.norm(e)


class TestParameters:
  @pytest.mark.parametrize("tied", [True, False])
  def test_count_equals_what_the_config_says(self, tied):
    config = CONFIG.__class__(**{**vars(CONFIG), "tie_word_embeddings": tied})
    shapes = jax.eval_shape(models.make_policy(config).init, jax.random.key(0))
    sizes = [x.size for x in jax.tree.leaves(shapes)]
    assert sum(sizes) == config.num_params()
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype("float32")}
    assert ("lm_head" in shapes) == (not tied)

  def test_layers_and_keys_give_different_numbers(self):
    init = jax.jit(models.make_policy(CONFIG).init)
    first, second = init(jax.random.key(0)), init(jax.random.key(1))
    up = lambda params: params["layers"]["mlp"]["up"]["kernel"]
    assert np.any(up(first)[0] != up(first)[1])
    assert np.any(up(first) != up(second))

  def test_sampling_params_are_the_layers_one_by_one(self):
    fns, params = tiny.tiny_policy()
    sampler = fns.for_sampling(params)
    for i, layer in enumerate(sampler["layers"]):
      jax.tree.map(
        np.testing.assert_array_equal,
        layer,
        jax.tree.map(lambda x, i=i: x[i], params["layers"]),
      )


class TestValue:
  def test_starts_at_zero_from_a_copy_of_the_policy(self):
    _, params = tiny.tiny_policy()
    fns = models.make_value(CONFIG)
    critic = fns.from_policy(params)
    tokens = _tokens()
    values = jax.jit(fns.values)(
      critic, tokens, np.ones_like(tokens), _positions(tokens)
    )
    np.testing.assert_array_equal(values, np.zeros(tokens.shape, np.float32))
    for mine, theirs in zip(
      jax.tree.leaves(critic["layers"]), jax.tree.leaves(params["layers"])
    ):
      assert mine.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()

  def test_is_linear_in_the_hidden_states(self):
    _, params = tiny.tiny_policy()
    fns = models.make_value(CONFIG, remat=False)
    make = lambda params, key: tiny.widen(fns.from_policy(params), key)
    critic = jax.jit(make)(params, jax.random.key(5))
    tokens = _tokens()
    segments, positions = np.ones_like(tokens), _positions(tokens)
    got = jax.jit(fns.values)(critic, tokens, segments, positions)
    none = np.zeros_like(tokens)
    states = _hidden(critic, tokens, segments, positions, none)
    head = jax.tree.map(np.asarray, critic["value_head"])
    expected = np.asarray(states) @ head["kernel"][:, 0] + head["bias"]
    _close(got, expected)
