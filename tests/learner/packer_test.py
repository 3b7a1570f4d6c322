"""Each response is trained on once, by the critic in full mini-batches."""

import types

import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm.learner import packer as packer_lib
from jaxrl_llm.learner.packer import Packer
from jaxrl_llm.types import Responses, Status, join_rows, take_rows, unjudged

ROWS = 5
SIZES = {"capacity": 64, "temperature": 1.0}


def member(waits=False, mini_batch=3, **settings):
  """Makes a member with just the attributes that packing needs."""
  return types.SimpleNamespace(
    settings=types.SimpleNamespace(mini_batch=mini_batch, **settings),
    training=types.SimpleNamespace(waits=waits),
  )


def make_packer(mini_batch=3):
  """Makes a packer with just enough to choose the critic's responses."""
  members = {"policy": member(), "critic": member(True, mini_batch=mini_batch)}
  return Packer(members, dict.fromkeys(members, True), **SIZES)


def make_responses(cut=(), first=0):
  """Makes responses with ids from `first` on; those in `cut` are unfinished."""
  rollout = tiny_run.random_rollout(np.random.default_rng(first), rows=ROWS)
  lengths = np.asarray([4, 9, 1, 6, 3], np.int32)
  status = np.full(ROWS, int(Status.FINISHED), np.int32)
  status[list(cut)] = int(Status.TRUNCATED)
  ids = np.arange(first, first + ROWS, dtype=np.int32)
  return unjudged(
    rollout.replace(
      lengths=lengths,
      mask=np.arange(9)[None] < lengths[:, None],
      status=status,
      sample_id=ids,
      group_id=ids,
    )
  ).replace(rewards=np.arange(first, first + ROWS).astype(np.float32))


def ids_of(responses: Responses | None):
  return [] if responses is None else responses.rollout.sample_id.tolist()


class TestWithWaiting:
  def take(self, packer, responses, waiting=None):
    """Returns (ids of the batch, ids for the critic, waiting responses)."""
    batch, rows, waiting = packer.with_waiting(responses, waiting)
    return batch, batch.rollout.sample_id[rows].tolist(), waiting

  def test_the_oldest_go_first(self):
    packer = make_packer(4)
    _, _, waiting = self.take(packer, make_responses((1, 4)))
    later = make_responses((0,), first=10)
    batch, learned, left = self.take(packer, later, waiting)
    # The policy trains on all new ones; responses that waited follow them.
    assert ids_of(batch) == [10, 11, 12, 13, 14, 0, 2, 3]
    assert learned == [0, 2, 3, 11] and ids_of(left) == [12, 13, 14]
    new = batch.rollout.lengths - batch.rollout.window_start
    assert (new[:5] > 0).all() and not new[5:].any()
    assert batch.rewards.tolist() == [10, 11, 12, 13, 14, 0, 2, 3]

  def test_a_run_may_go_on_with_smaller_mini_batches(self):
    packer = make_packer(16)
    _, _, waiting = self.take(packer, make_responses())
    _, _, waiting = self.take(packer, make_responses((1,), first=10), waiting)
    assert len(ids_of(waiting)) == 9
    # Waiting responses fill a mini-batch of the new size; the rest still waits.
    later = make_responses((0, 1), first=20)
    _, learned, left = self.take(make_packer(8), later, waiting)
    assert learned == [0, 1, 2, 3, 4, 10, 12, 13]
    assert ids_of(left) == [14, 22, 23, 24]
    assert left.rewards.tolist() == [14, 22, 23, 24]

  def test_groups_are_numbered_anew(self):
    packer = make_packer(4)
    _, _, waiting = self.take(packer, make_responses((1, 4)))
    later = make_responses((0,), first=10)
    rollout = later.rollout
    same = rollout.replace(group_id=np.asarray([0, 0, 2, 2, 9], np.int32))
    batch, _, _ = self.take(packer, later.replace(rollout=same), waiting)
    assert batch.rollout.group.tolist() == [0, 0, 1, 1, 2, 0, 1, 3]

  def test_nobody_waits_without_a_critic(self):
    packer = Packer({"policy": member()}, {"policy": True}, **SIZES)
    responses = make_responses((1,))
    batch, learned, waiting = self.take(packer, responses)
    assert batch is responses and learned == [] and waiting is None

  @pytest.mark.parametrize("size", [1, 3, 7])
  @pytest.mark.parametrize("seed", range(3))
  def test_every_ended_response_is_learned_from_once(self, seed, size):
    rng, packer = np.random.default_rng(seed), make_packer(size)
    waiting, ended, order = None, [], []
    for step in range(12):
      cut = np.flatnonzero(rng.random(ROWS) < 0.6)
      responses = make_responses(cut, first=step * ROWS)
      ended += ids_of(take_rows(responses, responses.ended))
      _, learned, waiting = self.take(packer, responses, waiting)
      assert len(learned) % size == 0
      order += learned
      assert len(ids_of(waiting)) < size
    assert sorted(order) == order
    assert order + ids_of(waiting) == ended


class TestCheckRows:
  def check(self, parts, rows):
    batches = [types.SimpleNamespace(rows=np.asarray(part)) for part in parts]
    packer_lib.check_rows(batches, np.asarray(rows, int))

  def test_each_once_is_right(self):
    self.check([[3, 0], [1, 2]], range(4))
    self.check([[5, 2], [9]], [2, 5, 9])
    self.check([], [])

  @pytest.mark.parametrize(
    ("parts", "said"),
    [
      ([[3, 0], [1]], "4 responses .* contain 3, 3 of them"),
      ([[3, 0], [1, 2], [1, 2]], "4 responses .* contain 6, 4 of them"),
      ([[3, 0], [1, 1]], "4 responses .* contain 4, 3 of them"),
      ([[3, 0], [1, 7]], "4 responses .* contain 4, 4 of them"),
      ([], "4 responses .* contain 0, 0 of them"),
    ],
    ids=["lost", "mini-batch twice", "response twice", "another", "none"],
  )
  def test_a_fault_is_told(self, parts, said):
    with pytest.raises(RuntimeError, match=said):
      self.check(parts, range(4))


def streamed(packer, rollout):
  """Returns parts of joined groups, each with its packed mini-batches."""
  responses = unjudged(rollout)
  groups = [
    take_rows(responses, rollout.group == i) for i in np.unique(rollout.group)
  ]
  parts = list(packer.joined(join_rows([group]) for group in groups))
  return [(part, packer.part(part)[1]) for part in parts]


@pytest.mark.parametrize(
  ("reads", "group_size"), [("more", 2), ("each prompt", 8)]
)
def test_parts_of_a_stream_fit_what_every_member_reads(reads, group_size):
  """This includes critics with a context or without shared prompts."""
  sizes = {"rows": 160, "prompt": 20, "room": 2, "group_size": group_size}
  rollout = tiny_run.random_rollout(np.random.default_rng(0), **sizes)

  def after_context(rollout):
    """The view of a critic that reads 40 more tokens."""
    return rollout.replace(
      prompt_tokens=np.pad(rollout.prompt_tokens, [(0, 0), (40, 0)]),
      prompt_lengths=rollout.prompt_lengths + 40,
    )

  alone = reads == "each prompt"
  members = dict.fromkeys(("policy", "critic"), member(micro_batch_size=2))
  packer = Packer(
    members,
    {"policy": True, "critic": not alone},
    **SIZES,
    views={} if alone else {"critic": after_context},
  )
  for part, found in streamed(packer, rollout):
    assert found["critic"][0].layout.present.sum() == part.rollout.lengths.sum()


def test_parts_of_a_stream_fit_prompts_of_nearly_a_row():
  """A row of 64 tokens then has room for only one response with its prompt."""
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=160, prompt=60, room=2, group_size=8
  )
  rollout = rollout.replace(
    prompt_lengths=np.full_like(rollout.prompt_lengths, 60),
    lengths=np.full_like(rollout.lengths, 2),
  )
  members = {"policy": member(micro_batch_size=8)}
  packer = Packer(members, {"policy": True}, **SIZES)
  parts = streamed(packer, rollout)
  assert sum(len(part.rewards) for part, _ in parts) == 160
