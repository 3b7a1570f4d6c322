"""Minder's denoiser: one tiny LSTM-VAE per metric.

It is trained on eight-second windows of healthy hosts, so that it reconstructs
a window without its noise. It sees a window without its mean, which is added to
the reconstruction: of levels far from those of healthy hosts, a model that was
trained on these makes less than of small differences.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.fleet import scores

WINDOW_S = 8
_HIDDEN, _LATENT = 4, 8
_Params = dict[str, Any]


def fit(
  key: chex.PRNGKey, windows: np.ndarray, *, steps: int = 600, batch: int = 256
) -> _Params:
  """Trains the denoisers of all metrics.

  Args:
    key: random key of initial weights, batches and noise.
    windows: float [N, 8, K] of healthy hosts (`standardized`, then `cut`).
    steps: updates of Adam.
    batch: windows per update.

  Returns:
    Parameters, every leaf with a leading axis K.

  Reference: Minder, section 4.2 (hidden size 4, latent size 8, one layer).
  """
  data = jnp.asarray(windows, jnp.float32).transpose(2, 0, 1)  # [K, N, 8]
  data -= data.mean(axis=-1, keepdims=True)
  first, key = jax.random.split(key)
  params = jax.vmap(_init)(jax.random.split(first, len(data)))
  transform = optax.adam(1e-2)

  def loss(params: _Params, x: jax.Array, key: chex.PRNGKey):
    mean, log_var = _encode(params, x)
    noise = jax.random.normal(key, mean.shape)
    decoded = _decode(params, mean + jnp.exp(0.5 * log_var) * noise)
    kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)
    return jnp.mean((decoded - x) ** 2) + 1e-3 * kl.mean()

  def total(params: _Params, x: jax.Array, keys: chex.PRNGKey):
    return jax.vmap(loss)(params, x, keys).sum()

  @jax.jit
  def update(carry: tuple[Any, ...], key: chex.PRNGKey):
    params, state = carry
    drawn, noise = jax.random.split(key)
    rows = jax.random.randint(drawn, (batch,), 0, data.shape[1])
    keys = jax.random.split(noise, len(data))
    grads = jax.grad(total)(params, data[:, rows], keys)
    updates, state = transform.update(grads, state)
    return (optax.apply_updates(params, updates), state), None

  carry = params, transform.init(params)
  (params, _), _ = jax.lax.scan(update, carry, jax.random.split(key, steps))
  return params


def standardized(x: np.ndarray) -> np.ndarray:
  """Returns `scores.residuals` in robust standard deviations of each metric.

  Args:
    x: float [H, S, K], NaN where nothing arrived.
  """
  filled = np.moveaxis(scores.fill_gaps(x), 2, 0)
  every = [scores.residuals(y, *scores.baseline(y)[:2]) for y in filled]
  residual = np.stack(every, axis=-1)
  scale = 1.4826 * np.median(np.abs(residual), axis=(0, 1))
  return (residual / np.maximum(scale, 1e-9)).clip(-50, 50).astype(np.float32)


def cut(x: np.ndarray) -> np.ndarray:
  """Cuts data into eight-second windows, [H, S, K] -> [H·T, 8, K]."""
  hosts, seconds, metrics = x.shape
  whole = x[:, : seconds // WINDOW_S * WINDOW_S]
  return whole.reshape(hosts * (seconds // WINDOW_S), WINDOW_S, metrics)


def denoised_scores(params: _Params, x: np.ndarray) -> np.ndarray:
  """Returns `median_scores` of denoised windows.

  Args:
    params: from `fit`.
    x: float [H, S, K] of one role, NaN where nothing arrived; at least 8
      seconds.

  Returns:
    float32 [T, H, K], every 8 seconds: distances of reconstructions from the
    fleet's median one, averaged over a minute and divided by their median.
  """
  hosts, seconds, metrics = x.shape
  number = seconds // WINDOW_S
  windows = cut(standardized(x)).transpose(2, 0, 1)  # [K, H·T, 8]
  clean = np.asarray(_reconstruct(params, windows))
  clean = clean.reshape(metrics, hosts, number, WINDOW_S)
  far = scores.distances(clean.transpose(1, 2, 0, 3))  # [H, T, K]
  span = min(scores.MEAN_S // WINDOW_S, number)
  sums = np.cumsum(far, axis=1, dtype=np.float64)
  sums = np.concatenate([np.zeros_like(sums[:, :1]), sums], axis=1)
  means = (sums[:, span:] - sums[:, :-span]) / span
  scale = np.maximum(np.median(far, axis=(0, 1)), 1e-6)
  return np.moveaxis(means / scale, 1, 0).astype(np.float32)


@jax.jit
def _reconstruct(params: _Params, windows: jax.Array) -> jax.Array:
  """Reconstructs windows [K, N, 8] one metric at a time, to limit memory."""
  means = windows.mean(axis=-1, keepdims=True)
  one = lambda xs: _decode(xs[0], _encode(xs[0], xs[1])[0])
  return jax.lax.map(one, (params, windows - means)) + means


def _init(key: chex.PRNGKey) -> _Params:
  keys = iter(jax.random.split(key, 7))
  normal = jax.nn.initializers.lecun_normal()
  draw = lambda *shape: normal(next(keys), shape)
  gates = 4 * _HIDDEN
  return {
    "encoder": {"in": draw(1, gates), "hidden": draw(_HIDDEN, gates)},
    "mean": draw(_HIDDEN, _LATENT),
    "log_var": draw(_HIDDEN, _LATENT),
    "decoder": {"in": draw(_LATENT, gates), "hidden": draw(_HIDDEN, gates)},
    "out": draw(_HIDDEN, 1),
  }


def _encode(params: _Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns mean and log variance [N, 8] of the latents of windows [N, 8]."""
  last = _lstm(params["encoder"], x.T[..., None])[-1]
  return last @ params["mean"], last @ params["log_var"]


def _decode(params: _Params, latent: jax.Array) -> jax.Array:
  repeated = jnp.broadcast_to(latent, (WINDOW_S, *latent.shape))
  return (_lstm(params["decoder"], repeated) @ params["out"])[..., 0].T


def _lstm(weights: _Params, inputs: jax.Array) -> jax.Array:
  """Returns the hidden states [8, N, hidden] of inputs [8, N, D]."""

  def step(carry: tuple[Any, ...], x: jax.Array):
    hidden, cell = carry
    gates = x @ weights["in"] + hidden @ weights["hidden"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f + 1) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden

  zeros = jnp.zeros((inputs.shape[1], _HIDDEN))
  return jax.lax.scan(step, (zeros, zeros), inputs)[1]
