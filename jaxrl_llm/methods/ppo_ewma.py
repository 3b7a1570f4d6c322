"""PPO-EWMA: the ratio is taken against a moving average of the policy.

    θ_prox ← decay θ_prox + (1 - decay) θ, with bias correction

Differs from PPO in the proximal policy, which is not the policy at the start of
the update and so does not depend on the number of mini-batches per batch. The
average scores each mini-batch again; an importance weight corrects for the
sampler.

Reference: Hilton et al. 2021, arXiv:2110.00641.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import losses, register, sharding
from jaxrl_llm.learner import choices, providers
from jaxrl_llm.learner.members import Companion, Member


def make(
  policy: Member, mesh: jax.sharding.Mesh, settings: Mapping[str, Any]
) -> Companion:
  """Makes the moving average of the policy, a dict of 'params' and 'weight'."""
  decay = settings["ewma_decay"]

  def init(params):
    copied = jax.tree.map(jnp.copy, params)
    return {"params": copied, "weight": jnp.ones((), jnp.float32)}

  def step(average, params, skipped):
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


choices.COMPANIONS["ema"] = make
register.leaf(
  "average_logprobs", provide, needs=("policy", "ema", "old_logprobs")
)
