"""Kernels interpreted on a CPU, and their comparison with plain XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import tiny
from jax.experimental import pallas as pl

from jaxrl_llm import models
from jaxrl_llm.models.kernels import flash_gpu


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


def block_tables(lengths, *, pages, width, page_size, shards=1, seed=0):
  """Assigns random pages to the tokens of each slot; others stay free.

  Args:
    lengths: tokens of each slot.
    pages: pages of each shard.
    width: maximum number of pages of a slot.
    page_size: tokens per page.
    shards: number of shards.
    seed: seed of the assignment.
  """
  rng = np.random.default_rng(seed)
  free = [list(rng.permutation(pages)) for _ in range(shards)]
  table = np.full((len(lengths), width), pages, np.int32)
  for slot, length in enumerate(lengths):
    for block in range(-(-length // page_size)):
      table[slot, block] = free[slot * shards // len(lengths)].pop()
  return models.make_block_tables(
    table, shards=shards, pages=pages, page_size=page_size
  )


def prefill_in_chunks(backend, q, k, v, chunk):
  """Returns the attention of all queries, and the contiguous layer."""
  time, outs = q.shape[1], []
  layer = backend.init_contiguous(len(q), time, jnp.float32)
  for start in range(0, time, chunk):
    part = np.s_[:, start : start + chunk]
    layer = backend.write_contiguous(layer, k[part], v[part], start)
    outs.append(backend.prefill_attention(q[part], layer, start))
  return jnp.concatenate(outs, axis=1), layer


def free_pages(tables):
  """Returns the pages that no slot holds, bool [D, P]."""
  shards, pages = tables.page_owner.shape
  free = np.ones((shards, pages), bool)
  for shard, held in enumerate(np.split(tables.page_indices, shards)):
    free[shard, held[held < pages]] = False
  return free


def attend_to_pages(backend, tables, lengths, page_size, q, k, v, dtype=None):
  """Computes attention of the last queries of slots with all tokens written.

  Free pages are NaN. Queries after the only token of a slot read 0.5, which its
  page is filled with.
  """
  shards, pages = tables.page_owner.shape
  fill = np.where(free_pages(tables), np.nan, 0.5).astype(np.float32)
  put = lambda x: (x + fill.reshape(*fill.shape, *[1] * (x.ndim - 2))).astype(
    dtype or q.dtype
  )
  layer = backend.init_paged(shards, pages, page_size, dtype or q.dtype)
  layer = jax.tree.map(lambda x: put(x.astype(jnp.float32)), layer)
  index = np.arange(k.shape[1], dtype=np.int32)
  index = np.broadcast_to(index, k.shape[:2])
  lengths, count = np.asarray(lengths)[:, None], q.shape[1]
  layer = backend.write_paged(layer, k, v, tables, index, index < lengths)
  last = np.maximum(lengths - count, 0) + np.arange(count)
  return backend.paged_attention(q, layer, tables, last.astype(np.int32))
