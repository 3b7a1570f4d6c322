"""HL-Gauss: a critic that predicts a distribution over K bins of equal width.

    V = Σ_k softmax(z)_k c_k,  c_k the centre of bin k
    L = -Σ_k p_k log softmax(z)_k,  p a Gaussian around the return

Differs from the critics of PPO and VAPO in the head and its loss,
classification instead of regression.

Reference: Farebrother et al. 2024, arXiv:2403.03950.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm import losses
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Settings, part
from jaxrl_llm.models import ValueHead


class CategoricalHead(ValueHead):
  """A critic's head whose outputs are logits of bins over its support.

  Logits of 0 give the value in the middle of the support.
  """

  def read(self, outputs: chex.Array) -> dict[str, jax.Array]:
    """Returns `values` [...] from logits [..., K], and `value_logits`."""
    low, high = self.support
    width = (high - low) / self.outputs
    centres = low + width * (jnp.arange(self.outputs) + 0.5)
    centres = jnp.expand_dims(centres, tuple(range(outputs.ndim - 1)))
    values = jnp.sum(jax.nn.softmax(outputs) * centres, axis=-1)
    return {"values": values, "value_logits": outputs}


def categorical_value_loss(
  value_logits: chex.Array,
  returns: chex.Array,
  *,
  low: float,
  high: float,
  sigma: float = 0.75,
) -> losses.ClippedValueLoss:
  """Cross entropy between a Gaussian around the return and a critic's K bins.

    L = -Σ_k p_k log softmax(z)_k
    p_k ∝ Φ((e_{k+1} - G) / s) - Φ((e_k - G) / s)

  e_0 = low, ..., e_K = high are the edges of the bins, s is sigma bin widths.
  The gradient with respect to z is softmax(z) - p: it is bounded however far G
  is from V, so noisy returns affect it less than the gradient of a squared
  error.

  Args:
    value_logits: [..., K], z, logits of the bins.
    returns: [...], G, targets, clipped to [low, high]. No gradient is stopped
      here.
    low: lower edge of the first bin.
    high: upper edge of the last bin. Returns should be several bin widths
      inside the edges, where the mean of p equals G.
    sigma: standard deviation of the Gaussian in bin widths.

  Returns:
    A `losses.ClippedValueLoss` of shape [...], not reduced; nothing is clipped.

  Raises:
    ValueError: if low is not below high, or sigma is not positive.

  Example:
    >>> logits, returns = jnp.zeros((2, 3)), jnp.array([0.0, 1.5])
    >>> out = categorical_value_loss(logits, returns, low=-1.5, high=1.5)
    >>> print(out.loss)
    [1.0986123 1.0986123]
  """
  value_logits = jnp.asarray(value_logits, jnp.float32)
  returns = jnp.asarray(returns, jnp.float32)
  chex.assert_equal_shape([value_logits[..., 0], returns])
  check_number("high", high, f"({low}, inf)")
  check_number("sigma", sigma, "(0, inf)")
  edges = jnp.linspace(low, high, value_logits.shape[-1] + 1)
  edges = jnp.expand_dims(edges, tuple(range(returns.ndim)))
  deviation = sigma * (high - low) / value_logits.shape[-1]
  distance = edges - jnp.clip(returns, low, high)[..., None]
  below = jax.lax.erf(distance / (math.sqrt(2) * deviation))
  target = jnp.diff(below) / (below[..., -1:] - below[..., :1])
  loss = -jnp.sum(target * jax.nn.log_softmax(value_logits), axis=-1)
  return losses.ClippedValueLoss(loss, jnp.zeros(loss.shape, bool))


def hl_gauss(
  algorithm: Algorithm,
  s: Settings,
  *,
  low: float = -2.0,
  high: float = 2.0,
  bins: int = 51,
  sigma: float = 0.75,
) -> Algorithm:
  """Lets the critic predict a distribution over bins.

  Args:
    algorithm: an algorithm with a critic.
    s: settings of the run.
    low: Lower edge of the first bin.
    high: Upper edge of the last bin. Returns should lie several bins inside the
      edges.
    bins: Number of bins, 2 to 4096.
    sigma: Width of the targets in bin widths.
  """
  check_number("bins", bins, "[2, 4096]")
  check_number("sigma", sigma, "(0, inf)")
  if algorithm.critic is None:
    raise InputError("'hl_gauss' needs a critic; use estimator.name='gae'")
  if s.loss.clip_value:
    raise InputError(
      "a distribution over bins cannot be clipped; use loss.clip_value=None"
    )
  worst = s.reward.incorrect
  worst -= s.reward.overlong_factor if s.reward.overlong_buffer else 0.0
  if not low < worst < s.reward.correct < high:
    raise InputError(
      f"the bins must cover the rewards, {worst:g} to {s.reward.correct:g},"
      " with a margin; change method.hl_gauss.low and .high"
    )
  edges = {"low": low, "high": high, "sigma": sigma}
  loss = part(categorical_value_loss, edges)
  head = CategoricalHead(bins, (low, high))
  critic = dataclasses.replace(algorithm.critic, loss=loss, head=head)
  return algorithm.change(critic=critic)
