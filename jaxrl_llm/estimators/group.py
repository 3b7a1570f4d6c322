"""Advantages relative to the other responses to the same prompt."""

import numbers
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import masked


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
  Groups may be ragged and their rows lie anywhere in the batch.

  Args:
    rewards: [B], one scalar per response.
    groups: int [B], which group a row belongs to. A row outside
      [0, num_groups) is padding: it enters no statistic and gets 0.
    num_groups: number of groups, static.
    center: 'mean', 'median' or 'leave_one_out' (mean of the *other* rows).
    scale: 'std' (Bessel), 'mad' (median absolute deviation from the median)
      or 'none' (divides by 1). 'mad' is usually 0 for binary rewards.
    epsilon: added to the scale, except for 'none'.

  Returns:
    float32 [B]; exactly 0 in a group of one row or of equal rewards.

  Raises:
    ValueError: for an unknown center or scale, a negative epsilon or a
      num_groups below one.

  Reference: Shao et al. 2024 (GRPO), arXiv:2402.03300; Liu et al. 2025 (Dr.
    GRPO), arXiv:2503.20783; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740;
    MC-GRPO 2026, arXiv:2601.22582.
  """
  chex.assert_rank([rewards, groups], 1)
  chex.assert_equal_shape([rewards, groups])
  _check_choice("center", center, _CENTERS)
  _check_choice("scale", scale, _SCALES)
  if num_groups < 1:
    raise ValueError(f"num_groups={num_groups}, expected at least 1")
  if isinstance(epsilon, numbers.Real) and not epsilon >= 0.0:
    raise ValueError(f"epsilon={epsilon}, expected at least 0")
  groups = jnp.asarray(groups)
  member = (groups >= 0) & (groups < num_groups)
  rewards = masked.masked_fill(rewards, member)
  # Measured from the group's least reward, equal rewards are exactly 0. From
  # zero, their mean rounds, and a tiny std blows the remainder up.
  least = masked.segment_min(rewards, groups, num_segments=num_groups)
  above = rewards - _spread(least, groups)
  centered = _CENTERS[center](above, groups, num_groups)
  divisor = _spread(_SCALES[scale](above, groups, num_groups, epsilon), groups)
  usable = member & (divisor > 0.0)
  return jnp.where(usable, centered / jnp.where(usable, divisor, 1.0), 0.0)


def _mean(rewards, groups, num_groups):
  """R_i - mean of the group."""
  mean = masked.segment_mean(rewards, groups, num_segments=num_groups)
  return rewards - _spread(mean, groups)


def _median(rewards, groups, num_groups):
  """R_i - median of the group."""
  median = masked.segment_median(rewards, groups, num_segments=num_groups)
  return rewards - _spread(median, groups)


def _leave_one_out(rewards, groups, num_groups):
  """R_i - mean of the others, which is G/(G-1) (R_i - mean of all)."""
  count = masked.segment_count(groups, num_segments=num_groups)
  factor = count / jnp.maximum(count - 1.0, 1.0)
  return _spread(factor, groups) * _mean(rewards, groups, num_groups)


def _std(rewards, groups, num_groups, epsilon):
  """Standard deviation with Bessel's correction, plus ε."""
  std = masked.segment_std(rewards, groups, num_segments=num_groups)
  return std + epsilon


def _mad(rewards, groups, num_groups, epsilon):
  """Median of |R - median|, plus ε."""
  distance = jnp.abs(_median(rewards, groups, num_groups))
  mad = masked.segment_median(distance, groups, num_segments=num_groups)
  return mad + epsilon


def _none(rewards, groups, num_groups, epsilon):
  """1 for every group."""
  del rewards, groups, epsilon
  return jnp.ones(num_groups, jnp.float32)


_CENTERS: dict[str, Callable[..., jax.Array]] = {
  "mean": _mean,
  "median": _median,
  "leave_one_out": _leave_one_out,
}
_SCALES: dict[str, Callable[..., jax.Array]] = {
  "std": _std,
  "mad": _mad,
  "none": _none,
}


def _spread(per_group: jax.Array, groups: jax.Array) -> jax.Array:
  """Gives each row its group's number, and padding rows 0."""
  groups = jnp.where(groups >= 0, groups, per_group.shape[0])
  return per_group.at[groups].get(mode="fill", fill_value=0.0)


def _check_choice(name: str, value: str, choices: dict[str, Callable]) -> None:
  if value not in choices:
    raise ValueError(f"{name}={value!r}, expected one of {sorted(choices)}")
