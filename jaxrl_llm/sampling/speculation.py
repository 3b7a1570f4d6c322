"""Speculative decoding: drafters, and the choice of the number of draft tokens.

A drafter proposes the next tokens, which the model then verifies in one step.
Drafting never changes a response: every token is drawn from the model's own
distribution, with the random number of its index, and a draft token saves a
step only if it equals that token. Only the order in which responses end
differs. The decision to draft may therefore depend on measured times, but not
in a run whose batches depend on that order (`constraints.exclusions`).
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

_RATES_KEPT = 5  # A rate is the median of this many newest measurements.


class Drafter(NamedTuple):
  """Pure functions of a drafter's own parameters and KV cache, if it has any.

  Without `propose`, nothing is drafted.
  """

  # (sampler parameters) -> parameters of the drafter; recomputed at every sync.
  params: Callable[[Any], Any] = lambda params: None
  # (shards, pages, page_size) -> paged KV cache of the drafter; () without one.
  init_kv_cache: Callable[..., tuple] = lambda *_: ()
  # (params, tokens [N, C]) -> contiguous KV cache of contexts.
  prefill: Callable[..., tuple] = lambda *_: ()
  # (params, kv_cache, BlockTables, Slots, active [S], Draw, count=) -> (draft
  #  tokens int32 [S, count], kv_cache). -1 is no draft token. `Slots` has
  #  last_token, position and history, int32 [S, C] with a valid prefix of
  #  position + 1 tokens.
  propose: Callable[..., tuple[jax.Array, tuple]] | None = None


def prompt_lookup(*, ngram: int = 3) -> Drafter:
  """Drafts the tokens that followed an earlier occurrence of the last n tokens.

  It costs next to nothing and works well where a response repeats its prompt or
  itself, as solutions do.

  Args:
    ngram: number of tokens that must match, n.

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

  return Drafter(propose=propose)


def quantized_copy(fns: ModelFns) -> Drafter:
  """Drafts with the policy itself in 8-bit weights, quantized at every sync.

  It reads a quarter of the bytes of float32 weights (half of bfloat16) and
  draws with the same random numbers, so it proposes the policy's own token
  except where rounding changes the draw.

  Args:
    fns: the policy's functions.

  Reference:
    EfficientRollout's drafter: a round-to-nearest copy of the current weights.
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

    # One more step than tokens: it writes keys and values of the last token.
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
  """An int8 matrix with one scale per column."""

  values: chex.Array  # int8 [..., I, O].
  scales: chex.Array  # [..., 1, O], in the dtype of the matrix.


def quantize(params: Any) -> Any:
  """Rounds matrices to the nearest of 255 steps; other arrays are unchanged."""

  def leaf(x):
    kept = x.dtype.itemsize == 1 or not jnp.issubdtype(x.dtype, jnp.floating)
    if x.ndim < 2 or kept:
      return x
    values, scales = FORMATS["int8"].quantise(x)
    return Quantized(values, scales.astype(x.dtype))

  return jax.tree.map(leaf, params)


def dequantize(params: Any) -> Any:
  """Multiplies quantized matrices by their scales."""
  whole = lambda x: isinstance(x, Quantized)
  leaf = lambda x: x.values.astype(x.scales.dtype) * x.scales if whole(x) else x
  return jax.tree.map(leaf, params, is_leaf=whole)


class AdaptiveSpeculation:
  """Chooses the fastest number of draft tokens, by measured tokens per second.

  Tries n draft tokens per step, n / 2 and none. The benefit of drafting depends
  on the number of active slots: few leave the device idle, many keep it busy.
  Speeds are therefore measured separately for each power of two of active
  slots.

  Reference: EfficientRollout adapts the number to the acceptance rate and
  predicts when drafting pays off; here measured speed decides both.
  """

  def __init__(self, num_draft_tokens: int, *, retry: int = 32):
    """Makes a chooser without measurements.

    Args:
      num_draft_tokens: maximum number of draft tokens per step, n; 0 never
        drafts.
      retry: choices after which a slower number is tried again.
    """
    self._num_draft_tokens = num_draft_tokens
    self._retry = retry
    self._choices = collections.defaultdict(int)
    self._rates = {}  # (bucket, num_draft_tokens) -> newest rates.

  def choose(self, active: int) -> int:
    """Returns draft tokens per step, the same number in all processes."""
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
    """Records a decode call; the first of its kind compiled and is left out."""
    key = (_bucket(active), num_draft_tokens)
    if key not in self._rates:
      self._rates[key] = collections.deque(maxlen=_RATES_KEPT)
      return
    self._rates[key].append(tokens / max(seconds, 1e-9))

  def rate(self, active: int, num_draft_tokens: int) -> float | None:
    """Returns the median of measured tokens per second; None if unmeasured."""
    rates = sorted(self._rates.get((_bucket(active), num_draft_tokens), ()))
    return rates[len(rates) // 2] if rates else None


def _bucket(active: int) -> int:
  return max(active, 1).bit_length()
