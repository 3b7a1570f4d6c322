"""Packed mini-batches: inputs of losses and the weight of each token."""

import jax
import numpy as np
import pytest
from helpers.tiny_algorithm import make_algorithm, pack_critic, pack_policy
from helpers.tiny_experience import MASK, SHIFTED, make, make_rollout

from jaxrl_llm import sharding
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.state import BatchArrays
from jaxrl_llm.system import processes
from jaxrl_llm.types import Status, take_rows


def pack(made, experience, rows=(1, 0, 2), by=pack_policy):
  """Packs rows for a model; returns them and the `gather` of their layout."""
  rollout, rows = make_rollout(), np.asarray(rows)
  layout = packing.make_layout(
    take_rows(rollout, rows), capacity=14, rows=2, micro_batches=2
  )
  batch = packing.MiniBatch(rows, layout, rollout)
  return by(take_rows(experience, rows), batch, made), layout.gather


class TestPolicyBatch:
  def test_packs_without_the_device(self):
    # A device operation would wait for the previous update.
    made, experience = make_algorithm(), make()

    def pack_both():
      for by in (pack_policy, pack_critic):
        pack(made, experience, by=by)

    assert not jax.make_jaxpr(pack_both)().eqns

  def test_unjudged_rows_carry_no_weight(self):
    made, got = make_algorithm(), make(judged=(True, True, False))
    for by in (pack_policy, pack_critic):
      packed, gather = pack(made, got, rows=(2, 0, 1), by=by)
      weights = gather(packed.inputs["weights"])
      assert not weights[0].any()
      np.testing.assert_allclose(weights[1:].sum(), 1.0, rtol=1e-6)
      for mask in (packed.mask, packed.packed.mask):
        np.testing.assert_array_equal(gather(mask)[1:], MASK[:2])
        assert not gather(mask)[0].any()

  @pytest.mark.parametrize(
    ("mode", "expected"),
    [
      ("token-mean", (1 / 9, 1 / 9, 1 / 9)),
      ("seq-mean-token-mean", (1 / 12, 1 / 6, 1 / 9)),
      ("seq-mean-token-sum", (1 / 3, 1 / 3, 1 / 3)),
      # The response limit of the tiny run is 12 tokens.
      ("dr-grpo", (1 / 36, 1 / 36, 1 / 36)),
    ],
  )
  def test_reduction_is_the_one_of_the_config(self, mode, expected):
    made = make_algorithm(
      loss__mode=mode, loss__kl_coefficient=0.1, loss__entropy_coefficient=0.1
    )
    batch, gather = pack(made, make(loss__kl_coefficient=0.1), rows=(0, 1, 2))
    for name in ("weights", "kl/weights", "entropy/weights"):
      np.testing.assert_allclose(
        gather(batch.inputs[name]),
        np.where(MASK, np.asarray(expected)[:, None], 0),
        rtol=1e-6,
      )
    # Always a mean over the tokens of correct responses (VAPO, eq. 9-10).
    right = MASK & np.asarray([[True], [False], [True]])
    nll = gather(batch.inputs["nll/weights"])
    np.testing.assert_allclose(nll, right / 7, rtol=1e-6)

  def test_positive_examples_are_whole_responses(self):
    """The window contains only the end of a correct response."""
    rollout = make_rollout(
      window_start=np.asarray([2, 0, 0]),
      status=np.asarray([Status.FINISHED, Status.FINISHED, Status.OVERLONG]),
    )
    got = make(rollout=rollout)
    positive, mask = (
      np.asarray(got[name]) for name in ("positive_mask", "policy_mask")
    )
    np.testing.assert_array_equal(positive, MASK * [[True], [False], [False]])
    np.testing.assert_array_equal(mask[0], [0, 0, 1, 1, 0])
    # They reach the update together with the policy's tokens.
    batch, gather = pack(make_algorithm(), got, rows=(0, 1, 2))
    np.testing.assert_array_equal(gather(batch.mask), mask)
    np.testing.assert_array_equal(gather(batch.packed.mask), mask | positive)
    nll = gather(batch.inputs["nll/weights"])
    np.testing.assert_allclose(nll, positive / 4)
    assert not gather(batch.inputs["weights"])[0, :2].any()

  @pytest.mark.parametrize(
    ("changes", "weights"),
    [
      ({"loss__nll_coefficient": 0.0}, set()),
      ({}, {"nll/weights"}),
      ({"loss__kl_coefficient": 0.1}, {"nll/weights", "kl/weights"}),
      (
        {"loss__nll_coefficient": 0.0, "loss__entropy_coefficient": 0.1},
        {"entropy/weights"},
      ),
    ],
  )
  def test_inputs_are_those_of_the_algorithm(self, changes, weights):
    made, got = make_algorithm(**changes), make(**changes)
    policy, gather = pack(made, got)
    assert policy.inputs.keys() == made.policy_inputs | weights | {"weights"}
    assert policy.step_scale is None
    for name in made.policy_inputs:
      np.testing.assert_array_equal(
        gather(policy.inputs[name]), np.where(MASK, got[name], 0)[[1, 0, 2]]
      )

  # Ratios 8, 1.5, 1 and 1/2; 8 is above the bound of 2.
  @pytest.mark.parametrize(("kind", "first"), [("truncate", 2), ("mask", 0)])
  def test_a_correction_weighs_tokens_and_not_the_denominator(
    self, kind, first
  ):
    changes = {"off_policy__correction": kind}
    got = make(rollout=SHIFTED, **changes)
    policy, gather = pack(make_algorithm(**changes), got, rows=(1, 0))
    np.testing.assert_allclose(
      gather(policy.inputs["weights"]),
      np.asarray([[1, 1, 0, 0, 0], [first, 1.5, 1, 0.5, 0]]) / 6,
      rtol=1e-6,
    )


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_critic_gets_what_its_loss_reads(clip):
  made, got = make_algorithm(loss__clip_value=clip), make(loss__clip_value=clip)
  value, gather = pack(made, got, by=pack_critic)
  expected = {"returns"} if clip is None else {"returns", "old_values"}
  assert value.inputs.keys() == {"weights", *expected}
  for name in expected:
    np.testing.assert_array_equal(
      gather(value.inputs[name]), np.where(MASK, got[name], 0)[[1, 0, 2]]
    )


class TestBatchArrays:
  """Six rows and two padding rows on 4 x 2 devices."""

  def arrays(self):
    mesh = sharding.make_mesh(data=4, fsdp=2, tensor=1)
    numbers = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    numbers[0], numbers[5] = -0.0, np.nan
    given = {"numbers": numbers, "mask": numbers > 0}
    there = processes.put(given, sharding.along_batch(mesh))
    return given, BatchArrays(((there, 6),), mesh)

  def test_rows_and_wholes_in_every_bit(self):
    given, arrays = self.arrays()
    assert set(arrays) == {"numbers", "mask"} and "other" not in arrays
    rows = np.asarray([5, 0, 3])
    for name, x in processes.to_host(arrays.take(rows)).items():
      assert x[:3].tobytes() == given[name][rows].tobytes()
      assert len(x) == 4  # As with one more row.
      assert arrays[name].tobytes() == given[name][:6].tobytes()

  def test_an_array_on_the_host(self):
    given, arrays = self.arrays()
    arrays["mask"] = np.arange(6)
    assert arrays.take(np.asarray([4, 1]))["mask"].tolist() == [4, 1]
    assert arrays["mask"].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays["numbers"].tobytes() == given["numbers"][:6].tobytes()

  def test_parts_are_concatenated(self):
    given, arrays = self.arrays()
    both = BatchArrays(arrays.parts * 2, arrays.mesh)
    expected = np.concatenate([given["numbers"][:6]] * 2)
    assert both["numbers"].tobytes() == expected.tobytes()
