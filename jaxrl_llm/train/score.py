"""Scoring: log-probs and values of packed rollouts under fixed parameters."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models import ModelFns, TokenLogprobs, ValueFns
from jaxrl_llm.train.packing import PackedTokens


def micro_batch(tree: Any, i: chex.Array) -> Any:
  """Slice i of every [M, ...] array."""
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree
  )


def _over_micro_batches(score, packed: PackedTokens) -> Any:
  """score(micro-batch) -> tree of [r, C] for the micro-batches with tokens."""
  arrays = {k: v for k, v in packed.items() if k != "count"}
  put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)

  def body(i, out):
    scores = score(micro_batch(arrays, i))
    return jax.tree.map(lambda old, new: put(old, new, i), out, scores)

  shapes = jax.eval_shape(score, micro_batch(arrays, 0))
  out = jax.tree.map(lambda x: jnp.zeros(packed.tokens.shape, x.dtype), shapes)
  return jax.lax.fori_loop(0, packed.count, body, out)


def score_logprobs(
  params: Any,
  packed: PackedTokens,
  temperature: chex.Numeric,
  *,
  fns: ModelFns,
) -> TokenLogprobs:
  """log π(target) and entropy at every unmasked position, float32 [M, r, C].

  Args:
    params: policy parameters.
    packed: the rows.
    temperature: of the law the responses were sampled from.
    fns: the policy.
  """

  def score(micro):
    return fns.logprobs(
      params,
      micro["tokens"],
      micro["targets"],
      micro["mask"],
      micro["segments"],
      micro["positions"],
      micro["prefixes"],
      temperature,
    )

  return _over_micro_batches(score, packed)


def score_values(
  params: Any, packed: PackedTokens, *, fns: ValueFns
) -> jax.Array:
  """V(state before target) at every position, float32 [M, r, C].

  At the last position of a sample this is V(state after its last token).
  """

  def score(micro):
    return fns.values(
      params,
      micro["tokens"],
      micro["segments"],
      micro["positions"],
      micro["prefixes"],
    )

  return _over_micro_batches(score, packed)
