"""Model directories: exact round trips, and one-line errors for damage."""

import functools
import json
import os
import struct

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm import sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import transformer
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.files import hf, hf_files

SIZES = dict(
  vocab_size=13,
  hidden_size=6,
  intermediate_size=10,
  num_layers=2,
  num_heads=3,
  num_kv_heads=1,
  head_dim=4,
  max_position_embeddings=32,
  rms_norm_eps=1e-6,
  rope_theta=1e4,
)
CONFIGS = {
  "llama": ModelConfig(family="llama", **SIZES),
  "llama biases": ModelConfig(
    family="llama",
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    **SIZES,
  ),
  "qwen2": ModelConfig(family="qwen2", attention_bias=True, **SIZES),
  "qwen3": ModelConfig(family="qwen3", **SIZES),
}
TIED = CONFIGS["llama biases"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def random_params(config, dtype=np.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), dtype),
    transformer.param_shapes(config),
  )


assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


@pytest.fixture
def model(tmp_path):
  """An intact directory that tests may damage."""
  config = CONFIGS["llama"]
  hf.write_params(tmp_path, config, random_params(config))
  return tmp_path


@pytest.fixture
def sharded(tmp_path):
  config = CONFIGS["llama"]
  hf.write_params(tmp_path, config, random_params(config), max_shard_bytes=1500)
  return tmp_path


class TestRoundTrip:
  @pytest.mark.parametrize("name", CONFIGS)
  @pytest.mark.parametrize(
    "dtype, limit", [(jnp.float32, 700), (jnp.bfloat16, 5 * 10**9)]
  )
  def test_bit_equal(self, tmp_path, name, dtype, limit):
    config = CONFIGS[name]
    params = random_params(config, dtype)
    hf.write_params(tmp_path, config, params, max_shard_bytes=limit)
    assert (tmp_path / INDEX).exists() == (limit == 700)
    assert hf.read_config(tmp_path) == config
    assert_same(hf.read_params(tmp_path, config, dtype=dtype), params)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["torch_dtype"] == np.dtype(dtype).name

  @pytest.mark.parametrize("name", ["llama biases", "qwen3"])
  def test_each_device_reads_its_part(self, tmp_path, monkeypatch, name):
    config = CONFIGS[name]
    expected = random_params(config)
    hf.write_params(tmp_path, config, expected, max_shard_bytes=2000)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    places = sharding.tree_shardings(expected, mesh)
    read, of_file = [], hf_files.read_tensor

    def read_tensor(tensor, part=None):
      read.append(of_file(tensor, part))
      return read[-1]

    monkeypatch.setattr(hf_files, "read_tensor", read_tensor)
    params = hf.read_params(tmp_path, config, dtype=np.float32, places=places)
    assert_same(params, expected)
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(places)):
      assert leaf.sharding == place
    # Each number once, although the data axis replicates every part.
    size = sum(x.size for x in jax.tree.leaves(expected))
    assert sum(x.size for x in read) == size
    assert max(x.size for x in read) <= max(
      place.shard_shape(x.shape)[-1] * place.shard_shape(x.shape)[-2]
      for x, place in zip(*map(jax.tree.leaves, (expected, places)))
      if x.ndim > 1
    )


class TestWrite:
  def test_weights_may_be_read_by_who_may_read_the_rest(self, sharded):
    config = sharded / "config.json"
    for file in sharded.iterdir():
      assert file.stat().st_mode == config.stat().st_mode, file

  def test_index_names_every_tensor_and_keeps_the_limit(self, sharded):
    index = json.loads((sharded / INDEX).read_text())
    names = set(index["weight_map"].values())
    assert names == {file.name for file in sharded.glob("*.safetensors")}
    assert len(names) > 2
    size = transformer.num_params(CONFIGS["llama"]) * 4
    assert index["metadata"]["total_size"] == size
    for name in names:
      tensors = safetensors.numpy.load_file(sharded / name)
      assert sum(tensor.nbytes for tensor in tensors.values()) <= 1500

  @pytest.mark.parametrize("limits", [(700, 10**9), (10**9, 700), (400, 900)])
  def test_replaces_what_it_wrote_before(self, tmp_path, limits):
    config = CONFIGS["qwen3"]
    for seed, limit in enumerate(limits):
      params = random_params(config, seed=seed)
      hf.write_params(tmp_path, config, params, max_shard_bytes=limit)
    assert_same(hf.read_params(tmp_path, config, dtype=np.float32), params)
    assert not list(tmp_path.glob(".export-*"))
    if (tmp_path / INDEX).exists():
      index = json.loads((tmp_path / INDEX).read_text())
      used = set(index["weight_map"].values())
      assert used == {file.name for file in tmp_path.glob("*.safetensors")}

  @pytest.mark.parametrize(
    "module, name, error",
    [
      (os, "fsync", OSError(28, "No space left on device")),
      (
        safetensors.numpy,
        "save_file",
        safetensors.SafetensorError("No space left\non device"),
      ),
    ],
  )
  def test_a_failed_export_leaves_the_old_one(
    self, model, monkeypatch, module, name, error
  ):
    config = CONFIGS["llama"]
    before = hf.read_params(model, config, dtype=np.float32)

    def fail(*_, **__):
      raise error

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(InputError, match="No space left") as info:
      hf.write_params(model, config, random_params(config, seed=1))
    assert "\n" not in str(info.value)
    monkeypatch.undo()
    assert_same(hf.read_params(model, config, dtype=np.float32), before)
    assert {file.name for file in model.iterdir()} == {SINGLE, "config.json"}

  def test_copies_tokenizer_and_token_ids(self, tmp_path):
    source, target = tmp_path / "source", tmp_path / "a" / "target"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "training_args.bin").write_text("no")
    (source / "config.json").write_text('{"eos_token_id": [7, 8]}')
    config = CONFIGS["qwen2"]
    hf.write_params(
      target, config, random_params(config), extra_files_from=source
    )
    assert {file.name for file in target.iterdir()} == {
      "config.json",
      "tokenizer.json",
      SINGLE,
    }
    values = json.loads((target / "config.json").read_text())
    assert values["eos_token_id"] == [7, 8] and values["bos_token_id"] is None
    # A chat template of another model would be mixed with this tokenizer.
    (target / "chat_template.jinja").write_text("{{ other }}")
    (target / "notes.txt").touch()
    for extra in (None, source):
      assert (target / "chat_template.jinja").exists()
      hf.write_params(
        target, config, random_params(config), extra_files_from=extra
      )
    assert not (target / "chat_template.jinja").exists()
    assert (target / "notes.txt").exists()

  def test_token_ids_are_checked(self, tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    config = CONFIGS["qwen2"]
    with pytest.raises(InputError, match="eos_token_id"):
      hf.write_params(
        tmp_path / "x",
        config,
        random_params(config),
        extra_files_from=tmp_path,
      )

  @pytest.mark.parametrize(
    "change",
    [
      {"value_head": {"kernel": np.zeros((6, 1), np.float32)}},
      {"final_norm": {"scale": np.zeros(7, np.float32)}},
      {"final_norm": {}},
      {"final_norm": {"scale": np.zeros(6, np.int32)}},
    ],
  )
  def test_other_parameters_are_refused(self, tmp_path, change):
    config = CONFIGS["llama"]
    with pytest.raises(ValueError, match="value_head|final_norm|dtype"):
      hf.write_params(tmp_path, config, random_params(config) | change)
    assert not list(tmp_path.iterdir())

  def test_path_is_a_file(self, tmp_path):
    (tmp_path / "file").touch()
    config = CONFIGS["llama"]
    with pytest.raises(InputError, match="cannot be written"):
      hf.write_params(tmp_path / "file", config, random_params(config))


class TestLenience:
  def test_recomputed_buffers_are_passed_over(self, model):
    file = model / SINGLE
    tensors = safetensors.numpy.load_file(file)
    for name in (
      "model.rotary_emb.inv_freq",
      "model.layers.0.self_attn.rotary_emb.inv_freq",
    ):
      tensors[name] = np.zeros(2, np.float32)
    safetensors.numpy.save_file(tensors, file)
    hf.read_params(model, CONFIGS["llama"], dtype=np.float32)

  def test_tied_head_that_is_written_as_well(self, tmp_path):
    params = random_params(TIED)
    hf.write_params(tmp_path, TIED, params)
    tensors = safetensors.numpy.load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / SINGLE)
    assert_same(hf.read_params(tmp_path, TIED, dtype=np.float32), params)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    safetensors.numpy.save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(InputError, match="tie_word_embeddings"):
      hf.read_params(tmp_path, TIED, dtype=np.float32)

  def test_download_cache_with_links_to_blobs(self, model, tmp_path_factory):
    repo = tmp_path_factory.mktemp("repo")
    (repo / "blobs").mkdir()
    (repo / "snapshots" / "abc").mkdir(parents=True)
    for number, name in enumerate(("config.json", SINGLE)):
      os.rename(model / name, repo / "blobs" / str(number))
      (repo / "snapshots" / "abc" / name).symlink_to(f"../../blobs/{number}")
    path = repo / "snapshots" / "abc"
    hf.read_params(path, hf.read_config(path), dtype=np.float32)


def write_raw(file, header, data=b""):
  """Writes a safetensors file with any header, bytes or object."""
  if not isinstance(header, bytes):
    header = json.dumps(header).encode()
  file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def split(file):
  """Returns the header object and the data of an intact file."""
  content = file.read_bytes()
  length = struct.unpack("<Q", content[:8])[0]
  return json.loads(content[8 : 8 + length]), content[8 + length :]


def rename(old, new):
  def damage(file):
    header, data = split(file)
    if new is None:
      # Remove the last tensor and its data; the rest stays intact.
      start, end = header.pop(old)["data_offsets"]
      assert end == len(data)
      data = data[:start]
    else:
      header[new] = header.pop(old)
    write_raw(file, header, data)

  return damage


def cut(count):
  return lambda file: file.write_bytes(file.read_bytes()[:count])


def raw(header, data=b""):
  return lambda file: write_raw(file, header, data)


def norm_as(dtype, value=1):
  def damage(file):
    tensors = safetensors.numpy.load_file(file)
    tensors["model.norm.weight"] = np.full(6, value, dtype)
    safetensors.numpy.save_file(tensors, file)

  return damage


def overlap_of_lines(file):
  """Shifts a tensor with control characters in its name, which errors quote."""
  header, data = split(file)
  tensor = header.pop("lm_head.weight")
  tensor["data_offsets"] = [x + 4 for x in tensor["data_offsets"]]
  write_raw(file, header | {"a\nb\x1b[2J": tensor}, data)


def other_shape(file):
  tensors = safetensors.numpy.load_file(file)
  tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
  safetensors.numpy.save_file(tensors, file)


def to_directory(file):
  file.unlink()
  file.mkdir()


# The library checks headers and layouts, and all of its errors are handled
# alike; test_cut_anywhere and bad_inputs/fuzz_test.py cover more.
DAMAGE = {
  "a pickle": lambda f: f.write_bytes(b"\x80\x04\x95" + bytes(100)),
  "a header of a tebibyte": lambda f: f.write_bytes(
    struct.pack("<Q", 1 << 40) + b"{}"
  ),
  "not UTF-8": raw(b'{"\xff": 1}'),
  "no tensors": raw({}),
  "missing tensor": rename("model.norm.weight", None),
  "renamed tensor": rename("model.norm.weight", "model.norm.bias"),
  "lines in a name": rename("model.norm.weight", "a\nb\x1b[2J"),
  "half a character": rename("model.norm.weight", "a\ud800"),
  "lines in a name at fault": overlap_of_lines,
  "transposed shape": other_shape,
  "whole numbers": norm_as(np.int32),
  "eight bits": norm_as(ml_dtypes.float8_e4m3fn),
  "NaN weights": norm_as(np.float32, np.nan),
  "infinite weights": norm_as(ml_dtypes.bfloat16, -np.inf),
  "weights too large for what is read": norm_as(np.float64, 1e300),
  "a directory": to_directory,
  "a link to nothing": lambda f: (f.unlink(), f.symlink_to("gone")),
}


def expect_one_line(directory, names):
  with pytest.raises(InputError) as info:
    config = hf.read_config(directory)
    hf.read_params(directory, config, dtype=np.float32)
  message = str(info.value)
  assert message.isprintable() and len(message) < 500
  assert any(str(directory / name) in message for name in names), message
  assert ";" in message or "cannot be read" in message


class TestDamagedSafetensors:
  @pytest.mark.parametrize("name", DAMAGE)
  def test_one_line_names_the_file(self, model, name):
    DAMAGE[name](model / SINGLE)
    expect_one_line(model, [SINGLE])

  def test_weights_that_are_not_finite_are_named(self, model):
    norm_as(np.float32, np.inf)(model / SINGLE)
    with pytest.raises(InputError, match="'model.norm.weight' has values that"):
      hf.read_params(model, hf.read_config(model), dtype=jnp.bfloat16)

  def test_cut_anywhere(self, model):
    content = (model / SINGLE).read_bytes()
    for count in range(0, len(content), 97):
      (model / SINGLE).write_bytes(content[:count])
      expect_one_line(model, [SINGLE])


class TestDirectories:
  @pytest.mark.parametrize("name", ["config.json", SINGLE])
  def test_missing_file(self, model, name):
    (model / name).unlink()
    expect_one_line(model, [name])
    expect_one_line(model / "gone", [""])

  def test_an_adapter_is_not_ignored(self, model):
    (model / "adapter_config.json").write_text("{}")
    expect_one_line(model, ["adapter_config.json"])

  @pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "a.pth", "weights.pkl"]
  )
  def test_pickles_only(self, model, name):
    os.rename(model / SINGLE, model / name)
    expect_one_line(model, [name])
    with pytest.raises(InputError, match="convert them to safetensors"):
      hf.read_params(model, CONFIGS["llama"], dtype=np.float32)

  @pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10**5, b'{"a":1,"a":1}', b"{}"],
  )
  def test_config_is_not_a_sound_object(self, model, content):
    (model / "config.json").write_bytes(content)
    expect_one_line(model, ["config.json"])

  def test_single_file_beside_a_foreign_index(self, sharded):
    (sharded / SINGLE).write_bytes(b"")
    with pytest.raises(InputError, match="both"):
      hf.read_params(sharded, CONFIGS["llama"], dtype=np.float32)


def weight_map(change):
  """Makes a damage that changes the index by a function of its weight map."""

  def damage(directory):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))

  return damage


def to_shard(name):
  """Makes a damage that maps one tensor to another file."""
  return weight_map(lambda names: names.update({"lm_head.weight": name}))


def index_text(text):
  return lambda directory: (directory / INDEX).write_bytes(text)


def last_shard(directory):
  return sorted(directory.glob("model-*"))[-1]


def same_tensor_twice(directory):
  """Writes one tensor to two shards; the index can name only one of them."""
  file = last_shard(directory)
  tensors = safetensors.numpy.load_file(file)
  tensors["model.embed_tokens.weight"] = np.zeros((13, 6), np.float32)
  safetensors.numpy.save_file(tensors, file)


INDEX_DAMAGE = {
  "empty": index_text(b""),
  "a list": index_text(b"[]"),
  "no weight map": index_text(b"{}"),
  "weight map not an object": index_text(b'{"weight_map": []}'),
  "no tensors": index_text(b'{"weight_map": {}}'),
  "file name not text": to_shard(1),
  "tensor listed twice": index_text(b'{"weight_map": {"a": "b", "a": "c"}}'),
  "absolute": to_shard("/etc/passwd"),
  "parent": to_shard("../outside.safetensors"),
  "NUL": to_shard("model\0.safetensors"),
  "two lines": to_shard("model\n.safetensors"),
  "missing shard": to_shard("model-9.safetensors"),
  "other shard": to_shard("model-00001-of-00099.safetensors"),
  "config as shard": to_shard("config.json"),
  "tensor not listed": weight_map(lambda names: names.pop("lm_head.weight")),
  "tensor that is not there": weight_map(
    lambda names: names.update({"x": names["lm_head.weight"]})
  ),
  "deleted shard": lambda directory: last_shard(directory).unlink(),
  "cut shard": lambda directory: cut(50)(last_shard(directory)),
  "tensor in two shards": same_tensor_twice,
}


class TestDamagedIndex:
  @pytest.mark.parametrize("name", INDEX_DAMAGE)
  def test_one_line_names_a_file(self, sharded, name):
    names = [INDEX, "", *os.listdir(sharded)]
    INDEX_DAMAGE[name](sharded)
    expect_one_line(sharded, names)
