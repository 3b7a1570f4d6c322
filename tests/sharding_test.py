"""Every leaf has a sharding, and moments are sharded like their parameter."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny
from jax.sharding import AxisType, PartitionSpec

from jaxrl_llm import digest, models, sharding
from jaxrl_llm.learner import optimizer as optimizer_lib
from jaxrl_llm.models import context, transformer

KEY = jax.random.key(0)


def _config(**changes):
  values = {"family": "llama", "mlp_bias": True, "tie_word_embeddings": False}
  return tiny.tiny_config().__class__(
    **{**vars(tiny.tiny_config()), **values, **changes}
  )


# Together, they have every kind of parameter.
CONFIGS = {
  "tied, q k v biases": tiny.tiny_config(),
  "untied, all biases": _config(),
  "q k norms": _config(family="qwen3", mlp_bias=False, attention_bias=False),
  "adapters": _config(
    adapters=models.Adapters(
      rank=2, alpha=4.0, targets=("attention", "mlp"), base_dtype="int8"
    )
  ),
  "experts": _config(
    family="qwen3_moe",
    mlp_bias=False,
    extra=(
      ("num_experts", 4),
      ("num_experts_per_tok", 2),
      ("moe_intermediate_size", 12),
      ("router_aux_loss_coef", 0.1),
    ),
    adapters=models.Adapters(
      rank=2, alpha=4.0, targets=("router",), base_dtype="int8"
    ),
  ),
}


def _mesh(data=2, fsdp=2, tensor=2):
  return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


@functools.cache
def _shapes(config, role):
  """Returns the shapes of a train state."""
  make = {"policy": models.make_policy, "value": models.make_value}[role]
  params = jax.eval_shape(make(config).init, KEY)
  optimizer = optimizer_lib.make_optimizer(
    lambda step: 1e-3,
    max_grad_norm=1.0,
    weight_decay=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
  )
  create = lambda: optimizer_lib.create_train_state(
    jax.tree.map(jnp.zeros_like, params), optimizer
  )
  return jax.eval_shape(create)


def _specs(tree, mesh):
  """Returns path -> (shape, PartitionSpec) of every leaf."""
  places = jax.tree.leaves(sharding.tree_shardings(tree, mesh))
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  assert len(places) == len(leaves)
  return {
    digest.path_name(path): (leaf.shape, place.spec)
    for (path, leaf), place in zip(leaves, places)
  }


class TestRules:
  @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
  @pytest.mark.parametrize("role", ["policy", "value"])
  def test_cover_every_leaf_of_a_train_state(self, config, role):
    specs = _specs(_shapes(config, role), _mesh())
    heads = [name for name in specs if "value_head" in name]
    assert bool(heads) == (role == "value")
    for shape, spec in specs.values():
      assert len(spec) <= len(shape)
    # Moments are placed like their parameter.
    params = {k: v for k, v in specs.items() if k.startswith("trained/")}
    for moment in ("mu", "nu"):
      follow = {
        "trained/" + name.split(f"/{moment}/")[1]: value
        for name, value in specs.items()
        if f"/{moment}/" in name
      }
      assert follow == params

  def test_place_the_kinds_of_parameters(self):
    config = _config(vocab_size=64)
    specs = _specs(
      jax.eval_shape(models.make_policy(config).init, KEY), _mesh()
    )
    expected = {
      "embed/embedding": ("tensor", ("fsdp", "context")),
      "lm_head/kernel": (("fsdp", "context"), "tensor"),
      "layers/attention/q/kernel": (None, ("fsdp", "context"), "tensor"),
      "layers/attention/k/bias": (None, "tensor"),
      "layers/attention/o/kernel": (None, "tensor", ("fsdp", "context")),
      "layers/mlp/up/kernel": (None, ("fsdp", "context"), "tensor"),
      "layers/mlp/down/kernel": (None, "tensor", ("fsdp", "context")),
      "layers/input_norm/scale": (None, None),
      "final_norm/scale": (None,),
    }
    for name, spec in expected.items():
      shape, got = specs[name]
      padded = tuple(got) + (None,) * (len(shape) - len(got))
      assert padded == spec, name

  def test_every_rule_is_needed(self):
    names = {
      name
      for config in CONFIGS.values()
      for role in ("policy", "value")
      for name in _specs(_shapes(config, role), _mesh())
    }
    firsts = {
      next(p for p, _ in sharding.PARAMETERS if re.search(p, name))
      for name in names
    }
    assert firsts == {pattern for pattern, _ in sharding.PARAMETERS}

  def test_no_match_is_an_error_that_names_the_path(self):
    tree = {"layers": {"attention": {"x": {"kernel": jnp.zeros((2, 2, 2))}}}}
    with pytest.raises(ValueError, match="'layers/attention/x/kernel'"):
      sharding.tree_shardings(tree, _mesh())

  def test_one_axis_for_two_dimensions_is_an_error(self, monkeypatch):
    monkeypatch.setitem(sharding.MESH_AXES, "embed", ("tensor",))
    with pytest.raises(ValueError, match="'embed/embedding' has dimensions"):
      sharding.tree_shardings({"embed": {"embedding": KEY}}, _mesh())

  def test_an_axis_that_does_not_divide_is_dropped(self):
    # 67 tokens are not divisible by 2; the hidden size 24 is.
    place = sharding.tree_shardings(
      {"embed": {"embedding": jax.ShapeDtypeStruct((67, 24), jnp.float32)}},
      _mesh(),
    )
    assert place["embed"]["embedding"].spec == PartitionSpec(
      None, ("fsdp", "context")
    )


class TestMakeMesh:
  def test_axes_sizes_and_types(self):
    mesh = _mesh(2, 1, 4)
    assert tuple(mesh.shape.values()) == (2, 1, 1, 4)
    assert mesh.axis_names == sharding.AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sharding.batch_size_of(_mesh(2, 2, 2)) == 4

  def test_minus_one_takes_the_devices_that_remain(self):
    assert _mesh(-1, 2, 2).shape["data"] == 2
    with pytest.raises(ValueError, match="tensor=3 leaves 2 idle of 8 devices"):
      _mesh(-1, 1, 3)
    assert _mesh(2, 1, 3).size == 6  # An explicit number.

  def test_uses_the_devices_given(self):
    devices = jax.devices()[4:6]
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1, devices=devices)
    assert list(mesh.devices.flat) == devices

  @pytest.mark.parametrize("sizes", [(16, 1, 1), (3, 3, 1), (-1, 4, 4)])
  def test_more_devices_than_there_are_raise(self, sizes):
    with pytest.raises(ValueError, match="needs (16|9) devices.*there are 8"):
      _mesh(*sizes)

  @pytest.mark.parametrize(
    "sizes", [(0, 1, 1), (-2, 1, 1), (1, 0, 1), (1, -1, 1), (-1, 1, 0)]
  )
  def test_sizes_out_of_range_raise(self, sizes):
    named = "mesh data={} x fsdp={} x context=1 x tensor={}".format(*sizes)
    with pytest.raises(ValueError, match=f"{named}: sizes must be >= 1"):
      _mesh(*sizes)


class TestPlacements:
  def test_along_batch_splits_one_axis_over_data_and_fsdp(self):
    x = jnp.arange(24.0).reshape(3, 8)
    place = sharding.along_batch(_mesh(), axis=1)
    shards = jax.device_put(x, place).addressable_shards
    assert {s.data.shape for s in shards} == {(3, 2)}
    first = sharding.along_batch(_mesh(4, 1, 2))
    shards = jax.device_put(x.T, first).addressable_shards
    assert {s.data.shape for s in shards} == {(2, 3)}

  @pytest.mark.parametrize("expert", [1, 2])
  def test_embeddings_are_exchanged_and_not_gathered(self, expert):
    mesh = sharding.make_mesh(
      data=1, fsdp=4, context=2, tensor=1, expert=expert
    )
    states = context.leading(sharding.packed_kv_sharding(mesh, 1), 2)
    config, numerics = tiny.tiny_config(), models.Numerics()
    shapes = {"embed": transformer.param_shapes(config)["embed"]}
    params = jax.tree.map(
      lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      *(shapes, sharding.tree_shardings(shapes, mesh)),
    )
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=states)
    embed = lambda *given: transformer.embed(*given, config, numerics, states)
    text = jax.jit(embed).lower(params, tokens).compile().as_text()
    assert "all-to-all" in text
    assert not re.search(r"= f32\S* all-gather", text)
