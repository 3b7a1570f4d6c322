"""PPO-EWMA: the ratio is taken against a moving average of the policy.

    θ_prox ← decay θ_prox + (1 - decay) θ, with bias correction

Differs from PPO in the proximal policy, which is not the policy at the start of
the update and so does not depend on the number of mini-batches per batch. The
average scores each mini-batch again; an importance weight corrects for the
sampler.

Reference: Hilton et al. 2021, arXiv:2110.00641.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import losses, sharding
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Settings, core, providers
from jaxrl_llm.learner.members import Companion, Member


def make(policy: Member, mesh: jax.sharding.Mesh, *, decay: float) -> Companion:
  """Makes the moving average of the policy, a dict of 'params' and 'weight'."""

  def init(params: Any):
    copied = jax.tree.map(jnp.copy, params)
    return {"params": copied, "weight": jnp.ones((), jnp.float32)}

  def step(average: dict[str, Any], params: Any, skipped: jax.Array):
    params, weight = losses.ewma_update(
      average["params"], average["weight"], params, decay=decay
    )
    moved = {"params": params, "weight": weight}
    # A skipped update leaves the average unchanged.
    return jax.tree.map(
      lambda new, old: jnp.where(skipped, old, new), moved, average
    )

  params = policy.shapes.trained
  shardings = sharding.tree_shardings(jax.eval_shape(init, params), mesh)
  init = jax.jit(init, out_shardings=shardings)
  step = jax.jit(step, out_shardings=shardings, donate_argnums=0)
  shapes = init.eval_shape(params)
  return Companion(shapes, init, follow=step, scores="proximal_logprobs")


def provide(scoring: providers.Scoring) -> np.ndarray:
  """Provides `average_logprobs` until the average has scored a mini-batch."""
  return scoring.policy["old_logprobs"]


def ppo_ewma(
  algorithm: Algorithm, s: Settings, *, decay: float = 0.889
) -> Algorithm:
  """Takes the ratio against a moving average of the policy.

  Args:
    algorithm: an algorithm with a ratio per token.
    s: settings of the run.
    decay: Decay of the average per update; its center of mass is
      1 / (1 - decay) - 1 updates.
  """
  check_number("decay", decay, "[0, 1)")
  kind, high = core.correction_of(s, otherwise=100.0)
  if s.off_policy.correction == "auto":
    kind = "truncate"
  if kind == "none":
    raise InputError(
      "'ppo_ewma' needs the weight proximal/behavior for a correct policy"
      " gradient; use off_policy.correction='auto'"
    )
  if s.off_policy.proximal != "recompute":
    raise InputError(
      "'ppo_ewma' has a proximal policy of its own; use"
      " off_policy.proximal='recompute'"
    )

  def check(final: Algorithm) -> None:
    per_token = losses.clipped_policy_loss, losses.cispo_loss
    if final.policy_loss.of not in per_token:
      raise InputError(
        "'ppo_ewma' needs a ratio per token; use loss.name='clip' or the method"
        " 'cispo'"
      )

  return algorithm.change(
    proximal="average_logprobs",
    corrections={"importance": core.importance(s, kind, high)},
    companions={"ema": functools.partial(make, decay=decay)},
    providers=providers.provider(
      "average_logprobs", provide, "policy", "ema", "old_logprobs"
    ),
    whole_batch=True,
    checks=(check,),
  )
