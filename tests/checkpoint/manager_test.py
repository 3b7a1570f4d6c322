"""Checkpoints are restored on any mesh, or a one-line error says why not."""

import pathlib
import resource
import shutil
import threading
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import cases

from jaxrl_llm import checkpoint, digest, sharding
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.errors import InputError

_CASES = cases.load("checkpoint")

TOLD = {"states": {"version": 3, "position": 12, "share": 0.1, "name": "é"}}


def make_mesh(*shape):
  return sharding.make_mesh(**dict(zip(sharding.AXES, shape)))


def make_trees():
  """Makes trees with realistic paths in float32, bfloat16 and int32."""
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


def targets(sizes=(1, 1, 1, 1)):
  trees = make_trees()
  shapes = jax.eval_shape(lambda: trees)
  places = sharding.tree_shardings(shapes, make_mesh(*sizes))
  return jax.jit(lambda: trees, out_shardings=places).eval_shape()


def tiny(step):
  return {"policy": {"x": np.float32([step])}}


def reopen(directory):
  return checkpoint.Checkpointer(directory, keep=2)


def write(directory, sizes=(1, 1, 1, 1)):
  saver = reopen(directory)
  saver.save(3, placed(make_trees(), make_mesh(*sizes)), TOLD)
  saver.close()


def one_line(error):
  text = str(error.value)
  assert "\n" not in text and len(text) < 500
  return text


# data x fsdp x context x tensor: one device, replicated arrays, sharded ones,
# and both over several axes.
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 8, 1, 1), (2, 1, 2, 2)]


@pytest.fixture(autouse=True, scope="module")
def _shares():
  """Lets each device write a slice of replicated arrays, Orbax's default."""
  of_tests = ocp.type_handlers.get_type_handler(jax.Array)
  register = ocp.type_handlers.register_type_handler
  register(jax.Array, ocp.type_handlers.ArrayHandler(), override=True)
  yield
  register(jax.Array, of_tests, override=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Folder with the same arrays saved from each layout."""
  folder = tmp_path_factory.mktemp("layouts")
  for sizes in LAYOUTS:
    write(folder / "x".join(map(str, sizes)), sizes)
  return folder


class TestRoundTrip:
  @pytest.mark.parametrize("after", LAYOUTS)
  def test_every_bit_onto_any_mesh(self, saved, after):
    wanted = targets(after)
    for before in LAYOUTS:
      folder = saved / "x".join(map(str, before))
      trees = checkpoint.load(folder / "3", wanted)
      chex.assert_trees_all_equal(jax.device_get(trees), make_trees())
      chex.assert_trees_all_equal_dtypes(trees, make_trees())
      same = lambda x, w: x.sharding.is_equivalent_to(w.sharding, x.ndim)
      assert all(jax.tree.leaves(jax.tree.map(same, trees, wanted)))

  def test_arrays_may_be_donated_after_save(self, tmp_path):
    trees = placed(make_trees(), make_mesh(1, 1, 1, 1))
    saver = reopen(tmp_path)
    saver.save(1, trees, TOLD)
    spoil = jax.jit(
      lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0
    )
    jax.block_until_ready(spoil(trees))
    saver.close()
    got = checkpoint.load(tmp_path / "1", targets())
    chex.assert_trees_all_equal(jax.device_get(got), make_trees())

  def test_keeps_the_best_beside_them(self, tmp_path):
    saver = checkpoint.Checkpointer(tmp_path, keep=1, best=lambda steps: 2)
    for step in (1, 2, 5, 7):
      saver.save(step, tiny(step), TOLD)
    saver.wait()
    found = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert found == ["2", "7"]
    # A step that was removed can be written again.
    (tmp_path / "7").rename(tmp_path / "aside")
    assert saver.latest_step() == 2
    saver.save(6, tiny(6), TOLD)
    saver.close()
    assert reopen(tmp_path).latest_step() == 6

  def test_keeps_multiples_of_a_number(self, tmp_path):
    saver = checkpoint.Checkpointer(tmp_path, keep=2, keep_every=4)
    assert saver.latest_step() is None
    for step in range(1, 8):
      saver.save(step, tiny(step), TOLD)
    saver.close()
    assert checkpoint.steps(tmp_path) == [4, 6, 7]


def _flip(file: pathlib.Path, bit: int):
  data = bytearray(file.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(data)


_DAMAGE = {
  "delete": lambda file: file.unlink(),
  "empty": lambda file: file.write_bytes(b""),
  "halve": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
  "append": lambda file: file.write_bytes(file.read_bytes() + b"x\n"),
}


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def _noticed(folder):
  """Returns the error of reading step 3; None if all of it is as saved."""
  try:
    told = commit.read(folder / "3")
    trees = checkpoint.load(folder / "3", targets())
  except InputError as error:
    text = str(error)
    assert "\n" not in text and len(text) < 600 and str(folder / "3") in text
    return error
  assert told.items() >= TOLD.items()
  chex.assert_trees_all_equal(jax.device_get(trees), make_trees())
  return None


class TestDamage:
  @pytest.mark.parametrize("kind", _DAMAGE)
  def test_of_a_file_is_noticed_or_does_not_matter(self, tmp_path, kind):
    write(tmp_path / "whole")
    errors, files = [], _files(tmp_path / "whole" / "3")
    assert len(files) > 10
    for number, file in enumerate(files):
      copy = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
      _DAMAGE[kind](copy / file.relative_to(tmp_path / "whole"))
      if error := _noticed(copy):
        # Without COMMIT, it is no checkpoint rather than a damaged one.
        gone = (kind, file.name) == ("delete", "COMMIT")
        assert isinstance(error, checkpoint.DamagedError) != gone
        errors.append(error)
    assert len(errors) > 2

  def test_of_one_bit_is_noticed_or_does_not_matter(self, tmp_path):
    write(tmp_path / "whole")
    rng, errors = np.random.default_rng(0), []
    files = _files(tmp_path / "whole" / "3")
    largest = max(files, key=lambda file: file.stat().st_size)
    for number in range(40):  # Half in the largest file.
      file = largest if number % 2 else rng.choice(files)
      copy = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
      place = copy / file.relative_to(tmp_path / "whole")
      _flip(place, int(rng.integers(8 * place.stat().st_size)))
      if error := _noticed(copy):
        errors.append(error)
    assert len(errors) >= 15
    assert all(isinstance(x, checkpoint.DamagedError) for x in errors)

  def test_names_the_array(self, tmp_path, monkeypatch):
    write(tmp_path)
    restore = ocp.Checkpointer.restore

    def spoiled(*args):
      items = restore(*args)
      scale = items["policy"]["final_norm"]["scale"]
      # The lowest bit of one element.
      bits = np.asarray(scale).view(np.uint16) ^ np.eye(8, dtype=np.uint16)[2]
      items["policy"]["final_norm"]["scale"] = jax.device_put(
        bits.view(scale.dtype), scale.sharding
      )
      return items

    monkeypatch.setattr(ocp.Checkpointer, "restore", spoiled)
    with pytest.raises(checkpoint.DamagedError) as error:
      checkpoint.load(tmp_path / "3", targets())
    text = one_line(error)
    assert "(1 of 18 arrays differ" in text
    assert "as policy/final_norm/scale)" in text


class TestUnreadable:
  def test_missing_step(self, tmp_path):
    with pytest.raises(InputError, match="9: no such checkpoint; check"):
      checkpoint.load(tmp_path / "9", targets())

  def test_of_another_model_or_with_another_leaf(self, tmp_path):
    write(tmp_path)
    wanted = targets()
    policy = wanted["policy"]
    leaf = policy["embed"]["embedding"].update(shape=(128, 65))
    for changes, *parts in (
      (
        {"embed": {"embedding": leaf}},
        "embed/embedding has shape (128, 64)",
        "(128, 65)",
      ),
      ({"head": policy["final_norm"]}, "head/scale has shape None"),
    ):
      with pytest.raises(InputError) as error:
        checkpoint.load(tmp_path / "3", wanted | {"policy": policy | changes})
      assert all(part in one_line(error) for part in parts)
    del policy["final_norm"]
    with pytest.raises(InputError, match="final_norm/scale is not part of"):
      checkpoint.load(tmp_path / "3", {"policy": policy})

  @cases.table("content, said", _CASES["of_other_content_with_its_checksum"])
  def test_of_other_content_with_its_checksum(self, tmp_path, content, said):
    (tmp_path / "3").mkdir()
    text = f"{content}\n"
    checksum = digest.of_bytes(text.encode())
    (tmp_path / "3" / "COMMIT").write_text(f"{text}{checksum}\n")
    with pytest.raises(InputError) as error:
      reopen(tmp_path).restore_states(3, {})
    assert said in one_line(error)

  def test_of_a_name_that_no_step_has(self, tmp_path):
    write(tmp_path)
    for name in ("012", "\u0661\u0662", "1" * 25, "-1"):
      shutil.copytree(tmp_path / "3", tmp_path / name)
    assert checkpoint.steps(tmp_path) == [3]

  def test_a_half_written_step_does_not_count(self, tmp_path):
    write(tmp_path)
    half = tmp_path / "4.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "3" / "policy", half / "policy")
    (tmp_path / "2.deleted").mkdir()
    # Everything but the COMMIT exists.
    shutil.copytree(tmp_path / "3", tmp_path / "4")
    (tmp_path / "4" / "COMMIT").unlink()
    saver = reopen(tmp_path)
    assert saver.latest_step() == 3
    assert not half.exists() and not (tmp_path / "2.deleted").exists()
    # It does not prevent a second attempt, either.
    saver.save(4, placed(make_trees(), make_mesh(1, 1, 1, 1)), TOLD)
    saver.close()
    assert reopen(tmp_path).latest_step() == 4
    got = checkpoint.load(tmp_path / "4", targets())
    chex.assert_trees_all_equal(jax.device_get(got), make_trees())


class TestUnwritable:
  """A failed save is reported, counted, and removes nothing."""

  def saver(self, directory):
    saver = reopen(directory)
    for step in (1, 2):
      saver.save(step, tiny(step), TOLD)
    saver.wait()
    assert saver.new_errors() == [] and saver.failures == 0
    return saver

  def assert_failed(self, saver, directory, why):
    assert saver.failures == 1 and saver.latest_step() == 2
    (line,) = saver.new_errors()
    assert f"{directory / '3'}: cannot write a checkpoint ({why}" in line
    assert "\n" not in line and len(line) < 500 and saver.new_errors() == []
    names = {path.name for path in directory.iterdir()}
    assert names <= {"1", "2", "3"}  # 3 without a COMMIT, if at all.
    # Once there is space again, the next save succeeds.
    saver.save(4, tiny(4), TOLD)
    saver.wait()
    assert saver.new_errors() == [] and saver.latest_step() == 4
    assert checkpoint.steps(directory) == [2, 4]
    saver.close()

  def test_what_orbax_says_is_one_line(self, tmp_path, monkeypatch):
    saver = self.saver(tmp_path)
    long = f"Error writing {'x' * 300}: No space left on device\nsecond line"

    def full(*_, **__):
      raise ValueError(long)

    with monkeypatch.context() as broken:
      broken.setattr(ocp.AsyncCheckpointer, "save", full)
      saver.save(3, tiny(3), TOLD)
    saver.wait()
    self.assert_failed(saver, tmp_path, "ValueError: Error writing xxx")

  def test_in_the_background(self, tmp_path, monkeypatch):
    saver, asked = self.saver(tmp_path), threading.Event()

    def broken(*_, **__):
      asked.wait(60)
      raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
      patch.setattr(commit, "write", broken)
      saver.save(3, tiny(3), TOLD)
      # Until it is noticed, there is neither a failure nor a newer step.
      assert saver.new_errors() == [] and saver.latest_step() == 2
      asked.set()
      saver.wait()
    self.assert_failed(saver, tmp_path, "OSError: [Errno 28] No space left")

  def test_without_the_room_it_is_not_begun(self, tmp_path, monkeypatch):
    saver = self.saver(tmp_path)
    with monkeypatch.context() as full:
      usage = lambda _: types.SimpleNamespace(free=3)
      full.setattr(shutil, "disk_usage", usage)
      saver.save(3, tiny(3), TOLD)
    saver.wait()
    why = "OSError: [Errno 28] it needs 4 bytes, but only 3 are free"
    self.assert_failed(saver, tmp_path, why)

  def test_a_file_size_limit_as_a_full_disk(self, tmp_path):
    saver = self.saver(tmp_path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal, so that the write fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
      rng = np.random.default_rng(0)
      tree = {"x": rng.normal(size=100_000).astype(np.float32)}
      saver.save(3, {"policy": tree}, TOLD)
      saver.wait()
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, old)
    self.assert_failed(saver, tmp_path, "")

  def test_the_old_one_goes_after_the_commit(self, tmp_path, monkeypatch):
    saver, there = self.saver(tmp_path), []
    write = commit.write

    def watched(*args, **record):
      there.append(checkpoint.steps(tmp_path))
      write(*args, **record)

    monkeypatch.setattr(commit, "write", watched)
    saver.save(3, tiny(3), TOLD)
    saver.close()
    assert there == [[1, 2]] and checkpoint.steps(tmp_path) == [2, 3]
