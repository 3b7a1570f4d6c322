"""Logits processors, which change the distribution of the next token.

A processor is a pure device function. Its state is a tree of arrays passed with
every call, so new values do not trigger a recompilation. The engine returns
log-probs under the processed distribution.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Distribution(NamedTuple):
  """Parameters of the distributions of R tokens; see `choose.choose`."""

  logits: jax.Array  # float32 [R, V].
  temperature: jax.Array  # float32 [R], 0 is greedy.
  top_k: jax.Array  # int32 [R], 0 is off.
  top_p: jax.Array  # float32 [R] in (0, 1], 1 is off.
  min_p: jax.Array  # float32 [R] in [0, 1), 0 is off.


class TokenContext(NamedTuple):
  """Positions of the R tokens to draw."""

  index: jax.Array  # int32 [R], response tokens before the drawn one.
  min_tokens: jax.Array  # int32 [R], minimum tokens before a stop token.
  stop_tokens: jax.Array  # int32 [n].


class LogitsProcessor(NamedTuple):
  """A transformation of the distribution.

  Attributes:
    fn: (distribution, context, state) -> distribution.
    stateful: whether it applies only to calls that pass its state; a stateless
      one always applies, with state None.
  """

  fn: Callable[[Distribution, TokenContext, Any], Distribution]
  stateful: bool = False


def add_bias(distribution, context, bias) -> Distribution:
  """Adds a bias [V] to the logits; -inf forbids a token."""
  del context
  return distribution._replace(logits=distribution.logits + bias[None])


def hold_stop_tokens(distribution, context, state) -> Distribution:
  """Forbids stop tokens before the minimum length."""
  del state
  early = context.index < context.min_tokens

  @jax.vmap
  def hold(logits, early):
    tokens = jnp.where(early, context.stop_tokens, len(logits))
    return logits.at[tokens].set(-jnp.inf, mode="drop")

  return distribution._replace(logits=hold(distribution.logits, early))


# Processors of `SamplingSettings`, applied before any others.
BUILT_IN: Mapping[str, LogitsProcessor] = {
  "logit_bias": LogitsProcessor(add_bias, stateful=True),
  "min_new_tokens": LogitsProcessor(hold_stop_tokens),
}
