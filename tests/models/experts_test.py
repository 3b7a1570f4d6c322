"""Tests of experts: routing, dispatch, load balancing, gradients, adapters."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from helpers import tiny
from helpers.tiny_experts import CONFIG, EXTRA, LOGITS, make, make_model, rows

from jaxrl_llm import models
from jaxrl_llm.models.experts import (
  ExpertsKind,
  Routing,
  by_place,
  choices_shape,
)


def reference(module, x):
  """Computes the module with a float64 loop over tokens and experts."""
  out, kernels = [], {}
  for name in ("gate", "up", "down"):
    kernels[name] = np.asarray(module.experts[name].kernel[...], np.float64)
  for row in np.asarray(x, np.float64).reshape(-1, x.shape[-1]):
    logits = row @ np.asarray(module.router.kernel[...], np.float64)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    chosen = np.argsort(-probs, kind="stable")[:2]
    total = 0
    for e in chosen:
      gate = row @ kernels["gate"][e]
      hidden = gate / (1 + np.exp(-gate)) * (row @ kernels["up"][e])
      share = probs[e] / probs[chosen].sum()
      total = total + share * (hidden @ kernels["down"][e])
    out.append(total)
  return np.reshape(out, x.shape)


@pytest.mark.parametrize("padding", [0, 5])
def test_the_load_of_a_worked_example(padding):
  module = make(logits=LOGITS)
  x = np.pad(LOGITS, [(0, padding), (0, 0)], constant_values=7.0)[None]
  valid = np.arange(3 + padding)[None] < 3
  _, aux = jax.jit(lambda x, valid: module(x, Routing(valid)))(x, valid)
  # Fractions (1/3, 1/6, 1/6, 1/3), mean probabilities (.3093, .1736, .3802,
  # .1370).
  assert np.mean(aux["balance"][valid]) == pytest.approx(0.9642, abs=1e-4)


def test_tokens_go_through_their_experts():
  module = make()
  x = np.random.default_rng(0).normal(size=(2, 7, 4)).astype(np.float32)
  out, _ = jax.jit(lambda x: module(x, Routing()))(x)
  np.testing.assert_allclose(out, reference(module, x), rtol=2e-5, atol=1e-5)
  # A token's output does not depend on other tokens.
  alone, _ = jax.jit(lambda x: module(x, Routing()))(x[1:, 3:4])
  np.testing.assert_allclose(alone[0, 0], out[1, 3], rtol=1e-5, atol=1e-6)


def test_layers_may_use_different_numbers_of_experts():
  def layer(experts, k):
    kind = ExpertsKind(
      num_experts=experts, per_token=k, intermediate_size=3, balance=0
    )
    return types.SimpleNamespace(mlp=kind)

  places = {"layers": layer(4, 1), "layers1": None, "layers2": layer(300, 3)}
  found = by_place(np.arange(8).reshape(1, 1, 8), places)
  assert found["layers"].tolist() == [[[[0]]], [[[4]]]]
  assert found["layers2"].tolist() == [[[[1, 2, 3]]], [[[5, 6, 7]]]]
  config = types.SimpleNamespace(layers=tuple(places.values()) * 2)
  assert choices_shape(config) == jax.ShapeDtypeStruct((8,), jnp.int16)


def test_gradients_equal_differences():
  module = make()
  x = np.random.default_rng(0).normal(size=(1, 5, 4)).astype(np.float32)
  graph, state = nnx.split(module)

  def loss(state, x):
    out, aux = nnx.merge(graph, state)(x, Routing())
    return jnp.sum(jnp.sin(out)) + jnp.sum(aux["balance"])

  jax.test_util.check_grads(loss, (state, x), order=1, modes=["rev"], eps=1e-3)


def test_experts_nobody_chose_are_allowed():
  module = make(logits=LOGITS)
  same = np.tile(LOGITS[:1], (6, 1))[None]
  out, _ = jax.jit(lambda x: module(x, Routing()))(same)
  np.testing.assert_allclose(out, reference(module, same), rtol=2e-5, atol=1e-5)


def test_a_model_gives_the_loss_of_every_token():
  fns, params = make_model()
  packed = rows()
  _, aux = jax.jit(fns.logprobs)(params, packed)
  assert aux["balance"].shape == packed.tokens.shape
  # At least balance · E / E in each of two layers.
  mean = np.mean(aux["balance"][packed.segments > 0])
  assert mean > 2 * EXTRA["router_aux_loss_coef"]


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_adapters_leave_experts_in_the_base(base_dtype):
  own = models.Adapters(
    rank=2,
    alpha=4.0,
    targets=("attention", "router"),
    base_dtype=base_dtype,
  )
  _, plain = make_model()
  config = dataclasses.replace(CONFIG, adapters=own)
  fns = models.make_policy(config, head_chunk=8)
  params = models.with_adapters(plain, jax.random.key(1), config)
  base, trained = models.partition(params, ())
  names = {path[1:] for path in traverse_util.flatten_dict(trained)}
  assert ("mlp", "router", "lora_a") in names
  trained = tiny.widen(trained, jax.random.key(2))
  params = models.merge(models.Params(base, trained))
  merged = own.merge(params)
  merged = jax.tree.map(lambda x: x.astype(jnp.float32), merged)
  plain_fns = models.make_policy(CONFIG, head_chunk=8)
  ours, _ = jax.jit(fns.logprobs)(params, rows())
  theirs, _ = jax.jit(plain_fns.logprobs)(merged, rows())
  np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_adapters_of_the_mlp_leave_its_router_alone():
  # As in PEFT, which has adapters of gate, up and down.
  own = models.Adapters(rank=2, alpha=4.0, targets=("attention", "mlp"))
  config = dataclasses.replace(CONFIG, adapters=own)
  shapes = jax.eval_shape(models.make_policy(config).init, jax.random.key(0))
  paths = traverse_util.flatten_dict(models.partition(shapes, ()).trained)
  assert paths and not any("router" in path for path in paths)


def test_experts_are_no_linear_layers():
  attention = [f"attention/{name}" for name in "koqv"]
  assert models.linear_layers(CONFIG) == [*attention, "mlp/router"]
