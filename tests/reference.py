"""Slow float64 NumPy implementations, directly from the papers.

They loop over rows, tokens and groups one at a time, so that a reader can
compare them with the equations, and share no code with the library.
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
  """max(0, 1 - 1 / (α l)) for one response of length l."""
  return 0.0 if length == 0 else max(0.0, 1.0 - 1.0 / (alpha * length))


def group_relative(rewards, groups, center, scale, epsilon):
  """(R_i - center) / (scale + ε) within each group separately, [B]."""
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
  """Reduces a per-token loss [B, T] to a scalar by the named mode."""
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
  """max(-A ρ, -A clip(ρ)) of one token; at most -c A where A < 0."""
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


def categorical_value_loss(logits, target, low, high, sigma):
  """Cross entropy of one token with a Gaussian histogram on [low, high]."""
  bins = len(logits)
  width = (high - low) / bins
  target = min(max(float(target), low), high)
  below = lambda x: math.erf((x - target) / (sigma * width * math.sqrt(2))) / 2
  inside = below(high) - below(low)
  normalizer = math.log(sum(math.exp(z) for z in logits))
  loss = 0.0
  for k in range(bins):
    mass = below(low + (k + 1) * width) - below(low + k * width)
    loss -= mass / inside * (float(logits[k]) - normalizer)
  return loss


def egae(rewards, values, mask, truncated, gamma, lambda_, next_values=None):
  """GAE that bootstraps truncated rows with next_values, or V(s_{l-1})."""
  bootstrap = []
  for i, row in enumerate(mask):
    tokens = np.flatnonzero(row)
    if not truncated[i] or not tokens.size:
      bootstrap.append(0.0)
    elif next_values is None:
      bootstrap.append(float(values[i][tokens[-1]]))
    else:
      bootstrap.append(float(next_values[i]))
  return gae(rewards, values, mask, gamma, lambda_, bootstrap)


def whiten(advantages, mask, center, epsilon):
  """(A - mean) / √(Bessel's variance + ε) over all unmasked tokens."""
  tokens = np.asarray(advantages, np.float64)[mask]
  shift = tokens.mean() if center else 0.0
  scale = np.sqrt(tokens.var(ddof=1) + epsilon)
  return np.where(mask, (np.where(mask, advantages, 0.0) - shift) / scale, 0.0)


def token_group_relative(rewards, lengths, groups, epsilon, limit):
  """Advantages of a group's tokens, computed token by token, [B]."""
  advantages = np.zeros(len(rewards))
  for group in set(groups):
    rows = [i for i, g in enumerate(groups) if g == group and lengths[i] > 0]
    if len(rows) < 2:
      continue
    tokens = [float(rewards[i]) for i in rows for _ in range(lengths[i])]
    found = [
      (float(rewards[i]) - np.mean(tokens)) / (np.std(tokens) + epsilon)
      for i in rows
    ]
    if max(abs(x) for x in found) >= limit:
      members = [rewards[i] for i in rows]
      found = group_relative(
        members, [group] * len(rows), "mean", "std", epsilon
      )
    advantages[rows] = found
  return advantages


def median_pivot(rewards, groups):
  """The first row with the lower median of its group, bool [B]."""
  pivot = np.zeros(len(rewards), bool)
  for group in set(groups):
    rows = [i for i, g in enumerate(groups) if g == group]
    members = sorted(rewards[i] for i in rows)
    median = members[(len(members) - 1) // 2]
    pivot[next(i for i in rows if rewards[i] == median)] = True
  return pivot


def optimal_baseline(rewards, weights, squared_norms, groups):
  """Σ w² g² R / Σ w² g² over the others of the group, [B]."""
  baseline = np.array(rewards, np.float64)
  for i, group in enumerate(groups):
    others = [j for j, g in enumerate(groups) if g == group and j != i]
    mass = [float(weights[j]) ** 2 * float(squared_norms[j]) for j in others]
    if sum(mass) > 0.0:
      total = sum(m * float(rewards[j]) for m, j in zip(mass, others))
      baseline[i] = total / sum(mass)
  return baseline


def entropy_code(entropies, mask, quantile):
  """HAPO's code of each token relative to the nearest-rank quantile, [B, T]."""
  logs = np.log(np.maximum(np.asarray(entropies, np.float64)[mask], 1e-8))
  pivot = np.sort(logs)[max(math.ceil(round(quantile * len(logs), 6)), 1) - 1]
  scaled = (logs - pivot) / np.sqrt(np.mean((logs - pivot) ** 2))
  code = [
    h / scaled.max() if h > 0 else h / abs(scaled.min()) if h < 0 else 0.0
    for h in scaled
  ]
  result = np.zeros(np.shape(mask))
  result[mask] = code
  return result


def gspo_ratio(logprobs, old_logprobs, mask, segments):
  """exp of the mean log-ratio of each token's sequence, [B, T]; 1 if masked."""
  ratio = np.ones(np.shape(mask))
  for i, row in enumerate(segments):
    for segment in set(row):
      tokens = [t for t, s in enumerate(row) if s == segment and mask[i][t]]
      if tokens:
        logs = [
          float(logprobs[i][t]) - float(old_logprobs[i][t]) for t in tokens
        ]
        ratio[i, tokens] = math.exp(min(sum(logs) / len(logs), 10.0))
  return ratio


def importance(proximal, behavior, mask, level):
  """π_prox / π_behav of each token's unit, [B, T]; 0 if masked."""
  ratio = np.zeros(np.shape(mask))
  for i, row in enumerate(mask):
    tokens = np.flatnonzero(row)
    logs = [float(proximal[i][t]) - float(behavior[i][t]) for t in tokens]
    for t, own in zip(tokens, logs):
      log = {
        "token": own,
        "sequence": sum(logs),
        "geometric": sum(logs) / len(logs),
      }[level]
      ratio[i, t] = math.exp(min(max(log, -20.0), 20.0))
  return ratio


def decoupled_loss(
  logprob, proximal, behavior, advantage, low, high, dual=None, cap=math.inf
):
  """min(π_prox/π_behav, cap) × the clipped loss around π_prox; one token."""
  weight = min(math.exp(proximal - behavior), cap)
  return weight * policy_loss(logprob, proximal, advantage, low, high, dual)


def adaptive_clip(code, low, high):
  """HAPO's clip bounds of one token: widened on the side of its code."""
  if code > 0:
    return low, high * (1 + code)
  return low * (1 - code), high


def redistribute(advantage, code, ratio, low, high):
  """A (1 + h) of one token: outside the neutral zone if h > 0, else inside."""
  inside = 1 - low / 2 < ratio < 1 + high / 2
  changed = not inside if code > 0 else inside
  return advantage * (1 + code) if changed else advantage


def hapo_loss(logprob, old_logprob, advantage, code, low, high, dual=None):
  """The clipped loss with one token's bounds and advantage."""
  low, high = adaptive_clip(code, low, high)
  ratio = math.exp(logprob - old_logprob)
  advantage = redistribute(advantage, code, ratio, low, high)
  return policy_loss(logprob, old_logprob, advantage, low, high, dual)
