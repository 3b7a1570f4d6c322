"""Choosing the next token: temperature, top-k, top-p, min-p as arrays.

The draw inverts the cumulative distribution, in two levels (blocks, then one
block), which costs one pass over the vocabulary instead of one random number
per entry. Top-k and top-p find their probability threshold by bisection over
the bit pattern of a float, so that nothing is ever sorted.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

_BLOCK = 256  # Entries of the vocabulary per block of the two-level draw.


class Choice(NamedTuple):
  """A token per slot, and its log-prob where it was drawn from."""

  tokens: jax.Array  # int32 [S].
  logprobs: jax.Array  # float32 [S].


def choose(
  uniform: chex.Array,
  logits: chex.Array,
  *,
  temperature: chex.Array,
  top_k: chex.Array,
  top_p: chex.Array,
  min_p: chex.Array,
  given: chex.Array | None = None,
) -> Choice:
  """Draws one token per slot from the filtered, tempered softmax.

  Filters apply in the order top-k, top-p (of what top-k left), min-p; entries
  that tie with the last one kept are kept too. All settings are arrays: a new
  value never compiles anything, and filters that no slot uses cost nothing.

  Args:
    uniform: float32 [S] in [0, 1), one number per slot.
    logits: float32 [S, V].
    temperature: float32 [S]; 0 means greedy.
    top_k: int32 [S]; 0 means off.
    top_p: float32 [S] in (0, 1]; 1 means off.
    min_p: float32 [S] in [0, 1); 0 means off.
    given: int32 [S], tokens to take instead of a draw; -1 means none.

  Returns:
    `Choice`. The log-prob of a greedy slot is 0: it has no other token.
  """
  chex.assert_rank([uniform, logits], [1, 2])
  chex.assert_equal_shape([uniform, temperature, top_k, top_p, min_p])
  greedy = temperature <= 0
  scale = jnp.where(greedy, 1.0, temperature)[:, None]
  logits = logits.astype(jnp.float32)
  # The maximum goes first: a tiny temperature must not divide it to infinity.
  below = logits - jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(below / scale)
  filtered = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
  weights = jax.lax.cond(
    filtered,
    lambda w: _filter(w, top_k, top_p, min_p),
    lambda w: w,
    weights,
  )
  tokens, kept = _invert_cdf(uniform, weights)
  # An argmax costs as much as all of the above on a CPU: only if asked for.
  best = jax.lax.cond(
    jnp.any(greedy),
    lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32),
    lambda _: tokens,
    logits,
  )
  tokens = jnp.where(greedy, best, tokens)
  if given is not None:
    tokens = jnp.where(given >= 0, given, tokens)
    kept = jnp.take_along_axis(weights, tokens[:, None], axis=-1)[:, 0]
  logprobs = jnp.log(kept) - jnp.log(jnp.sum(weights, axis=-1))
  return Choice(tokens, jnp.where(greedy, 0.0, logprobs))


def _invert_cdf(uniform, weights):
  """First entry whose cumulative weight exceeds uniform · total."""
  slots, size = weights.shape
  block = min(_BLOCK, size)
  blocks = jnp.pad(weights, ((0, 0), (0, -size % block)))
  blocks = blocks.reshape(slots, -1, block)
  sums = jnp.sum(blocks, axis=-1)
  ends = jnp.cumsum(sums, axis=-1)
  target = uniform * ends[:, -1]
  which = _first_above(ends, sums, target)
  pick = lambda x: jnp.take_along_axis(x, which[:, None], axis=-1)[:, 0]
  inside = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
  rest = target - (pick(ends) - pick(sums))
  within = _first_above(jnp.cumsum(inside, axis=-1), inside, rest)
  kept = jnp.take_along_axis(inside, within[:, None], axis=-1)[:, 0]
  return (which * block + within).astype(jnp.int32), kept


def _first_above(ends, weights, target):
  """Index of the first end above target, the last positive one at most.

  Rounding can leave every end at or below the target; an entry of weight 0 must
  not be chosen even then.
  """
  size = weights.shape[-1]
  index = jnp.sum(ends <= target[:, None], axis=-1)
  positive = jnp.where(weights > 0, jnp.arange(size)[None], -1)
  index = jnp.minimum(index, jnp.max(positive, axis=-1))
  # A weight of 0 at the index itself can only follow from rounding too.
  weight = jnp.take_along_axis(weights, index[:, None], axis=-1)[:, 0]
  after = jnp.where(positive >= index[:, None], positive, size)
  return jnp.where(weight > 0, index, jnp.min(after, axis=-1))


def _filter(weights, top_k, top_p, min_p):
  size = weights.shape[-1]
  total = functools.partial(jnp.sum, axis=-1, keepdims=True)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)[:, None]
  enough = lambda t: total(weights >= t) >= k
  weights = jnp.where(weights >= _threshold(weights, enough), weights, 0.0)
  mass = top_p[:, None] * total(weights)
  enough = lambda t: total(jnp.where(weights >= t, weights, 0.0)) >= mass
  # top_p 1 keeps all: rounding of the mass must not drop the smallest ones.
  bound = jnp.where(top_p[:, None] < 1, _threshold(weights, enough), 0.0)
  weights = jnp.where(weights >= bound, weights, 0.0)
  return jnp.where(weights >= min_p[:, None], weights, 0.0)  # The maximum is 1.


def _threshold(weights, enough):
  """Largest float t in [0, 1] with enough(t), by bisection over its bits.

  Non-negative floats are ordered like their bit patterns, so 30 halvings find
  the exact value; `enough` is monotone, true at 0.
  """
  as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
  one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
  low = jnp.zeros((weights.shape[0], 1), jnp.int32)
  high = jnp.full_like(low, one + 1)  # enough(low) and not enough(high).

  def body(_, bounds):
    low, high = bounds
    middle = (low + high) // 2
    good = enough(as_float(middle))
    return jnp.where(good, middle, low), jnp.where(good, high, middle)

  low, _ = jax.lax.fori_loop(0, 31, body, (low, high))
  return as_float(low)
