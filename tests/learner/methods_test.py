"""Parts of methods: settings under which they change nothing; packed rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_algorithm import (
  call,
  flat,
  make_algorithm,
  make_batch,
  make_experience,
  make_rollout,
  noise,
  policy_batch,
)


class TestIdentities:
  @pytest.mark.parametrize(
    ("kind", "level"),
    [("truncate", "token"), ("truncate", "sequence"), ("mask", "geometric")],
  )
  def test_correction_of_equal_logprobs(self, kind, level):
    made = make_algorithm(off_policy__correction=kind, off_policy__level=level)
    plain = policy_batch(make_algorithm())
    assert made.correction is not None
    chex.assert_trees_all_equal(policy_batch(made), plain)
    # It differs as soon as the log-probs do.
    other = make_rollout().behavior_logprobs + 0.5
    changed = policy_batch(made, old_logprobs=other).inputs["weights"]
    assert not np.array_equal(changed, plain.inputs["weights"])

  @pytest.mark.parametrize(
    ("leaf", "on"),
    [
      ("ref_logprobs", {"loss__kl_coefficient": 0.1}),
      ("turn_rewards", {"environment__rewards": "turns"}),
      ("ref_logprobs", {"loss__kl_reward_coefficient": 0.1}),
      ("entropies", {"method__use": ("hapo",)}),
      ("behavior_logprobs", {"off_policy__correction": "truncate"}),
      ("behavior_logprobs", {"method__use": ("vcpo",)}),
      ("version", {"method__use": ("a_3po",)}),
      ("average_logprobs", {"method__use": ("ppo_ewma",)}),
    ],
  )
  def test_what_a_part_that_is_off_rests_on_is_not_asked_for(self, leaf, on):
    assert leaf in make_algorithm(**on).leaves
    assert leaf not in make_algorithm().leaves

  @pytest.mark.parametrize(
    "zero",
    [
      {"reward__overlong_factor": 0.0, "reward__overlong_buffer": 4},
      # No response is truncated or overlong.
      {"estimator__tail_drop": 3},
      {"loss__overlong_filter": True},
    ],
  )
  def test_a_part_that_does_nothing_changes_no_bit(self, zero):
    chex.assert_trees_all_equal(
      make_experience(make_algorithm(**zero)), make_experience(make_algorithm())
    )

  def test_an_endless_horizon_is_a_constant_lambda_of_one(self):
    adaptive = make_algorithm(estimator__alpha=float("inf"))
    constant = {"estimator__lambda_schedule": "constant"}
    made = make_algorithm(estimator__lambda_policy=1.0, **constant)
    expected = make_experience(made)
    chex.assert_trees_all_equal(make_experience(adaptive), expected)
    other = make_experience(
      make_algorithm(estimator__lambda_policy=0.9, **constant)
    )
    assert not np.array_equal(other["advantages"], expected["advantages"])

  def test_infinite_bounds_are_none(self):
    rng = np.random.default_rng(13)
    logprobs, old, advantages = rng.normal(size=(3, 2, 40)).astype(np.float32)
    inputs = {
      "logprobs": logprobs,
      "proximal_logprobs": old,
      "advantages": advantages,
    }

    def policy(dual_clip):
      made = make_algorithm(loss__dual_clip=dual_clip)
      return call(made.policy_loss, inputs)

    def value(clip_value):
      made = make_algorithm(loss__clip_value=clip_value)
      return call(
        made.value_loss,
        {"values": logprobs, "returns": advantages, "old_values": old},
      )

    for loss, bound in ((policy, 1.5), (value, 0.2)):
      chex.assert_trees_all_equal(loss(float("inf")), loss(None))
      assert not np.array_equal(loss(bound).loss, loss(None).loss)

  def test_step_scale_of_equal_weights_is_one(self):
    made = make_algorithm(method__use=("vcpo",))
    scale = policy_batch(made).step_scale
    assert scale.dtype == np.float32 and scale == 1.0
    other = make_rollout().behavior_logprobs + noise(8)
    assert 0 < policy_batch(made, old_logprobs=other).step_scale < 1
    assert policy_batch(make_algorithm()).step_scale is None


# Methods with a loss of their own, and settings that clip some of the random
# tokens below; '' is PPO's clip.
LOSSES = [
  ("", {}),
  ("a_3po", {}),
  ("cispo", {}),
  ("deepseek_v3_2", {}),
  ("dppo", {"divergence": "kl", "delta": 0.01}),
  ("dppo", {"divergence": "tv", "delta": 0.05}),
  ("gspo", {}),
  ("hapo", {}),
  ("kpop", {}),
  ("rloo", {}),
  ("sao", {}),
  ("sapo_gate", {"tau_pos": 4.0}),
  ("sft", {}),
  ("vcpo", {}),
]


class TestPackedRows:
  """Losses must not mix the responses in one row."""

  @pytest.mark.parametrize(("name", "settings"), LOSSES)
  def test_equal_padded_rows(self, name, settings):
    changes = {f"method__{name}__{key}": x for key, x in settings.items()}
    changes["method__use"] = (name,) if name else ()
    if name == "sft":
      changes |= {"data__group_size": 1, "loss__nll_coefficient": 0.0}
    made, batch = make_algorithm(**changes), make_batch()
    mask = make_rollout().mask
    old = make_rollout().behavior_logprobs
    padded = {
      "proximal_logprobs": old,
      "behavior_logprobs": old,
      "advantages": noise(10),
      "interpolation_share": np.where(mask, 0.4, 0.0).astype(np.float32),
      "entropy_code": np.clip(noise(11), -1, 1) * mask,
      "mask": mask,
    }
    logprobs = (old + 0.6 * noise(12)).astype(np.float32)
    scatter = lambda x: jnp.asarray(flat(batch.layout.scatter(x)))
    packed = {k: scatter(v[batch.rows]) for k, v in padded.items()}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def loss(x, inputs, segments):
      out = made.policy_loss(inputs | {"logprobs": x, "segments": segments})
      return jnp.sum(jnp.where(inputs["mask"], out.loss, 0.0)), out

    slope, expected = loss(logprobs, padded, None)
    found = loss(
      scatter(logprobs[batch.rows]), packed, flat(batch.packed.segments)
    )
    rows = np.argsort(batch.rows)
    unpack = lambda x: np.where(mask, batch.layout.gather(x)[rows], 0)
    packed_slope, out = jax.tree.map(unpack, found)
    for field in ("loss", "ratio", "clipped_high", "clipped_low"):
      np.testing.assert_allclose(
        getattr(out, field),
        np.where(mask, getattr(expected, field), 0),
        rtol=2e-6,
        atol=1e-6,
      )
    np.testing.assert_allclose(
      packed_slope, np.where(mask, slope, 0), rtol=2e-6, atol=1e-6
    )
    assert np.asarray(expected.clipped_high)[mask].any() == (
      name not in ("rloo", "sft", "vcpo")
    )
