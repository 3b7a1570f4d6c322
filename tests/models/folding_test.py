"""Tests of experts over several devices: folding, capacity, load metrics."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_experts

from jaxrl_llm import models, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import context
from jaxrl_llm.models.experts import Routing

CONFIG = tiny_experts.CONFIG
# Attention has data 2 x fsdp 2 x tensor 2 and so on; experts have their group.
MESHES = {
  "fsdp": {"data": 2, "fsdp": 4, "tensor": 1, "expert": 4},
  "tensor": {"data": 2, "fsdp": 2, "tensor": 2, "expert": 2},
  "both": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2, "expert": 4},
  "half": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 4},
}


def make_fns(mesh, **settings):
  place = lambda make: make(mesh, CONFIG.num_kv_heads)
  return models.make_policy(
    CONFIG,
    head_chunk=8,
    sharding=place(sharding.packed_kv_sharding),
    sampler_sharding=place(sharding.slot_sharding),
    **settings,
  )


def loss_of(fns, params, packed):
  scored, aux = fns.logprobs(params, packed)
  aux = {name: x * packed.mask for name, x in aux.items()}
  loss = -jnp.sum(scored.logprobs) + jnp.sum(aux["balance"])
  return loss, (scored.logprobs, aux)


def run(fns, params, packed):
  grad = jax.value_and_grad(functools.partial(loss_of, fns), has_aux=True)
  return jax.jit(grad)(params, packed)


@functools.cache
def alone():
  """Returns loss and gradients on one device."""
  return run(*tiny_experts.make_model(), tiny_experts.rows(8))


def on_mesh(axes, **settings):
  mesh = sharding.make_mesh(**axes)
  _, params = tiny_experts.make_model()
  placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
  along = jax.device_put(tiny_experts.rows(8), sharding.along_batch(mesh))
  return run(make_fns(mesh, **settings), placed, along)


assert_trees_close = functools.partial(
  chex.assert_trees_all_close, rtol=1e-5, atol=1e-5
)


@pytest.mark.parametrize(
  ("name", "capacity"), [*((x, 0.0) for x in MESHES), ("both", 1.8)]
)
def test_folded_experts_equal_unfolded_ones(name, capacity):
  axes = MESHES[name]
  found = on_mesh(axes, expert_capacity=capacity)
  dropped = found[0][1][1].pop("metrics/expert_dropped", 0.0)
  np.testing.assert_array_equal(dropped, 0)
  assert_trees_close(found, alone())
  if name == "both" and not capacity:
    assert_trees_close(on_mesh(axes | {"expert": 1}), alone())


def test_a_device_of_a_group_has_its_own_experts():
  _, params = tiny_experts.make_model()
  mesh = sharding.make_mesh(**MESHES["both"])
  places = sharding.tree_shardings(params, mesh)
  layer = jax.device_put(params, places)["layers"]
  up = layer["mlp"]["experts"]["up"]["kernel"]  # [2, 4, 24, 12].
  assert {s.data.shape for s in up.addressable_shards} == {(2, 1, 12, 12)}
  q = layer["attention"]["q"]["kernel"]  # As without a group.
  plain = sharding.make_mesh(**MESHES["both"] | {"expert": 1})
  unfolded = sharding.tree_shardings(params, plain)["layers"]
  assert q.sharding.shard_shape(q.shape) == unfolded["attention"]["q"][
    "kernel"
  ].shard_shape(q.shape)


def test_the_sampler_may_be_folded():
  """A prefill has the same results as on one device."""
  mesh = sharding.make_mesh(**MESHES["half"])
  fns, params = tiny_experts.make_model()
  tokens = np.random.default_rng(1).integers(0, 60, (3, 7)).astype(np.int32)
  prefill = lambda fns: jax.jit(
    lambda params: fns.prefill(fns.for_sampling(params), tokens)
  )
  expected = prefill(fns)(params)
  placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
  assert_trees_close(prefill(make_fns(mesh))(placed), expected)


@pytest.mark.parametrize(("time", "real"), [(7, 7), (8, 5)])
def test_padding_does_not_displace_tokens(time, real):
  """All tokens use the experts 0 and 1; rows are padded here or before."""
  module = tiny_experts.make(logits=tiny_experts.LOGITS)
  x = np.tile(tiny_experts.LOGITS[:1], (4, time, 1))
  valid = np.broadcast_to(np.arange(time) < real, (4, time))
  choices = np.where(valid[..., None], np.int8([0, 1]), np.int8([0, 0]))
  mesh = sharding.make_mesh(**MESHES["both"])
  place = context.leading(sharding.packed_kv_sharding(mesh, 2), 2)
  run = lambda place: jax.jit(
    lambda x: module(x, Routing(valid, choices, place))[0][:, :real]
  )
  assert_trees_close(run(place)(x), run(None)(x))


def test_capacity_without_limit_has_the_bits_of_dropless_dispatch():
  _, params = tiny_experts.make_model()
  limited = models.make_policy(CONFIG, head_chunk=8, expert_capacity=1e6)
  found = run(limited, params, tiny_experts.rows(8))
  jax.tree.map(np.testing.assert_array_equal, found, alone())


def test_tokens_over_the_capacity_are_dropped_and_counted():
  """All six tokens are routed to experts 0 and 1 with capacity three each."""
  module = tiny_experts.make(logits=tiny_experts.LOGITS)
  same = np.tile(tiny_experts.LOGITS[:1], (8, 1))[None]
  valid = np.arange(8)[None] >= 2
  limited = jax.jit(lambda x: module(x, Routing(valid, capacity=0.75)))
  out, aux = limited(same)
  whole, _ = jax.jit(lambda x: module(x, Routing(valid)))(same)
  # Capacity 0.75 · 8 tokens · 2 / 4 experts = 3, for the first valid tokens.
  np.testing.assert_allclose(out[0, 2:5], whole[0, 2:5], rtol=1e-5)
  np.testing.assert_array_equal(out[0, [0, 1, 5, 6, 7]], 0)
  dropped = aux["metrics/expert_dropped"]
  np.testing.assert_array_equal(dropped[0], [0, 0, 0, 0, 0, 0.5, 0.5, 0.5])
  # Two of four experts have all tokens; halved, as one of two layers.
  np.testing.assert_allclose(aux["metrics/expert_load"], 2.0 / 2)


def test_a_group_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="expert=3 must be a multiple of tensor"):
    sharding.make_mesh(data=1, fsdp=4, tensor=2, expert=3)
  mesh = sharding.make_mesh(data=1, fsdp=8, tensor=1, expert=8)
  with pytest.raises(InputError, match="=8 must divide the 4 experts"):
    make_fns(mesh)
