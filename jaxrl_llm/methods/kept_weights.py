"""Kept weights: separates sampler-trainer mismatch from staleness.

    π_prox / π_behav = (π_writer / π_behav) (π_prox / π_writer)

The first factor is numerical mismatch: sampler and trainer score a token with
the same weights. The second factor is staleness. Each has its own bound.
Differs from decoupled PPO (AReaL) in that the trainer keeps the weights of
every version that may have sampled a token of a batch, and scores new tokens
with them.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import register, sharding
from jaxrl_llm.learner import choices, providers
from jaxrl_llm.learner.members import Companion, Member


def make(
  policy: Member, mesh: jax.sharding.Mesh, settings: Mapping[str, Any]
) -> Companion:
  """Makes the companion that keeps the last K trained parameters, [K, ...].

  Version v is in slot v mod K until version v + K replaces it. The parameters
  are sharded like the policy's.

  Args:
    policy: the policy.
    mesh: mesh of the policy.
    settings: `keep_weights`, the stored dtype (any but float32 rounds the
      weights), and `versions`, K >= 1.
  """
  del mesh
  versions, dtype = settings["versions"], jnp.dtype(settings["keep_weights"])

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
  # Sharded like the policy, so that the same program scores with them.
  read = jax.jit(read, out_shardings=places)
  return Companion(init.eval_shape(params), init, record=write, read=read)


def writer_logprobs(scoring: providers.Scoring) -> np.ndarray:
  """Scores new tokens in the trainer with the weights that sampled them.

  Every version scores complete mini-batches, as the policy does, so that equal
  weights give bitwise equal log-probs. The scores of the current version are
  reused.

  Returns:
    float32 [B, T]; `old_logprobs` for tokens that are not new.
  """
  rollout, version = scoring.rollout, scoring.state.step
  read = scoring.learner.companions["kept"].read
  new = np.arange(rollout.mask.shape[1]) >= rollout.window_start[:, None]
  wrote = np.where(rollout.mask & new, rollout.version, version)
  out = scoring.policy["old_logprobs"].copy()
  for earlier in np.setdiff1d(wrote, version):
    trained = read(scoring.state.companions["kept"], earlier)
    theirs = wrote == earlier
    rows = theirs.any(axis=1)
    scored = scoring.tokens(
      "policy", providers.LOGPROBS, trained, rows, version=earlier
    )
    out[theirs] = scored[theirs]
  return out


choices.COMPANIONS["kept"] = make
register.leaf(
  "writer_logprobs", writer_logprobs, needs=("policy", "kept", "old_logprobs")
)
