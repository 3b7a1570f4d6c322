"""What was saved comes back on any mesh, or one line says why not."""

import json
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import checkpoint, sharding
from jaxrl_llm.errors import InputError, TrainingStopped

META = {"step": 3, "version": 3, "position": 12, "seed": 0}


def make_mesh(*shape):
  return sharding.make_mesh(**dict(zip(sharding.AXES, shape)))


def make_trees():
  """Trees with the paths of real ones, in float32, bfloat16 and int32."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  layer = lambda: {
    "mlp": {"up": {"kernel": draw(2, 8, 16)}},
    "attention": {"q": {"kernel": draw(2, 8, 8), "bias": draw(2, 8)}},
  }
  policy = {
    "embed": {"embedding": draw(128, 64)},
    "layers": layer(),
    "final_norm": {"scale": draw(8).astype(jnp.bfloat16)},
  }
  optimizer = {
    "opt_state": ({"count": np.int32(7), "mu": policy, "nu": policy},),
    "step": np.int32(7),
    "skipped": np.int32(1),
  }
  return {"policy": policy, "policy_optimizer": optimizer}


def placed(trees, mesh):
  return jax.device_put(trees, sharding.tree_shardings(trees, mesh))


def targets(mesh, names=("policy", "policy_optimizer")):
  trees = {name: make_trees()[name] for name in names}
  shapes = jax.eval_shape(lambda: trees)
  places = sharding.tree_shardings(shapes, mesh)
  return jax.jit(lambda: trees, out_shardings=places).eval_shape()


def write(directory, mesh, step=3, meta=META, keep=2):
  saver = checkpoint.Checkpointer(directory, keep=keep)
  saver.save(step, placed(make_trees(), mesh), meta)
  saver.close()


def reopen(directory):
  return checkpoint.Checkpointer(directory, keep=2)


def one_line(error):
  text = str(error.value)
  assert "\n" not in text and len(text) < 500
  return text


class TestRoundTrip:
  @pytest.mark.parametrize(
    ("before", "after"),
    [
      ((8, 1, 1), (2, 2, 2)),
      ((2, 2, 2), (8, 1, 1)),
      ((2, 2, 2), (1, 1, 1)),
      ((1, 1, 1), (1, 8, 1)),
    ],
  )
  def test_every_bit_onto_another_mesh(self, tmp_path, before, after):
    write(tmp_path, make_mesh(*before))
    saver = reopen(tmp_path)
    assert saver.latest_step() == 3
    wanted = targets(make_mesh(*after))
    trees = saver.restore(3, wanted)
    chex.assert_trees_all_equal(jax.device_get(trees), make_trees())
    chex.assert_trees_all_equal_dtypes(trees, make_trees())
    same = lambda x, w: x.sharding.is_equivalent_to(w.sharding, x.ndim)
    assert all(jax.tree.leaves(jax.tree.map(same, trees, wanted)))
    meta = saver.restore_meta(3)
    assert {k: meta[k] for k in META} == META
    saver.close()

  def test_arrays_may_be_donated_after_save(self, tmp_path):
    trees = placed(make_trees(), make_mesh(1, 1, 1))
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    saver.save(1, trees, META)
    spoil = jax.jit(
      lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0
    )
    jax.block_until_ready(spoil(trees))
    saver.wait()
    got = saver.restore(1, targets(make_mesh(1, 1, 1)))
    chex.assert_trees_all_equal(jax.device_get(got), make_trees())
    saver.close()

  def test_keeps_the_newest(self, tmp_path):
    saver = checkpoint.Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 5):
      saver.save(step, {"policy": {"x": np.float32([step])}}, META)
    saver.close()
    found = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert found == ["2", "5"]
    assert reopen(tmp_path).latest_step() == 5

  def test_keeps_the_best_beside_them(self, tmp_path):
    saver = checkpoint.Checkpointer(tmp_path, keep=1, best=lambda steps: 2)
    for step in (1, 2, 5, 7):
      saver.save(step, {"policy": {"x": np.float32([step])}}, META)
    saver.wait()
    found = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert found == ["2", "7"]
    # A step that was taken away can be written again.
    (tmp_path / "7").rename(tmp_path / "aside")
    saver.reload()
    assert saver.latest_step() == 2
    saver.save(6, {"policy": {"x": np.float32([6])}}, META)
    saver.close()
    assert reopen(tmp_path).latest_step() == 6

  def test_no_checkpoint_yet(self, tmp_path):
    assert reopen(tmp_path / "new").latest_step() is None


class TestPartialRestore:
  def test_policy_without_the_optimizer_on_disk(self, tmp_path):
    write(tmp_path, make_mesh(2, 2, 2))
    for item in (tmp_path / "3").glob("*_optimizer"):
      shutil.rmtree(item)
    saver = reopen(tmp_path)
    got = saver.restore(3, targets(make_mesh(1, 1, 1), names=("policy",)))
    assert list(got) == ["policy"]
    chex.assert_trees_all_equal(
      jax.device_get(got["policy"]), make_trees()["policy"]
    )
    assert saver.restore_meta(3)["position"] == 12
    saver.close()


def _cut(path: pathlib.Path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _data_files(item: pathlib.Path) -> list[pathlib.Path]:
  return list((item / "d").iterdir())


class TestUnreadable:
  def test_missing_step(self, tmp_path):
    write(tmp_path, make_mesh(1, 1, 1))
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore(9, targets(make_mesh(1, 1, 1)))
    assert str(tmp_path / "9") in one_line(error)
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore_meta(9)
    assert str(tmp_path / "9") in one_line(error)

  @pytest.mark.parametrize("damage", ["item", "data", "metadata", "manifest"])
  def test_damaged_item(self, tmp_path, damage):
    write(tmp_path, make_mesh(1, 1, 1))
    item = tmp_path / "3" / "policy"
    if damage == "item":
      shutil.rmtree(item)
    elif damage == "data":
      for file in _data_files(item):
        _cut(file)
    elif damage == "metadata":
      (item / "_METADATA").write_text("{")
    else:
      (item / "manifest.ocdbt").unlink()
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore(3, targets(make_mesh(1, 1, 1)))
    text = one_line(error)
    assert str(tmp_path / "3") in text and "another" in text

  def test_damaged_meta(self, tmp_path):
    write(tmp_path, make_mesh(1, 1, 1))
    file = tmp_path / "3" / "meta" / "metadata"
    for content in ("{", "[]", "{}"):
      file.write_text(content)
      with pytest.raises(InputError) as error:
        reopen(tmp_path).restore_meta(3)
      assert str(tmp_path / "3") in one_line(error)

  def test_of_another_model(self, tmp_path):
    write(tmp_path, make_mesh(1, 1, 1))
    wanted = targets(make_mesh(1, 1, 1))
    leaf = wanted["policy"]["embed"]["embedding"]
    wanted["policy"]["embed"]["embedding"] = leaf.update(shape=(128, 65))
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore(3, wanted)
    text = one_line(error)
    assert "embed/embedding has shape (128, 64)" in text
    assert "(128, 65)" in text

  def test_with_another_leaf(self, tmp_path):
    write(tmp_path, make_mesh(1, 1, 1))
    wanted = targets(make_mesh(1, 1, 1))
    wanted["policy"]["head"] = wanted["policy"]["final_norm"]
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore(3, wanted)
    assert "head/scale has shape None" in one_line(error)

  @pytest.mark.parametrize("away", [-1, 1])
  def test_of_another_format(self, tmp_path, away):
    write(tmp_path, make_mesh(1, 1, 1))
    file = tmp_path / "3" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(meta | {"format": meta["format"] + away}))
    with pytest.raises(InputError, match="reads 3; use the version that wrot"):
      reopen(tmp_path).restore_meta(3)

  def test_a_half_written_step_does_not_count(self, tmp_path):
    write(tmp_path, make_mesh(1, 1, 1))
    half = tmp_path / "4.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "3" / "policy", half / "policy")
    saver = reopen(tmp_path)
    assert saver.latest_step() == 3
    # Nor does it stand in the way of the step's second attempt.
    saver.save(4, placed(make_trees(), make_mesh(1, 1, 1)), META)
    saver.close()
    assert reopen(tmp_path).latest_step() == 4
    got = reopen(tmp_path).restore(4, targets(make_mesh(1, 1, 1)))
    chex.assert_trees_all_equal(jax.device_get(got), make_trees())


class TestUnwritable:
  def test_one_line_tells_what_and_why(self, tmp_path, monkeypatch):
    saver = reopen(tmp_path)
    long = f"Error writing {'x' * 300}: No space left on device\nsecond line"

    def full(*_, **__):
      raise ValueError(long)

    monkeypatch.setattr(saver._manager, "save", full)
    with pytest.raises(TrainingStopped) as error:
      saver.save(1, {"policy": {"x": np.float32([1])}}, META)
    text = one_line(error)
    assert f"{tmp_path}: cannot write a checkpoint (ValueError: Error" in text
    assert "No space left on device); make room; the same --workdir" in text


class TestTree:
  def test_round_trip_onto_another_mesh(self, tmp_path):
    tree = make_trees()["policy"]
    for factor in (2.0, 1.0):  # The second one replaces the first.
      scaled = jax.tree.map(lambda x, f=factor: (x * f).astype(x.dtype), tree)
      checkpoint.save_tree(
        tmp_path / "tree", placed(scaled, make_mesh(2, 2, 2))
      )
    target = targets(make_mesh(8, 1, 1))["policy"]
    got = checkpoint.load_tree(tmp_path / "tree", target)
    chex.assert_trees_all_equal(jax.device_get(got), tree)

  def test_missing(self, tmp_path):
    with pytest.raises(InputError, match="no such checkpoint"):
      checkpoint.load_tree(tmp_path / "none", {})

  def test_damaged(self, tmp_path):
    tree = placed(make_trees()["policy"], make_mesh(1, 1, 1))
    checkpoint.save_tree(tmp_path / "tree", tree)
    for file in _data_files(tmp_path / "tree"):
      _cut(file)
    with pytest.raises(InputError) as error:
      checkpoint.load_tree(
        tmp_path / "tree", targets(make_mesh(1, 1, 1))["policy"]
      )
    assert str(tmp_path / "tree") in one_line(error)
