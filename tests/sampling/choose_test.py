"""The distribution of the next token matches exact probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.sampling.choose import choose
from jaxrl_llm.sampling.processors import Distribution
from jaxrl_llm.sharding import make_mesh

DRAWS = 2_000
# One block; blocks of 128, which divide the vocabulary; and blocks of 256 with
# a padded last one, since no block size divides a prime.
SIZES = (23, 256, 640, 701)
QWEN = 151_936  # 128 · 1,187.
LAWS = {
  "plain": {},
  "cold": {"temperature": 0.5},
  "hot": {"temperature": 2.5},
  "top-k": {"top_k": 5},
  "top-p": {"top_p": 0.7},
  "min-p": {"min_p": 0.1},
  "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))
EVEN = np.linspace(0, ALMOST_ONE, 64, dtype=np.float32)


def _logits(size):
  return np.random.default_rng(size).normal(0, 1.5, size).astype(np.float32)


def _distribution(logits, settings, slots=None):
  """Makes a distribution; settings are numbers, or lists with one per slot."""
  types, slots = {"top_k": np.int32}, slots or len(logits)
  arrays = {
    name: np.broadcast_to(np.asarray(value, types.get(name, np.float32)), slots)
    for name, value in (OFF | settings).items()
  }
  return Distribution(logits, **arrays)


_choose = jax.jit(choose)


def _draw(logits, settings, uniform=EVEN):
  logits = np.broadcast_to(logits, (len(uniform), np.shape(logits)[-1]))
  out = _choose(uniform, _distribution(logits, settings))
  return np.asarray(out.tokens), np.asarray(out.logprobs)


@functools.cache
def _uniform():
  keys = jax.random.split(jax.random.key(17), DRAWS)
  return np.asarray(jax.jit(jax.vmap(jax.random.uniform))(keys))


def _exact(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """Computes probabilities in float64, by sorting."""
  z = np.asarray(logits, np.float64) / temperature
  p = np.exp(z - z.max())
  p /= p.sum()
  if top_k:
    p = np.where(p >= np.sort(p)[-min(top_k, p.size)], p, 0)
    p /= p.sum()
  if top_p < 1:
    descending = np.sort(p)[::-1]
    last = np.searchsorted(np.cumsum(descending), top_p)
    p = np.where(p >= descending[last], p, 0)
    p /= p.sum()
  p = np.where(p >= min_p * p.max(), p, 0)
  return p / p.sum()


def _assert_follows(p, uniform, tokens, logprobs, atol=1e-5):
  """Checks that draws invert the CDF of `p` at their random numbers."""
  assert p[tokens].min() > 0  # No filtered tokens.
  np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=atol)
  ends = np.cumsum(p)
  assert np.all(uniform <= ends[tokens] + 1e-6)
  assert np.all(uniform >= ends[tokens] - p[tokens] - 1e-6)


class TestLaw:
  @pytest.mark.parametrize("size", SIZES)
  @pytest.mark.parametrize("law", LAWS)
  def test_draws_follow_the_exact_law(self, size, law):
    settings = LAWS[law]
    drawn = _draw(_logits(size), settings, _uniform())
    _assert_follows(_exact(_logits(size), **settings), _uniform(), *drawn)

  def test_slots_of_one_batch_keep_their_own_settings(self):
    laws = [*LAWS.values(), {"temperature": 0.0}]
    which = np.arange(DRAWS) % len(laws)
    names = OFF.keys()
    mixed = {n: [(OFF | laws[i])[n] for i in which] for n in names}
    got = _draw(_logits(256), mixed, _uniform())
    for i, law in enumerate(laws):
      alone = _draw(_logits(256), law, _uniform())
      for g, a in zip(got, alone):
        np.testing.assert_array_equal(g[which == i], a[which == i])


class TestFilters:
  """Filters on a few slots with an odd vocabulary of several blocks."""

  @pytest.mark.parametrize(
    "settings",
    [{"top_k": 701}, {"top_k": 10_000}, {"top_p": 1.0}, {"min_p": 0.0}],
  )
  def test_settings_that_keep_all_are_bit_identical_to_none(self, settings):
    logits = _logits(701)
    # Slot 0 filters, so that the other slots take the filter path, too.
    mixed = {
      k: [5 if k == "top_k" else OFF[k]] + [settings.get(k, OFF[k])] * 63
      for k in OFF
    }
    for g, e in zip(_draw(logits, mixed), _draw(logits, {})):
      np.testing.assert_array_equal(g[1:], e[1:])

  @pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}]
  )
  def test_the_narrowest_filter_keeps_the_best_alone(self, settings):
    tokens, logprobs = _draw(_logits(701), settings)
    assert set(tokens) == {_logits(701).argmax()}
    np.testing.assert_array_equal(logprobs, 0.0)

  @pytest.mark.parametrize(
    "settings", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}]
  )
  def test_ties_with_the_last_kept_are_kept(self, settings):
    logits = np.full(701, -9.0, np.float32)
    tied = [3, 255, 256, 699]
    logits[tied] = 2.0
    tokens, logprobs = _draw(logits, settings)
    assert set(tokens) == set(tied)
    np.testing.assert_allclose(logprobs, -np.log(4), atol=1e-5)

  @pytest.mark.parametrize("top_p", [0.3, 0.5, 0.50001, 0.8])
  def test_top_p_keeps_the_smallest_set_with_its_mass(self, top_p):
    logits = np.full(701, -np.inf, np.float32)
    logits[[600, 1, 400]] = np.log([0.5, 0.3, 0.2])
    kept = [600, 1, 400][: np.searchsorted([0.5, 0.8, 1.0], top_p - 1e-6) + 1]
    assert set(_draw(logits, {"top_p": top_p})[0]) == set(kept)


class TestGreedy:
  def test_is_the_argmax_with_log_prob_zero(self):
    logits = np.random.default_rng(0).normal(size=(64, 701)).astype(np.float32)
    settings = {"temperature": 0.0, "top_k": 3, "top_p": 0.5}
    tokens, logprobs = _draw(logits, settings)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(logprobs, 0.0)

  def test_takes_the_first_of_equals(self):
    logits = np.zeros((64, 701), np.float32)
    logits[:, [300, 500]] = 1.0
    tokens, _ = _draw(logits, {"temperature": 0.0})
    assert set(tokens) == {300}

  @pytest.mark.parametrize("temperature", [1e-7, 1.2e-38])
  def test_is_the_limit_of_small_temperatures(self, temperature):
    logits = 50 * np.random.default_rng(0).normal(size=(64, 701))
    settings = {"temperature": temperature}
    tokens, logprobs = _draw(logits.astype(np.float32), settings)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


class TestEdges:
  @pytest.mark.parametrize("size", SIZES)
  def test_extreme_numbers_give_the_first_and_last_possible_token(self, size):
    logits = np.full(size, -np.inf, np.float32)
    # Zero probability at both ends, in entire blocks and in between.
    logits[[5, 9, size - 6]] = [0.0, 1.0, -3.0]
    uniform = np.resize(np.float32([0.0, ALMOST_ONE]), 64)
    tokens, logprobs = _draw(logits, {}, uniform)
    np.testing.assert_array_equal(tokens, np.resize([5, size - 6], 64))
    p = _exact(logits)
    np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=1e-5)

  @pytest.mark.parametrize("settings", [{}, {"top_p": 0.95}, {"top_k": 20}])
  def test_impossible_tokens_are_never_chosen(self, settings):
    rng = np.random.default_rng(1)
    # Each slot has a sparse distribution with weights of all magnitudes.
    logits = rng.normal(0, 12, (DRAWS, 701)).astype(np.float32)
    logits[rng.random(logits.shape) < rng.random((DRAWS, 1))] = -np.inf
    logits[:, 350] = 0.0  # At least one token is possible.
    uniform = _uniform().copy()
    uniform[::3], uniform[1::3] = 0.0, ALMOST_ONE
    tokens, logprobs = _draw(logits, settings, uniform)
    rows = np.arange(DRAWS)
    assert np.all(np.isfinite(logits[rows, tokens]))
    assert np.all(np.isfinite(logprobs)) and np.all(logprobs <= 1e-6)

  @pytest.mark.parametrize("size, block", [(640, 128), (701, 256)])
  def test_a_number_on_a_boundary_belongs_to_the_next_token(self, size, block):
    logits = np.full(size, -np.inf, np.float32)
    equal = np.array([2, block - 1, block, 600])
    logits[equal] = 1.5
    uniform = np.resize(np.float32([0.0, 0.25, 0.5, 0.75]), 64)
    tokens, _ = _draw(logits, {}, uniform)
    np.testing.assert_array_equal(tokens, np.resize(equal, 64))

  @pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"temperature": 0.0}])
  @pytest.mark.parametrize("value", [np.nan, -np.inf])
  def test_without_a_possible_token_it_is_negative(self, value, settings):
    logits = np.full((64, 701), value, np.float32)
    tokens, _ = _draw(logits, settings)
    assert (tokens < 0).all()

  def test_bfloat16_logits_give_float32_log_probs(self):
    logits = jnp.zeros((2, 23), jnp.bfloat16)
    out = _choose(np.float32([0.1, 0.9]), _distribution(logits, {}))
    assert out.logprobs.dtype == jnp.float32
    assert out.tokens.dtype == jnp.int32

  def test_shapes_that_disagree_raise(self):
    with pytest.raises(AssertionError):
      choose(jnp.zeros(2), _distribution(jnp.zeros((2, 5)), {}, slots=3))


class TestBlocks:
  """Tokens are drawn in blocks of the vocabulary, equal in size if possible."""

  @pytest.mark.parametrize("size", [23, 256, 640, 1024, QWEN])
  def test_divide_the_vocabulary_without_a_padded_copy(self, size):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    distribution = _distribution(shape((2, size)), {}, slots=2)
    program = jax.make_jaxpr(choose)(shape((2,)), distribution)
    assert "pad[" not in str(program)

  def test_of_a_prime_vocabulary_are_padded(self):
    distribution = _distribution(np.zeros((2, 701)), {})
    program = jax.make_jaxpr(choose)(np.zeros(2), distribution)
    assert "f32[2,768] = pad[" in str(program)

  def test_of_a_large_vocabulary_follow_the_exact_law(self):
    uniform = (np.arange(64, dtype=np.float32) + 0.5) / 64
    drawn = _draw(_logits(QWEN), {}, uniform)
    _assert_follows(_exact(_logits(QWEN)), uniform, *drawn, atol=1e-4)

  def test_of_256_tokens_draw_the_tokens_of_earlier_releases(self):
    uniform = (np.arange(16, dtype=np.float32) + 0.5) / 16
    tokens, _ = _draw(_logits(1024), {}, uniform)
    assert tokens.tolist() == [
      *(17, 84, 154, 256, 307, 340, 404, 465),
      *(554, 622, 682, 760, 810, 849, 922, 994),
    ]


class TestGiven:
  """Tokens can be given instead of drawn."""

  def test_have_the_log_probs_at_which_they_would_be_drawn(self):
    logits = np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    uniform = np.linspace(0, 0.99, 6, dtype=np.float32)
    temperature = np.float32([1, 0.7, 1, 1, 0, 1])
    given = np.int32([-1, 299, 0, 255, 7, -1])
    distribution = _distribution(logits, {"temperature": temperature})
    drawn = choose(uniform, distribution)
    out = choose(uniform, distribution, given=given)
    none = given < 0
    np.testing.assert_array_equal(
      out.tokens, np.where(none, drawn.tokens, given)
    )
    np.testing.assert_array_equal(out.logprobs[none], drawn.logprobs[none])
    scale = np.where(temperature > 0, temperature, 1)
    logp = np.asarray(jax.nn.log_softmax(logits / scale[:, None]))
    wanted = logp[np.arange(6), np.asarray(out.tokens)]
    wanted[4] = 0  # Greedy.
    np.testing.assert_allclose(out.logprobs, wanted, rtol=1e-5, atol=1e-5)
    # Giving the drawn tokens returns the same bits.
    again = choose(uniform, distribution, given=drawn.tokens)
    jax.tree.map(np.testing.assert_array_equal, again, drawn)

  @pytest.mark.parametrize("temperature", [1.0, 0.1, 0.003])
  def test_are_finite_however_improbable(self, temperature):
    # Weights from 1 to far below the smallest float, also subnormal ones.
    logits = np.float32([[0, *-temperature * np.arange(1, 400, 3.0)]])
    slots = logits.shape[1]
    given = np.arange(slots, dtype=np.int32)
    rows = np.repeat(logits, slots, axis=0)
    # A filter of one slot removes nothing from the others.
    top_k = np.where(given, 0, 2)
    law = _distribution(rows, {"temperature": temperature, "top_k": top_k})
    for laws in (law, law._replace(top_k=np.zeros(slots, np.int32))):
      got = _choose(np.full(slots, 0.5, np.float32), laws, given=given)
      scaled = rows[0].astype(float) / np.float32(temperature)
      wanted = scaled - np.log(np.exp(scaled).sum())
      np.testing.assert_allclose(got.logprobs[1:], wanted[1:], rtol=1e-5)

  def test_are_impossible_where_a_filter_removes_them(self):
    rows = np.repeat(np.float32([[0, -1, -2, -200]]), 4, axis=0)
    law = _distribution(rows, {"top_k": [2, 0, 0, 0], "top_p": [1, 0.9, 1, 1]})
    given = np.int32([2, 3, 3, 0])
    got = _choose(np.full(4, 0.5, np.float32), law, given=given).logprobs
    np.testing.assert_array_equal(np.isfinite(got), [False, False, True, True])


class TestMesh:
  """Devices that share a vocabulary choose the same tokens as one device."""

  # Slots that the devices share equally, and slots and vocabularies that they
  # cannot divide.
  @pytest.mark.parametrize("slots", [16, 6, 7])
  @pytest.mark.parametrize("size", [640, 701])
  def test_equals_one_device(self, slots, size):
    mesh = make_mesh(data=2, fsdp=1, tensor=4)
    place = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(slots)
    logits = rng.normal(0, 2, (slots, size)).astype(np.float32)
    settings = {
      "temperature": rng.choice(np.float32([0, 0.7, 1]), slots),
      "top_k": rng.choice([0, 5], slots),
      "top_p": rng.choice([0.8, 1], slots),
      "min_p": rng.choice([0, 0.1], slots),
    }
    distribution = _distribution(logits, settings)
    uniform = rng.random(slots, np.float32)
    given = np.where(np.arange(slots) % 3, -1, 7).astype(np.int32)
    expected = _choose(uniform, distribution, given=given)
    got = jax.jit(functools.partial(choose, sharding=place))(
      uniform, distribution, given=given
    )
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=1e-5)
    assert len(set(np.asarray(got.tokens))) > 2
