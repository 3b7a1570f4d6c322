"""Kept weights: separates sampler-trainer mismatch from staleness.

    π_prox / π_behav = (π_writer / π_behav) (π_prox / π_writer)

The first factor is numerical mismatch: sampler and trainer score a token with
the same weights. The second factor is staleness. Each has its own bound.
Differs from decoupled PPO (AReaL) in that the trainer keeps the weights of
every version that may have sampled a token of a batch, and scores new tokens
with them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config, sharding
from jaxrl_llm.errors import InputError, check_choice, check_number
from jaxrl_llm.learner import Algorithm, Settings, core, providers
from jaxrl_llm.learner.members import Companion, Member


def make(
  policy: Member, mesh: jax.sharding.Mesh, *, versions: int, dtype: str
) -> Companion:
  """Makes the companion that keeps the last K trained parameters, [K, ...].

  Version v is in slot v mod K until version v + K replaces it. The parameters
  are sharded like the policy's.

  Args:
    policy: the policy.
    mesh: mesh of the policy.
    versions: K, at least 1.
    dtype: stored data type; any but float32 rounds the weights.
  """

  def init(params: Any):
    copies = lambda x: jnp.broadcast_to(x.astype(dtype), (versions, *x.shape))
    return jax.tree.map(copies, params)

  def write(kept: Any, params: Any, version: int):
    put = functools.partial(
      jax.lax.dynamic_update_index_in_dim, index=version % versions, axis=0
    )
    return jax.tree.map(lambda old, x: put(old, x.astype(dtype)), kept, params)

  def read(kept: Any, version: int):
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


def kept_weights(
  algorithm: Algorithm,
  s: Settings,
  *,
  dtype: str = "float32",
  mismatch_high: float = 2.0,
) -> Algorithm:
  """Corrects for writer/behavior and for proximal/writer, each in its bounds.

  Costs memory for the weights of all versions in a batch, and a scoring pass
  for each.

  Args:
    algorithm: an algorithm with an off-policy correction.
    s: settings of the run.
    dtype: Data type of the kept weights, 'float32' or 'bfloat16'.
    mismatch_high: Upper bound of writer/behavior; off_policy.high then bounds
      proximal/writer.
  """
  check_choice("dtype", dtype, ("float32", "bfloat16"))
  check_number("mismatch_high", mismatch_high, "[1, inf)")
  kind, high = core.correction_of(s)
  versions = config.most_staleness(s)
  if s.off_policy.correction == "none":
    raise InputError(
      "only a correction uses kept weights; use off_policy.correction='auto'"
    )
  if not versions:
    raise InputError(
      "all tokens are from the newest weights; set schedule.lag, or"
      " schedule.stop='first_groups'"
    )
  if s.schedule.replay:
    raise InputError(
      "replayed tokens are older than kept weights; use schedule.replay=0"
    )
  if s.sampler.exact:
    raise InputError(
      "kept weights are scored in packed rows; use sampler.exact=False"
    )
  writer = {"proximal_logprobs": "writer_logprobs"}
  stale = {"behavior_logprobs": "writer_logprobs"}

  def check(final: Algorithm) -> None:
    own = "staleness" in final.corrections
    if not own or final.proximal != "old_logprobs":
      raise InputError(
        "staleness is measured from the policy at the start of the update; use"
        " off_policy.proximal='recompute', and no method with its own"
      )

  return algorithm.change(
    corrections={
      "mismatch": core.importance(s, kind, mismatch_high, **writer),
      "staleness": core.importance(s, kind, high, **stale),
    },
    companions={
      "kept": functools.partial(make, versions=versions, dtype=dtype)
    },
    providers=providers.provider(
      "writer_logprobs", writer_logprobs, "policy", "kept", "old_logprobs"
    ),
    checks=(check,),
    shaped_by=("schedule.max_staleness",),
  )
