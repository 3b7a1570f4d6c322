"""VCPO: reduces the variance of training on stale responses.

    A_i = R_i - b_i,   b_i = Σ_{j≠i} w_j² g_j² R_j / Σ_{j≠i} w_j² g_j²
    step *= min(1, √(ρ / reference)),   ρ = (Σ w)² / (n Σ w²)

w is the importance weight of a complete response and g the norm of its
gradient. Differs from RLOO in the baseline, which minimises the variance
off-policy, and in the step size, which shrinks when few responses have most of
the weight. The baseline excludes the response itself, unlike the authors' code.

Reference: Huang et al. 2026, arXiv:2602.17616.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxrl_llm import estimators, losses, models, sharding
from jaxrl_llm.errors import check_choice, check_number
from jaxrl_llm.learner import Algorithm, Settings, estimates, part, providers
from jaxrl_llm.learner.packing import pack, place
from jaxrl_llm.methods.rloo import rloo
from jaxrl_llm.system import processes
from jaxrl_llm.types import Rollout, take_rows

# `gradient_norms` -> input with ‖∇ log π‖² of each response up to a
# constant factor. For tokens with orthogonal gradients of equal norm, it would
# be the length.
SQUARED_NORMS = {"length": "own_lengths", "exact": "squared_gradient_norms"}


def sequence_weights(
  old_logprobs: Array, behavior_logprobs: Array, mask: Array
) -> Array:
  """Returns π_old / π_behav of complete responses, [B], not truncated."""
  log_ratio = jnp.where(mask, old_logprobs - behavior_logprobs, 0.0)
  return jnp.exp(jnp.clip(jnp.sum(log_ratio, axis=1), -20.0, 20.0))


def optimal_baseline(
  token_rewards: Array,
  mask: Array,
  squared_norms: Array,
  groups: Array,
  old_logprobs: Array,
  behavior_logprobs: Array,
) -> Array:
  """Rewards minus the off-policy baseline of minimum variance, [B, T].

  The importance weights of the baseline are not truncated, unlike those of the
  loss; any baseline that excludes the response itself is unbiased.
  """
  rewards = estimates.outcome(token_rewards)
  baseline = estimators.optimal_baseline(
    rewards,
    sequence_weights(old_logprobs, behavior_logprobs, mask),
    squared_norms,
    groups,
    num_groups=groups.shape[0],
  )
  return estimates.per_token(rewards - baseline, mask)


def squared_gradient_norms(gradient_norms: Array) -> Array:
  """Squared norms of the responses' gradients, [B]."""
  return jnp.square(gradient_norms)


def ess_step_scale(
  old_logprobs: Array,
  behavior_logprobs: Array,
  policy_mask: Array,
  *,
  ess_reference: float,
) -> Array:
  """Factor of a step, min(1, √(effective sample ratio / reference)).

  A mini-batch with fewer effective samples than the reference takes a smaller
  step; one with more never exceeds the learning rate.
  """
  weights = sequence_weights(old_logprobs, behavior_logprobs, policy_mask)
  ratio = losses.effective_sample_ratio(weights, jnp.any(policy_mask, axis=1))
  return jnp.minimum(1.0, jnp.sqrt(ratio / ess_reference))


def score_gradient_norms(
  params: models.Params, packed: models.PackedRows, *, fns: models.ModelFns
) -> Array:
  """Gradient norm ‖∇ log π‖ of each micro-batch's response, float32 [M].

  Gradients are computed one after the other, which needs the memory of one
  gradient and the time of M backward passes. 0 for an empty micro-batch.

  Args:
    params: policy parameters; the gradient is with respect to the trained ones.
    packed: micro-batches of one response each, see `one_by_one`.
    fns: functions of the policy.
  """

  def logprob(trained: Any, rows: models.PackedRows):
    whole = params._replace(trained=trained)
    return jnp.sum(fns.logprobs(whole, rows)[0].logprobs)

  def body(i: Array, norms: Array):
    gradient = jax.grad(logprob)(params.trained, packed.rows(i))
    return norms.at[i].set(optax.global_norm(gradient))

  norms = jnp.zeros(len(packed.tokens), jnp.float32)
  return jax.lax.fori_loop(0, packed.count, body, norms)


@functools.cache
def _norms(fns: models.ModelFns, mesh: jax.sharding.Mesh):
  """Returns jitted (params, result of `one_by_one`) -> [M]."""
  score = functools.partial(score_gradient_norms, fns=fns)
  return jax.jit(score, out_shardings=sharding.replicated(mesh))


def one_by_one(
  rollout: Rollout, *, capacity: int, rows: int, micro_batches: int
) -> models.PackedRows:
  """Packs each of B >= 1 samples into its own micro-batch, [M, r, C].

  Args:
    rollout: B samples.
    capacity: tokens per row, C; at least the longest sample.
    rows: rows per micro-batch, r; all but the first row are empty.
    micro_batches: static number of micro-batches, M, at least B.
  """
  each = [
    pack(
      take_rows(rollout, [i]), capacity=capacity, rows=rows, micro_batches=1
    )[0].replace(count=None)
    for i in range(len(rollout.lengths))
  ]
  rest = (0, micro_batches - len(each))

  def joined(*parts):
    parts = np.concatenate(parts)
    return np.pad(parts, [rest] + [(0, 0)] * (parts.ndim - 1))

  return jax.tree.map(joined, *each).replace(count=np.int32(len(each)))


def provide_norms(scoring: providers.Scoring) -> np.ndarray:
  """Provides ‖∇ log π‖ of responses in mini-batches, [B]; 0 for the others."""
  rollout, mesh = scoring.rollout, scoring.learner.mesh
  policy = scoring.learner.policy
  out = np.zeros(len(rollout.lengths), np.float32)
  lengths = rollout.prompt_lengths + rollout.lengths
  longest = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
  # Three row lengths: most responses are far shorter than the longest.
  sizes = itertools.pairwise((0, longest // 4, longest // 2, longest))
  batches = scoring.mini_batches["policy"]
  for batch, (shorter, size) in itertools.product(batches, sizes):
    of_size = (lengths > shorter) & (lengths <= size)
    rows = batch.rows[of_size[batch.rows]]
    if not rows.size:
      continue
    packed = one_by_one(
      take_rows(rollout, rows),
      capacity=size,
      rows=sharding.batch_size_of(mesh),
      micro_batches=len(batch.rows),
    )
    packed = packed.replace(temperature=np.float32(batch.temperature))
    norms = _norms(policy.fns, mesh)(
      scoring.state.params("policy"), place(packed, mesh)
    )
    out[rows] = processes.to_host(norms)[: rows.size]
  return out


def vcpo(
  algorithm: Algorithm,
  s: Settings,
  *,
  gradient_norms: str = "length",
  scale_steps: bool = True,
  ess_reference: float = 1.0,
) -> Algorithm:
  """Off-policy baseline of minimum variance; steps scaled by the sample size.

  Args:
    algorithm: any algorithm; its critic is dropped.
    s: settings of the run.
    gradient_norms: Squared gradient norm of a response: its number of generated
      tokens ('length'), or 'exact', by one backward pass per response.
    scale_steps: Scales steps by sqrt(effective sample ratio / ess_reference).
    ess_reference: Reference effective sample ratio (1 is on-policy), above 0.
  """
  check_choice("gradient_norms", gradient_norms, SQUARED_NORMS)
  check_number("ess_reference", ess_reference, "(0, 1]")
  norms = SQUARED_NORMS[gradient_norms]
  scale = part(ess_step_scale, {"ess_reference": ess_reference})
  return rloo(algorithm, s).change(
    advantages=part(optimal_baseline, squared_norms=norms),
    critic=None,
    inputs={"squared_gradient_norms": part(squared_gradient_norms)},
    providers=providers.provider("gradient_norms", provide_norms, "policy"),
    step_scale=scale if scale_steps else None,
    whole_batch=algorithm.whole_batch or scale_steps,
  )
