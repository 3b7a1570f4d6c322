"""Chooses next tokens, with temperature, top-k, top-p and min-p as arrays.

The draw inverts the cumulative distribution, in two levels (blocks, then one
block), which costs one pass over the vocabulary instead of one random number
per entry. Top-k and top-p find their probability threshold by bisection over
the bit pattern of a float, so nothing is sorted.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models import context
from jaxrl_llm.models.backends import platform_of
from jaxrl_llm.sampling.processors import Distribution
from jaxrl_llm.sharding import axes_of

# Entries of the vocabulary per block of the two-level draw.
_MIN_BLOCK, _BLOCK = 64, 256
_LANES = 128  # Lanes of a vector register of a TPU.
_BITS_OF_ONE = 0x3F800000  # The bits of 1.0 in float32.
_COLD = 1e-30  # Temperature at which only the most probable tokens have weight.


class Choice(NamedTuple):
  """A token per slot, and its log-prob under the sampling distribution."""

  tokens: jax.Array  # int32 [S].
  logprobs: jax.Array  # float32 [S].


def choose(
  uniform: chex.Array,
  distribution: Distribution,
  *,
  given: chex.Array | None = None,
  sharding: NamedSharding | None = None,
) -> Choice:
  """Draws one token per slot from the softmax after temperature and filters.

  Filters apply in the order top-k, top-p (of the mass left by top-k), min-p;
  ties with the last kept entry are also kept. All settings are arrays: a new
  value never recompiles, and filters that no slot uses cost nothing.

  Args:
    uniform: float32 [S] in [0, 1), one number per slot.
    distribution: logits and settings of the slots.
    given: int32 [S], tokens to use instead of drawing; -1 draws a token. The
      log-prob of one that the filters remove is -inf.
    sharding: sharding of slots; None: one device. Devices that share the
      vocabulary of a slot's logits exchange them, so that each has all logits
      of some slots.

  Returns:
    `Choice`. The log-prob of a greedy slot is 0, as its token has probability
    1. If no token has a probability (logits of NaN, or all of them -inf), the
    token is negative.
  """
  logits, *settings = distribution
  chex.assert_rank([uniform, logits], [1, 2])
  chex.assert_equal_shape([uniform, *settings])
  if given is None:
    given = jnp.full(uniform.shape, -1, jnp.int32)
  arrays = logits, uniform, given, *settings
  on_gpu = platform_of(sharding) == "gpu"
  remove = _filter_on_gpu if on_gpu else _filter
  if sharding is None:
    return _choose(remove, *arrays)
  return _choose_by_slots(remove, sharding, *arrays)


def _choose_by_slots(remove, sharding, *arrays):
  """Chooses on each device for some slots, with their whole vocabulary.

  On its own, XLA gathers all logits on every GPU, and TPUs exchange sums in
  each bisection.
  """
  logits, uniform, *_ = arrays
  mesh, slots = sharding.mesh, sharding.spec[0]
  if len(uniform) % context.num_shards(sharding, 0):
    slots = None
  axes = axes_of("vocab", mesh)
  parts = math.prod(mesh.shape[axis] for axis in axes)
  if logits.shape[1] % parts:
    axes, parts = (), 1

  def on_device(*arrays):
    count = len(arrays[0])
    # Copies of the last slot: zeros would be settings that switch top-p on.
    widths = lambda x: [(0, -count % parts), *[(0, 0)] * (x.ndim - 1)]
    logits, *others = (jnp.pad(x, widths(x), mode="edge") for x in arrays)
    if parts > 1:
      logits = jax.lax.all_to_all(logits, axes, 0, 1, tiled=True)
      own = jax.lax.axis_index(axes)
      others = (x.reshape(parts, -1)[own] for x in others)
    choice = _choose(remove, logits, *others)
    if parts > 1:
      choice = jax.lax.all_gather(choice, axes, tiled=True)
    return jax.tree.map(lambda x: x[:count], choice)

  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(P(slots, axes), *[P(slots)] * (len(arrays) - 1)),
    out_specs=P(slots),
    check_vma=False,  # Pallas kernels do not declare it.
  )(*arrays)


def _choose(remove, logits, uniform, given, temperature, *filters):
  greedy = temperature <= 0
  scale = jnp.where(greedy, _COLD, temperature)[:, None]
  uniform = jnp.where(greedy, 0.0, uniform)  # Ties: the first token.
  logits = logits.astype(jnp.float32)
  # Subtract the maximum before a tiny temperature can make it overflow.
  below = logits - jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(below / scale)
  weights, least = remove(weights, *filters)
  tokens = jnp.where(given >= 0, given, _invert_cdf(uniform, weights))
  pick = lambda x: jnp.take_along_axis(x, tokens[:, None], axis=-1)
  weight = pick(weights)
  # The weight of a given token may underflow without being filtered out.
  underflows = (least <= 0) & (weight < jnp.finfo(weight.dtype).tiny)
  log_weight = jnp.where(underflows, pick(below) / scale, jnp.log(weight))
  logprobs = log_weight[:, 0] - jnp.log(jnp.sum(weights, axis=-1))
  return Choice(tokens, jnp.where(greedy, 0.0, logprobs))


def _invert_cdf(uniform, weights):
  """Returns the first entry whose cumulative weight exceeds uniform · total."""
  slots, size = weights.shape
  block = _block_size(size)
  if size % block:
    weights = jnp.pad(weights, ((0, 0), (0, -size % block)))
  blocks = weights.reshape(slots, -1, block)
  sums = jnp.sum(blocks, axis=-1)
  ends = jnp.cumsum(sums, axis=-1)
  target = uniform * ends[:, -1]
  which = _first_above(ends, sums, target)
  pick = lambda x: jnp.take_along_axis(x, which[:, None], axis=-1)[:, 0]
  inside = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
  rest = target - (pick(ends) - pick(sums))
  within = _first_above(jnp.cumsum(inside, axis=-1), inside, rest)
  return (which * block + within).astype(jnp.int32)


def _block_size(size):
  """Returns a divisor of the vocabulary size in a suitable range, if any.

  Without one, padding the last block copies all weights.
  """
  if size <= _BLOCK:
    return size
  divisors = [n for n in range(_MIN_BLOCK, _BLOCK + 1) if size % n == 0]
  whole_registers_first = lambda n: (n % _LANES == 0, n)
  return max(divisors, key=whole_registers_first, default=_BLOCK)


def _first_above(ends, weights, target):
  """Returns the index of the first end above target, among positive weights.

  Rounding can leave every end at or below the target; even then an entry of
  weight 0 must not be chosen.
  """
  size = weights.shape[-1]
  index = jnp.sum(ends <= target[:, None], axis=-1)
  positive = jnp.where(weights > 0, jnp.arange(size)[None], -1)
  index = jnp.minimum(index, jnp.max(positive, axis=-1))
  # A weight of 0 at this index can also only come from rounding.
  after = jnp.where(positive >= index[:, None], positive, size)
  return jnp.min(after, axis=-1)


def _filter(weights, top_k, top_p, min_p):
  """Returns the weights, 0 where removed, and the smallest kept, [S, 1]."""
  total = lambda of: jnp.sum(of(weights), axis=-1, keepdims=True)
  settings = top_k[:, None], top_p[:, None]
  keep = lambda: _keep(weights, bound(total, *settings), min_p)
  filtered = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
  return jax.lax.cond(
    filtered, keep, lambda: (weights, jnp.zeros_like(weights[:, :1]))
  )


def _filter_on_gpu(weights, top_k, top_p, min_p):
  # Pallas is slow to import, and other platforms do not need it.
  from jaxrl_llm.sampling import filter_gpu

  least = filter_gpu.bounds(weights, top_k, top_p, bound)
  return _keep(weights, least, min_p)


def _keep(weights, least, min_p):
  least = jnp.maximum(least, min_p[:, None])  # The maximum is 1.
  return jnp.where(weights >= least, weights, 0.0), least


def bound(
  total: Callable[[Callable[[jax.Array], jax.Array]], jax.Array],
  top_k: jax.Array,
  top_p: jax.Array,
) -> jax.Array:
  """Returns the smallest weight that top-k, and then top-p, keep; 0 keeps all.

  Args:
    total: sums a function of the weights, at most 1, over the vocabulary.
    top_k: as in `Distribution`, in the shape of a sum.
    top_p: as in `Distribution`, in the shape of a sum.
  """
  count = lambda t: total(lambda w: jnp.where(w >= t, 1.0, 0.0))
  enough = lambda t: (top_k > 0) & (count(t) >= top_k)
  by_k = _threshold(top_k.shape, enough)
  above = lambda t: total(lambda w: jnp.where(w >= t, w, 0.0))
  mass = top_p * above(by_k)
  by_p = _threshold(top_p.shape, lambda t: above(jnp.maximum(t, by_k)) >= mass)
  # top_p=1 keeps all: rounding of the mass must not drop the smallest weights.
  return jnp.where(top_p < 1, jnp.maximum(by_k, by_p), by_k)


def _threshold(shape, enough):
  """Returns the largest float t in [0, 1] with enough(t), 0 if there is none.

  Non-negative floats are ordered like their bit patterns, so 30 bisections find
  the exact value; `enough` is monotone.
  """
  as_float = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
  low = jnp.zeros(shape, jnp.int32)
  high = low + (_BITS_OF_ONE + 1)  # Not enough(high).

  def body(_, bounds):
    low, high = bounds
    middle = (low + high) >> 1
    good = enough(as_float(middle))
    return jnp.where(good, middle, low), jnp.where(good, high, middle)

  low, _ = jax.lax.fori_loop(0, 30, body, (low, high))
  return as_float(low)
