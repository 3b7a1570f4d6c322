"""How changed places are written, and what that costs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sync
from jaxrl_llm.sync import patch as patch_lib


class TestSize:
  def _patch(self, places, *, size=100_000, dtype="bfloat16"):
    old = np.zeros(size, jnp.dtype(dtype))
    new = old.copy()
    new[np.asarray(places)] = 1
    old, new = sync.stamp({"x": old}, 0), sync.stamp({"x": new}, 1)
    patch = sync.diff(old, new)
    assert sync.apply(old, patch).digest == new.digest
    return patch.leaves["x"]

  @pytest.mark.parametrize(
    ("places", "gaps"),
    [
      ([0], [0]),
      ([255], [255]),
      (range(0, 100_000, 100), [0] + 999 * [99]),
      # One wide gap is crossed; many of them are worth two bytes.
      ([*range(0, 4000, 40), 4600], [0] + 99 * [39] + [255, 255, 127]),
      (range(600, 100_000, 600), [600] + 165 * [599]),
      ([99_999], [99_999]),
    ],
  )
  def test_gaps_take_the_dtype_that_costs_least(self, places, gaps):
    leaf = self._patch(places)
    assert leaf.gaps.tolist() == gaps
    widths = (1, 2, 4)
    costs = [
      (len(places) + sum((b - a - 1) >> 8 * w for a, b in self._gaps(places)))
      * (w + 2)
      for w in widths
    ]
    assert leaf.nbytes == min(costs)
    assert leaf.gaps.itemsize == widths[int(np.argmin(costs))]

  def _gaps(self, places):
    return list(zip([-1, *places], places))

  def test_a_leaf_is_sent_whole_when_that_is_not_larger(self):
    # Three bytes for a change, two for an element.
    some = self._patch(range(0, 999), size=1500)
    assert some.gaps is not None and some.nbytes == 2997
    many = self._patch(range(0, 1000), size=1500)
    assert many.gaps is None and many.nbytes == 3000


class TestCode:
  def test_is_undone_by_its_places(self):
    rng = np.random.default_rng(2)
    for spread in (2, 300, 70_000, 1 << 34):
      places = np.unique(rng.integers(0, 50 * spread, 50))
      for itemsize in (1, 2, 4, 8):
        gaps = patch_lib._code(places, itemsize=itemsize)
        back = patch_lib._places(gaps)
        # What else is written are elements that stay as they are.
        assert set(places) <= set(back) and (np.diff(back) > 0).all()
        assert back[-1] == places[-1]
