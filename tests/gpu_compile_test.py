"""Sampler and update compile with their kernels for an H100."""

import importlib.util

import pytest
from helpers import programs

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not any(
      importlib.util.find_spec(f"jax_cuda{version}_plugin")
      for version in (12, 13)
    ),
    reason="no CUDA plugin of JAX is installed: pip install -e '.[gpu]'",
  ),
]


@pytest.fixture(scope="module", name="report")
def _report():
  return programs.compiled("tests/lower_for_gpu.py")


def test_attention_of_a_row_holds_no_scores(report):
  # One kernel forward and two backward. The output takes 24 MiB; the scores of
  # one head would take 256 MiB.
  assert report["packed"]["attention"] == 3
  assert report["packed"]["temporary_bytes"] < 25 * 2**20


def test_products_of_experts_copy_no_rows(report):
  # XLA's attention would have temporaries of 88 GiB.
  assert report["experts"]["attention"] == 3
  assert report["experts"]["temporary_bytes"] < 2**20


def test_a_decode_step_has_few_kernels_a_layer_and_no_branch(report):
  two, three = report["decode 2"], report["decode 3"]
  added = {name: three[name] - count for name, count in two.items()}
  assert added["attention"] == 2  # Partitions, then their sum.
  assert added["kernels"] <= 12
  assert three["branches"] == 0


def test_an_update_attends_by_the_kernels_on_a_mesh(report):
  # Forward, recomputed for the backward pass, and twice in it.
  assert report["update"]["attention"] == 4
