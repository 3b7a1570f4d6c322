"""POISE: a linear probe of the policy's own hidden states is the baseline.

    A_i = R_i - mean_{j ≠ i} h_j,   h_j = mean_t (w · s_t + c)

w and c regress the rewards on the hidden states s of the middle layer. Differs
from a critic in that it costs half a forward pass and no second model, and from
GRPO in that groups of two suffice. The baseline of a response reads only the
other responses to its prompt: a baseline that read the response itself would
depend on its actions and bias the gradient. The authors fit a ridge regression
on means of the last states; here the probe is trained on the states of all
tokens, with one optimizer step per mini-batch.

Reference: Choi et al. 2026 (POISE), arXiv:2605.07579.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked
from jaxrl_llm.learner import Algorithm, Settings, estimates, part, providers
from jaxrl_llm.learner.algorithm import MemberSpec
from jaxrl_llm.learner.members import Member, Training, make_member
from jaxrl_llm.learner.scoring import over_micro_batches
from jaxrl_llm.learner.update import Objective, Sums
from jaxrl_llm.models import PackedRows, Params

_LEARNING_RATE = 0.01  # High, because the probe is linear.


def make_probe(
  policy: Member, algorithm: Algorithm, mesh: jax.sharding.Mesh
) -> Member:
  """Makes the member that reads the middle layer of the policy."""
  config = policy.fns.config
  period = len(config.period)
  layers = max(config.num_layers // 2 // period, 1) * period

  def init(key: Array):
    zeros = jnp.zeros(config.hidden_size)
    return {"probe_head": {"kernel": zeros, "bias": jnp.zeros(())}}

  def probed(params: Params, rows: PackedRows):
    head = params.trained["probe_head"]
    states = policy.fns.states(params.base, rows, layers)
    return states.astype(jnp.float32) @ head["kernel"] + head["bias"]

  def loss(params: Params, micro: dict[str, Any]):
    packed, inputs = micro["packed"], micro["inputs"]
    error = probed(params, packed) - inputs["outcomes"]
    total = jnp.sum(inputs["weights"] * error**2)
    tokens = jnp.sum(packed.mask, dtype=jnp.float32)
    return total, Sums({"poise/loss": total}, {}, {}, tokens)

  def score(params: Params, packed: PackedRows):
    read = lambda rows: probed(params, rows)
    return over_micro_batches(read, packed)

  training = Training(
    Objective("poise", loss),
    score,
    reads=["outcomes"],
    mask="policy_mask",
    mode="seq-mean-token-mean",
    reads_policy=True,
  )
  settings = dataclasses.replace(
    policy.settings, learning_rate=_LEARNING_RATE, frozen=()
  )
  fns = policy.fns._replace(init=init)
  return make_member(fns, training, settings, mesh)


def cross_probe(
  token_rewards: Array, poise_values: Array, mask: Array, groups: Array
) -> Array:
  """Rewards minus the probe's mean on the other responses, [B, T].

  Args:
    token_rewards: [B, T].
    poise_values: [B, T], output of the probe at every token.
    mask: bool [B, T].
    groups: int [B]; the response of a group of one gets 0.
  """
  count = len(groups)
  own = masked.masked_mean(poise_values, mask, axis=1)
  sums, sizes = (
    jnp.append(x, 0.0)[groups]
    for x in (
      masked.segment_sum(own, groups, num_segments=count),
      masked.segment_count(groups, num_segments=count),
    )
  )
  others = (sums - own) / jnp.maximum(sizes - 1, 1)
  advantages = estimates.outcome(token_rewards) - others
  return estimates.per_token(jnp.where(sizes > 1, advantages, 0.0), mask)


def with_probe(algorithm: Algorithm) -> Algorithm:
  """Adds the probe, and its values as the input `poise_values`."""
  if "poise" in algorithm.members:
    return algorithm
  return algorithm.change(
    inputs={"outcomes": part(estimates.outcome)},
    members={"poise": MemberSpec(make_probe, ("outcomes",))},
    providers=providers.provider(
      "poise_values", providers.of_member("poise"), "poise"
    ),
  )


def poise(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Takes the probe's values of the other responses as the baseline."""
  with_values = with_probe(algorithm)
  return with_values.change(advantages=part(cross_probe), critic=None)
