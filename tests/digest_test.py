"""Checksums depend on every bit, path and position, but not on devices."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import digest, sharding

DTYPES = "float32 bfloat16 float16 float8_e4m3fn int32 int8 uint16 bool".split()


def random_bits(rng, shape, dtype):
  """Makes an array of uniform bits: NaNs with payloads, −0, subnormals."""
  dtype = jnp.dtype(dtype)
  if dtype == np.dtype(bool):
    return rng.integers(0, 2, shape).astype(bool)
  count = int(np.prod(shape)) * dtype.itemsize
  return np.frombuffer(rng.bytes(count), dtype).reshape(shape)


def random_tree(seed):
  """Makes a tree with leaves of all dtypes, a scalar and an empty leaf."""
  rng = np.random.default_rng(seed)
  shapes = [(3, 5), (7,), (), (0, 4), (2, 3, 2)]
  return {
    "outer": {name: random_bits(rng, (3, 5), name) for name in DTYPES},
    "layers": tuple({"w": random_bits(rng, s, "bfloat16")} for s in shapes),
  }


def _mix(x):
  x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
  x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
  return x ^ x >> 16


def _by_hand(array, name):
  """Computes the docstring's formula per element with Python integers."""
  seed = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode())
  words = np.atleast_1d(array).reshape(-1).view(np.uint8).tobytes()
  size, signed = array.dtype.itemsize, array.dtype.kind == "i"
  words = [
    int.from_bytes(words[i : i + size], "little", signed=signed) % 2**32
    for i in range(0, len(words), size)
  ]
  low, high = _mix((seed + 1) % 2**32), _mix((seed + 2) % 2**32)
  for i, word in enumerate(words):
    place = _mix((i + seed) % 2**32)
    mixed = _mix(word ^ place)
    low, high = low + mixed, high + mixed * (place | 1)
  return low % 2**32 | (high % 2**32) << 32


class TestChecksums:
  @pytest.mark.parametrize("dtype", DTYPES)
  def test_are_the_formula(self, dtype):
    array = random_bits(np.random.default_rng(3), (3, 5), dtype)
    assert digest.checksums({"a": {"b": array}}) == {
      "a/b": _by_hand(array, "a/b")
    }

  def test_of_numpy_and_of_device_arrays_are_the_same(self):
    for seed in range(3):
      tree = random_tree(seed)
      assert digest.checksums(tree) == digest.checksums(
        jax.tree.map(jnp.array, tree)
      )

  def test_path_shape_and_dtype_count(self):
    zeros = lambda shape, dtype="float32": np.zeros(shape, jnp.dtype(dtype))
    trees = [
      {"a": zeros((2, 3))},
      {"b": zeros((2, 3))},
      {"a": zeros((3, 2))},
      {"a": zeros((6,))},
      {"a": zeros((2, 3), "int32")},
      {"a": zeros((2, 3)), "b": zeros((0,))},
      {"a": zeros((2, 3)), "c": zeros((0,))},
      {"a": zeros((2, 3)), "c": zeros((0, 1))},
      {},
    ]
    assert len({digest.checksum(tree) for tree in trees}) == len(trees)

  def test_do_not_depend_on_mesh_and_sharding(self):
    rng = np.random.default_rng(5)
    tree = {d: random_bits(rng, (8, 4), d) for d in ("float32", "bfloat16")}
    found = {digest.checksum(tree)}
    meshes = [
      sharding.make_mesh(data=2, fsdp=2, tensor=2),
      sharding.make_mesh(
        data=1, fsdp=4, tensor=1, devices=jax.devices()[:3:-1]
      ),
    ]
    specs = [(), ("fsdp", "tensor"), (None, "fsdp"), (("data", "fsdp"), None)]
    for mesh in meshes:
      for spec in specs:
        place = NamedSharding(mesh, PartitionSpec(*spec))
        found.add(digest.checksum(jax.device_put(tree, place)))
    assert len(found) == 1

  def test_are_compiled_once_a_shape(self):
    tree = {str(i): np.full((3, 11), i, np.float32) for i in range(6)}
    before = digest._program(None)._cache_size()
    digest.checksums(tree)
    digest.checksums(jax.tree.map(np.negative, tree))
    assert digest._program(None)._cache_size() == before + 1

  def test_refuse_what_has_no_bits_to_compare(self):
    with pytest.raises(TypeError, match="a: no checksum for dtype complex64"):
      digest.checksum({"a": np.zeros(2, np.complex64)})
    with pytest.raises(TypeError, match="no checksum for dtype float64"):
      digest.checksum({"a": np.zeros(2)})
    with pytest.raises(TypeError, match="no checksum for dtype key"):
      digest.checksum({"a": jax.random.key(0)})

  def test_refuse_two_leaves_of_one_name(self):
    with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
      digest.checksum({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)})


class TestCopies:
  """One array replicated over devices; one bit of a replica is flipped."""

  def leaf(self, rng, mesh, spec):
    x = rng.standard_normal((8, 6)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  def with_a_flipped_bit(self, rng, leaf):
    """Returns the array and the device whose replica is wrong."""
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    devices = [shard.device for shard in leaf.addressable_shards]
    wrong = int(rng.integers(len(parts)))
    bits = parts[wrong].view(np.uint32).reshape(-1)
    bits[rng.integers(bits.size)] ^= np.uint32(1) << np.uint32(rng.integers(32))
    shards = [jax.device_put(x, d) for x, d in zip(parts, devices)]
    broken = jax.make_array_from_single_device_arrays(
      leaf.shape, leaf.sharding, shards
    )
    return broken, devices[wrong]

  def test_a_flipped_bit_is_found_with_its_device(self):
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for i in range(20):
      tree = {
        "whole": self.leaf(rng, mesh, ()),
        "half": self.leaf(rng, mesh, ("b",)),
        "host": np.ones(3, np.float32),
      }
      assert digest.copies_that_differ(tree) == []
      name = ("whole", "half")[i % 2]
      tree[name], device = self.with_a_flipped_bit(rng, tree[name])
      assert digest.copies_that_differ(tree) == [f"{name} on {device}"]

  def test_what_lies_on_one_device_has_none(self):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    rng = np.random.default_rng(1)
    split = self.leaf(rng, mesh, (("a", "b"),))
    assert digest.copies_that_differ([split, jnp.ones(3), np.ones(2)]) == []
