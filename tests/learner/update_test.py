"""The update is the gradient of the plain loss, however it is split."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.tiny_update import (
  CAPACITY,
  GSPO,
  POLICY_LOSS,
  SAMPLES,
  change_of,
  gradient_of_update,
  largest,
  make_batch,
  make_data,
  make_params,
  places,
  plain_logprobs,
  plain_values,
  updated,
)

from jaxrl_llm import losses, sharding
from jaxrl_llm.learner import packing


def assert_same_metrics(got, expected):
  """Compares metrics that do not depend on micro-batches, as noise does."""
  assert got.keys() == expected.keys()
  for name in [name for name in got if "/gradient_" not in name]:
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-7)


def plain_policy_loss(params):
  """Computes VAPO's policy loss on [B, T] arrays: total and summands."""
  _, data = make_data()
  logprobs, _ = plain_logprobs(params)
  mask, positive = data["policy_mask"], data["positive_mask"]
  loss = POLICY_LOSS(
    logprobs, data["proximal_logprobs"], data["advantages"]
  ).loss
  surrogate = jnp.where(mask, loss, 0.0) / mask.sum()
  nll = -0.1 * jnp.where(positive, logprobs, 0.0) / positive.sum()
  return (surrogate + nll).sum(), {
    "policy/loss": surrogate,
    "policy/nll_loss": nll,
  }


def plain_gspo_loss(params):
  """Computes GSPO with KL (k2) and entropy terms: total and summands."""
  _, data = make_data()
  logprobs, entropy = plain_logprobs(params)
  mask = data["policy_mask"]
  count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
  log_ratio = jnp.where(mask, logprobs - data["proximal_logprobs"], 0.0)
  mean = log_ratio.sum(axis=1, keepdims=True) / count
  # The value is s_i; the gradient is that of the token.
  ratio = jax.lax.stop_gradient(jnp.exp(mean)) * jnp.exp(
    logprobs - jax.lax.stop_gradient(logprobs)
  )
  bounded = jnp.clip(ratio, 1 - GSPO["clip_low"], 1 + GSPO["clip_high"])
  advantages = data["advantages"]
  surrogate = -jnp.minimum(ratio * advantages, bounded * advantages)
  k2 = jnp.square(logprobs - data["ref_logprobs"]) / 2
  parts = {
    "policy/loss": surrogate,
    "policy/kl_loss": 0.3 * k2,
    "policy/entropy_loss": -0.2 * entropy,
  }
  parts = {k: jnp.where(mask, x, 0.0) / mask.sum() for k, x in parts.items()}
  return sum(x.sum() for x in parts.values()), parts


def plain_value_loss(params):
  """Computes ½ (V − return)² on [B, T] arrays: total and summands."""
  _, data = make_data()
  values = plain_values(params)
  mask = data["value_mask"]
  errors = 0.5 * jnp.square(values - data["returns"])
  loss = jnp.where(mask, errors, 0.0) / mask.sum()
  return loss.sum(), {"value/loss": loss}


PLAIN = {
  "policy": plain_policy_loss,
  "gspo": plain_gspo_loss,
  "value": plain_value_loss,
}


def assert_sum_of(value, terms):
  """Checks that a float32 number is a sum of terms, in any order."""
  terms = np.asarray(terms, np.float64)
  # Each of n float32 additions has an error of at most 2⁻²⁴ of its result,
  # which Σ |terms| bounds; the sum may be much smaller. Each term has a few
  # rounding errors of the same size, fewer than n.
  additions = np.count_nonzero(terms)
  bound = 2.0**-24 * additions * np.abs(terms).sum()
  assert abs(float(value) - terms.sum()) <= bound


class TestGradient:
  @pytest.mark.parametrize("kind", ["policy", "gspo", "value"])
  def test_equals_that_of_the_plain_loss(self, kind):
    prefixes = make_batch(kind).packed.prefixes
    assert prefixes.any() and not prefixes.all()
    compute = jax.jit(jax.value_and_grad(PLAIN[kind], has_aux=True))
    (_, parts), expected = compute(make_params(kind))
    got, metrics = gradient_of_update(kind)
    assert largest(expected) > 0.1
    chex.assert_trees_all_close(
      got, expected, rtol=1e-4, atol=1e-6 * largest(expected)
    )
    for name, terms in parts.items():
      assert_sum_of(metrics[name], terms)
    if kind == "gspo":  # Some ratios are inside the bounds.
      for side in ("high", "low"):
        assert 0 < metrics[f"policy/clip_fraction_{side}"] < 0.5
    role = "value" if kind == "value" else "policy"
    np.testing.assert_allclose(
      metrics[f"{role}/grad_norm"], optax.global_norm(expected), rtol=1e-6
    )

  @pytest.mark.parametrize(
    ("kind", "packing"),
    [
      *(("policy", {"micro_batch_size": n}) for n in (1, SAMPLES)),
      ("value", {"micro_batch_size": 1}),
      # Other neighbours in a row and more padding after them.
      ("policy", {"capacity": CAPACITY + 17}),
      # Every response with a separate prompt, as on TPUs.
      *((kind, {"share": False}) for kind in ("policy", "value")),
    ],
  )
  def test_is_the_same_however_rows_are_packed(self, kind, packing):
    packed = make_batch(kind, **packing).packed
    assert packed.prefixes.any() == packing.get("share", True)
    got, metrics = gradient_of_update(kind, **packing)
    expected, whole = gradient_of_update(kind)
    chex.assert_trees_all_close(
      got, expected, rtol=1e-5, atol=1e-6 * largest(expected)
    )
    assert_same_metrics(metrics, whole)

  def test_metrics_are_means_over_the_tokens_trained_on(self):
    _, data = make_data()
    logprobs, _ = jax.jit(plain_logprobs)(make_params("policy"))
    old, mask = data["proximal_logprobs"], data["policy_mask"]
    terms = POLICY_LOSS(logprobs, old, data["advantages"])
    _, metrics = gradient_of_update("policy")
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
    kl = losses.kl_k3(old, logprobs)
    np.testing.assert_allclose(
      metrics["policy/approx_kl"], np.asarray(kl)[mask].mean(), rtol=1e-5
    )
    assert metrics["policy/lr"] == np.float32(1e-2)


class TestMesh:
  @pytest.mark.parametrize(
    ("kind", "shape"),
    [
      ("policy", (2, 2, 1, 2)),
      ("policy", (1, 2, 2, 2)),
      ("value", (2, 2, 1, 2)),
      pytest.param("value", (2, 1, 4, 1), marks=pytest.mark.slow),
    ],
  )
  def test_eight_devices_equal_one(self, kind, shape):
    mesh = sharding.make_mesh(**dict(zip(sharding.AXES, shape)))
    batch = packing.place(make_batch(kind, micro_batch_size=8), mesh)
    weights = batch.inputs["weights"]
    assert weights.sharding.shard_shape((2, 8, CAPACITY))[1] == (
      8 // sharding.batch_size_of(mesh)
    )
    after, metrics = updated(kind, batch, mesh)
    if shape == (1, 2, 2, 2):
      kernel = after.trained["layers"]["mlp"]["up"]["kernel"]
      assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 24)
    expected, one = gradient_of_update(kind)
    chex.assert_trees_all_close(
      change_of(kind, after), expected, rtol=1e-5, atol=1e-6 * largest(expected)
    )
    assert_same_metrics(metrics, one)
    same = lambda x, s: x.sharding.is_equivalent_to(s, x.ndim)
    same = jax.tree.map(same, after.trained, places(kind, mesh).trained)
    assert all(jax.tree.leaves(same))
