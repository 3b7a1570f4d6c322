"""A sampler generates the same on a separate mesh as on the trainer's."""

import functools

import chex
import jax
import numpy as np
import pytest
from helpers import tempered, tiny_mesh_run, tiny_run
from helpers.tiny_mesh_run import PLAIN, recorded
from helpers.tiny_run import with_config

from jaxrl_llm import metrics, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.trainer import build, loop, meshes, summary


@pytest.fixture(scope="module")
def make_run(model):
  """Name in MESHES -> run, each built and compiled once."""
  return tiny_mesh_run.run_maker(model)


@pytest.fixture(scope="module")
def written(make_run, tmp_path_factory):
  """Name in MESHES -> (workdir, rollouts) of a complete run."""

  @functools.cache
  def write(name):
    workdir = tmp_path_factory.mktemp(name)
    with recorded(make_run(name)) as rollouts:
      loop.train(make_run(name), workdir)
    return workdir, rollouts

  return write


def assert_same_responses(mine, his, *fields):
  """Compares fields of two rollouts, and their log-probs up to rounding."""
  for field in fields:
    np.testing.assert_array_equal(mine[field], his[field])
  np.testing.assert_allclose(
    mine.behavior_logprobs, his.behavior_logprobs, rtol=0, atol=1e-5
  )


def device_ids(tree):
  return {
    device.id for x in jax.tree.leaves(tree) for device in x.sharding.device_set
  }


@pytest.mark.slow
class TestRuns:
  @pytest.mark.parametrize("name", ["rearranged", "drafting"])
  def test_the_same_tokens_as_on_one_mesh(self, written, name):
    _, ours = written(name)
    _, wanted = written("shared")
    assert len(ours) == len(wanted) == 4 + 3  # Steps and evaluations.
    for mine, his in zip(ours, wanted):
      assert_same_responses(mine, his, "tokens", "lengths", "version")

  @pytest.mark.parametrize(
    ("name", "trains", "writes"),
    [
      ("shared", range(2), range(2)),
      ("apart", range(2), range(2, 4)),
      ("rearranged", range(8), range(8)),
    ],
  )
  def test_each_side_has_its_own_devices(self, make_run, name, trains, writes):
    states, weights = loop.begin(make_run(name))
    assert device_ids(states.learner.policy) == set(trains)
    assert device_ids(weights.params) == set(writes)

  def test_the_sampler_holds_whole_weights_where_the_trainer_splits_them(
    self, make_run
  ):
    states, weights = loop.begin(make_run("rearranged"))
    share = lambda x: x.addressable_shards[0].data.size / x.size
    embedding = lambda params: params["embed"]["embedding"]
    assert share(embedding(states.learner.policy.trained)) == 1 / 8
    assert share(embedding(weights.params)) == 1

  def test_nothing_is_compiled_after_the_first_steps(
    self, make_run, written, tmp_path
  ):
    written("rearranged")
    loop.train(make_run("rearranged"), tmp_path)
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert [row["compile/count"] for row in rows[2:]] == [0] * 3


# Settings that move further state between sampler and trainer.
MOVING = {
  "estimator__name": "gae",
  "value__pretrain_steps": 2,
  "schedule__window": 5,
  "schedule__stop": "first_groups",
  "loss__kl_coefficient": 0.1,
  "method__use": ("ppo_ewma", tempered.SLIGHTLY),
}
ONE = {"mesh__data": 1}
APART = {"mesh__data": 1, "sampler__mesh__data": 1}
EIGHT = {"mesh__fsdp": 2, "mesh__context": 2, "mesh__tensor": 2}


@pytest.mark.slow
class TestMovingState:
  """Unfinished responses, critic, averages and prompts change devices."""

  STEPS = 4

  @pytest.fixture(scope="class")
  def run(self, model):
    """(mesh) -> a run on it, built once."""

    @functools.cache
    def make(**mesh):
      changes = (
        PLAIN | MOVING | {"run__steps": self.STEPS, "eval__every": self.STEPS}
      )
      return build.make_run(tiny_run.make_config(model, **changes | mesh))

    return lambda mesh: make(**mesh)

  @pytest.fixture(scope="class")
  def whole(self, run, tmp_path_factory):
    """The rows and rollouts of an uninterrupted run on one device."""
    return self.train(run, tmp_path_factory.mktemp("whole"), (ONE, self.STEPS))

  def train(self, run, folder, *parts):
    """Trains on each mesh up to its step; returns rows and rollouts."""
    found = []
    for mesh, steps in parts:
      with recorded(run(mesh)) as written:
        loop.train(with_config(run(mesh), run__steps=steps), folder)
      # An uninterrupted run has only the last of the final evaluations.
      found += written if steps == self.STEPS else written[:-1]
    return tiny_run.comparable(folder), found

  def test_apart_it_is_the_same_run(self, run, whole, tmp_path):
    rows, found = self.train(run, tmp_path, (APART, 2), (APART, 4))
    for row in (*rows, *whole[0]):
      row.pop("sampler_trainer/parity_error", None)
    assert rows[2].keys() > whole[0][2].keys()  # It was evaluated.
    rows[2] = {name: rows[2][name] for name in whole[0][2]}
    assert rows == whole[0] and len(rows) == self.STEPS + 1
    chex.assert_trees_all_equal(found, whole[1])

  def test_it_goes_on_with_other_devices(self, run, whole, tmp_path):
    _, found = self.train(run, tmp_path, (ONE, 2), (EIGHT, 3), (ONE, 4))
    assert len(found) == len(whole[1])
    for mine, his in zip(found, whole[1]):
      fields = "tokens", "lengths", "version", "status", "example_id"
      assert_same_responses(mine, his, *fields)


class TestDescribe:
  def test_says_where_each_side_is(self, make_run):
    shared, apart, rearranged = (
      "\n".join(summary.describe(make_run(name)))
      for name in ("shared", "apart", "rearranged")
    )
    assert "sampler  2 cpu (data=2), devices 0 to 1, each holds" in shared
    assert "sampler  2 cpu (data=2), devices 2 to 3, each holds" in apart
    assert "trainer  8 cpu (fsdp=8), devices 0 to 7, each holds" in rearranged
    assert "sampler  8 cpu (data=8), devices 0 to 7, each holds" in rearranged
    with_trainer = "shared with the trainer"
    assert with_trainer in shared and with_trainer in rearranged
    assert with_trainer not in apart

  def test_what_is_held_is_what_the_state_holds(self, make_run):
    run = make_run("rearranged")
    states, weights = loop.begin(run)
    held = lambda tree: {
      sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.device == device
      )
      for device in jax.devices()
    }
    shapes = run.learner.policy.shapes
    assert held(states.learner.policy) == {sharding.bytes_per_device(shapes)}
    assert held(weights.params) == {
      sharding.bytes_per_device(run.transfer.shapes)
    }


ROWS = {f"optimizer__{x}__micro_batch_size": 8 for x in ("policy", "value")}


class TestSettings:
  def make(self, **changes):
    return meshes.make_meshes(tiny_run.make_config("none", **changes))

  def test_the_sampler_gets_the_devices_after_the_trainers(self):
    trainer, sampler = self.make(
      mesh__data=2, sampler__mesh__data=-1, sampler__mesh__tensor=2
    )
    assert list(trainer.devices.flat) == jax.devices()[:2]
    assert list(sampler.devices.flat) == jax.devices()[2:]
    assert tuple(sampler.shape.values()) == (3, 1, 1, 2)

  def test_without_a_mesh_of_its_own_it_shares_the_trainers(self):
    trainer, sampler = self.make(mesh__data=2)
    assert sampler is trainer

  def test_micro_batches_divide_over_the_mesh(self, model):
    sizes = {"mesh__data": 8, "optimizer__policy__micro_batch_size": 8}
    make = lambda **more: build.make_run(
      tiny_run.make_config(model, **sizes, **more)
    )
    with pytest.raises(InputError, match="value.micro_batch_size=2 must be a"):
      make()
    # Without a critic, its micro-batches do not matter.
    make(estimator__name="group", value__pretrain_steps=0)

  @pytest.mark.parametrize(
    ("sizes", "said"),
    [
      (
        {"mesh__data": 2, "sampler__mesh__data": 8},
        "data=8 x fsdp=1 .* needs 8 .* are 6, .* leaves free",
      ),
      (
        {"mesh__fsdp": 8, "sampler__mesh__fsdp": 16},
        "data=-1 x fsdp=16 .* needs 16 .* are 8, .* shares",
      ),
      (
        {"sampler__mesh__fsdp": 2},
        "data=-1 x fsdp=2 .* leaves 1 idle of 7 .* leaves free",
      ),
    ],
  )
  def test_devices_that_do_not_fit_are_refused(self, sizes, said):
    sizes = {"mesh__data": 1, "sampler__mesh__data": -1, **ROWS, **sizes}
    said = f"config.sampler.mesh: mesh {said}; change its sizes"
    with pytest.raises(InputError, match=said) as error:
      self.make(**sizes)
    assert "\n" not in str(error.value)
