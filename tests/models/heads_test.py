"""Chunked log-probs equal the plain formula and never store all logits."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.models import heads

B, T, D, V = 3, 11, 5, 23
# Masks by name: full, holes, an empty row next to full ones, all empty.
MASKS = {
  "full": np.ones((B, T), bool),
  "holes": np.random.default_rng(0).random((B, T)) < 0.5,
  "empty row": np.arange(B)[:, None] + np.zeros((B, T)) != 1,
  "nothing": np.zeros((B, T), bool),
}


def _inputs(tied):
  keys = jax.random.split(jax.random.key(3), 5)
  hidden = jax.random.normal(keys[0], (B, T, D))
  kernel = jax.random.normal(keys[1], (V, D) if tied else (D, V))
  targets = jax.random.randint(keys[2], (B, T), 0, V)
  # Cotangents of both outputs, so that one gradient tests both.
  pulls = jax.random.normal(keys[3], (2, B, T))
  return hidden, kernel, targets, pulls


def _plain(hidden, kernel, targets, mask, temperature, *, tied):
  matrix = kernel.T if tied else kernel
  z = jnp.einsum("btd,dv->btv", hidden, matrix, precision="highest")
  logp = jax.nn.log_softmax(z / temperature)
  picked = jnp.sum(logp * jax.nn.one_hot(targets, V), axis=-1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
  return jnp.where(mask, picked, 0.0), jnp.where(mask, entropy, 0.0)


@functools.partial(jax.jit, static_argnames=("function",))
def _value_and_grad(
  hidden, kernel, targets, mask, temperature, pulls, function
):
  def total(hidden, kernel):
    out = function(hidden, kernel, targets, mask, temperature)
    return sum(jnp.sum(p * x) for p, x in zip(pulls, out)), tuple(out)

  grads, out = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, kernel)
  return out, grads


@functools.cache
def _function(name, **settings):
  return functools.partial(
    {"chunked": heads.chunked_logprobs, "plain": _plain}[name], **settings
  )


def _both(tied, chunk, mask):
  """Computes ours, with invalid inputs where masked, and the reference."""
  hidden, kernel, targets, pulls = _inputs(tied)
  broken = jnp.where(mask[..., None], hidden, jnp.nan)
  rest = mask, jnp.float32(0.6), pulls
  chunked = _function("chunked", tied=tied, chunk=chunk)
  got = _value_and_grad(
    broken, kernel, jnp.where(mask, targets, -1), *rest, function=chunked
  )
  plain = _function("plain", tied=tied)
  return got, _value_and_grad(hidden, kernel, targets, *rest, function=plain)


def _chunked(tied, hidden, targets, mask):
  """Computes (outputs, gradients) at temperature 1 in chunks of 4."""
  _, kernel, _, pulls = _inputs(tied)
  arguments = hidden, kernel, targets, mask, jnp.float32(1), pulls
  function = _function("chunked", tied=tied, chunk=4)
  return _value_and_grad(*arguments, function=function)


class TestChunkedLogprobs:
  # Chunks that do not divide the 11 positions, and one that contains all.
  @pytest.mark.parametrize(
    "tied, chunk", [(True, 1), (True, 4), (False, 4), (False, 64)]
  )
  @pytest.mark.parametrize("mask", MASKS)
  def test_equals_the_plain_formula_and_reads_nothing_masked(
    self, tied, chunk, mask
  ):
    mask = MASKS[mask]
    got, expected = _both(tied, chunk, mask)
    chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-6)
    outputs, (d_hidden, _) = got
    for x in (*outputs, d_hidden):
      assert not np.any(np.asarray(x)[~mask])

  @pytest.mark.parametrize("tied", [True, False])
  def test_unused_ids_have_no_probability(self, tied):
    unused = (4, 9, *range(15, V))  # Holes, and padding at the end.
    hidden, kernel, _, pulls = _inputs(tied)
    used = np.delete(np.arange(V), unused)
    places = np.random.default_rng(5).integers(0, used.size, (B, T))
    rest = MASKS["holes"], jnp.float32(0.6), pulls
    got, (d_hidden, d_kernel) = _value_and_grad(
      *(hidden, kernel, used[places], *rest),
      function=_function("chunked", tied=tied, chunk=4, unused=unused),
    )
    # The same as in a head without these rows.
    axis = 0 if tied else 1
    expected = _value_and_grad(
      *(hidden, jnp.take(kernel, used, axis), places, *rest),
      function=_function("chunked", tied=tied, chunk=4),
    )
    rows = jnp.take(d_kernel, used, axis)
    chex.assert_trees_all_close(
      (got, (d_hidden, rows)), expected, rtol=2e-5, atol=2e-6
    )
    assert not jnp.take(d_kernel, np.asarray(unused), axis).any()
    logits = np.asarray(heads.logits(hidden, kernel, tied, unused))
    assert (logits[..., list(unused)] == -np.inf).all()
    assert np.isfinite(logits[..., used]).all()

  def test_huge_logits_stay_finite(self):
    hidden, _, targets, _ = _inputs(True)
    out = _chunked(True, hidden * 1e4, targets, MASKS["full"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))

  def test_bfloat16_stays_near_with_the_dtypes_of_its_inputs(self):
    hidden, _, targets, _ = _inputs(False)
    run = lambda x: _chunked(False, x, targets, MASKS["holes"])
    outputs, (d_hidden, d_kernel) = run(hidden.astype(jnp.bfloat16))
    expected, (expected_hidden, expected_kernel) = run(hidden)
    assert d_hidden.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in (*outputs, d_kernel))
    for g, e in zip(outputs, expected):
      np.testing.assert_allclose(g, e, atol=0.1)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=0.1)
    np.testing.assert_allclose(d_kernel, expected_kernel, atol=0.2)


class TestDefaultChunk:
  @pytest.mark.parametrize(
    "platform, rows, time, vocabulary, chunk",
    [
      ("cpu", 8, 8192, 151_936, 128),
      # 512 MiB hold 1,766 x 75,968 logits: five chunks of multiples of 128.
      ("tpu", 1, 8192, 75_968, 1664),
      ("gpu", 1, 8192, 151_936, 896),
      ("tpu", 1, 1024, 32_000, 1024),  # One chunk.
      ("tpu", 64, 8192, 151_936, 128),  # As on a CPU.
    ],
  )
  def test_is_by_platform_and_shape(
    self, platform, rows, time, vocabulary, chunk
  ):
    assert heads.default_chunk(platform, rows, time, vocabulary) == chunk

  def test_is_what_a_chunk_of_zero_means(self, monkeypatch):
    asked = []
    found = lambda *shape: asked.append(shape) or 4
    monkeypatch.setattr(heads, "default_chunk", found)
    hidden, kernel, targets, _ = _inputs(False)
    mesh = sharding.make_mesh(
      data=1, fsdp=3, tensor=1, devices=jax.devices()[:3]
    )
    run = lambda chunk, place: heads.chunked_logprobs(
      *(hidden, kernel, targets, MASKS["holes"]),
      tied=False,
      chunk=chunk,
      sharding=place,
    )
    for place in (None, sharding.head_sharding(mesh, V)):
      jax.tree.map(np.testing.assert_array_equal, run(0, place), run(4, place))
    assert asked == [("cpu", B, T, V), ("cpu", B // 3, T, V)]


class TestMemory:
  """No array has B · T · V entries, forward or backward."""

  @pytest.mark.parametrize("tied", [True, False])
  def test_no_array_holds_all_logits(self, tied):
    # Primes, so that no other array has the same number of entries.
    batch, time, size, vocab, chunk = 3, 17, 2, 1013, 5
    shape = jax.ShapeDtypeStruct
    arguments = (
      shape((batch, time, size), jnp.float32),
      shape((vocab, size) if tied else (size, vocab), jnp.float32),
      shape((batch, time), jnp.int32),
      shape((batch, time), bool),
    )

    def total(*arguments):
      out = heads.chunked_logprobs(*arguments, 0.7, tied=tied, chunk=chunk)
      return jnp.sum(out.logprobs) + jnp.sum(out.entropy)

    jaxpr = jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(
      *arguments
    )
    sizes = set(_sizes(jaxpr.jaxpr))
    assert batch * chunk * vocab in sizes  # Chunks are found.
    assert max(sizes) == batch * chunk * vocab


def _sizes(jaxpr):
  """Yields the number of entries of every array in a jaxpr, nested ones too."""
  for equation in jaxpr.eqns:
    for variable in (*equation.invars, *equation.outvars):
      yield int(np.prod(variable.aval.shape, dtype=np.int64))
    for value in jax.tree.leaves(
      tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _sizes(inner)


class TestMesh:
  """Rows are split over two or four device groups, the vocabulary over two."""

  def _split(self, tied, groups, rows):
    """Returns (arguments on a mesh, function, the same on one device)."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    size, width = 24, 8  # Divisible by devices.
    hidden = normal(rows, T, width)
    kernel = normal(*((size, width) if tied else (width, size)))
    targets = rng.integers(0, size, (rows, T)).astype(np.int32)
    mask = rng.random((rows, T)) < 0.7
    arguments = (hidden, kernel, targets, mask, np.float32(0.7))
    arguments += (normal(2, rows, T),)
    mesh = sharding.make_mesh(data=1, fsdp=groups, tensor=2)
    place = sharding.head_sharding(mesh, size)
    of = functools.partial(_function, "chunked", tied=tied, chunk=4)
    return arguments, of(sharding=place), of()

  @pytest.mark.parametrize("tied", [False, True])
  @pytest.mark.parametrize("groups, rows", [(2, 4), (4, 4), (4, 3)])
  def test_equals_one_device(self, tied, groups, rows):
    arguments, split, whole = self._split(tied, groups, rows)
    got = _value_and_grad(*arguments, function=split)
    expected = _value_and_grad(*arguments, function=whole)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)

  def test_the_kernel_is_gathered_and_its_gradient_summed_once(self):
    arguments, split, _ = self._split(False, 4, 4)
    mesh = split.keywords["sharding"].mesh
    of = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    rows, kernel = of(("data", "fsdp")), of("fsdp", "tensor")
    places = rows, kernel, rows, rows, None, of(None, ("data", "fsdp"))
    given = [
      x if place is None else jax.device_put(x, place)
      for x, place in zip(arguments, places)
    ]
    text = _value_and_grad.lower(*given, function=split).compile().as_text()
    # Loops may only contain the sum over the vocabulary's shards.
    bodies = re.findall(r"^%?\S*(?:body|region)\S* .*?^\}", text, re.M | re.S)
    assert bodies
    assert not any("all-gather" in body for body in bodies)
    wide = re.compile(r"f32\[(?:\d+,)*8,\d+\]\S* (?:all-reduce|reduce-scatter)")
    assert not any(wide.search(body) for body in bodies)
