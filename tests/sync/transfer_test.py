"""Weights arrive complete, on the sampler's mesh, in small groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny

from jaxrl_llm import digest, models, sharding, sync
from jaxrl_llm.sync import transfer as transfer_lib

MESHES = {
  "trainer": ((1, 2, 2), slice(0, 4)),
  "apart": ((2, 1, 2), slice(4, 8)),
  "one": ((1, 1, 1), slice(7, 8)),
}


def _mesh(name):
  (data, fsdp, tensor), devices = MESHES[name]
  return sharding.make_mesh(
    data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[devices]
  )


def _shapes():
  return jax.eval_shape(lambda params: params, tiny.tiny_policy()[1])


def _layout(dtype="bfloat16"):
  fns = models.make_policy(
    tiny.tiny_config(), numerics=models.Numerics.all(jnp.dtype(dtype))
  )
  return fns.for_sampling


def _placed():
  """Returns a copy of the trainer's parameters on its mesh."""
  params = jax.device_get(tiny.tiny_policy()[1])
  return jax.device_put(
    params, sharding.tree_shardings(params, _mesh("trainer"))
  )


@functools.cache
def _transfer(target=None, *, dtype="bfloat16", most=5000):
  """Makes a transfer from the trainer's mesh to another (None: the same)."""
  layout = _layout(dtype)
  place = lambda mesh: sharding.tree_shardings(
    jax.eval_shape(layout, _shapes()), _mesh(mesh)
  )
  return sync.WeightTransfer(
    layout,
    _shapes(),
    source=place("trainer"),
    target=place(target) if target else None,
    max_bytes=most,
  )


@functools.cache
def _expected(dtype="bfloat16"):
  return jax.jit(_layout(dtype))(tiny.tiny_policy()[1])


def _equal_bits(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


class TestSend:
  @pytest.mark.parametrize(
    ("dtype", "target"), [("float32", None), ("bfloat16", "trainer")]
  )
  def test_is_the_layout_and_shares_no_memory(self, dtype, target):
    # The trainer donates its parameters to its next update.
    params = _placed()
    weights = _transfer(target, dtype=dtype).send(params, 7)
    for leaf in jax.tree.leaves(params):
      leaf.delete()
    _equal_bits(weights.params, _expected(dtype))
    assert weights.version == 7

  def test_reshards_onto_another_mesh_of_other_devices(self):
    weights = _transfer("apart").send(_placed(), 1)
    _equal_bits(weights.params, _expected())
    for leaf in jax.tree.leaves(weights.params):
      assert leaf.sharding.device_set == set(jax.devices()[4:])
    kernel = weights.params["layers"][1]["mlp"]["up"]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(24, 20)}

  def test_has_one_checksum_whatever_mesh_and_groups(self):
    transfers = [
      _transfer(),
      _transfer("apart"),
      _transfer("one", most=1 << 30),
    ]
    found = set()
    for transfer in transfers:
      weights = transfer.send(_placed(), 0)
      found |= {weights.checksum, digest.checksum(weights.params)}
    assert found == {digest.checksum(jax.device_get(_expected()))}

  def test_deletes_what_it_replaces(self):
    params, transfer = _placed(), _transfer("apart")
    old = transfer.send(params, 0)
    new = transfer.send(jax.tree.map(jnp.negative, params), 1, replaces=old)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
    assert new.checksum == digest.checksum(new.params) != old.checksum
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))

  def test_compiles_once(self):
    params, transfer = _placed(), _transfer("apart")
    weights = transfer.send(params, 0)
    transfer.send(params, 1, replaces=weights)
    transfer.checksums(params)
    assert len(transfer._programs) > 3
    assert {p._cache_size() for _, p, _ in transfer._programs} == {1}

  def test_refuses_groups_of_no_bytes(self):
    with pytest.raises(ValueError, match="max_bytes=0, expected"):
      sync.WeightTransfer(_layout(), _shapes(), max_bytes=0)


class TestChecksums:
  def test_are_those_of_what_arrives(self):
    params, transfer = _placed(), _transfer("apart")
    assert transfer.checksums(params) == digest.checksums(
      transfer.send(params, 0).params
    )


def _bytes(leaves):
  return sum(x.nbytes for x in leaves)


def _alive():
  """Returns bytes of sharded arrays; single-device arrays may be views."""
  arrays = jax.live_arrays()
  return _bytes(x for x in arrays if len(x.sharding.device_set) > 1)


class TestGroups:
  @pytest.mark.parametrize(
    ("most", "replacing"), [(700, True), (5000, False), (1 << 20, True)]
  )
  def test_bound_what_is_under_way(self, monkeypatch, most, replacing):
    params, transfer = _placed(), _transfer("apart", most=most)
    old = transfer.send(params, 0)
    sizes = [x.nbytes for x in jax.tree.leaves(old.params)]
    before = _alive()
    put, sent, alive = jax.device_put, [], []

    def spy(leaves, places):
      out = jax.block_until_ready(put(leaves, places))
      copies = sum(sent)  # Arrived minus deleted bytes.
      if replacing:
        copies -= sum(sent) + _bytes(leaves)
      alive.append(_alive() - before - copies)
      sent.append(_bytes(leaves))
      return out

    monkeypatch.setattr(jax, "device_put", spy)
    new = transfer.send(params, 1, replaces=old if replacing else None)
    assert sum(sent) == sum(sizes) == _bytes(jax.tree.leaves(new.params))
    assert max(sent) <= max(most, *sizes)
    assert len(sent) <= 2 * sum(sizes) // most + 1  # Not too small.
    # One copy of a group is sent, another arrives.
    assert alive == [2 * size for size in sent]

  def test_take_neighbours_and_lone_giants(self):
    groups = transfer_lib._groups([2, 2, 9, 1, 4, 5, 0], 5)
    assert groups == [[0, 1], [2], [3, 4], [5, 6]]
    assert transfer_lib._groups([], 5) == []
