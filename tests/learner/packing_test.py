"""Packed rows contain every token once, with correctly shifted targets."""

import numpy as np
import pytest
from helpers.tiny_run import random_rollout

from jaxrl_llm.learner import packing


class TestFirstFitDecreasing:
  def test_golden(self):
    lengths = np.asarray([3, 6, 4, 2, 5, 1])
    row, offset, used = packing.first_fit_decreasing(lengths, 7)
    # Longest first: 6 | 5 | 4 | 3 joins the 4, 2 joins the 5, 1 joins the 6.
    np.testing.assert_array_equal(row, [2, 0, 2, 1, 1, 0])
    np.testing.assert_array_equal(offset, [4, 0, 0, 5, 0, 6])
    assert used == 3

  @pytest.mark.parametrize("seed", range(20))
  def test_never_overlaps_nor_exceeds(self, seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(5, 40))
    lengths = rng.integers(1, capacity + 1, int(rng.integers(1, 60)))
    row, offset, used = packing.first_fit_decreasing(lengths, capacity)
    filled = np.zeros((used, capacity), int)
    for r, o, n in zip(row, offset, lengths):
      assert 0 <= o and o + n <= capacity
      filled[r, o : o + n] += 1
    assert filled.max() == 1 and filled.sum() == lengths.sum()
    assert (filled.sum(axis=1) > 0).all()

  def test_nothing(self):
    row, offset, used = packing.first_fit_decreasing(np.zeros(0, int), 4)
    assert row.size == offset.size == used == 0


class TestPack:
  def test_the_shift_by_hand(self):
    rollout = random_rollout(np.random.default_rng(0), rows=2)
    rollout = rollout.replace(
      prompt_tokens=np.asarray([[10, 11, 12], [20, 21, 0]]),
      prompt_lengths=np.asarray([3, 2]),
      tokens=np.asarray([[13, 14, 0], [22, 0, 0]]),
      lengths=np.asarray([2, 1]),
      mask=np.asarray([[True, True, False], [True, False, False]]),
      behavior_logprobs=np.asarray([[-1, -2, 9], [-3, 9, 9]], np.float32),
    )
    packed, layout = packing.pack(rollout, capacity=9, rows=1, micro_batches=2)
    row = lambda name: packed[name][0, 0].tolist()
    assert row("tokens") == [10, 11, 12, 13, 14, 20, 21, 22, 0]
    assert row("targets") == [11, 12, 13, 14, 0, 21, 22, 0, 0]
    assert row("segments") == [1, 1, 1, 1, 1, 2, 2, 2, 0]
    assert row("positions") == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert not packed.prefixes.any()
    # 13 is predicted at the position of 12, 14 at 13, and 22 at 21.
    assert row("mask") == [0, 0, 1, 1, 0, 0, 1, 0, 0]
    # Log-probs are at the position of their token: 13, 14 and 22.
    assert row("logprobs") == [0, 0, 0, -1, -2, 0, 0, -3, 0]
    assert packed.count == 1 and not packed.segments[1].any()
    values = np.asarray([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]], np.float32)
    scattered = layout.scatter(values)
    assert scattered.dtype == np.float32
    assert scattered[0, 0].tolist() == [0, 0, 1, 2, 0, 0, 3, 0, 0]
    of_responses = layout.scatter(np.asarray([True, False]), fill=True)
    assert of_responses[0, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1]
    np.testing.assert_array_equal(
      layout.gather(scattered), [[1, 2, 0], [3, 0, 0]]
    )
    # The last tokens are 14 and 22.
    np.testing.assert_array_equal(layout.start + layout.lengths, [4, 7])
    np.testing.assert_array_equal(layout.gather_last(packed.tokens), [14, 22])

  def test_a_shared_prompt_by_hand(self):
    rollout = random_rollout(np.random.default_rng(0), rows=3, group_size=3)
    rollout = rollout.replace(
      prompt_tokens=np.asarray([[10, 11, 12]] * 3),
      prompt_lengths=np.asarray([3, 3, 3]),
      tokens=np.asarray([[21, 0, 0], [31, 32, 33], [41, 42, 0]]),
      lengths=np.asarray([1, 3, 2]),
      mask=np.asarray([[1, 0, 0], [1, 1, 1], [1, 0, 0]], bool),
      behavior_logprobs=-np.asarray([[1, 9, 9], [2, 3, 4], [5, 9, 9]], "f4"),
    )
    packed, layout = packing.pack(rollout, capacity=10, rows=2, micro_batches=1)
    row = lambda name, r=0: packed[name][0, r].tolist()
    # The longest two share one prompt; the third has its own copy.
    assert row("tokens") == [10, 11, 12, 31, 32, 33, 12, 41, 42, 0]
    assert row("targets") == [11, 0, 31, 32, 33, 0, 41, 42, 0, 0]
    assert row("positions") == [0, 1, 2, 3, 4, 5, 2, 3, 4, 0]
    assert row("segments") == [1, 1, 2, 2, 2, 2, 3, 3, 3, 0]
    assert row("prefixes") == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert row("mask") == [0, 0, 1, 1, 1, 0, 1, 0, 0, 0]
    assert row("logprobs") == [0, 0, 0, -2, -3, -4, 0, -5, 0, 0]
    assert row("tokens", 1) == [10, 11, 12, 21, 0, 0, 0, 0, 0, 0]
    assert row("segments", 1) == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert not packed.prefixes[0, 1].any()
    np.testing.assert_array_equal(layout.gather(packed.targets), rollout.tokens)

  @pytest.mark.parametrize("share", [True, False])
  @pytest.mark.parametrize("seed", range(10))
  def test_every_sample_once_with_its_prompt_and_itself(self, seed, share):
    rng = np.random.default_rng(seed)
    rollout = random_rollout(rng, rows=12, group_size=(1, 4)[seed % 2])
    some = rng.random(12) < 0.8  # The other responses are empty.
    rollout = rollout.replace(
      lengths=rollout.lengths * some, mask=rollout.mask & some[:, None]
    )
    packed, layout = packing.pack(
      rollout,
      capacity=int(rng.integers(16, 50)),
      rows=3,
      micro_batches=4,
      share=share,
    )
    assert share or not packed.prefixes.any()
    assert not packed.tokens[packed.count :].any()
    assert packed.tokens[: packed.count].any(axis=(1, 2)).all()
    # A position's target is the token after it.
    present = np.arange(9)[None] < rollout.lengths[:, None]
    np.testing.assert_array_equal(layout.present, present)
    np.testing.assert_array_equal(
      layout.gather(packed.targets), np.where(present, rollout.tokens, 0)
    )
    np.testing.assert_array_equal(
      packed.tokens.reshape(-1)[layout.index + 1], rollout.tokens[present]
    )
    np.testing.assert_array_equal(layout.gather(packed.mask), rollout.mask)
    assert packed.mask.sum() == rollout.mask.sum()
    last = [layout.gather_last(packed[x]) for x in ("tokens", "positions")]
    names = ("tokens", "segments", "prefixes", "positions")
    grid = {name: packed[name].reshape(12, -1) for name in names}
    for i in range(12):
      row, column = divmod(int(layout.start[i]), grid["tokens"].shape[1])
      segment = grid["segments"][row, column]
      prefix = grid["prefixes"][row, column]
      seen = grid["segments"][row] == segment
      if prefix:
        seen |= grid["segments"][row] == prefix
      prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
      response = rollout.tokens[i, : rollout.lengths[i]]
      whole = np.concatenate([prompt, response])
      np.testing.assert_array_equal(grid["tokens"][row][seen], whole)
      np.testing.assert_array_equal(
        grid["positions"][row][seen], np.arange(len(whole))
      )
      # Of an empty response, the last token is that of the prompt.
      assert [x[i] for x in last] == [whole[-1], len(whole) - 1]

  def test_errors(self):
    rollout = random_rollout(np.random.default_rng(0), rows=4)
    rollout = rollout.replace(lengths=np.asarray([9, 9, 9, 9]))
    longest = int(rollout.prompt_lengths.max()) + 9
    joined = rollout.replace(group=np.zeros(4, np.int32))
    for rows, capacity, micro_batches, said in (
      (rollout, longest - 1, 2, f"sample of {longest} tokens"),
      (joined, longest, 2, "one group have different prompts"),
      (rollout, longest, 1, "do not fit 1 micro-batches of 2"),
    ):
      sizes = {"capacity": capacity, "micro_batches": micro_batches}
      with pytest.raises(ValueError, match=said):
        packing.pack(rows, rows=2, **sizes)


class TestMiniBatches:
  def make(self, rows, size, *, seed=None, group_size=1, chosen=None):
    """Returns responses and their mini-batches; a seed shuffles them."""
    rollout = random_rollout(
      np.random.default_rng(1), rows=rows, group_size=group_size
    )
    rng = None if seed is None else np.random.default_rng(seed)
    return rollout, packing.mini_batches(
      rollout, size=size, rng=rng, capacity=16, rows=2, chosen=chosen
    )

  def check_targets(self, rollout, batches):
    for batch in batches:
      np.testing.assert_array_equal(
        batch.layout.gather(batch.packed.targets),
        np.where(batch.layout.present, rollout.tokens[batch.rows], 0),
      )

  def test_every_sample_once_and_fixed_shapes(self):
    rollout, batches = self.make(12, 4, seed=5)
    rows = np.concatenate([b.rows for b in batches])
    assert sorted(rows) == list(range(12)) and rows.tolist() != list(range(12))
    assert {b.packed.tokens.shape for b in batches} == {(2, 2, 16)}
    self.check_targets(rollout, batches)

  def test_groups_are_shuffled_whole(self):
    orders = []
    for seed in range(2):
      rollout, batches = self.make(24, 8, seed=seed, group_size=4)
      groups = np.concatenate([rollout.group[b.rows] for b in batches])
      assert (groups.reshape(-1, 4) == groups[::4, None]).all()
      orders.append(groups[::4].tolist())
    assert sorted(orders[0]) == list(range(6)) and orders[0] != orders[1]

  def test_a_remainder_is_spread_over_all(self):
    _, batches = self.make(7, 3)
    rows = [b.rows.tolist() for b in batches]
    assert rows == [[0, 1, 2], [3, 4], [5, 6]]
    # Arrays have one size, so that nothing is recompiled.
    assert {b.packed.tokens.shape for b in batches} == {(2, 2, 16)}

  def test_of_chosen_samples_alone(self):
    chosen = np.asarray([11, 0, 2, 4, 7, 8, 9])
    rollout, batches = self.make(12, 4, seed=0, group_size=3, chosen=chosen)
    assert [b.rows.size for b in batches] == [4, 3]
    rows = np.concatenate([b.rows for b in batches])
    assert sorted(rows) == sorted(chosen)
    # Samples of a group stay adjacent, although no group is complete.
    groups = rollout.group[rows]
    changes = np.count_nonzero(np.diff(groups))
    assert changes == len(set(groups.tolist())) - 1
    self.check_targets(rollout, batches)

  def test_of_no_sample_there_is_none(self):
    _, batches = self.make(4, 4, chosen=np.zeros(0, np.int64))
    assert not batches
