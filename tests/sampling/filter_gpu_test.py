"""The GPU kernel that finds filter bounds, interpreted on a CPU."""

import functools

import jax
import numpy as np
from jax.experimental import pallas as pl

from jaxrl_llm.sampling import choose, filter_gpu


def test_keeps_what_the_filter_of_other_platforms_keeps(monkeypatch):
  interpreted = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(filter_gpu.pl, "pallas_call", interpreted)
  # Several chunks, which do not divide the vocabulary.
  monkeypatch.setattr(filter_gpu, "_CHUNK", 256)
  rng = np.random.default_rng(0)
  weights = rng.random((8, 700), np.float32) ** 8
  weights[:, 600] = 1.0
  weights[2, :300] = weights[2, 5]  # Ties.
  top_k = np.int32([0, 5, 20, 0, 700, 0, 9, 0])
  top_p = np.float32([1, 1, 1, 0.7, 1, 1e-6, 0.5, 1])
  min_p = np.float32([0, 0, 0.1, 0, 0, 0, 0, 0.3])
  arrays = weights, top_k, top_p, min_p
  expected = jax.jit(choose._filter)(*arrays)
  got = jax.jit(choose._filter_on_gpu)(*arrays)
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  kept = np.count_nonzero(got[0], axis=1)
  assert kept[0] == 700 and kept[1] == 5 and kept[5] == 1 < kept[3] < 300
