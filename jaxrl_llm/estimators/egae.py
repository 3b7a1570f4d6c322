"""Advantages of truncated responses (T-PPO)."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_choice, check_number
from jaxrl_llm.estimators.gae import gae


@of_equal_shape(
  "token_rewards", "values", "mask", rows=["truncated", "next_values"]
)
def egae(
  token_rewards: chex.Array,
  values: chex.Array,
  mask: chex.Array,
  truncated: chex.Array,
  *,
  gamma: chex.Numeric,
  lambda_: chex.Numeric,
  boundary: str = "repeat",
  next_values: chex.Array | None = None,
) -> jax.Array:
  """Extended GAE: generalised advantage estimation for unfinished responses.

    δ_t = r_t + γ V(s_{t+1}) - V(s_t)
    A_t = Σ_{k=0}^{l-t-1} (γ λ)^k δ_{t+k},   0 ≤ t < l,  V(s_l) := V(s_{l-1})

  A response that is cut after l tokens has no reward yet. The sum ends at the
  cut, and the value after it repeats the last one, so that with γ = 1 the last
  token of a window gets exactly 0. With γ < 1 it gets -(1 - γ) V(s_{l-1}), an
  unwanted penalty: use γ = 1. A response that ended, by its stop token or at
  the hard limit, has no next state and gets plain GAE, bit for bit.

  Args:
    token_rewards: [..., T], as in `gae`.
    values: [..., T], as in `gae`.
    mask: [..., T], True at the response tokens of the window; as in `gae`.
    truncated: bool [...], True for responses that continue after the window.
    gamma: as in `gae`.
    lambda_: as in `gae`.
    boundary: V(s_l) of truncated rows. 'repeat' takes V of the row's last
      unmasked token, as in the paper; 'bootstrap' takes next_values; 'zero'
      treats the response as ended, which is biased and meant for comparison.
    next_values: [...], V(s_l), read only by 'bootstrap' and in truncated rows.

  Returns:
    float32 [..., T]; 0 in masked slots.

  Raises:
    ValueError: for an unknown boundary, for 'bootstrap' without next_values,
      and as in `gae`.

  Reference: Fan et al. 2025 (T-PPO), arXiv:2506.15050, equation 6.

  Example:
    >>> rewards = jnp.array([[0.0, 1.0], [0.0, 0.0]])
    >>> values = jnp.array([[0.25, 0.5], [0.25, 0.5]])
    >>> mask = jnp.ones((2, 2), bool)
    >>> cut = jnp.array([False, True])  # The second response continues.
    >>> print(egae(rewards, values, mask, cut, gamma=1.0, lambda_=1.0))
    [[0.75 0.5 ]
     [0.25 0.  ]]
  """
  check_choice("boundary", boundary, BOUNDARIES)
  if boundary == "bootstrap" and next_values is None:
    raise ValueError(
      "boundary='bootstrap' needs next_values, the value of the state after"
      " each row's last token"
    )
  return gae(
    token_rewards,
    values,
    mask,
    gamma=gamma,
    lambda_=lambda_,
    bootstrap_value=masked.masked_fill(
      BOUNDARIES[boundary](values, mask, next_values), _cut(mask, truncated)
    ),
  )


@of_equal_shape("values", "mask", rows=["truncated", "next_values"])
def boundary_error(
  values: chex.Array,
  mask: chex.Array,
  truncated: chex.Array,
  next_values: chex.Array,
) -> jax.Array:
  """Mean |V(s_l) - V(s_{l-1})| over cut responses, EGAE's approximation error.

  'repeat' differs from 'bootstrap' at token t by
  (γ λ)^(l-1-t) γ (V(s_l) - V(s_{l-1})), so this number bounds the mean error
  in units of the advantage.

  Args:
    values: [..., T], as in `egae`.
    mask: [..., T], as in `egae`.
    truncated: bool [...], as in `egae`.
    next_values: [...], V(s_l).

  Returns:
    float32 scalar; 0 if no row with a token is truncated.

  Example:
    >>> values, mask = jnp.array([[0.25, 0.75]]), jnp.ones((1, 2), bool)
    >>> cut, following = jnp.array([True]), jnp.array([0.5])
    >>> print(boundary_error(values, mask, cut, following))
    0.25
  """
  cut = _cut(mask, truncated)
  step = masked.masked_fill(next_values, cut) - _last(values, mask)
  return masked.masked_mean(jnp.abs(step), cut)


@of_equal_shape("mask", rows=["truncated"])
def drop_tail(
  mask: chex.Array, truncated: chex.Array, *, tokens: int
) -> jax.Array:
  """Removes the last tokens of each truncated row from a mask.

  For the policy loss only: the advantages of these tokens are the least
  reliable. Estimate advantages with the full mask first, as the TD errors of
  dropped tokens still contribute to those of earlier tokens.

  Args:
    mask: [..., T], True at response tokens; may have holes.
    truncated: bool [...], True for responses that continue.
    tokens: number of unmasked tokens to drop, at least 0.

  Returns:
    bool [..., T].

  Raises:
    ValueError: if tokens is negative.

  Example:
    >>> mask = jnp.array([[True, True, True], [True, True, False]])
    >>> cut = jnp.array([True, False])
    >>> print(drop_tail(mask, cut, tokens=1).astype(int))
    [[1 1 0]
     [1 1 0]]
  """
  mask = jnp.asarray(mask, bool)
  check_number("tokens", tokens, "[0, inf)")
  remaining = jax.lax.cumsum(
    mask.astype(jnp.int32), axis=mask.ndim - 1, reverse=True
  )
  return mask & (
    ~jnp.asarray(truncated, bool)[..., None] | (remaining > tokens)
  )


def _cut(mask: chex.Array, truncated: chex.Array) -> jax.Array:
  """Returns which rows are truncated and have a token, bool [...]."""
  return jnp.asarray(truncated, bool) & jnp.any(mask, axis=-1)


def _last(values: chex.Array, mask: chex.Array) -> jax.Array:
  """Returns the value of each row's last unmasked token, [...]; 0 if empty."""
  mask = jnp.asarray(mask, bool)
  time = jax.lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
  latest = jnp.max(time, axis=-1, keepdims=True, where=mask, initial=-1)
  return masked.masked_sum(values, time == latest, axis=-1)


# (values, mask, next_values) -> V(s_l), [...].
BOUNDARIES: dict[str, Callable[..., jax.Array]] = {
  "repeat": lambda values, mask, next_values: _last(values, mask),
  "bootstrap": lambda values, mask, next_values: next_values,
  "zero": lambda values, mask, next_values: jnp.zeros(jnp.shape(mask)[:-1]),
}
