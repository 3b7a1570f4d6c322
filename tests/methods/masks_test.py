"""Masks of tokens and sequences, soft gates and the unbiased KL.

Token losses are compared with float64 loops, sequence losses with loops over
rows, and some with results by hand.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_algorithm import (
  call,
  inputs_of_loss,
  make_algorithm,
  policy_batch,
)

from jaxrl_llm import losses
from jaxrl_llm.methods import deepseek_v3_2, dppo, kpop, sao, sapo_gate


def binary_kl(p, q):
  return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def dis(new, old, advantage, low=0.3, high=5.0):
  ratio = new / old
  return ratio * advantage if 1 - low < ratio < 1 + high else 0.0


def dppo_tv(new, old, advantage, delta=0.2):
  if abs(new - old) > delta and advantage * (new - old) > 0:
    return 0.0
  return min(new / old, 20.0) * advantage


def dppo_kl(new, old, advantage, delta=0.05):
  if binary_kl(old, new) > delta and advantage * (new - old) > 0:
    return 0.0
  return min(new / old, 20.0) * advantage


def two_way(new, old, advantage, delta=0.05):
  far = max(binary_kl(old, new), binary_kl(new, old)) > delta
  return 0.0 if far else new / old * advantage


def gate(new, old, advantage, tau_pos=1.0, tau_neg=1.05):
  tau = tau_pos if advantage > 0 else tau_neg
  x = 1 / (1 + math.exp(-tau * (new / old - 1)))
  return 4 * x * (1 - x) * new / old * advantage


# Loss, and minus its gradient with respect to one token's log-prob.
SETTINGS = {"clip_low": 0.3, "clip_high": 5.0}
STEEP = {"tau_pos": 4.0, "tau_neg": 5.0}
PULLS = {
  "dis": (functools.partial(sao.dis_loss, **SETTINGS), dis),
  "icepop": (
    functools.partial(sao.dis_loss, clip_low=0.5, clip_high=4.0),
    functools.partial(dis, low=0.5, high=4.0),
  ),
  "dppo_tv": (dppo.dppo_tv_loss, dppo_tv),
  "dppo_kl": (dppo.dppo_kl_loss, dppo_kl),
  "kpop": (kpop.kpop_loss, two_way),
  "sapo_gate": (sapo_gate.sapo_gate_loss, gate),
  "steep_gate": (
    functools.partial(sapo_gate.sapo_gate_loss, **STEEP),
    functools.partial(gate, **STEEP),
  ),
}
REJECTING = [name for name in PULLS if not name.endswith("gate")]
# Loss, new and old probability, advantage, minus the gradient.
BY_HAND = [
  ("dis", 0.6, 0.5, 2.0, 2.4),
  ("dis", 0.34, 0.5, 1.0, 0.0),  # Below 0.7, for any sign.
  ("dis", 0.34, 0.5, -1.0, 0.0),
  ("dis", 0.59, 0.1, 1.0, 5.9),
  ("dis", 0.61, 0.1, 1.0, 0.0),
  ("icepop", 0.34, 0.5, 1.0, 0.68),
  ("icepop", 0.51, 0.1, 1.0, 0.0),
  ("dppo_tv", 0.6, 0.5, 1.0, 1.2),
  ("dppo_tv", 0.8, 0.5, 1.0, 0.0),
  ("dppo_tv", 0.8, 0.5, -1.0, -1.6),  # Moves back.
  ("dppo_tv", 0.2, 0.5, -1.0, 0.0),
  ("dppo_tv", 0.19, 0.001, 1.0, 20.0),  # A rare token; capped.
  ("dppo_kl", 0.6, 0.5, 1.0, 1.2),  # KL 0.0204.
  ("dppo_kl", 0.7, 0.5, 1.0, 0.0),  # 0.0872.
  ("kpop", 0.6, 0.5, -1.0, -1.2),
  ("kpop", 0.7, 0.5, -1.0, 0.0),
  ("kpop", 0.02, 0.001, 1.0, 20.0),  # Both KLs are small for rare tokens.
  ("sapo_gate", 0.5, 0.5, 3.0, 3.0),
  ("sapo_gate", 1.0, 0.5, 1.0, 1.5728955),
  ("steep_gate", 0.5, 0.5, -3.0, -3.0),
]


def pull(loss, new, old, advantages):
  total = lambda x: loss(x, old, advantages).loss.sum()
  return -jax.jit(jax.grad(total))(new)


def probabilities(seed=0, shape=(6, 50)):
  """Makes new and old probabilities, close or far apart, and advantages."""
  rng = np.random.default_rng(seed)
  new, old = rng.uniform(0.02, 0.98, (2, *shape))
  return new, old, rng.normal(size=shape)


class TestOneToken:
  @pytest.mark.parametrize("name", PULLS)
  def test_equals_reference(self, name):
    loss, slow = PULLS[name]
    new, old, advantages = probabilities()
    logs = np.log(new, dtype=np.float32), np.log(old, dtype=np.float32)
    got = pull(loss, *map(jnp.float32, (*logs, advantages)))
    expected = np.vectorize(slow)(new, old, advantages)
    # The slope of a float32 sigmoid close to 1 has an error of 6e-8.
    atol = 1e-6 if name in REJECTING else 1e-5
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=atol)
    # Flags mark dropped tokens, and those that the gate gives less than half.
    dropped = np.asarray(got == 0)
    if name not in REJECTING:
      half = got / (advantages * new / old) < 0.5
      dropped = half & (advantages * (new - old) > 0)
    out = loss(*map(jnp.float32, (*logs, advantages)))
    np.testing.assert_array_equal(out.clipped_high, dropped & (new > old))
    np.testing.assert_array_equal(out.clipped_low, dropped & (new < old))
    assert dropped.any() and not dropped.all()

  @pytest.mark.parametrize("name", PULLS)
  def test_by_hand(self, name):
    tokens = np.float32([x for one, *x in BY_HAND if one == name])
    new, old, advantages, expected = tokens.T
    got = pull(PULLS[name][0], np.log(new), np.log(old), advantages)
    np.testing.assert_allclose(got, expected, rtol=1e-4)

  def test_certain_tokens_are_finite(self):
    for other in (0.0, -1e-9, -30.0):
      for pair in ((0.0, other), (other, 0.0)):
        assert np.isfinite(losses.binary_kl(*map(jnp.float32, pair)))

  def test_the_gate_is_that_of_ppo_at_the_old_policy(self):
    _, old, advantages = probabilities(1)
    old, advantages = jnp.float32(np.log(old)), jnp.float32(advantages)
    got = pull(sapo_gate.sapo_gate_loss, old, old, advantages)
    np.testing.assert_allclose(got, advantages, rtol=1e-6)


def test_dis_recomputes_no_policy():
  made = make_algorithm(method__use=("sao",), off_policy__proximal="stored")
  assert "old_logprobs" not in made.leaves and made.correction is None


class TestDeepSeek:
  def batch(self):
    new, old, advantages = probabilities(2, (6, 40))
    new = np.log(new).astype(np.float32)
    old = (new + 0.3 * np.log(old)).astype(np.float32)  # Mostly below.
    old[::2] = new[::2] + 0.7
    advantages = np.repeat(advantages[:, :1], 40, axis=1).astype(np.float32)
    advantages[:4] = np.abs(advantages[:4]) * np.array([[1], [1], [-1], [-1]])
    mask = np.arange(40)[None] < np.array([40, 9, 30, 31, 1, 0])[:, None]
    return new, old, advantages, mask

  def loss(self, new, old, advantages, mask):
    out = deepseek_v3_2.clip_off_policy_mask_loss(
      new, old, advantages, mask, None, clip_low=0.2, clip_high=0.28
    )
    return jnp.where(mask, out.loss, 0.0)

  def test_drops_what_is_bad_and_far(self):
    new, old, advantages, mask = self.batch()
    total = lambda x: self.loss(x, old, advantages, mask).sum()
    got = np.asarray(jax.jit(jax.grad(total))(new))
    clip = losses.clipped_policy_loss
    plain = lambda x: jnp.where(
      mask, clip(x, old, advantages, clip_low=0.2, clip_high=0.28).loss, 0.0
    ).sum()
    expected = np.array(jax.grad(plain)(new))
    dropped = [
      row
      for row in range(len(new))
      if mask[row].any()
      and advantages[row, 0] < 0
      and (old - new)[row][mask[row]].astype(np.float64).mean() > 0.5
    ]
    assert 2 in dropped and 0 not in dropped and 3 not in dropped
    expected[dropped] = 0.0
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (got[dropped] == 0).all() and expected[3].any()

  def test_padding_does_not_matter(self):
    new, old, advantages, mask = self.batch()
    total = lambda x, o: self.loss(x, o, advantages, mask).sum()
    nan = lambda x: np.where(mask, x, np.nan)
    value, slope = jax.value_and_grad(total)(nan(new), nan(old))
    assert float(value) == float(total(new, old)) and np.isfinite(slope).all()

  def test_the_kl_is_unbiased_for_tokens_of_any_policy(self):
    """The sum over all tokens under the sampler is ∇KL(π ‖ π_ref)."""
    rng = np.random.default_rng(3)
    logits, ref, behavior = rng.normal(size=(3, 7)).astype(np.float32)
    ref, behavior = map(jax.nn.log_softmax, (ref, behavior))

    def expected(x):
      x = jax.nn.log_softmax(x)
      return jnp.sum(jnp.exp(x) * (x - ref))

    def estimated(x):
      kl = deepseek_v3_2.unbiased_kl(jax.nn.log_softmax(x), ref, behavior)
      return jnp.sum(jnp.exp(behavior) * kl)

    one, other = map(jax.value_and_grad, (estimated, expected))
    np.testing.assert_allclose(one(logits)[0], other(logits)[0], rtol=1e-5)
    np.testing.assert_allclose(one(logits)[1], other(logits)[1], atol=1e-6)
    # By hand: twice the sampler's probability, half of the reference's.
    got = deepseek_v3_2.unbiased_kl(*jnp.log(jnp.array([0.2, 0.4, 0.1])))
    assert float(got) == pytest.approx(2 * (2 - 1 - math.log(2)), rel=1e-5)

  def test_the_config_chooses_both(self):
    made = make_algorithm(
      method__use=("deepseek_v3_2",),
      method__deepseek_v3_2__delta=0.2,
      loss__kl_coefficient=0.1,
      off_policy__proximal="stored",
    )
    assert {"segments", "mask"} <= {*made.policy_loss.reads}
    assert "behavior_logprobs" in made.auxiliary["kl"].loss.reads
    inputs = inputs_of_loss(policy_batch(made))
    inputs["logprobs"] = inputs["proximal_logprobs"] - 0.3
    inputs["advantages"] = -np.ones_like(inputs["advantages"])
    loss = np.asarray(call(made.policy_loss, inputs).loss)
    assert not loss[inputs["mask"]].any()
