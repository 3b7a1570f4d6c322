"""Patches as bytes: the same patch comes out, or one line."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sync


def _pair():
  rng = np.random.default_rng(0)
  make = lambda shape, dtype: rng.normal(size=shape).astype(jnp.dtype(dtype))
  old = {
    "sparse": make((40, 30), "bfloat16"),
    "dense": make((5,), "float32"),
    "same": make((4, 4), "float32"),
    "scalar": make((), "float32"),
    "int": rng.integers(-9, 9, 500).astype(np.int8),
  }
  new = {name: np.array(x) for name, x in old.items()}
  new["sparse"][[3, 39], [5, 29]] = np.nan
  new["dense"] += 1
  new["scalar"] = -new["scalar"]
  new["int"][[0, 499]] += 1
  return sync.stamp(old, 11), sync.stamp(new, 12)


class TestBytes:
  def test_the_same_patch_comes_out(self):
    old, new = _pair()
    patch = sync.diff(old, new)
    assert patch.leaves["dense"].gaps is None
    assert patch.leaves["sparse"].gaps is not None
    data = sync.to_bytes(patch)
    again = sync.from_bytes(data)
    assert sync.to_bytes(again) == data
    for field in ("base", "version", "base_digest", "digests"):
      assert getattr(again, field) == getattr(patch, field)
    got = sync.apply(old, again)
    assert got.digest == new.digest and got.version == 12
    for name, x in new.params.items():
      assert np.asarray(got.params[name]).tobytes() == np.asarray(x).tobytes()

  def test_a_patch_without_changes(self):
    old, _ = _pair()
    same = dataclasses.replace(old, version=12)
    patch = sync.from_bytes(sync.to_bytes(sync.diff(old, same)))
    assert sync.apply(old, patch).version == 12

  def test_every_damage_is_refused(self):
    data = sync.to_bytes(sync.diff(*_pair()))
    broken = [data[:n] for n in (0, 5, 16, 40, len(data) - 1)]
    broken += [data + b"\0", b"x" + data]
    for place in range(0, len(data), 7):
      copy = bytearray(data)
      copy[place] ^= 1 << place % 8
      broken.append(bytes(copy))
    for bad in broken:
      with pytest.raises(sync.SyncError) as error:
        sync.from_bytes(bad)
      assert "\n" not in str(error.value)

  def test_what_is_wrong_is_said(self):
    data = sync.to_bytes(sync.diff(*_pair()))
    with pytest.raises(sync.SyncError, match="are no patch of this format"):
      sync.from_bytes(b"PK\3\4" + data)
    with pytest.raises(sync.SyncError, match="was cut or changed on the way"):
      sync.from_bytes(data[:-3])
