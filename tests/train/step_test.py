"""The update is the gradient of the plain loss, however it is split."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run

from jaxrl_llm import losses, models, sharding
from jaxrl_llm.train import experience, packing, recipe, score, state, step
from jaxrl_llm.types import Experience

SAMPLES, PROMPT, ROOM = 16, 7, 9
CAPACITY = 24  # Some samples share their prompt, others do not.
TEMPERATURE = np.float32(0.8)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
POLICY_LOSS = functools.partial(losses.clipped_policy_loss, **CLIPS)
RATE = lambda step: 1e-2 + 0.0 * step
# The first change of the parameters is the gradient itself, and yet there is
# an optimizer state.
SGD = optax.sgd(1.0, momentum=0.9)


@functools.cache
def make_fns(kind, mesh=None):
  make = models.make_policy if kind == "policy" else models.make_value
  place = sharding.along_batch(mesh) if mesh else None
  settings = {"head_chunk": 8} if kind == "policy" else {}
  return make(tiny_run.model_config(), sharding=place, **settings)


@functools.cache
def make_params(kind):
  """Random weights, large enough for gradients of every size; on the host."""
  params = jax.eval_shape(make_fns(kind).init, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(1)
  draw = lambda x: rng.normal(scale=0.2, size=x.shape).astype(np.float32)
  return jax.tree.unflatten(tree, [draw(x) for x in leaves])


@functools.cache
def make_data():
  """A rollout and what the losses want, unpacked."""
  rng = np.random.default_rng(7)
  rollout = tiny_run.random_rollout(
    rng, rows=SAMPLES, prompt=PROMPT, room=ROOM, vocab=19, group_size=4
  )
  mask = rollout.mask
  normal = lambda: rng.normal(size=mask.shape).astype(np.float32)
  policy_mask = mask & (np.arange(SAMPLES) != 3)[:, None]
  data = Experience(
    # Far enough from the policy for both clips to act.
    old_logprobs=-3.0 + 0.5 * normal(),
    advantages=np.where(mask, normal(), 0),
    old_values=normal(),
    returns=normal(),
    policy_mask=policy_mask,
    value_mask=policy_mask,
    positive_mask=policy_mask & (np.arange(SAMPLES) % 3 == 0)[:, None],
  )
  return rollout, data


SETTINGS = tiny_run.make_config("none")
RECIPE = recipe.make_recipe(estimator=SETTINGS.estimator, loss=SETTINGS.loss)


def make_batch(kind, *, micro_rows, rows=range(SAMPLES), capacity=CAPACITY):
  rollout, data = make_data()
  rows = np.asarray(rows)
  packed, layout = packing.pack(
    packing.select(rollout, rows),
    capacity=capacity,
    rows=micro_rows,
    micro_batches=-(-len(rows) // micro_rows),
  )
  if kind == "value":
    return experience.value_batch(data, rows, packed, layout)
  return experience.policy_batch(data, rows, packed, layout, recipe=RECIPE)


@functools.cache
def make_step(kind, mesh=None):
  fns = make_fns(kind, mesh)
  pinned = {}
  if mesh is not None:
    shapes = jax.eval_shape(
      lambda: state.create_train_state(make_params(kind), SGD)
    )
    pinned = {
      "state_shardings": sharding.tree_shardings(shapes, mesh),
      "metrics_sharding": sharding.replicated(mesh),
    }
  if kind == "value":
    loss = lambda values, returns, old: losses.clipped_value_loss(
      values, returns
    )
    return step.make_value_step(fns, SGD, RATE, loss, **pinned), pinned
  return step.make_policy_step(fns, SGD, RATE, POLICY_LOSS, **pinned), pinned


def make_state(kind):
  params = jax.tree.map(jnp.array, make_params(kind))
  return state.create_train_state(params, SGD)


def settings_of(kind):
  return (TEMPERATURE,) if kind == "policy" else ()


@functools.cache
def gradient_of_step(kind, micro_rows):
  """What one update subtracts from the parameters, and its metrics."""
  update, _ = make_step(kind)
  after, metrics = update(
    make_state(kind),
    make_batch(kind, micro_rows=micro_rows),
    *settings_of(kind),
  )
  change = lambda old, new: old - np.asarray(new)
  return jax.tree.map(change, make_params(kind), after.params), metrics


def padded():
  """Prompt and response side by side, right-padded [B, L], and its mask."""
  rollout, _ = make_data()
  length = PROMPT + ROOM
  tokens = np.zeros((SAMPLES, length), np.int32)
  total = rollout.prompt_lengths + rollout.lengths
  for i in range(SAMPLES):
    p, n = rollout.prompt_lengths[i], rollout.lengths[i]
    tokens[i, : p + n] = [*rollout.prompt_tokens[i, :p], *rollout.tokens[i, :n]]
  before = rollout.prompt_lengths[:, None] - 1 + np.arange(ROOM)[None]
  return (
    tokens,
    np.arange(length)[None] < total[:, None],
    np.minimum(before, length - 1),
  )


def plain_policy_loss(params):
  """VAPO's policy loss written out on [B, T] arrays."""
  rollout, data = make_data()
  tokens, present, before = padded()
  logits = make_fns("policy").logits(params, tokens, present) / TEMPERATURE
  everything = jax.nn.log_softmax(logits)
  at = jnp.take_along_axis(everything, before[..., None], axis=1)
  logprobs = jnp.take_along_axis(
    at, rollout.tokens[..., None].astype(np.int32), axis=2
  )[..., 0]
  mask, positive = data.policy_mask, data.positive_mask
  loss = POLICY_LOSS(logprobs, data.old_logprobs, data.advantages).loss
  surrogate = jnp.sum(jnp.where(mask, loss, 0.0)) / mask.sum()
  nll = -jnp.sum(jnp.where(positive, logprobs, 0.0)) / positive.sum()
  return surrogate + 0.1 * nll, (surrogate, 0.1 * nll)


def plain_value_loss(params):
  _, data = make_data()
  tokens, present, before = padded()
  positions = np.maximum(present.cumsum(axis=1) - 1, 0)
  values = make_fns("value").values(
    params, tokens, present.astype(np.int32), positions
  )
  values = jnp.take_along_axis(values, before, axis=1)
  mask = data.value_mask
  errors = 0.5 * jnp.square(values - data.returns)
  loss = jnp.sum(jnp.where(mask, errors, 0.0)) / mask.sum()
  return loss, (loss,)


def largest(tree):
  return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


class TestGradient:
  @pytest.mark.parametrize("kind", ["policy", "value"])
  def test_equals_that_of_the_plain_loss(self, kind):
    plain = plain_policy_loss if kind == "policy" else plain_value_loss
    prefixes = make_batch(kind, micro_rows=4).packed.prefixes
    assert prefixes.any() and not prefixes.all()
    compute = jax.jit(jax.value_and_grad(plain, has_aux=True))
    (_, parts), expected = compute(make_params(kind))
    got, metrics = gradient_of_step(kind, 4)
    assert largest(expected) > 0.1
    chex.assert_trees_all_close(
      got, expected, rtol=1e-4, atol=1e-6 * largest(expected)
    )
    names = ["policy/loss", "policy/nll_loss"][: len(parts)]
    for name, part in zip(names if kind == "policy" else ["value/loss"], parts):
      # A sum of terms of both signs, each of the order of 1.
      np.testing.assert_allclose(metrics[name], part, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
      metrics[f"{kind}/grad_norm"], optax.global_norm(expected), rtol=1e-6
    )

  @pytest.mark.parametrize(
    ("kind", "micro_rows"),
    [
      ("policy", 1),
      pytest.param("policy", 2, marks=pytest.mark.slow),
      ("policy", SAMPLES),
      pytest.param("value", 1, marks=pytest.mark.slow),
      pytest.param("value", 2, marks=pytest.mark.slow),
      ("value", SAMPLES),
    ],
  )
  def test_any_number_of_micro_batches_is_the_same(self, kind, micro_rows):
    got, metrics = gradient_of_step(kind, micro_rows)
    expected, whole = gradient_of_step(kind, 4)
    chex.assert_trees_all_close(
      got, expected, rtol=1e-5, atol=1e-6 * largest(expected)
    )
    assert metrics.keys() == whole.keys()
    for name, value in metrics.items():
      np.testing.assert_allclose(value, whole[name], rtol=1e-5, atol=1e-7)

  def test_metrics_are_means_over_the_tokens_trained_on(self):
    rollout, data = make_data()
    packed, layout = packing.pack(
      rollout, capacity=CAPACITY, rows=4, micro_batches=4
    )
    scored = jax.jit(
      functools.partial(score.score_logprobs, fns=make_fns("policy"))
    )(make_params("policy"), packed, TEMPERATURE)
    mask = data.policy_mask
    terms = POLICY_LOSS(
      layout.gather(scored), data.old_logprobs, data.advantages
    )
    _, metrics = gradient_of_step("policy", 4)
    for name in ("clipped_high", "clipped_low"):
      share = np.asarray(getattr(terms, name))[mask].mean()
      assert share > 0.05
      side = name.removeprefix("clipped_")
      np.testing.assert_allclose(
        metrics[f"policy/clip_fraction_{side}"], share, rtol=1e-5
      )
    np.testing.assert_allclose(
      metrics["policy/ratio_max"], np.asarray(terms.ratio)[mask].max(), 1e-5
    )
    kl = losses.kl_k3(data.old_logprobs, layout.gather(scored))
    np.testing.assert_allclose(
      metrics["policy/approx_kl"], np.asarray(kl)[mask].mean(), rtol=1e-5
    )
    assert metrics["policy/lr"] == np.float32(1e-2)


class TestWeights:
  def test_token_mean_over_the_whole_mini_batch(self):
    _, data = make_data()
    batch = make_batch("policy", micro_rows=2)
    count = data.policy_mask.sum()
    weights = np.asarray(batch.weights)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
    assert set(np.unique(weights)) == {0.0, np.float32(1 / count)}
    np.testing.assert_array_equal(weights > 0, batch.packed.mask)

  def test_nll_has_a_normaliser_of_its_own(self):
    _, data = make_data()
    batch = make_batch("policy", micro_rows=2)
    count = data.positive_mask.sum()
    assert 0 < count < data.policy_mask.sum()
    weights = np.asarray(batch.nll_weights)
    np.testing.assert_allclose(weights.sum(), 0.1, rtol=1e-6)
    np.testing.assert_allclose(np.unique(weights), [0, 0.1 / count], rtol=1e-6)

  def test_no_correct_response_no_nll(self):
    batch = make_batch("policy", micro_rows=2, rows=[1, 2, 4, 5])
    assert not batch.nll_weights.any() and batch.weights.any()

  def test_nothing_judged_trains_on_nothing(self):
    batch = make_batch("policy", micro_rows=2, rows=[3])
    assert not batch.weights.any() and not batch.packed.mask.any()


class TestMesh:
  @pytest.mark.parametrize(
    ("kind", "shape"),
    [
      ("policy", (8, 1, 1)),
      ("policy", (2, 2, 2)),
      pytest.param("value", (8, 1, 1), marks=pytest.mark.slow),
      ("value", (2, 2, 2)),
    ],
  )
  def test_eight_devices_equal_one(self, kind, shape):
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, shape)))
    update, pinned = make_step(kind, mesh=mesh)
    placed = jax.device_put(make_state(kind), pinned["state_shardings"])
    batch = step.place(make_batch(kind, micro_rows=8), mesh)
    if shape == (2, 2, 2):
      kernel = placed.params["layers"]["mlp"]["up"]["kernel"]
      assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 24)
    assert batch.weights.sharding.shard_shape((2, 8, CAPACITY))[1] == (
      8 // sharding.batch_size_of(mesh)
    )
    after, metrics = update(placed, batch, *settings_of(kind))
    expected, one = gradient_of_step(kind, 4)
    change = lambda old, new: old - np.asarray(new)
    got = jax.tree.map(change, make_params(kind), after.params)
    chex.assert_trees_all_close(
      got, expected, rtol=1e-5, atol=1e-6 * largest(expected)
    )
    for name in metrics:
      np.testing.assert_allclose(metrics[name], one[name], rtol=1e-5, atol=1e-7)
    want = pinned["state_shardings"].params
    same = lambda x, s: x.sharding.is_equivalent_to(s, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, after.params, want)))


@pytest.fixture(scope="module")
def policy_step():
  return make_step("policy")[0]


class TestOneProgram:
  def test_lengths_and_temperature_compile_nothing(self, policy_step):
    batch = make_batch("policy", micro_rows=4)
    current, _ = policy_step(make_state("policy"), batch, TEMPERATURE)
    compiled = policy_step._cache_size()
    for rows, temperature in (
      ([1] * 16, 0.5),
      ([*range(8), *range(8)], 1.3),
    ):
      batch = make_batch("policy", micro_rows=4, rows=rows)
      current, _ = policy_step(current, batch, np.float32(temperature))
    assert policy_step._cache_size() == compiled
    assert current.step == 3

  def test_the_state_is_donated(self, policy_step):
    before = make_state("policy")
    policy_step(before, make_batch("policy", micro_rows=4), TEMPERATURE)
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))

  def test_micro_batches_that_hold_nothing_are_not_run(self, policy_step):
    # Their arrays may hold anything: only `count` micro-batches are read.
    batch = make_batch("policy", micro_rows=4)
    assert batch.packed.count < batch.packed.tokens.shape[0]
    spoiled = batch.advantages.copy()
    spoiled[batch.packed.count :] = np.nan
    outputs = [
      policy_step(make_state("policy"), b, TEMPERATURE)
      for b in (batch, batch.replace(advantages=spoiled))
    ]
    chex.assert_trees_all_equal(*outputs)


class TestNotFinite:
  @pytest.mark.parametrize(
    ("field", "poison"),
    [
      ("advantages", np.nan),
      ("advantages", np.inf),
      ("old_logprobs", np.nan),
      ("weights", -np.inf),
    ],
  )
  def test_is_skipped_and_counted(self, policy_step, field, poison):
    batch = make_batch("policy", micro_rows=4)
    where = tuple(np.argwhere(batch.packed.mask)[3])
    spoiled = np.array(batch[field])
    spoiled[where] = poison
    good, _ = policy_step(make_state("policy"), batch, TEMPERATURE)
    before = jax.device_get(good)
    bad, metrics = policy_step(
      good, batch.replace(**{field: spoiled}), TEMPERATURE
    )
    chex.assert_trees_all_equal(
      jax.device_get((bad.params, bad.opt_state)),
      (before.params, before.opt_state),
    )
    assert (bad.step, bad.skipped, bad.skipped_in_a_row) == (1, 1, 1)
    assert metrics["policy/skipped"] == 1.0
    bad, _ = policy_step(bad, batch.replace(**{field: spoiled}), TEMPERATURE)
    assert (bad.skipped, bad.skipped_in_a_row) == (2, 2)
    good, metrics = policy_step(bad, batch, TEMPERATURE)
    assert (good.step, good.skipped, good.skipped_in_a_row) == (2, 2, 0)
    assert metrics["policy/skipped"] == 0.0

  def test_a_weight_that_is_not_finite(self, policy_step):
    broken = make_state("policy")
    scale = broken.params["final_norm"]["scale"].at[0].set(jnp.nan)
    broken.params["final_norm"]["scale"] = scale
    batch = make_batch("policy", micro_rows=4)
    after, _ = policy_step(broken, batch, TEMPERATURE)
    assert (after.step, after.skipped) == (0, 1)


class TestScore:
  def test_equals_the_plain_model(self):
    rollout, _ = make_data()
    packed, layout = packing.pack(
      rollout,
      capacity=CAPACITY,
      rows=4,
      micro_batches=4,
    )
    tokens, present, before = padded()
    logits = jax.jit(make_fns("policy").logits)(
      make_params("policy"), tokens, present
    )
    at = np.take_along_axis(
      np.asarray(jax.nn.log_softmax(logits / TEMPERATURE)),
      before[..., None],
      axis=1,
    )
    expected = np.take_along_axis(at, rollout.tokens[..., None], axis=2)[..., 0]
    scored = jax.jit(
      functools.partial(score.score_logprobs, fns=make_fns("policy"))
    )(make_params("policy"), packed, TEMPERATURE)
    np.testing.assert_allclose(
      layout.gather(scored)[rollout.mask], expected[rollout.mask], atol=1e-5
    )
    values = jax.jit(make_fns("value").values)(
      make_params("value"),
      tokens,
      present.astype(np.int32),
      np.maximum(present.cumsum(axis=1) - 1, 0),
    )
    expected = np.take_along_axis(np.asarray(values), before, axis=1)
    scored = jax.jit(
      functools.partial(score.score_values, fns=make_fns("value"))
    )(make_params("value"), packed)
    np.testing.assert_allclose(
      layout.gather(scored)[layout.present],
      expected[layout.present],
      atol=1e-5,
    )
