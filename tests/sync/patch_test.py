"""Patches give the new weights bit for bit, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sync

DTYPES = ("float32", "bfloat16", "int8", "int64")
SHAPES = ((), (0, 3), (4, 5), (700,))


def random_tree(rng):
  """Uniform bits, so NaNs with payloads and −0 are there."""

  def leaf(shape, dtype):
    dtype = jnp.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)

  return {
    "deep": {d: tuple(leaf(s, d) for s in SHAPES) for d in DTYPES},
    "flags": rng.integers(0, 2, 9).astype(bool),
    "zeros": np.zeros(300, np.float32),
  }


def changed(tree, rng, share):
  """The tree with new bits in about a share of its elements."""

  def leaf(x):
    bits = np.array(x).reshape(-1).view(f"u{x.dtype.itemsize}")
    chosen = rng.random(bits.shape) < share
    limit = 2 if x.dtype == np.dtype(bool) else 1 << 62
    new = rng.integers(0, limit, bits.shape).astype(bits.dtype)
    bits[chosen] = new[chosen]
    return bits.view(x.dtype).reshape(x.shape)

  return jax.tree.map(leaf, tree)


def raw(tree):
  return [
    (str(x.dtype), np.shape(x), np.asarray(x).tobytes())
    for x in jax.tree.leaves(tree)
  ]


def pair(share=0.02, seed=0, versions=(3, 4)):
  rng = np.random.default_rng(seed)
  old = random_tree(rng)
  new = changed(old, rng, share)
  return sync.stamp(old, versions[0]), sync.stamp(new, versions[1])


class TestDiffAndApply:
  @pytest.mark.parametrize("share", [0.0, 0.003, 0.1, 1.0])
  @pytest.mark.parametrize("seed", range(3))
  def test_give_the_new_weights_bit_for_bit(self, share, seed):
    old, new = pair(share, seed)
    before = raw(old.params)
    patch = sync.diff(old, new)
    got = sync.apply(old, patch)
    assert raw(got.params) == raw(new.params)
    assert (got.version, got.digest) == (4, new.digest)
    assert jax.tree.structure(got.params) == jax.tree.structure(new.params)
    assert raw(old.params) == before
    if not share:
      assert not patch.leaves and patch.nbytes == 0

  def test_signs_of_zeros_and_payloads_of_nans_are_sent(self):
    nans = np.asarray([0x7FC00001, 0x7FC00002, 0xFFC00000], np.uint32)
    old = {"x": np.zeros(9, np.float32), "n": np.zeros(300, np.float32)}
    new = {"x": old["x"].copy(), "n": old["n"].copy()}
    new["x"][4] = -0.0
    new["n"][[7, 8, 280]] = nans.view(np.float32)
    old, new = sync.stamp(old, 0), sync.stamp(new, 1)
    patch = sync.diff(old, new)
    assert {n: len(p.bits) for n, p in patch.leaves.items()} == {"n": 3, "x": 1}
    assert raw(sync.apply(old, patch).params) == raw(new.params)

  def test_weights_on_devices_are_patched_as_those_on_the_host(self):
    x = np.arange(512, dtype=np.float32).astype(jnp.dtype("bfloat16"))
    y = x.copy()
    y[100] = 7
    host = sync.diff(sync.stamp({"x": x}, 0), sync.stamp({"x": y}, 1))
    put = lambda x, v: sync.stamp({"x": jnp.asarray(x)}, v)
    device = sync.diff(put(x, 0), put(y, 1))
    assert sync.to_bytes(host) == sync.to_bytes(device)
    assert raw(sync.apply(put(x, 0), host).params) == raw({"x": y})

  def test_a_chain_of_patches_goes_from_first_to_last(self):
    rng = np.random.default_rng(0)
    trees = [random_tree(rng)]
    for _ in range(4):
      trees.append(changed(trees[-1], rng, 0.01))
    weights = [sync.stamp(tree, i) for i, tree in enumerate(trees)]
    patches = [sync.diff(a, b) for a, b in zip(weights, weights[1:])]
    got = weights[0]
    for patch in patches:
      got = sync.apply(got, patch)
    assert got.version == 4 and got.digest == weights[4].digest
    assert raw(got.params) == raw(trees[4])

  def test_leaves_that_stay_cost_nothing_and_are_shared(self):
    old, new = pair(0.0)
    tree = new.params | {"zeros": np.ones(300, np.float32)}
    patch = sync.diff(old, sync.stamp(tree, 4))
    assert list(patch.leaves) == ["zeros"]
    got = sync.apply(old, patch)
    assert np.shares_memory(
      got.params["deep"]["float32"][3], old.params["deep"]["float32"][3]
    )


class TestRefusals:
  def _refused(self, old, patch, match):
    with pytest.raises(sync.SyncError, match=match) as error:
      sync.apply(old, patch)
    assert "\n" not in str(error.value)

  def test_a_skipped_patch(self):
    rng = np.random.default_rng(1)
    trees = [random_tree(rng)]
    for _ in range(2):
      trees.append(changed(trees[-1], rng, 0.01))
    first, second, third = (sync.stamp(t, i) for i, t in enumerate(trees))
    patch = sync.diff(second, third)
    self._refused(first, patch, "from version 1 to 2 does not fit .* version 0")
    # Also if somebody says that they are of the right version.
    liar = dataclasses.replace(first, version=1)
    self._refused(liar, patch, "made for other weights than these of version 1")
    self._refused(third, patch, "does not fit weights of version 2")

  def test_a_base_that_was_damaged_after_its_stamp(self):
    old, new = pair()
    patch = sync.diff(old, new)
    x = np.array(old.params["zeros"])
    x[-1] = 1e-30
    old = dataclasses.replace(old, params=old.params | {"zeros": x})
    self._refused(old, patch, "does not give zeros of version 4")

  @pytest.mark.parametrize("part", ["bits", "gaps"])
  def test_a_patch_that_was_tampered_with(self, part):
    old, new = pair()
    patch = sync.diff(old, new)
    name, leaf = next(
      (n, p) for n, p in patch.leaves.items() if p.gaps is not None
    )
    array = getattr(leaf, part).copy()
    array[0] ^= 1
    leaf = dataclasses.replace(leaf, **{part: array})
    patch = dataclasses.replace(patch, leaves=patch.leaves | {name: leaf})
    self._refused(old, patch, f"does not give {name} of version 4")

  def test_a_patch_without_one_of_its_leaves(self):
    old, new = pair()
    patch = sync.diff(old, new)
    name = next(iter(patch.leaves))
    leaves = {n: p for n, p in patch.leaves.items() if n != name}
    patch = dataclasses.replace(patch, leaves=leaves)
    self._refused(old, patch, f"does not give {name} of version 4")

  @pytest.mark.parametrize(
    "change",
    [
      {"dtype": "float16"},
      {"shape": (350, 2)},
      {"gaps": np.asarray([700], np.uint32)},
      {"gaps": np.asarray([1, 2], np.uint32)},
      {"gaps": None},
    ],
  )
  def test_a_leaf_that_does_not_fit(self, change):
    x, y = np.zeros((2, 350), np.int16), np.zeros((2, 350), np.int16)
    y[1, 3] = 5
    old = sync.stamp({"x": x}, 0)
    patch = sync.diff(old, sync.stamp({"x": y}, 1))
    leaf = dataclasses.replace(patch.leaves["x"], **change)
    patch = dataclasses.replace(patch, leaves={"x": leaf})
    self._refused(old, patch, "x does not fit the weights; damaged")

  def test_a_leaf_on_one_side_only(self):
    old, new = pair()
    patch = sync.diff(old, new)
    less = {k: v for k, v in old.params.items() if k != "zeros"}
    self._refused(
      dataclasses.replace(old, params=less), patch, "zeros is on one side only"
    )
    with pytest.raises(sync.SyncError, match="zeros is in one of version 3 to"):
      sync.diff(sync.stamp(less, 3), new)

  @pytest.mark.parametrize(
    "other", [np.zeros(299, np.float32), np.zeros(300, np.int32)]
  )
  def test_no_patch_between_shapes_or_dtypes(self, other):
    old, new = pair()
    new = sync.stamp(new.params | {"zeros": other}, 4)
    with pytest.raises(sync.SyncError, match="^zeros goes from float32.300"):
      sync.diff(old, new)

  def test_no_patch_of_weights_with_a_wrong_stamp(self):
    old, new = pair()
    new = dataclasses.replace(new, digest=new.digest ^ 1)
    with pytest.raises(sync.SyncError, match="stamp of version 4 is not"):
      sync.diff(old, new)
