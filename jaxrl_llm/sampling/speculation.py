"""Speculative decoding: drafters, and whether drafting pays at the moment.

A drafter proposes the next tokens, which the model then verifies at once.
Whatever it proposes, responses are the same as without: a token is always drawn
from the model's own distribution, with the random number of its index, and a
draft token saves a step only if it is that token. Only the order in which
responses end differs. So the decision to draft may follow the clock, but not in
a run whose batches depend on that order (`constraints.exclusions`).
"""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.errors import check_number
from jaxrl_llm.models import ModelFns
from jaxrl_llm.models.numerics import FORMATS
from jaxrl_llm.system import processes

# (logits [S, 1, V], ahead [S, 1]) -> tokens [S, 1], as the model would draw.
Draw = Callable[[jax.Array, jax.Array], jax.Array]

_RATES_KEPT = 5  # The newest measurements count.


class Drafter(NamedTuple):
  """Pure functions of a drafter's own parameters and KV cache."""

  # (sampler parameters) -> the drafter's own; made anew at every sync.
  params: Callable[[Any], Any]
  # (shards, pages, page_size) -> its paged KV cache; () if it has none.
  init_kv_cache: Callable[..., tuple]
  # (params, tokens [N, C]) -> its contiguous KV cache of contexts.
  prefill: Callable[..., tuple]
  # (params, kv_cache, BlockTables, Slots, active [S], Draw, count=) -> (draft
  #  tokens int32 [S, count], kv_cache). -1 is none. `Slots` has last_token,
  #  position and history, int32 [S, C] with a valid prefix of position + 1
  #  tokens.
  propose: Callable[..., tuple[jax.Array, tuple]] | None


NO_DRAFTER = Drafter(
  params=lambda params: None,
  init_kv_cache=lambda *_: (),
  prefill=lambda *_: (),
  propose=None,
)


def prompt_lookup(*, ngram: int = 3) -> Drafter:
  """Drafts what followed the last n tokens when they stood there before.

  It costs next to nothing and is good where a response repeats its prompt or
  itself, as solutions do.

  Args:
    ngram: n, tokens that must be equal.

  Raises:
    ValueError: `ngram` is below 1.

  Reference:
    Saxena 2023, Prompt lookup decoding.
  """
  check_number("ngram", ngram, "[1, inf)")

  def propose(params, kv_cache, block_tables, slots, active, draw, *, count):
    del params, block_tables, active, draw
    history, last = slots.history, slots.position
    width = history.shape[1]
    index = jnp.arange(width)[None]
    equal = jnp.ones(history.shape, bool)
    for back in range(ngram):
      at = jnp.maximum(last - back, 0)[:, None]
      newest = jnp.take_along_axis(history, at, axis=1)
      earlier = jnp.roll(history, back, axis=1)
      equal &= (earlier == newest) & (index >= back)
    found = jnp.where(equal & (index < last[:, None]), index, -1)
    end = jnp.max(found, axis=1)  # End of the newest earlier n-gram.
    at = end[:, None] + 1 + jnp.arange(count)[None]
    known = (end[:, None] >= ngram - 1) & (at <= last[:, None])
    tokens = jnp.take_along_axis(history, jnp.minimum(at, width - 1), axis=1)
    return jnp.where(known, tokens, -1), kv_cache

  return NO_DRAFTER._replace(propose=propose)


def quantized_copy(fns: ModelFns) -> Drafter:
  """Drafts with the policy itself in 8-bit weights, made anew at every sync.

  It reads a quarter of the bytes of float32 weights (half of bfloat16) and
  draws with the same random numbers, so that it agrees wherever rounding does
  not move a token over the border.

  Args:
    fns: the policy's functions.

  Reference:
    EfficientRollout's drafter: a round-to-nearest copy of today's weights.
  """

  def propose(params, kv_cache, block_tables, slots, active, draw, *, count):
    params = dequantize(params)

    def step(carry, ahead):
      token, kv_cache = carry
      logits, kv_cache, *_ = fns.decode(
        params,
        kv_cache,
        block_tables,
        token,
        slots.position[:, None] + ahead,
        active[:, None],
      )
      drawn = draw(logits, jnp.full_like(token, ahead))
      return (drawn, kv_cache), drawn[:, 0]

    # One step more than tokens: it writes the last one's keys and values.
    (_, kv_cache), tokens = jax.lax.scan(
      step, (slots.last_token[:, None], kv_cache), jnp.arange(count + 1)
    )
    return tokens[:-1].T, kv_cache

  return Drafter(
    params=quantize,
    init_kv_cache=fns.init_kv_cache,
    prefill=lambda params, tokens: fns.prefill(dequantize(params), tokens),
    propose=propose,
  )


class Quantized(NamedTuple):
  """A matrix in 8 bits with a scale for each of its columns."""

  values: chex.Array  # int8 [..., I, O].
  scales: chex.Array  # [..., 1, O], in the dtype of the matrix.


def quantize(params: Any) -> Any:
  """Matrices rounded to the nearest of 255 steps; other arrays stay."""

  def leaf(x):
    kept = x.dtype.itemsize == 1 or not jnp.issubdtype(x.dtype, jnp.floating)
    if x.ndim < 2 or kept:
      return x
    values, scales = FORMATS["int8"].quantise(x)
    return Quantized(values, scales.astype(x.dtype))

  return jax.tree.map(leaf, params)


def dequantize(params: Any) -> Any:
  """The parameters that quantized ones stand for."""
  whole = lambda x: isinstance(x, Quantized)
  leaf = lambda x: x.values.astype(x.scales.dtype) * x.scales if whole(x) else x
  return jax.tree.map(leaf, params, is_leaf=whole)


class AdaptiveSpeculation:
  """Drafts as many tokens as is fastest, by measured tokens per second.

  Tries n draft tokens per step, n / 2 and none. How well drafting does depends
  on how many slots are active: few leave the device idle, many fill it. So
  counts are told apart by powers of two.

  Reference: EfficientRollout changes the number by the share of accepted tokens
  and predicts when drafting pays; here both are measured as speed.
  """

  def __init__(self, num_draft_tokens: int, *, retry: int = 32):
    """Has measured nothing yet.

    Args:
      num_draft_tokens: n, most draft tokens per step; 0 never drafts.
      retry: choices after which a slower number is tried again.
    """
    self._num_draft_tokens = num_draft_tokens
    self._retry = retry
    self._choices = collections.defaultdict(int)
    self._rates = {}  # (bucket, num_draft_tokens) -> newest rates.

  def choose(self, active: int) -> int:
    """Draft tokens per step for so many active slots, in all processes."""
    if not self._num_draft_tokens:
      return 0
    return processes.of_first(self._choose, active)

  def _choose(self, active: int) -> int:
    most = self._num_draft_tokens
    options = list(dict.fromkeys((most, most // 2, 0)))
    for option in options:
      if self.rate(active, option) is None:
        return option
    fastest, *slower = sorted(options, key=lambda n: -self.rate(active, n))
    bucket = _bucket(active)
    self._choices[bucket] += 1
    turn, rest = divmod(self._choices[bucket], self._retry)
    return fastest if rest else slower[turn % len(slower)]

  def observe(
    self, active: int, num_draft_tokens: int, tokens: int, seconds: float
  ) -> None:
    """Takes note of a decode call; the first of a kind compiled: left out."""
    key = (_bucket(active), num_draft_tokens)
    if key not in self._rates:
      self._rates[key] = collections.deque(maxlen=_RATES_KEPT)
      return
    self._rates[key].append(tokens / max(seconds, 1e-9))

  def rate(self, active: int, num_draft_tokens: int) -> float | None:
    """Median tokens per second as measured; None if it was not."""
    rates = sorted(self._rates.get((_bucket(active), num_draft_tokens), ()))
    return rates[len(rates) // 2] if rates else None


def _bucket(active: int) -> int:
  return max(active, 1).bit_length()
