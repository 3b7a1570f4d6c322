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
  make = models.make_value if kind == "value" else models.make_policy
  place = sharding.along_batch(mesh) if mesh else None
  settings = {} if kind == "value" else {"head_chunk": 8}
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
    behavior_logprobs=rollout.behavior_logprobs,
    advantages=np.where(mask, normal(), 0),
    old_values=normal(),
    returns=normal(),
    policy_mask=policy_mask,
    value_mask=policy_mask,
    positive_mask=policy_mask & (np.arange(SAMPLES) % 3 == 0)[:, None],
    columns={},
  )
  return rollout, data


@functools.cache
def make_reference():
  """Log-probs of the initial policy for the KL, [B, T]."""
  draw = np.random.default_rng(3).normal(size=(SAMPLES, ROOM))
  return -3.0 + 0.5 * draw.astype(np.float32)


# Bounds far wider than the paper's, so that some responses are inside them.
GSPO = {"clip_low": 0.05, "clip_high": 0.3}
RECIPES = {
  "policy": recipe.make_recipe(tiny_run.make_config("none")),
  "gspo": recipe.make_recipe(
    tiny_run.make_config(
      "none",
      loss__name="gspo",
      **{f"loss__{name}": bound for name, bound in GSPO.items()},
      loss__nll_coefficient=0.0,
      loss__kl="k2",
      loss__kl_coefficient=0.3,
      loss__entropy_coefficient=0.2,
    )
  ),
}


def make_batch(kind, *, micro_rows, rows=range(SAMPLES), capacity=CAPACITY):
  rollout, data = make_data()
  rows = np.asarray(rows)
  packed, layout = packing.pack(
    packing.select(rollout, rows),
    capacity=capacity,
    rows=micro_rows,
    micro_batches=-(-len(rows) // micro_rows),
  )
  batch = packing.MiniBatch(rows, packed, layout)
  if kind == "value":
    return experience.value_batch(data, batch)
  if "ref_logprobs" in RECIPES[kind].columns:
    data = data.replace(columns={"ref_logprobs": make_reference()})
  return experience.policy_batch(data, batch, recipe=RECIPES[kind])


def with_column(batch, name, values):
  """The policy batch with one of its columns replaced."""
  return batch.replace(columns=batch.columns | {name: values})


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
  made = RECIPES[kind].policy_loss, RECIPES[kind].terms
  return step.make_policy_step(fns, SGD, RATE, *made, **pinned), pinned


def make_state(kind):
  params = jax.tree.map(jnp.array, make_params(kind))
  return state.create_train_state(params, SGD)


def settings_of(kind):
  return () if kind == "value" else (TEMPERATURE,)


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


def plain_logprobs(params):
  """Log-probs and entropies of the responses, [B, T], one sample a row."""
  rollout, _ = make_data()
  tokens, present, before = padded()
  logits = make_fns("policy").logits(params, tokens, present) / TEMPERATURE
  everything = jax.nn.log_softmax(logits)
  at = jnp.take_along_axis(everything, before[..., None], axis=1)
  logprobs = jnp.take_along_axis(
    at, rollout.tokens[..., None].astype(np.int32), axis=2
  )[..., 0]
  return logprobs, -jnp.sum(jnp.exp(at) * at, axis=2)


def plain_policy_loss(params):
  """VAPO's policy loss on [B, T] arrays: the total and its summands."""
  _, data = make_data()
  logprobs, _ = plain_logprobs(params)
  mask, positive = data.policy_mask, data.positive_mask
  loss = POLICY_LOSS(logprobs, data.old_logprobs, data.advantages).loss
  surrogate = jnp.where(mask, loss, 0.0) / mask.sum()
  nll = -0.1 * jnp.where(positive, logprobs, 0.0) / positive.sum()
  return (surrogate + nll).sum(), {
    "policy/loss": surrogate,
    "policy/nll_loss": nll,
  }


def plain_gspo_loss(params):
  """GSPO with KL (k2) and entropy terms, written out likewise."""
  _, data = make_data()
  logprobs, entropy = plain_logprobs(params)
  mask = data.policy_mask
  count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
  log_ratio = jnp.where(mask, logprobs - data.old_logprobs, 0.0)
  mean = log_ratio.sum(axis=1, keepdims=True) / count
  # s_i in value, the token's own in gradient.
  ratio = jax.lax.stop_gradient(jnp.exp(mean)) * jnp.exp(
    logprobs - jax.lax.stop_gradient(logprobs)
  )
  bounded = jnp.clip(ratio, 1 - GSPO["clip_low"], 1 + GSPO["clip_high"])
  advantages = data.advantages
  surrogate = -jnp.minimum(ratio * advantages, bounded * advantages)
  k2 = jnp.square(logprobs - make_reference()) / 2
  parts = {
    "policy/loss": surrogate,
    "policy/kl_loss": 0.3 * k2,
    "policy/entropy_loss": -0.2 * entropy,
  }
  parts = {k: jnp.where(mask, x, 0.0) / mask.sum() for k, x in parts.items()}
  return sum(x.sum() for x in parts.values()), parts


def plain_value_loss(params):
  """½ (V − return)² on [B, T] arrays, its total and summands."""
  _, data = make_data()
  tokens, present, before = padded()
  positions = np.maximum(present.cumsum(axis=1) - 1, 0)
  values = make_fns("value").values(
    params, tokens, present.astype(np.int32), positions
  )
  values = jnp.take_along_axis(values, before, axis=1)
  mask = data.value_mask
  errors = 0.5 * jnp.square(values - data.returns)
  loss = jnp.where(mask, errors, 0.0) / mask.sum()
  return loss.sum(), {"value/loss": loss}


PLAIN = {
  "policy": plain_policy_loss,
  "gspo": plain_gspo_loss,
  "value": plain_value_loss,
}


def assert_sum_of(value, terms):
  """A float32 number is the sum of the given terms, however it was added."""
  terms = np.asarray(terms, np.float64)
  # Each of n additions in float32 is off by 2⁻²⁴ of its result at most, which
  # Σ |terms| bounds; the sum itself may be small next to its terms. The few
  # roundings that a term has had before are of that size too, and n is larger.
  additions = np.count_nonzero(terms)
  bound = 2.0**-24 * additions * np.abs(terms).sum()
  assert abs(float(value) - terms.sum()) <= bound


def largest(tree):
  return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


class TestGradient:
  @pytest.mark.parametrize("kind", ["policy", "gspo", "value"])
  def test_equals_that_of_the_plain_loss(self, kind):
    prefixes = make_batch(kind, micro_rows=4).packed.prefixes
    assert prefixes.any() and not prefixes.all()
    compute = jax.jit(jax.value_and_grad(PLAIN[kind], has_aux=True))
    (_, parts), expected = compute(make_params(kind))
    got, metrics = gradient_of_step(kind, 4)
    assert largest(expected) > 0.1
    chex.assert_trees_all_close(
      got, expected, rtol=1e-4, atol=1e-6 * largest(expected)
    )
    for name, terms in parts.items():
      assert_sum_of(metrics[name], terms)
    if kind == "gspo":  # Some responses are inside both bounds, others not.
      for side in ("high", "low"):
        assert 0 < metrics[f"policy/clip_fraction_{side}"] < 0.5
    role = "value" if kind == "value" else "policy"
    np.testing.assert_allclose(
      metrics[f"{role}/grad_norm"], optax.global_norm(expected), rtol=1e-6
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

  def test_wider_rows_are_the_same(self):
    """Other neighbours in a row and more padding behind them."""
    update, _ = make_step("policy")
    batch = make_batch("policy", micro_rows=4, capacity=CAPACITY + 17)
    after, metrics = update(make_state("policy"), batch, TEMPERATURE)
    expected, narrow = gradient_of_step("policy", 4)
    chex.assert_trees_all_close(
      jax.tree.map(
        lambda old, new: old - np.asarray(new),
        make_params("policy"),
        after.params,
      ),
      expected,
      rtol=1e-5,
      atol=1e-6 * largest(expected),
    )
    np.testing.assert_allclose(
      metrics["policy/loss"], narrow["policy/loss"], rtol=1e-5, atol=1e-7
    )

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
      layout.gather(scored.logprobs), data.old_logprobs, data.advantages
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
    kl = losses.kl_k3(data.old_logprobs, layout.gather(scored.logprobs))
    np.testing.assert_allclose(
      metrics["policy/approx_kl"], np.asarray(kl)[mask].mean(), rtol=1e-5
    )
    assert metrics["policy/lr"] == np.float32(1e-2)


class TestWeights:
  def test_token_mean_over_the_whole_mini_batch(self):
    _, data = make_data()
    batch = make_batch("policy", micro_rows=2)
    count = data.policy_mask.sum()
    weights = np.asarray(batch.columns["weights"])
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
    assert set(np.unique(weights)) == {0.0, np.float32(1 / count)}
    np.testing.assert_array_equal(weights > 0, batch.packed.mask)

  def test_nll_has_a_normaliser_of_its_own(self):
    _, data = make_data()
    batch = make_batch("policy", micro_rows=2)
    count = data.positive_mask.sum()
    assert 0 < count < data.policy_mask.sum()
    weights = np.asarray(batch.columns["nll_weights"])
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(np.unique(weights), [0, 1 / count], rtol=1e-6)

  def test_no_correct_response_no_nll(self):
    batch = make_batch("policy", micro_rows=2, rows=[1, 2, 4, 5])
    assert not batch.columns["nll_weights"].any()
    assert batch.columns["weights"].any()

  def test_nothing_judged_trains_on_nothing(self):
    batch = make_batch("policy", micro_rows=2, rows=[3])
    assert not batch.columns["weights"].any()
    assert not batch.packed.mask.any()


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
    weights = batch.weights if kind == "value" else batch.columns["weights"]
    assert weights.sharding.shard_shape((2, 8, CAPACITY))[1] == (
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
    spoiled = batch.columns["advantages"].copy()
    spoiled[batch.packed.count :] = np.nan
    outputs = [
      policy_step(make_state("policy"), b, TEMPERATURE)
      for b in (batch, with_column(batch, "advantages", spoiled))
    ]
    chex.assert_trees_all_equal(*outputs)


class TestStepScale:
  """One update from the same state under several factors."""

  def apply(self, policy_step, scale):
    batch = make_batch("policy", micro_rows=4)
    if scale is not None:
      batch = batch.replace(step_scale=np.float32(scale))
    after, metrics = policy_step(make_state("policy"), batch, TEMPERATURE)
    return jax.device_get(after), metrics

  def test_scales_the_update_and_not_the_optimizer(self, policy_step):
    plain, metrics = self.apply(policy_step, None)
    assert "policy/step_scale" not in metrics
    one, metrics = self.apply(policy_step, 1.0)
    assert metrics["policy/step_scale"] == 1.0
    chex.assert_trees_all_equal(one, plain)
    half, metrics = self.apply(policy_step, 0.5)
    assert metrics["policy/step_scale"] == 0.5
    chex.assert_trees_all_equal(half.opt_state, plain.opt_state)
    before = make_params("policy")
    # Half of an update is exact; only adding it to the weights rounds.
    expected = jax.tree.map(
      lambda old, trace: old - 0.5 * trace.astype(np.float64),
      before,
      optax.tree_utils.tree_get(plain.opt_state, "trace"),
    )
    difference = jax.tree.map(
      lambda got, want: np.abs(got - want) / np.spacing(np.abs(got)),
      half.params,
      expected,
    )
    assert largest(difference) <= 0.5

  def test_a_new_factor_compiles_nothing(self, policy_step):
    self.apply(policy_step, 1.0)
    compiled = policy_step._cache_size()
    self.apply(policy_step, 0.25)
    assert policy_step._cache_size() == compiled

  def test_lies_whole_on_every_device(self):
    mesh = sharding.make_mesh(data=8, fsdp=1, tensor=1)
    batch = make_batch("policy", micro_rows=8)
    placed = step.place(batch.replace(step_scale=np.float32(0.5)), mesh)
    assert placed.step_scale.sharding.is_fully_replicated
    assert step.place(batch, mesh).step_scale is None


class TestNotFinite:
  @pytest.mark.parametrize(
    ("column", "poison"),
    [
      ("advantages", np.nan),
      ("advantages", np.inf),
      ("old_logprobs", np.nan),
      ("weights", -np.inf),
    ],
  )
  def test_is_skipped_and_counted(self, policy_step, column, poison):
    batch = make_batch("policy", micro_rows=4)
    where = tuple(np.argwhere(batch.packed.mask)[3])
    values = np.array(batch.columns[column])
    values[where] = poison
    spoiled = with_column(batch, column, values)
    good, _ = policy_step(make_state("policy"), batch, TEMPERATURE)
    before = jax.device_get(good)
    bad, metrics = policy_step(good, spoiled, TEMPERATURE)
    chex.assert_trees_all_equal(
      jax.device_get((bad.params, bad.opt_state)),
      (before.params, before.opt_state),
    )
    assert (bad.step, bad.skipped, bad.skipped_in_a_row) == (1, 1, 1)
    assert metrics["policy/skipped"] == 1.0
    bad, _ = policy_step(bad, spoiled, TEMPERATURE)
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
    mask = rollout.mask
    np.testing.assert_allclose(
      layout.gather(scored.logprobs)[mask], expected[mask], atol=1e-5
    )
    entropy = -np.sum(np.exp(at) * at, axis=2)
    assert np.ptp(entropy[mask]) > 0.05
    np.testing.assert_allclose(
      layout.gather(scored.entropy)[mask], entropy[mask], atol=1e-5
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
