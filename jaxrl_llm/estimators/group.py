"""Advantages and baselines from the other responses to the same prompt."""

import functools
import numbers
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked
from jaxrl_llm.arrays import of_equal_shape
from jaxrl_llm.errors import check_choice, check_number


def group_relative(
  rewards: chex.Array,
  groups: chex.Array,
  *,
  num_groups: int,
  center: str = "mean",
  scale: str = "std",
  epsilon: chex.Numeric = 1e-6,
) -> jax.Array:
  """Group-relative advantages, A_i = (R_i - center_g) / (scale_g + ε).

  'mean' with 'std' is GRPO and DAPO, 'mean' with 'none' Dr. GRPO,
  'leave_one_out' with 'none' RLOO, 'median' with 'std' or 'mad' MC-GRPO.
  Groups may differ in size, and their rows may be anywhere in the batch.

  Args:
    rewards: [B], one scalar per response.
    groups: int [B], the group of each row. A row outside [0, num_groups) is
      padding: it enters no statistic and gets 0.
    num_groups: number of groups, static.
    center: 'mean', 'median' or 'leave_one_out' (mean of the *other* rows).
    scale: 'std' (Bessel), 'mad' (median absolute deviation from the median)
      or 'none' (divides by 1). 'mad' is usually 0 for binary rewards.
    epsilon: added to the scale, except for 'none'.

  Returns:
    float32 [B]; exactly 0 in a group of one row or of equal rewards.

  Raises:
    ValueError: for an unknown center or scale, a negative epsilon, or
      num_groups below one.

  Reference: Shao et al. 2024 (GRPO), arXiv:2402.03300; Liu et al. 2025 (Dr.
    GRPO), arXiv:2503.20783; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740;
    MC-GRPO 2026, arXiv:2601.22582.

  Example:
    >>> rewards = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0])
    >>> groups = jnp.array([0, 0, 0, 0, 1])  # The last is a group of one.
    >>> print(group_relative(rewards, groups, num_groups=2, scale="none"))
    [ 0.75 -0.25 -0.25 -0.25  0.  ]
    >>> print(group_relative(rewards, groups, num_groups=2, epsilon=0.0))
    [ 1.5 -0.5 -0.5 -0.5  0. ]
  """
  check_choice("center", center, CENTERS)
  check_choice("scale", scale, SCALES)
  check_number("epsilon", epsilon, "[0, inf]")
  rewards, groups, member = _members(rewards, groups, num_groups)
  of = _of_group(groups, num_groups)
  above = _above_least(rewards, of)
  centered = CENTERS[center](above, of)
  divisor = SCALES[scale](above, of, epsilon)
  usable = member & (divisor > 0.0)
  return jnp.where(usable, centered / jnp.where(usable, divisor, 1.0), 0.0)


@of_equal_shape("rewards", "lengths", "groups")
def token_group_relative(
  rewards: chex.Array,
  lengths: chex.Array,
  groups: chex.Array,
  *,
  num_groups: int,
  epsilon: chex.Numeric = 1e-6,
  limit: chex.Numeric = 5.0,
) -> jax.Array:
  """HAPO's token-level group advantages, with statistics over *tokens*.

    μ = Σ l_i R_i / Σ l_i,   σ² = Σ l_i (R_i - μ)² / Σ l_i
    A_i = (R_i - μ) / (σ + ε)

  Every token of a group counts once, as in a token-mean loss, so the advantages
  of a group's tokens sum to 0. A short response whose reward differs from the
  others may get a huge A: a group in which any |A| reaches the limit gets
  `group_relative` (GRPO) advantages instead.

  Args:
    rewards: [B], one scalar per response.
    lengths: int [B], l_i, response tokens.
    groups: int [B], as in `group_relative`.
    num_groups: number of groups, static.
    epsilon: added to the spread.
    limit: smallest |A| that makes a group fall back to GRPO, above 0; infinity
      disables the fallback.

  Returns:
    float32 [B]; exactly 0 in a group of one row or of equal rewards, and for
    a response without a token.

  Raises:
    ValueError: for a negative epsilon, a limit that is not positive, or
      num_groups below one.

  Reference: HAPO 2025, arXiv:2509.16591.

  Example:
    >>> rewards, lengths = jnp.array([1.0, -1.0]), jnp.array([30, 10])
    >>> groups = jnp.array([0, 0])
    >>> A = token_group_relative(rewards, lengths, groups, num_groups=1)
    >>> print(f"{A[0]:.2f} {A[1]:.2f}")  # 30 · 0.58 - 10 · 1.73 ≈ 0.
    0.58 -1.73
  """
  check_number("epsilon", epsilon, "[0, inf]")
  check_number("limit", limit, "(0, inf]")
  # A response without a token is in no group.
  groups = jnp.where(lengths > 0, groups, num_groups)
  rewards, groups, counts = _members(rewards, groups, num_groups)
  of = _of_group(groups, num_groups)
  total = functools.partial(of, masked.segment_sum)
  tokens = masked.masked_fill(lengths, counts)
  share = tokens / jnp.maximum(total(tokens), 1.0)
  above = _above_least(rewards, of)
  centered = jnp.where(counts, above - total(share * above), 0.0)
  variance = total(share * jnp.square(centered))
  scale = jnp.sqrt(variance) + epsilon
  usable = counts & (scale > 0.0)
  advantages = jnp.where(usable, centered / jnp.where(usable, scale, 1.0), 0.0)
  wild = (jnp.abs(advantages) >= limit).astype(jnp.float32)
  by_response = group_relative(
    rewards, groups, num_groups=num_groups, epsilon=epsilon
  )
  return jnp.where(total(wild) > 0, by_response, advantages)


def median_pivot(
  rewards: chex.Array, groups: chex.Array, *, num_groups: int
) -> jax.Array:
  """Marks the pivot of each group, which MC-GRPO excludes from the update.

  The median of a group of odd size is one of its rewards, and the advantage of
  that row is 0: of G + 1 sampled responses, G are trained on. First compute
  advantages with `group_relative(..., center='median')` over all rows.

  Args:
    rewards: [B], one scalar per response.
    groups: int [B], as in `group_relative`.
    num_groups: number of groups, static.

  Returns:
    bool [B], True for exactly one row of each nonempty group: the first row
    with the median reward, or with the lower of the two middle rewards in a
    group of even size. Rows tied with it are False.

  Raises:
    ValueError: for num_groups below one.

  Reference: MC-GRPO 2026, arXiv:2601.22582.

  Example:
    >>> rewards = jnp.array([1.0, 0.0, 0.5])
    >>> print(median_pivot(rewards, jnp.zeros(3, int), num_groups=1))
    [False False  True]
  """
  rewards, groups, member = _members(rewards, groups, num_groups)
  row = jnp.arange(rewards.shape[0])
  _, ordered = jax.lax.sort((groups, rewards), num_keys=2)
  count = masked.segment_count(groups, num_segments=num_groups)
  count = count.astype(jnp.int32)
  middle = jnp.cumsum(count) - count + jnp.maximum(count - 1, 0) // 2
  median = ordered.at[middle].get(mode="clip")[groups]
  tied = member & (rewards == median)
  first = jax.ops.segment_min(
    row, jnp.where(tied, groups, num_groups), num_groups
  )
  return tied & (row == first[groups])


@of_equal_shape("rewards", "weights", "squared_norms")
def optimal_baseline(
  rewards: chex.Array,
  weights: chex.Array,
  squared_norms: chex.Array,
  groups: chex.Array,
  *,
  num_groups: int,
) -> jax.Array:
  """Off-policy optimal baseline, from the other rows of the group.

    b_i = Σ_{j≠i} w_j² g_j² R_j / Σ_{j≠i} w_j² g_j²

  Among constant baselines, this one minimises the variance of
  w (R - b) ∇log π. Leaving the row itself out keeps the estimate unbiased.
  Subtract it: A = R - b.

  Args:
    rewards: [B], one scalar per response.
    weights: [B], w, importance weight of each response. b is optimal if the
      loss uses the same weights, and nearly so if the loss truncates them.
    squared_norms: [B], g² = ‖∇ log π(response)‖². If per-response gradients are
      too expensive, the number of response tokens is a proxy; only proportions
      matter.
    groups: int [B], as in `group_relative`.
    num_groups: number of groups, static. With groups of 0 and num_groups=1, the
      whole batch is one group.

  Returns:
    float32 [B]; a row gets its own reward if no other row of its group has a
    weight, so that its advantage is 0, as in every group of one. 0 for padding.

  Raises:
    ValueError: for num_groups below one.

  Reference: Huang et al. 2026 (VCPO), arXiv:2602.17616, after Greensmith et
    al. 2004, "Variance reduction techniques for gradient estimates in
    reinforcement learning".

  Example:
    >>> rewards = jnp.array([1.0, 0.0, 0.0])
    >>> weights, norms = jnp.ones(3), jnp.array([10.0, 10.0, 30.0])
    >>> groups = jnp.zeros(3, int)
    >>> print(optimal_baseline(rewards, weights, norms, groups, num_groups=1))
    [0.   0.25 0.5 ]
  """
  rewards, groups, member = _members(rewards, groups, num_groups)
  mass = jnp.square(masked.masked_fill(weights, member))
  mass *= masked.masked_fill(squared_norms, member)
  order = jnp.argsort(groups)
  columns = jnp.stack([mass, mass * rewards], axis=1)[order]
  others = _sum_of_others(columns, groups[order])
  total, weighted = jnp.zeros_like(others).at[order].set(others).T
  known = member & (total > 0.0)
  return jnp.where(known, weighted / jnp.where(known, total, 1.0), rewards)


def _sum_of_others(x: jax.Array, groups: jax.Array) -> jax.Array:
  """Returns Σ_{j≠i} x_j within runs of equal groups, [N, K].

  Adds the sum of the rows before i to that of the rows after i: total minus own
  would lose all precision where one row dominates its group.
  """

  def step(total: jax.Array, row: tuple[jax.Array, ...]):
    edge, own = row
    total = jnp.where(edge, 0.0, total)
    return total + own, total

  changes = groups[1:] != groups[:-1]
  edge = jnp.ones(1, bool)
  start = jnp.zeros_like(x[0])
  _, before = jax.lax.scan(step, start, (jnp.append(edge, changes), x))
  _, behind = jax.lax.scan(
    step, start, (jnp.append(changes, edge), x), reverse=True
  )
  return before + behind


def _of_group(groups: jax.Array, num_groups: int) -> Callable[..., jax.Array]:
  """Returns (segment reduction, x [B]) -> result for each row's group, [B]."""

  def of(reduce: Callable[..., jax.Array], x: jax.Array):
    per_group = reduce(x, groups, num_segments=num_groups)
    return per_group.at[groups].get(mode="fill", fill_value=0.0)

  return of


def _above_least(rewards: jax.Array, of: Callable[..., jax.Array]):
  """Returns R_i - smallest of the group; exactly 0 if all rewards are equal.

  Without this the mean of equal rewards is rounded, and dividing by the tiny
  spread amplifies the remainder.
  """
  return rewards - of(masked.segment_min, rewards)


def _leave_one_out(rewards: jax.Array, of: Callable[..., jax.Array]):
  """Returns R_i - mean of the others, G/(G-1) (R_i - mean of all)."""
  count = of(masked.segment_sum, jnp.ones_like(rewards))
  factor = count / jnp.maximum(count - 1.0, 1.0)
  return factor * CENTERS["mean"](rewards, of)


def _mad(rewards: jax.Array, of: Callable[..., jax.Array]):
  """Returns the median of |R - median|."""
  distance = jnp.abs(CENTERS["median"](rewards, of))
  return of(masked.segment_median, distance)


# (rewards, `_of_group`) -> R_i - center of the group.
CENTERS: dict[str, Callable[..., jax.Array]] = {
  "mean": lambda rewards, of: rewards - of(masked.segment_mean, rewards),
  "median": lambda rewards, of: rewards - of(masked.segment_median, rewards),
  "leave_one_out": _leave_one_out,
}
# (rewards, `_of_group`, ε) -> divisor of the group's rewards.
SCALES: dict[str, Callable[..., jax.Array]] = {
  "std": lambda rewards, of, epsilon: of(masked.segment_std, rewards) + epsilon,
  "mad": lambda rewards, of, epsilon: _mad(rewards, of) + epsilon,
  "none": lambda rewards, of, epsilon: jnp.ones_like(rewards),
}


@of_equal_shape("rewards", "groups")
def _members(
  rewards: chex.Array, groups: chex.Array, num_groups: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns rewards, groups and a mask of rows in a group.

  Other rows get the reward 0 and the group num_groups.
  """
  if rewards.ndim != 1:
    raise ValueError(f"rewards has shape {rewards.shape}, not [B]; flatten it")
  if not jnp.issubdtype(groups.dtype, jnp.integer):
    raise ValueError(f"groups has {groups.dtype}, not integers")
  if not isinstance(num_groups, numbers.Integral):
    raise ValueError(f"num_groups={num_groups!r}, expected a whole number")
  check_number("num_groups", num_groups, "[1, inf)")
  member = (groups >= 0) & (groups < num_groups)
  groups = jnp.where(member, groups, num_groups)
  return masked.masked_fill(rewards, member), groups, member
