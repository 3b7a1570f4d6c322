"""Kernels interpreted on a CPU, and their comparison with plain XLA."""

import dataclasses
import functools

import jax
import numpy as np
from helpers import tiny
from jax.experimental import pallas as pl

from jaxrl_llm.models import flash_gpu


def interpret_gpu(monkeypatch):
  """Interprets GPU kernels."""
  interpreted = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(flash_gpu.pl, "pallas_call", interpreted)


def make_kind(heads=4, kv_heads=2, size=64, window=None):
  """Returns a kind of attention of the given sizes."""
  config = dataclasses.replace(
    tiny.tiny_config(), num_heads=heads, num_kv_heads=kv_heads, head_dim=size
  )
  return dataclasses.replace(config.layers[0].attention, window=window)


def with_gradients(attend, q, k, v, segments, prefixes, g):
  """Returns the attention of packed rows and the gradients of q, k and v."""
  function = lambda *qkv: attend(*qkv, segments, prefixes)
  out, pull = jax.vjp(jax.jit(function), q, k, v)
  return out, *pull(g)


def assert_equal(ours, xla, *rows):
  """Compares two functions that compute the attention of packed rows."""
  for got, expected in zip(
    with_gradients(ours, *rows), with_gradients(xla, *rows)
  ):
    # Rounding errors of sums scale with the largest terms, even if they cancel.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * scale)
