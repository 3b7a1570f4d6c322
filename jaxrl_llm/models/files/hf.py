"""Reading and writing Hugging Face model directories.

Reading validates everything before a weight is used. Writing leaves a directory
either complete or without weights, never with a mixture of old and new files.
"""

import os
import pathlib
import re
import shutil
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util
from huggingface_hub import split_state_dict_into_shards_factory

from jaxrl_llm import digest
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.models.adapters import FACTORS, Adapters
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.files import hf_files
from jaxrl_llm.models.files.hf_layout import (
  Entry,
  Leaf,
  entries_of,
  leaves_of,
  shapes_of,
  tensor_shapes,
)
from jaxrl_llm.models.heads import ValueHead

_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_ADAPTERS = re.compile(r"adapter_(config\.json|model\.safetensors)")
_PEFT_CONFIG = "adapter_config.json"
_EXTRA_FILES = (
  *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
  *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
  *("merges.txt", "chat_template.jinja", "generation_config.json"),
)
_WITH_EXTRAS = re.compile(
  "|".join([_WRITTEN.pattern, *map(re.escape, _EXTRA_FILES)])
)
# Suffixes of class names in transformers.
_POLICY, _CRITIC = "ForCausalLM", "ForTokenClassification"
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

Params = dict[str, Any]


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
  """Reads the `config.json` of a policy or a critic.

  Raises:
    InputError: the directory or file is missing, damaged or not supported.
  """
  file, values = _read_json_config(path)
  name = _architecture(values)
  if name.endswith(_CRITIC):
    values["architectures"] = [name.removesuffix(_CRITIC) + _POLICY]
  return ModelConfig.from_hf(values, file)


def is_model(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a directory with the weights of a model."""
  return bool(path) and any(pathlib.Path(path).glob("*.safetensors"))


def is_critic(path: str | os.PathLike[str]) -> bool:
  """Returns whether a model directory has a value head."""
  return _architecture(_read_json_config(path)[1]).endswith(_CRITIC)


def _read_json_config(
  path: str | os.PathLike[str],
) -> tuple[pathlib.Path, dict[str, Any]]:
  """Returns the path of a directory's config.json and its values."""
  folder = hf_files.directory(path)
  if (folder / _PEFT_CONFIG).exists():
    raise InputError(
      f"{folder / _PEFT_CONFIG}: this adapter would be ignored; merge it into"
      " its model with PEFT's merge_and_unload, and give the merged model"
    )
  file = hf_files.member(folder, hf_files.CONFIG)
  return file, hf_files.read_json(file)


def _architecture(values: Mapping[str, Any]) -> str:
  """Returns the class name in config.json, or '' if there is none."""
  names = values.get("architectures")
  return str(names[0]) if isinstance(names, list) and names else ""


def read_critic(
  path: str | os.PathLike[str],
  config: ModelConfig,
  head: ValueHead,
  place: Callable[[Params], Params],
) -> Params:
  """Reads the weights of a critic, or of a policy to initialise one from.

  Args:
    path: model directory.
    config: result of `read_config` for this directory.
    head: head of the critic.
    place: shapes of parameters -> their shardings.

  Returns:
    Nested dict of float32 arrays, with the head that the directory contains.

  Raises:
    InputError: files are missing or damaged, or the heads differ.
  """
  outputs = head.outputs if is_critic(path) else None
  file, values = _read_json_config(path)
  saved, support = values.get("value_support"), head.support and [*head.support]
  if outputs and saved != support:
    raise InputError(
      f"{file}: value_support of this critic is {saved}, but that of"
      f" config.value is {support}; set value.head, value.low and value.high to"
      " match the critic"
    )
  shapes = traverse_util.unflatten_dict(shapes_of(config.base, outputs))
  settings = {"dtype": jnp.float32, "outputs": outputs}
  return read_params(path, config, places=place(shapes), **settings)


def read_params(
  path: str | os.PathLike[str],
  config: ModelConfig,
  *,
  dtype: Any,
  places: Params | None = None,
  outputs: int | None = None,
) -> Params:
  """Reads the weights of a model directory into a nested dict.

  Each device's part is read directly from the files: besides the result, only
  one part and one tensor are in host memory at a time.

  Args:
    path: directory with `model.safetensors`, or `model.safetensors.index.json`
      and its shards.
    config: result of `read_config` for this directory.
    dtype: dtype of the result.
    places: nested dict like the result with the sharding of each parameter,
      which may include devices of other processes; None: the default device.
    outputs: number of outputs of the value head that replaces the policy's
      head; None: a policy.

  Returns:
    Nested dict shaped like `transformer.param_shapes(config.base)`, except for
    kernels that the base of adapters stores in fewer bits.

  Raises:
    InputError: files are missing or damaged, or do not fit the configuration.
  """
  listing, tensors = hf_files.read_headers(hf_files.directory(path))
  return _from_tensors(listing, tensors, config, dtype, places, outputs)


def from_arrays(
  listing: pathlib.Path,
  arrays: Mapping[str, np.ndarray],
  config: ModelConfig,
  outputs: int | None = None,
) -> Params:
  """Builds parameters, or arrays of their shapes, from arrays by tensor name.

  Args:
    listing: source of the arrays, for messages.
    arrays: floating-point arrays in the layout of a model's files.
    config: configuration of the model.
    outputs: as in `read_params`.

  Returns:
    Nested dict of float32 arrays on the default device; see `read_params`.

  Raises:
    InputError: the arrays do not fit the configuration, or are not finite.
  """
  file = types.SimpleNamespace(get_slice=arrays.get, get_tensor=arrays.get)
  tensors = {
    name: hf_files.Tensor(listing, name, "F32", array.shape, file)
    for name, array in arrays.items()
  }
  return _from_tensors(listing, tensors, config, jnp.float32, None, outputs)


def to_arrays(
  params: Mapping[str, Any], config: ModelConfig, outputs: int | None = None
) -> dict[str, np.ndarray]:
  """Copies parameters to arrays by tensor name: inverts `from_arrays`."""
  entries = entries_of(leaves_of(config.base, outputs), params)
  return {entry.name: entry.to_host() for entry in entries}


def _from_tensors(
  listing: pathlib.Path,
  tensors: Mapping[str, hf_files.Tensor],
  config: ModelConfig,
  dtype: Any,
  places: Params | None,
  outputs: int | None,
) -> Params:
  """Builds parameters from open tensors; for arguments see `read_params`."""
  hf_files.check_tensors(listing, tensors, tensor_shapes(config, outputs))
  flat_places = traverse_util.flatten_dict(places or {})
  params = {}
  for leaf in leaves_of(config.base, outputs):
    place = flat_places.get(leaf.path)
    read = {leaf.path: _place(leaf, tensors, dtype, place)}
    if config.adapters and config.adapters.quantised:
      read = _stored(read, config.adapters, flat_places)
    params |= read
  return traverse_util.unflatten_dict(params)


def _stored(
  params: Params, adapters: Adapters, places: Mapping[str, Any]
) -> Params:
  """Quantises a parameter before the next one is read; paths are flat."""

  def store(params: Params):
    stored = adapters.store(traverse_util.unflatten_dict(params))
    return traverse_util.flatten_dict(stored)

  shardings = {path: places.get(path) for path in jax.eval_shape(store, params)}
  return jax.jit(store, out_shardings=shardings)(params)


def _place(
  leaf: Leaf,
  tensors: Mapping[str, hf_files.Tensor],
  dtype: Any,
  place: jax.sharding.Sharding | None,
) -> jax.Array:
  """Reads a parameter onto its devices; shared parts are read once."""
  if place is None:
    return jnp.asarray(
      _read(leaf, tensors, dtype, (slice(None),) * len(leaf.shape))
    )
  parts = place.addressable_devices_indices_map(leaf.shape)
  arrays, before = {}, None
  for device in sorted(parts, key=lambda d: (str(parts[d]), d.id)):
    if parts[device] != before:
      before = parts[device]
      part = _read(leaf, tensors, dtype, before)
    arrays[device] = jax.block_until_ready(jax.device_put(part, device))
  arrays = [arrays[device] for device in parts]
  return jax.make_array_from_single_device_arrays(
    leaf.shape, place, arrays, dtype=dtype
  )


def _read(
  leaf: Leaf,
  tensors: Mapping[str, hf_files.Tensor],
  dtype: Any,
  part: hf_files.Part,
) -> np.ndarray:
  """Reads a part of a parameter."""
  bounds = [p.indices(size)[:2] for p, size in zip(part, leaf.shape)]
  array = np.empty([end - begin for begin, end in bounds], dtype)
  count = len(leaf.stacks)
  stacks = [x[slice(*bound)] for x, bound in zip(leaf.stacks, bounds)]
  of_tensor = [slice(*bound) for bound in bounds[count:]]
  of_tensor = tuple(of_tensor[::-1] if leaf.transposed else of_tensor)
  parts = array.reshape(-1, *array.shape[count:])  # A view.
  names = leaf._replace(stacks=tuple(stacks)).names()
  for part_of, name in zip(parts, names, strict=True):
    tensor = hf_files.read_tensor(tensors[name], of_tensor)
    part_of[...] = tensor.T if leaf.transposed else tensor
    if not np.isfinite(part_of).all():
      raise InputError(
        f"{tensors[name].path}: tensor {name!r} has values that are not finite"
        f" as {array.dtype}; download the model again"
      )
  return array


def write_params(
  path: str | os.PathLike[str],
  config: ModelConfig,
  params: Mapping[str, Any],
  *,
  max_shard_bytes: int = 5_000_000_000,
  extra_files_from: str | os.PathLike[str] | None = None,
  head: ValueHead | None = None,
) -> None:
  """Writes a model directory that `transformers` loads.

  Only the tensors of one shard are in host memory at a time (twice with
  safetensors before 0.8). Weights of an earlier call are replaced; the file
  that makes the new weights loadable is written last.

  Args:
    path: directory, created if necessary.
    config: configuration of the model.
    params: nested dict shaped like `transformer.param_shapes(config.base)`, in
      the dtypes of the file.
    max_shard_bytes: maximum size of a file in bytes, unless one tensor is
      larger.
    extra_files_from: a model directory whose tokenizer files, generation
      settings and special token ids replace those in `path`.
    head: head of a critic, which is written as a token classifier with one
      label per output; None: the model is a policy.

  Raises:
    ValueError: the parameters do not fit the configuration.
    InputError: `path` cannot be written, or `extra_files_from` not read.
  """
  check_number("max_shard_bytes", max_shard_bytes, "[1, inf)")
  outputs = head and head.outputs
  entries = entries_of(leaves_of(config.base, outputs), params)
  source = extra_files_from and hf_files.directory(extra_files_from)
  values = config.to_hf() | _token_ids(source)
  if head is not None:
    name = _architecture(values).removesuffix(_POLICY)
    values["architectures"] = [name + _CRITIC]
    values["id2label"] = {k: f"value_{k}" for k in range(outputs)}
    values["value_support"] = head.support
  # The dtype key that every release of transformers reads.
  values["torch_dtype"] = entries[0].array.dtype.name
  first = hf_files.INDEX, hf_files.SINGLE
  written = _WITH_EXTRAS if source else _WRITTEN
  with hf_files.published(path, written, first=first) as stage:
    hf_files.write_json(stage / hf_files.CONFIG, values)
    _copy_extras(source, stage)
    _write_weights(stage, entries, max_shard_bytes)


def write_adapters(
  path: str | os.PathLike[str],
  config: ModelConfig,
  params: Mapping[str, Any],
  *,
  base: str,
) -> None:
  """Writes adapters as a directory that PEFT loads.

  Args:
    path: directory, created if necessary. Adapters of an earlier call are
      replaced.
    config: configuration of the model, with adapters.
    params: nested dict of the adapter factors only.
    base: name or path of the base model.

  Raises:
    InputError: The directory cannot be written.
  """
  adapters = config.adapters
  leaves = [leaf for leaf in leaves_of(config) if leaf.path[-1] in FACTORS]
  arrays = {
    f"base_model.model.{entry.name}": entry.to_host()
    for entry in entries_of(leaves, params)
  }
  values = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": adapters.rank,
    "lora_alpha": adapters.alpha,
    "use_rslora": adapters.scaling == "rslora",
    "target_modules": sorted({name.split(".")[-3] for name in arrays}),
    "lora_dropout": 0.0,
    "bias": "none",
  }
  with hf_files.published(path, _ADAPTERS, first=(_PEFT_CONFIG,)) as stage:
    hf_files.write_json(stage / _PEFT_CONFIG, values)
    file = stage / "adapter_model.safetensors"
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})


def _token_ids(source: pathlib.Path | None) -> dict[str, Any]:
  """Returns the special token ids of another model's config."""
  if source is None or not (source / hf_files.CONFIG).exists():
    return {}
  file, values = _read_json_config(source)
  ids = {key: values[key] for key in _TOKEN_KEYS if values.get(key) is not None}
  for key, value in ids.items():
    several = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= -1 for token in several):
      raise InputError(
        f"{file}: key '{key}' must be a token id or a list of them; correct the"
        " file"
      )
  return ids


def _copy_extras(source: pathlib.Path | None, stage: pathlib.Path) -> None:
  for name in _EXTRA_FILES:
    if source is not None and (source / name).exists():
      shutil.copyfile(hf_files.member(source, name), stage / name)


def copy_settings(source: str | os.PathLike[str], to: pathlib.Path) -> None:
  """Copies the files of a model directory other than its weights.

  Raises:
    InputError: the source cannot be read.
    OSError: the other directory cannot be written.
  """
  source = hf_files.directory(source)
  config = hf_files.member(source, hf_files.CONFIG)
  to.mkdir(parents=True, exist_ok=True)
  for name in _EXTRA_FILES:  # Left by another model.
    (to / name).unlink(missing_ok=True)
  shutil.copyfile(config, to / hf_files.CONFIG)
  _copy_extras(source, to)


def settings_digest(path: str | os.PathLike[str]) -> str:
  """Returns a digest of the files that `copy_settings` copies.

  Weights are not read: for large models this would take minutes.
  """
  files = [pathlib.Path(path) / x for x in (hf_files.CONFIG, *_EXTRA_FILES)]
  found = [(x.name, digest.of_files([x])) for x in files if x.is_file()]
  return digest.of_bytes(repr(found).encode())


def _write_weights(
  stage: pathlib.Path, entries: list[Entry], limit: int
) -> None:
  """Writes one weight file, or several files and their index."""
  tensors = {entry.name: entry for entry in entries}
  split = split_state_dict_into_shards_factory(
    tensors,
    get_storage_size=lambda entry: entry.size,
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=limit,
  )
  for file, names in split.filename_to_tensors.items():
    arrays = {name: tensors[name].to_host() for name in names}
    safetensors.numpy.save_file(arrays, stage / file, metadata={"format": "pt"})
  if split.is_sharded:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    hf_files.write_json(stage / hf_files.INDEX, index)
