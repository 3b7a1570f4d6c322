"""Test-time search: a critic selects which partial responses continue.

Every few tokens, the critic predicts for each of the k responses to a problem
the probability p of becoming correct. k copies of them are selected and
continue with independent random numbers:

  particles   weights ∝ p / (1 − p), resampled systematically
  dora        weights ∝ softmax(p / 0.1) γ, where γ is the diagonal of
              softmax(cos / 0.01), so that equal responses share one weight;
              cos compares the token counts of two responses
  beam        the best quarter, four copies each

Ended responses take part until all responses to their problem have ended.

Reference: Puri et al. 2025 (particles), arXiv:2502.01618; DORA 2025,
arXiv:2506.15707, which compares embeddings of another model.
"""

import functools
from collections.abc import Callable

import numpy as np

from jaxrl_llm.types import Rollout, ended, join_rows, take_rows

_STEPS = 8  # Number of selections in a response of maximum length.
_COPIES = 4  # Copies of a response in a beam.

# (chances [n], token counts of the responses [n, V]) -> weights [n].
Weigh = Callable[[np.ndarray, np.ndarray], np.ndarray]


def odds(chances: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the weights of particles, which sum to 1."""
  del counts
  weights = chances / (1 - chances)
  return weights / weights.sum()


def by_direction(chances: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the weights of DORA, which sum to 1."""
  unit = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1)
  similar = np.exp((unit @ unit.T - 1) / 0.01)
  weights = np.exp((chances - chances.max()) / 0.1)
  weights = weights * np.diag(similar) / similar.sum(axis=1)
  return weights / weights.sum()


def best(chances: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the weights of a beam, which sum to 1."""
  del counts
  width = max(len(chances) // _COPIES, 1)
  rank = np.argsort(np.argsort(-chances, kind="stable"))
  return (rank < width) / width


def systematic(weights: np.ndarray) -> np.ndarray:
  """Returns n indices in proportion to n weights that sum to 1.

  Each index occurs ⌊n w⌋ or ⌈n w⌉ times; a uniform grid replaces random draws.
  """
  offsets = (np.arange(len(weights)) + 0.5) / len(weights)
  found = np.searchsorted(np.cumsum(weights), offsets)
  return np.minimum(found, len(weights) - 1)


def search(
  write: Callable[..., Rollout],
  chance: Callable[[Rollout], np.ndarray],
  rollout: Rollout,
  *,
  weigh: Weigh,
) -> Rollout:
  """Generates complete responses, continuing only the best prefixes.

  Args:
    write: (rows, window=tokens) -> rows, some tokens longer.
    chance: (B responses) -> probability of each to become correct, in (0, 1).
    rollout: B responses without a token, with ascending sample ids.
    weigh: function that returns the weights of the responses to a problem.
  """
  window = max(rollout.tokens.shape[1] // _STEPS, 1)
  while not (over := ended(rollout)).all():
    written = write(take_rows(rollout, ~over), window=window)
    rollout = join_rows([take_rows(rollout, over), written])
    rollout = take_rows(rollout, np.argsort(rollout.sample_id))
    over, chances = ended(rollout), chance(rollout)
    from_rows = np.arange(len(over))
    for group in np.unique(rollout.group):
      own = np.flatnonzero(rollout.group == group)
      if not over[own].all():
        counts = _counts(take_rows(rollout, own))
        from_rows[own] = own[systematic(weigh(chances[own], counts))]
    copies = take_rows(rollout, from_rows)
    rollout = copies.replace(sample_id=rollout.sample_id)
  return join_rows([rollout])


def _counts(rollout: Rollout) -> np.ndarray:
  """Returns how often each token occurs in a response, [B, V]."""
  found = zip(rollout.tokens, rollout.lengths)
  size = rollout.tokens.max() + 1
  return np.stack([np.bincount(x[:n], minlength=size) for x, n in found])


SEARCHES = {
  "particles": functools.partial(search, weigh=odds),
  "dora": functools.partial(search, weigh=by_direction),
  "beam": functools.partial(search, weigh=best),
}
