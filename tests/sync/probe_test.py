"""The probe: both paths agree, and what differs is found."""

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxrl_llm import models, sharding, sync

TOKENS = sync.probe_tokens(67, rows=2, length=9)


def _probe(dtype):
  fns = models.make_policy(tiny.tiny_config(), dtype=dtype, head_chunk=8)
  _, params = tiny.tiny_policy()
  link = sync.Link(fns.for_sampling, jax.eval_shape(lambda: params))
  tolerance = sync.TOLERANCES[jnp.dtype(dtype).name]
  return sync.make_probe(fns, TOKENS, tolerance=tolerance), link, params


class TestProbe:
  def test_float32_agrees_and_a_small_change_is_found(self):
    probe, link, params = _probe(jnp.float32)
    assert probe(params, link.push(params, 0)) <= 1e-5
    scale = params["final_norm"]["scale"].at[2].multiply(1.01)
    moved = link.push(params | {"final_norm": {"scale": scale}}, 1)
    with pytest.raises(sync.SyncError, match="version 1 differ .* than 1e-05"):
      probe(params, moved)

  def test_bfloat16_agrees_and_other_weights_are_found(self):
    probe, link, params = _probe(jnp.bfloat16)
    assert 0 < probe(params, link.push(params, 0)) <= 2e-2
    other = tiny.widen(params, jax.random.key(1))
    with pytest.raises(sync.SyncError, match="version 3 differ .* than 0.02"):
      probe(params, link.push(other, 3))

  def test_nan_is_found(self):
    probe, link, params = _probe(jnp.float32)
    scale = params["final_norm"]["scale"].at[2].set(jnp.nan)
    broken = link.push(params | {"final_norm": {"scale": scale}}, 1)
    with pytest.raises(sync.SyncError, match="share of nan, more"):
      probe(params, broken)

  def test_works_across_meshes(self):
    probe, _, params = _probe(jnp.float32)
    fns, _ = tiny.tiny_policy()
    mesh = sharding.make_mesh(
      data=1, fsdp=1, tensor=2, devices=jax.devices()[6:]
    )
    shapes = jax.eval_shape(lambda: params)
    target = sync.layout_shardings(fns.for_sampling, shapes, mesh)
    link = sync.Link(fns.for_sampling, shapes, target=target)
    assert probe(params, link.push(params, 0)) <= 1e-5

  def test_tokens_are_fixed_and_in_the_vocabulary(self):
    again = sync.probe_tokens(67, rows=2, length=9)
    assert (again == TOKENS).all() and TOKENS.dtype == "int32"
    assert TOKENS.min() >= 0 and TOKENS.max() < 67
