"""A sampler generates the same on a separate mesh as on the trainer's."""

import functools

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_mesh_run, tiny_run
from helpers.tiny_mesh_run import MESHES, PLAIN, recorded
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
    run, rollouts = recorded(make_run(name))
    loop.train(run, workdir)
    return workdir, rollouts

  return write


def device_ids(tree):
  return {
    device.id for x in jax.tree.leaves(tree) for device in x.sharding.device_set
  }


@pytest.mark.slow
class TestRuns:
  @pytest.mark.parametrize("name", ["apart", "rearranged"])
  def test_the_same_tokens_as_on_one_mesh(self, written, name):
    _, ours = written(name)
    _, wanted = written("shared")
    assert len(ours) == len(wanted) == 4 + 3  # Steps and evaluations.
    for mine, his in zip(ours, wanted):
      np.testing.assert_array_equal(mine.tokens, his.tokens)
      np.testing.assert_array_equal(mine.lengths, his.lengths)
      np.testing.assert_array_equal(mine.version, his.version)
      np.testing.assert_allclose(
        mine.behavior_logprobs, his.behavior_logprobs, rtol=0, atol=1e-5
      )

  def test_apart_is_the_same_run_bit_for_bit(self, written):
    # Other devices run the same programs.
    rows = [
      [
        {k: v for k, v in row.items() if k != "sampler_trainer/parity_error"}
        for row in tiny_run.comparable(written(name)[0])
      ]
      for name in ("apart", "shared")
    ]
    assert rows[0] == rows[1]

  @pytest.mark.parametrize(
    ("name", "trains", "writes"),
    [
      ("shared", range(4), range(4)),
      ("apart", range(4), range(4, 8)),
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
    written("apart")
    loop.train(make_run("apart"), tmp_path)
    rows = metrics.read_rows(tmp_path / "metrics.jsonl")
    assert [row["compile/count"] for row in rows[2:]] == [0] * 3

  def test_a_run_goes_on_under_other_meshes(self, make_run, written, tmp_path):
    loop.train(with_config(make_run("shared"), run__steps=2), tmp_path)
    run, rollouts = recorded(make_run("rearranged"))
    loop.train(run, tmp_path)
    for mine, his in zip(rollouts, written("shared")[1][4:]):
      np.testing.assert_array_equal(mine.tokens, his.tokens)


# Settings that move further state between sampler and trainer.
WINDOWS = {
  "estimator__name": "gae",
  "schedule__window": 5,
  "value__pretrain_steps": 2,
}
KINDS = {
  "windows of first groups, temperature by entropy": WINDOWS
  | {"schedule__stop": "first_groups", "sampler__entropy_tau": 0.5},
  "drafts, reference and average": {
    "sampler__drafter": "quantized_copy",
    "loss__kl_coefficient": 0.1,
    "off_policy__proximal": "ewma",
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_goes_apart(model, tmp_path, kind):
  runs = []
  for name in ("shared", "apart"):
    changes = {"run__steps": 3, "eval__every": 3}
    changes = PLAIN | MESHES[name] | KINDS[kind] | changes
    run, rollouts = recorded(
      build.make_run(tiny_run.make_config(model, **changes))
    )
    # The second half is a resumed run.
    for steps in (2, 3):
      loop.train(with_config(run, run__steps=steps), tmp_path / name)
    rows = tiny_run.comparable(tmp_path / name)
    for row in rows:
      row.pop("sampler_trainer/parity_error", None)
    runs.append((rows, rollouts))
  (rows, rollouts), (wanted_rows, wanted) = runs
  assert rows == wanted_rows and len(rows) == 4
  chex.assert_trees_all_equal(rollouts, wanted)


ONE = {"mesh__data": 1}
PRETRAINED = 3  # Batches of value pretraining; the last is only measured.
EIGHT = {"mesh__fsdp": 2, "mesh__context": 2, "mesh__tensor": 2}


@pytest.mark.slow
def test_a_windowed_run_goes_on_with_other_devices(model, tmp_path):
  """Unfinished responses, critic and prompts move to 8 devices and back."""
  data, prompts = tmp_path / "sums.jsonl", 20
  data.write_text(
    "".join(
      f'{{"question": "{1 + i % 9}+{1 + i // 9}?", "answer": "4"}}\n'
      for i in range(prompts)
    )
  )
  changes = PLAIN | WINDOWS | {"run__steps": 6, "eval__every": 6}
  changes |= {
    "data__source": "jsonl",
    "data__path": str(data),
    "data__holdout": 0,
    "data__settings": {},
    "eval__source": "jsonl",
    "eval__path": str(data),
  }
  one, eight = (
    build.make_run(tiny_run.make_config(model, **changes | mesh))
    for mesh in (ONE, EIGHT)
  )
  run, wanted = recorded(one)
  loop.train(run, tmp_path / "whole")
  found = []
  for mesh, steps in ((one, 2), (eight, 4), (one, 6)):
    run, written = recorded(with_config(mesh, run__steps=steps))
    loop.train(run, tmp_path / "moved")
    # The uninterrupted run has only the last of the final evaluations.
    found += written if steps == 6 else written[:-1]
  assert len(found) == len(wanted)
  for mine, his in zip(found, wanted):
    for field in ("tokens", "lengths", "version", "status", "example_id"):
      np.testing.assert_array_equal(getattr(mine, field), getattr(his, field))
    np.testing.assert_allclose(
      mine.behavior_logprobs, his.behavior_logprobs, rtol=0, atol=1e-5
    )
  # Preceded by value pretraining and the evaluation of step 0.
  drawn = {
    int(group): int(example)
    for rollout in found[PRETRAINED + 1 : PRETRAINED + 7]
    for group, example in zip(rollout.group_id, rollout.example_id)
  }
  order = [drawn[group] for group in sorted(drawn)]
  assert len(order) >= prompts and sorted(order[:prompts]) == [*range(prompts)]
  rows = [tiny_run.comparable(tmp_path / name) for name in ("moved", "whole")]
  assert [r.get("reward/mean") for r in rows[0]] == [
    r.get("reward/mean") for r in rows[1]
  ]


class TestDescribe:
  def test_says_where_each_side_is(self, make_run):
    shared, apart, rearranged = (
      "\n".join(summary.describe(make_run(name))) for name in MESHES
    )
    assert "sampler  4 cpu (data=4), devices 0 to 3, each holds" in shared
    assert "sampler  4 cpu (data=4), devices 4 to 7, each holds" in apart
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

  @pytest.mark.parametrize(
    ("trainers", "samplers", "said"),
    [
      ((2, 1), (8, 1), "data=8 x fsdp=1 .* needs 8 .* are 6, .* leaves free"),
      ((1, 8), (-1, 16), "data=-1 x fsdp=16 .* needs 16 .* are 8, .* shares"),
      (
        (1, 1),
        (-1, 2),
        "data=-1 x fsdp=2 .* leaves 1 idle of 7 .* leaves free",
      ),
    ],
  )
  def test_devices_that_do_not_fit_are_refused(self, trainers, samplers, said):
    meshes = {"mesh": trainers, "sampler__mesh": samplers}
    changes = {
      f"{mesh}__{axis}": size
      for mesh, sizes in meshes.items()
      for axis, size in zip(("data", "fsdp"), sizes)
    }
    said = f"config.sampler.mesh: mesh {said}; change its sizes"
    with pytest.raises(InputError, match=said) as error:
      self.make(**changes, **ROWS)
    assert "\n" not in str(error.value)
