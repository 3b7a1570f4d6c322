"""Slow NumPy versions, straight from the papers, in float64.

Loops over rows, tokens and groups, one at a time, so that a reader can hold
them against the equations. Shares nothing with the library.
"""

import math

import numpy as np


def gae(rewards, values, mask, gamma, lambda_, bootstrap=None):
  """A_t = δ_t + γ λ_t A_{t+1} over the unmasked tokens of each row, [B, T]."""
  rows, length = np.shape(values)
  lambda_ = np.broadcast_to(np.asarray(lambda_, np.float64), (rows, length))
  advantages = np.zeros((rows, length))
  for i in range(rows):
    next_value = 0.0 if bootstrap is None else float(bootstrap[i])
    running = 0.0
    for t in reversed([t for t in range(length) if mask[i][t]]):
      value = float(values[i][t])
      delta = float(rewards[i][t]) + gamma * next_value - value
      running = delta + gamma * lambda_[i, t] * running
      advantages[i, t] = running
      next_value = value
  return advantages


def lambda_returns(rewards, values, mask, gamma, lambda_, bootstrap=None):
  """G_t = A_t + V(s_t) at unmasked tokens, [B, T]."""
  advantages = gae(rewards, values, mask, gamma, lambda_, bootstrap)
  return np.where(mask, advantages + np.where(mask, values, 0.0), 0.0)


def length_adaptive_lambda(length, alpha):
  """max(0, 1 - 1 / (α l)) of one response."""
  return 0.0 if length == 0 else max(0.0, 1.0 - 1.0 / (alpha * length))


def group_relative(rewards, groups, center, scale, epsilon):
  """(R_i - center) / (scale + ε) with every group treated on its own, [B]."""
  rewards = np.asarray(rewards, np.float64)
  advantages = np.zeros(len(rewards))
  for group in set(groups):
    rows = [i for i, g in enumerate(groups) if g == group]
    if len(rows) == 1:
      continue
    members = rewards[rows]
    divisor = {
      "std": lambda x: np.std(x, ddof=1) + epsilon,
      "mad": lambda x: np.median(np.abs(x - np.median(x))) + epsilon,
      "none": lambda x: 1.0,
    }[scale](members)
    for place, row in enumerate(rows):
      others = np.delete(members, place)
      middle = {
        "mean": np.mean(members),
        "median": np.median(members),
        "leave_one_out": np.mean(others),
      }[center]
      advantages[row] = (rewards[row] - middle) / divisor
  return advantages


def aggregate(loss, mask, mode, norm=None):
  """The named reduction of a per-token loss, [B, T] -> scalar."""
  sequences = [
    [x for x, kept in zip(row, row_mask) if kept]
    for row, row_mask in zip(loss, mask)
  ]
  sequences = [x for x in sequences if x]
  if not sequences:
    return 0.0
  if mode == "token-mean":
    return float(np.mean([x for row in sequences for x in row]))
  if mode == "seq-mean-token-mean":
    return float(np.mean([np.mean(row) for row in sequences]))
  if mode == "seq-mean-token-sum":
    return float(np.mean([np.sum(row) for row in sequences]))
  if mode == "seq-mean-token-sum-norm":
    return float(np.sum([np.sum(row) for row in sequences])) / norm
  if mode == "dr-grpo":
    return float(np.mean([np.sum(row) / norm for row in sequences]))
  raise KeyError(mode)


def policy_loss(logprob, old_logprob, advantage, low, high, dual=None):
  """max(-A ρ, -A clip(ρ)), and at most -c A where A < 0; of one token."""
  ratio = math.exp(min(max(logprob - old_logprob, -20.0), 20.0))
  clipped = min(max(ratio, 1.0 - low), 1.0 + high)
  loss = max(-advantage * ratio, -advantage * clipped)
  if dual is not None and advantage < 0:
    loss = min(loss, -dual * advantage)
  return loss


def value_loss(value, target, old_value=None, clip=None):
  """½ max((V - G)², (clip(V) - G)²) of one token."""
  error = (value - target) ** 2
  if clip is not None:
    moved = min(max(value, old_value - clip), old_value + clip)
    error = max(error, (moved - target) ** 2)
  return 0.5 * error
