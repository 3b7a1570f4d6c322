"""Scoring: log-probs, entropies and values of a batch's tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.learner.packing import MiniBatch, PackedTokens
from jaxrl_llm.models import ModelFns, Params, TokenLogprobs, ValueFns
from jaxrl_llm.types import Rollout


def _over_micro_batches(score, packed: PackedTokens) -> Any:
  """Maps score, micro-batch -> tree of [r, C], over nonempty micro-batches."""

  def body(i, out):
    scores = score(packed.rows(i))
    return jax.tree.map(
      lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, i, axis=0),
      out,
      scores,
    )

  shapes = jax.eval_shape(score, packed.rows(0))
  out = jax.tree.map(lambda x: jnp.zeros(packed.tokens.shape, x.dtype), shapes)
  return jax.lax.fori_loop(0, packed.count, body, out)


def score_logprobs(
  params: Any, packed: PackedTokens, temperature: chex.Numeric, *, fns: ModelFns
) -> TokenLogprobs:
  """log π(target) and entropy at every unmasked position, float32 [M, r, C].

  Args:
    params: policy parameters.
    packed: the rows.
    temperature: that the responses were sampled at.
    fns: the policy.
  """
  score = lambda rows: fns.logprobs(params, rows, temperature)[0]
  return _over_micro_batches(score, packed)


def score_values(
  params: Any, packed: PackedTokens, *, fns: ValueFns
) -> jax.Array:
  """V(state before target) at every position, float32 [M, r, C].

  At the last position of a sample this is V(state after its last token).
  """
  return _over_micro_batches(lambda rows: fns.values(params, rows)[0], packed)


def score_gradient_norms(
  params: Params,
  packed: PackedTokens,
  temperature: chex.Numeric,
  *,
  fns: ModelFns,
) -> jax.Array:
  """Gradient norm ‖∇ log π‖ of each micro-batch's response, float32 [M].

  One gradient at a time, at the memory of one and the time of M backward
  passes. 0 for a micro-batch without a response.

  Args:
    params: policy parameters; the gradient is that of the trained ones.
    packed: micro-batches of one response each, see `packing.one_by_one`.
    temperature: that the responses were sampled at.
    fns: the policy.
  """

  def logprob(trained, rows):
    whole = params._replace(trained=trained)
    return jnp.sum(fns.logprobs(whole, rows, temperature)[0].logprobs)

  def body(i, norms):
    gradient = jax.grad(logprob)(params.trained, packed.rows(i))
    return norms.at[i].set(optax.global_norm(gradient))

  norms = jnp.zeros(len(packed.tokens), jnp.float32)
  return jax.lax.fori_loop(0, packed.count, body, norms)


def policy_scores(
  score: Callable[[Any, MiniBatch], TokenLogprobs],
  params: Any,
  reference: Any,
  rollout: Rollout,
  batches: Sequence[MiniBatch],
  *,
  reads_old: bool,
) -> dict[str, np.ndarray]:
  """Scores responses by the policy before the update and by the reference.

  Args:
    score: (params, mini-batch) -> packed log-probs and entropies, on the host.
    params: parameters of the policy.
    reference: parameters of the KL's reference; None without a KL.
    rollout: B responses.
    batches: mini-batches of the rows to score.
    reads_old: whether the algorithm reads the policy's scores. If not, only the
      first mini-batch is scored, for the parity of sampler and trainer.

  Returns:
    `old_logprobs`, `entropies` and `ref_logprobs`, [B, T], 0 where not scored;
    `scored`, bool [B], rows with the first two.
  """
  names = ("old_logprobs", "entropies", "ref_logprobs")
  out = {n: np.zeros(rollout.mask.shape, np.float32) for n in names}
  out["scored"] = np.zeros(len(rollout.lengths), bool)
  for i, batch in enumerate(batches):
    gather = batch.layout.gather
    if reads_old or i == 0:
      scored = score(params, batch)
      out["old_logprobs"][batch.rows] = gather(scored.logprobs)
      out["entropies"][batch.rows] = gather(scored.entropy)
      out["scored"][batch.rows] = True
    if reference is not None:
      scored = score(reference, batch)
      out["ref_logprobs"][batch.rows] = gather(scored.logprobs)
  return out


def writer_logprobs(
  score: Callable[[Any, MiniBatch], TokenLogprobs],
  params_of: Callable[[int], Any],
  old_logprobs: np.ndarray,
  rollout: Rollout,
  batches: Sequence[MiniBatch],
  *,
  version: int,
) -> np.ndarray:
  """Scores new tokens in the trainer by the weights that sampled them.

  Every version scores whole mini-batches, as the policy does, so that equal
  weights give bitwise equal log-probs.

  Args:
    score: as in `policy_scores`.
    params_of: (version) -> parameters.
    old_logprobs: [B, T], scores of `version`, which are reused.
    rollout: B responses.
    batches: mini-batches of the rows with new tokens.
    version: version of the policy.

  Returns:
    float32 [B, T]; `old_logprobs` for tokens that are not new.
  """
  new = np.arange(rollout.mask.shape[1]) >= rollout.window_start[:, None]
  wrote = np.where(rollout.mask & new, rollout.version, version)
  out = old_logprobs.copy()
  for earlier in np.setdiff1d(wrote, version):
    params = params_of(earlier)
    for batch in batches:
      theirs = wrote[batch.rows] == earlier
      if theirs.any():
        scored = batch.layout.gather(score(params, batch).logprobs)
        out[batch.rows] = np.where(theirs, scored, out[batch.rows])
  return out


def critic_scores(
  score: Callable[[Any, MiniBatch], np.ndarray],
  params: Any,
  rollout: Rollout,
  batches: Sequence[MiniBatch],
) -> dict[str, np.ndarray]:
  """Returns `values` [B, T] and `next_values` [B], V after the last token."""
  values = np.zeros(rollout.mask.shape, np.float32)
  next_values = np.zeros(len(rollout.lengths), np.float32)
  for batch in batches:
    scored = score(params, batch)
    values[batch.rows] = batch.layout.gather(scored)
    next_values[batch.rows] = batch.layout.gather_last(scored)
  return {"values": values, "next_values": next_values}
