"""Scoring: log-probs, entropies and values of a batch's tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import ModelFns, PackedRows, TokenLogprobs, ValueFns


def over_micro_batches(score, packed: PackedRows) -> Any:
  """Maps score, micro-batch -> tree of [r, C], over nonempty micro-batches."""
  # Traced once for its shapes and for the loop.
  score = jax.jit(score, inline=True)

  def body(i, out):
    put = lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, i, 0)
    return jax.tree.map(put, out, score(packed.rows(i)))

  shapes = jax.eval_shape(score, packed.rows(0))
  out = jax.tree.map(lambda x: jnp.zeros(packed.tokens.shape, x.dtype), shapes)
  return jax.lax.fori_loop(0, packed.count, body, out)


def score_logprobs(
  params: Any, packed: PackedRows, *, fns: ModelFns
) -> TokenLogprobs:
  """Returns log π(target) and entropy where unmasked, float32 [M, r, C].

  Args:
    params: policy parameters.
    packed: packed rows.
    fns: functions of the policy.
  """
  return over_micro_batches(lambda rows: fns.logprobs(params, rows)[0], packed)


def score_values(
  params: Any, packed: PackedRows, *, fns: ValueFns
) -> dict[str, jax.Array]:
  """Returns a critic's outputs with one number per position, float32 [M, r, C].

  `values` is V(state before target), or V(state after the last token) at the
  last position of a sample.
  """

  def score(rows):
    outputs, _ = fns.outputs(params, rows)
    # An output may be a tree, such as the outputs of several critics.
    has_one = lambda x: getattr(x, "shape", None) == rows.tokens.shape
    return {name: x for name, x in outputs.items() if has_one(x)}

  return over_micro_batches(score, packed)
