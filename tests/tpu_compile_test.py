"""Sampler and update compile for TPUs with their kernels."""

import importlib.util

import pytest
from helpers import programs

_LAYERS, _DEVICES = 2, 8

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[tpu]'",
  ),
]


@pytest.fixture(scope="module", name="report")
def _report():
  """Returns a report on every compiled program, made in a separate process."""
  return programs.compiled("tests/lower_for_tpu.py")


class TestSampler:
  def test_every_layer_of_a_step_attends_by_the_kernel(self, report):
    assert report["sampler decode"]["kernels"] == _LAYERS

  def test_a_prefill_attends_by_the_kernel(self, report):
    # Only keys and values of the last layer are needed.
    assert report["sampler prefill"]["kernels"] == _LAYERS - 1

  def test_pages_stay_on_their_devices(self, report):
    assert report["sampler decode"]["gathered_caches"] == 0


class TestScale:
  """2,048 slots of 2 layers of Qwen2.5-32B on 64 chips of v5p."""

  # 65,536 pages of 128 tokens: 2 x 8 heads x 128 x 2 bytes in 2 layers.
  KV_CACHE = 65_536 * 128 * 2 * 8 * 128 * 2 * 2

  def test_every_chip_holds_its_part_of_the_kv_cache(self, report):
    assert report["decode at scale"]["in_place_bytes"] == self.KV_CACHE / 64

  def test_a_decode_step_needs_little_beside_it(self, report):
    sizes, cache = report["decode at scale"], self.KV_CACHE / 64
    # The policy, sharded over 16 of the 64 chips.
    assert sizes["argument_bytes"] < cache + 2**29
    # Half of a chip's pages of one layer.
    assert sizes["temporary_bytes"] < cache / 2 / 2


class TestUpdate:
  def test_attends_by_the_kernel(self, report):
    # Forward, recomputed for the backward pass, and twice in it.
    assert report["update"]["kernels"] == 4

  def test_only_keys_and_values_are_gathered_of_other_parts_of_a_row(
    self, report
  ):
    gathered = {
      tuple(axes): size
      for kind, axes, size in report["update"]["sent"]
      if kind == "all-gather" and "context" in axes
    }
    # Forward, and recomputed for the backward pass: half of the keys and values
    # of 4 rows of 512 tokens, 2 of 4 heads per device, in bfloat16.
    keys = 2 * _LAYERS * 4 * (512 / 2) * 2 * 2 * 128 * 2
    assert keys <= gathered["context",] <= 1.1 * keys

  def test_every_device_holds_its_part_of_the_state(self, report):
    part = report["state_bytes"] / _DEVICES
    assert part < report["update"]["argument_bytes"] < 1.1 * part
