"""Kept weights: the sampler's mismatch apart from the updates since.

    π_prox / π_behav = (π_writer / π_behav) (π_prox / π_writer)

The first factor is numerical mismatch, of tokens that the sampler and the
trainer score by the same weights; the second is staleness. Each has a bound of
its own. Differs from decoupled PPO (AReaL) in that the trainer keeps the
weights of every version that may have written a token of a batch, and scores
new tokens by them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import register, sharding
from jaxrl_llm.learner import choices, providers
from jaxrl_llm.learner.members import Companion, Member
from jaxrl_llm.learner.packing import MiniBatch
from jaxrl_llm.models import TokenLogprobs
from jaxrl_llm.types import Rollout


def make_kept_weights(
  policy: Member, *, versions: int, dtype: Any
) -> Companion:
  """Keeps the trained parameters of the last K versions, [K, ...].

  Version v is in slot v mod K until version v + K replaces it. The sharding is
  that of the policy.

  Args:
    policy: the policy.
    versions: K, at least 1.
    dtype: stored dtype; any other than float32 rounds the weights.
  """

  def init(params):
    copies = lambda x: jnp.broadcast_to(x.astype(dtype), (versions, *x.shape))
    return jax.tree.map(copies, params)

  def write(kept, params, version):
    put = functools.partial(
      jax.lax.dynamic_update_index_in_dim, index=version % versions, axis=0
    )
    return jax.tree.map(lambda old, x: put(old, x.astype(dtype)), kept, params)

  def read(kept, version):
    take = functools.partial(
      jax.lax.dynamic_index_in_dim, index=version % versions, keepdims=False
    )
    return jax.tree.map(lambda x: take(x).astype(jnp.float32), kept)

  params = policy.shapes.trained
  places = jax.tree.map(lambda x: x.sharding, params)
  stacked = jax.tree.map(sharding.with_leading_axis, places)
  init = jax.jit(init, out_shardings=stacked)
  write = jax.jit(write, out_shardings=stacked, donate_argnums=0)
  # Sharded like the policy's own, so that the same program scores them.
  read = jax.jit(read, out_shardings=places)
  return Companion(init.eval_shape(params), init, record=write, read=read)


def make(policy: Member, mesh: jax.sharding.Mesh, settings: Mapping[str, Any]):
  """Makes the companion of config group off_policy and `versions`."""
  del mesh
  dtype = jnp.dtype(settings["keep_weights"])
  return make_kept_weights(policy, versions=settings["versions"], dtype=dtype)


def writer_logprobs(
  score: Callable[[Any, MiniBatch], TokenLogprobs],
  params_of: Callable[[int], Any],
  old_logprobs: np.ndarray,
  rollout: Rollout,
  batches: Sequence[MiniBatch],
  *,
  version: int,
) -> np.ndarray:
  """Scores new tokens in the trainer by the weights that sampled them.

  Every version scores whole mini-batches, as the policy does, so that equal
  weights give bitwise equal log-probs.

  Args:
    score: (params, mini-batch) -> packed log-probs and entropies, on the host.
    params_of: (version) -> parameters.
    old_logprobs: [B, T], scores of `version`, which are reused.
    rollout: B responses.
    batches: mini-batches of the rows with new tokens.
    version: version of the policy.

  Returns:
    float32 [B, T]; `old_logprobs` for tokens that are not new.
  """
  new = np.arange(rollout.mask.shape[1]) >= rollout.window_start[:, None]
  wrote = np.where(rollout.mask & new, rollout.version, version)
  out = old_logprobs.copy()
  for earlier in np.setdiff1d(wrote, version):
    params = params_of(earlier)
    for batch in batches:
      theirs = wrote[batch.rows] == earlier
      if theirs.any():
        scored = batch.layout.gather(score(params, batch).logprobs)
        out[batch.rows] = np.where(theirs, scored, out[batch.rows])
  return out


def provide(scoring: providers.Scoring) -> np.ndarray:
  """Provides `writer_logprobs`."""
  read = scoring.learner.companions["kept"].read
  return writer_logprobs(
    lambda trained, batch: scoring.packed("policy", batch, trained),
    lambda version: read(scoring.state.companions["kept"], version),
    scoring.policy["old_logprobs"],
    scoring.rollout,
    scoring.mini_batches["policy"],
    version=scoring.state.step,
  )


choices.COMPANIONS["kept"] = make
register.leaf(
  "writer_logprobs", provide, needs=("policy", "kept", "old_logprobs")
)
