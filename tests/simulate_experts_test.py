"""The cost account of models with experts matches a compiled program."""

import collections

import jax
import pytest
from helpers import tiny_experts

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sharding
from jaxrl_llm.tools.simulate import account, hlo
from jaxrl_llm.tools.simulate.models import MODELS

CONFIG = tiny_experts.CONFIG
BIG = MODELS["qwen3-30b-a3b"]
AXES = {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
# One layer's experts: 128 experts of three matrices 2048 x 768.
LAYER = 128 * 3 * 2048 * 768


def sizes_of(model, mesh, capacity=0.0):
  config = config_lib.method("grpo")
  config.model.expert_capacity = capacity
  return account.Sizes(config, model, mesh)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_device_gathers_the_experts_of_its_part_of_a_group(group):
  mesh = (
    AXES if group == 1 else AXES | {"fsdp": 8 // group, "expert": group // 2}
  )
  sizes = sizes_of(BIG, mesh)
  dense = models.num_params(BIG) - 48 * LAYER
  assert sizes.gathered == dense / 2 + 48 * LAYER / group
  assert sizes.received == sizes.gathered - models.num_params(BIG) / 8


@pytest.mark.parametrize("capacity", [0.0, 1.0], ids=["dropless", "capacity"])
def test_what_tokens_send_is_what_the_program_sends(capacity):
  mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2, expert=4)
  kv_heads = CONFIG.num_kv_heads
  fns = models.make_policy(
    CONFIG,
    head_chunk=8,
    sharding=sharding.packed_kv_sharding(mesh, kv_heads),
    expert_capacity=capacity,
  )
  params = jax.eval_shape(fns.init, jax.random.key(0))
  shaped = lambda x, place: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=place
  )
  params = jax.tree.map(shaped, params, sharding.tree_shardings(params, mesh))
  along = sharding.along_batch(mesh)
  packed = jax.tree.map(
    lambda x: shaped(x, along if x.ndim else None), tiny_experts.rows(8)
  )
  program = jax.jit(fns.logprobs).lower(params, packed).compile()
  sent = collections.Counter()
  for each in hlo.collectives(program.as_text(), mesh.shape, [1]):
    if set(each.axes) == {"expert", "tensor"}:
      sent[each.kind] += each.bytes
  # Eight rows of twelve tokens on eight devices, in float32.
  sizes = sizes_of(CONFIG, dict(mesh.shape), capacity)
  known = 2 * CONFIG.num_layers * 12 * sizes.exchanged
  if capacity:
    # 12 tokens x 2 experts x 24 numbers x 4 bytes, 3/4 of them to other
    # devices, there and back in two layers.
    assert known == 2 * 2 * (12 * 2 * 24 * 4) * 3 / 4
    assert sent["all-to-all"] == known
  else:
    # A group has 48 tokens, 36 of them from other devices.
    assert known == 2 * 2 * 36 * 24 * 4
    assert sent["reduce-scatter"] == known / 2
    # Plus indices and weights of two experts, next to 24 numbers per token.
    assert sent["all-gather"] == pytest.approx(known / 2 * 28 / 24)
