"""Reading and writing Hugging Face model directories.

The family's table maps parameter paths to tensor names, and shapes come from
the model. Reading checks everything before a weight is used. Writing leaves a
directory either complete or without weights, never with a mixture.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import types
from collections.abc import (
  Callable,
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util
from huggingface_hub import split_state_dict_into_shards_factory

from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.models import families, hf_files, transformer
from jaxrl_llm.models.adapters import FACTORS, Adapters
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import ValueHead
from jaxrl_llm.system import files

_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_ADAPTERS = re.compile(r"adapter_(config\.json|model\.safetensors)")
_PEFT_CONFIG = "adapter_config.json"
_EXTRA_FILES = (
  *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
  *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
  *("merges.txt", "chat_template.jinja", "generation_config.json"),
)
# Ends of the names of classes in transformers.
_POLICY, _CRITIC = "ForCausalLM", "ForTokenClassification"
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

Params = dict[str, Any]


class _Leaf(NamedTuple):
  """A parameter, stored in files as one tensor or as one per layer.

  Experts have a tensor for each layer and expert.
  """

  path: tuple[str, ...]  # Path in the parameter tree.
  shape: tuple[int, ...]  # Including the stacked axes, if any.
  name: str  # Name of its tensors, with {} for each stacked axis.
  stacks: tuple[range, ...]  # Numbers in names along the stacked axes.

  @property
  def transposed(self) -> bool:
    """Whether files have the transpose: [out, in] for [in, out] here."""
    return self.path[-1] in ("kernel", *FACTORS)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """Shape of each of its tensors in a file."""
    shape = self.shape[len(self.stacks) :]
    return shape[::-1] if self.transposed else shape

  def names(self) -> list[str]:
    """Returns the names of its tensors, in the order of its parts."""
    return [self.name.format(*at) for at in itertools.product(*self.stacks)]


class _Entry(NamedTuple):
  """A tensor to write: a part of a leaf."""

  name: str
  leaf: _Leaf
  array: Any  # All parts, on any devices.
  part: tuple[int, ...]  # Index along the stacked axes.

  @property
  def size(self) -> int:
    """Size in the file, in bytes."""
    return math.prod(self.leaf.tensor_shape) * self.array.dtype.itemsize

  def to_host(self) -> np.ndarray:
    """Copies the tensor to the host, in the layout of the file."""
    value = np.asarray(self.array[self.part])
    return np.ascontiguousarray(value.T if self.leaf.transposed else value)


def _shapes(config: ModelConfig, outputs: int | None) -> dict[tuple, Any]:
  """Returns the shapes by path; see `read_params` for `outputs`."""
  shapes = traverse_util.flatten_dict(transformer.param_shapes(config))
  if outputs is None:
    return shapes
  shapes = {path: x for path, x in shapes.items() if path[0] != "lm_head"}
  head = {"kernel": (config.hidden_size, outputs), "bias": (outputs,)}
  for name, shape in head.items():
    shapes["value_head", name] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return shapes


def _leaves(config: ModelConfig, outputs: int | None = None) -> list[_Leaf]:
  """Lists the parameters of the model; see `read_params` for `outputs`."""
  words = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
  words["value_head"] = "score"
  words |= families.get(config.family).names
  places = transformer.places(config)
  layers = {
    place: range(first, config.num_layers, len(places))
    for first, place in enumerate(places)
  }
  leaves = []
  for path, leaf in _shapes(config, outputs).items():
    first = "layers" if path[0] in layers else path[0]
    name = ".".join(words.get(word, word) for word in (first, *path[1:]))
    stacks = (layers[path[0]],) if path[0] in layers else ()
    if name.count("{}") > len(stacks):
      stacks += (range(leaf.shape[len(stacks)]),)
    leaves.append(_Leaf(path, leaf.shape, name, stacks))
  return leaves


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
  """Reads `config.json` of the directory of a model, which may be a critic.

  Raises:
    InputError: the directory or file is missing, damaged or not supported.
  """
  file = hf_files.member(hf_files.directory(path), hf_files.CONFIG)
  values = hf_files.read_json(file)
  if is_critic(path):
    values |= {"architectures": [_architecture(values, _CRITIC, _POLICY)]}
  return ModelConfig.from_hf(values, file)


def is_model(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a directory with the weights of a model."""
  return bool(path) and any(pathlib.Path(path).glob("*.safetensors"))


def is_critic(path: str | os.PathLike[str]) -> bool:
  """Returns whether a model directory has a value head."""
  file = hf_files.member(hf_files.directory(path), hf_files.CONFIG)
  return _architecture(hf_files.read_json(file), "", "").endswith(_CRITIC)


def _architecture(values: Mapping[str, Any], old: str, new: str) -> str:
  """Returns the name of the class in config.json, its end replaced."""
  names = values.get("architectures")
  name = str(names[0]) if isinstance(names, list) and names else ""
  return name.removesuffix(old) + new


def read_critic(
  path: str | os.PathLike[str],
  config: ModelConfig,
  head: ValueHead,
  place: Callable[[Params], Params],
) -> Params:
  """Reads the weights of a critic, or of a policy for one with a new head.

  Args:
    path: model directory.
    config: result of `read_config` for this directory.
    head: head of the critic.
    place: shapes of parameters -> their shardings.

  Returns:
    Nested dict of float32 arrays, with the head of the directory.

  Raises:
    InputError: files are missing or damaged, or the head is another one.
  """
  outputs = head.outputs if is_critic(path) else None
  file = hf_files.member(hf_files.directory(path), hf_files.CONFIG)
  support = hf_files.read_json(file).get("value_support")
  if outputs and support != head.support:
    raise InputError(
      f"{file}: the values of this critic are over {support}, and those of"
      f" config.value over {head.support}; set value.head, low and high to its"
    )
  shapes = traverse_util.unflatten_dict(_shapes(config.base, outputs))
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

  Devices get their parts directly from the files: besides the result, one part
  and one tensor are in host memory at a time.

  Args:
    path: directory with `model.safetensors`, or `model.safetensors.index.json`
      and its shards.
    config: result of `read_config` for this directory.
    dtype: dtype of the result.
    places: nested dict like the result with the sharding of each parameter,
      which may include devices of other processes; None: the default device.
    outputs: outputs of the value head that takes the place of the policy's;
      None: the head is the policy's.

  Returns:
    Nested dict shaped as `transformer.param_shapes(config.base)`, but for what
    the base of adapters stores in fewer bits.

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
  """Builds parameters, or what has their shapes, from arrays by tensor name.

  Args:
    listing: where the arrays are from, for messages.
    arrays: floating-point arrays in the layout of a model's files.
    config: configuration of the model.
    outputs: as in `read_params`.

  Returns:
    Nested dict of float32 arrays on the default device, as of `read_params`.

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
  entries = _entries(_leaves(config.base, outputs), params)
  return {entry.name: entry.to_host() for entry in entries}


def tensor_shapes(
  config: ModelConfig, outputs: int | None = None
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a model's tensors by name; see `read_params`."""
  leaves = _leaves(config.base, outputs)
  return {name: leaf.tensor_shape for leaf in leaves for name in leaf.names()}


def _from_tensors(listing, tensors, config, dtype, places, outputs) -> Params:
  """Builds parameters of opened tensors; arguments as of `read_params`."""
  hf_files.check_tensors(listing, tensors, tensor_shapes(config, outputs))
  flat_places = traverse_util.flatten_dict(places or {})
  params = {}
  for leaf in _leaves(config.base, outputs):
    place = flat_places.get(leaf.path)
    read = {leaf.path: _place(leaf, tensors, dtype, place)}
    if config.adapters and config.adapters.quantised:
      read = _stored(read, config.adapters, flat_places)
    params |= read
  return traverse_util.unflatten_dict(params)


def _stored(
  params: Params, adapters: Adapters, places: Mapping[str, Any]
) -> Params:
  """Quantises a parameter, before the next one needs memory; paths are flat."""

  def store(params):
    stored = adapters.store(traverse_util.unflatten_dict(params))
    return traverse_util.flatten_dict(stored)

  shardings = {path: places.get(path) for path in jax.eval_shape(store, params)}
  return jax.jit(store, out_shardings=shardings)(params)


def _place(
  leaf: _Leaf,
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
  leaf: _Leaf,
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
        f" as {array.dtype}; get the model again"
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

  The tensors of one shard are in host memory at a time (twice with safetensors
  before 0.8). Weights of an earlier call are replaced; the file that makes the
  new ones loadable is written last.

  Args:
    path: directory, created if necessary.
    config: configuration of the model.
    params: nested dict shaped as `transformer.param_shapes(config.base)`, with
      the dtypes of the file.
    max_shard_bytes: maximum size of a file in bytes, unless one tensor is
      larger.
    extra_files_from: a model directory whose tokenizer files, generation
      settings and special token ids are copied.
    head: head of a critic, which is written as a token classifier with a label
      for each output; None: the model is a policy.

  Raises:
    ValueError: the parameters do not fit the configuration.
    InputError: The directory cannot be written, or the other one not read.
  """
  check_number("max_shard_bytes", max_shard_bytes, "[1, inf)")
  outputs = head and head.outputs
  entries = _entries(_leaves(config.base, outputs), params)
  source = extra_files_from and hf_files.directory(extra_files_from)
  values = config.to_hf() | _token_ids(source)
  if head is not None:
    values["architectures"] = [_architecture(values, _POLICY, _CRITIC)]
    values["id2label"] = {k: f"value_{k}" for k in range(outputs)}
    values["value_support"] = head.support
  # The key of the dtype that every release of transformers reads.
  values["torch_dtype"] = entries[0].array.dtype.name
  with _published(
    path, _WRITTEN, first=(hf_files.INDEX, hf_files.SINGLE)
  ) as stage:
    (stage / hf_files.CONFIG).write_text(_json(values), encoding="utf-8")
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
    params: nested dict of the factors alone.
    base: name or path of the model that they belong to.

  Raises:
    InputError: The directory cannot be written.
  """
  adapters = config.adapters
  leaves = [leaf for leaf in _leaves(config) if leaf.path[-1] in FACTORS]
  arrays = {
    f"base_model.model.{entry.name}": entry.to_host()
    for entry in _entries(leaves, params)
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
  with _published(path, _ADAPTERS, first=(_PEFT_CONFIG,)) as stage:
    (stage / _PEFT_CONFIG).write_text(_json(values), encoding="utf-8")
    file = stage / "adapter_model.safetensors"
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})


def _entries(
  leaves: Sequence[_Leaf], params: Mapping[str, Any]
) -> list[_Entry]:
  """Lists the tensors to write."""
  arrays = traverse_util.flatten_dict(params)
  leaves = {leaf.path: leaf for leaf in leaves}
  wanted = {path: leaf.shape for path, leaf in leaves.items()}
  found = {path: tuple(array.shape) for path, array in arrays.items()}
  for path in wanted | found:
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f"params at {'/'.join(path)}: shape must be {wanted.get(path)} by the"
        f" policy's configuration, got {found.get(path)}"
      )
  for array in arrays.values():
    if array.dtype not in hf_files.DTYPES.values():
      raise ValueError(f"dtype of weights must be floating, got {array.dtype}")
  return [
    _Entry(leaf.name.format(*numbers), leaf, arrays[path], part)
    for path, leaf in leaves.items()
    for part, numbers in zip(
      np.ndindex(*map(len, leaf.stacks)), itertools.product(*leaf.stacks)
    )
  ]


def _token_ids(source: pathlib.Path | None) -> dict[str, Any]:
  """Returns the special token ids of another model's config."""
  if source is None or not (source / hf_files.CONFIG).exists():
    return {}
  file = hf_files.member(source, hf_files.CONFIG)
  values = hf_files.read_json(file)
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


def _write_weights(
  stage: pathlib.Path, entries: list[_Entry], limit: int
) -> None:
  """Writes one file, or several and the index that names them."""
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
    index = {
      "metadata": split.metadata,
      "weight_map": split.tensor_to_filename,
    }
    (stage / hf_files.INDEX).write_text(_json(index), encoding="utf-8")


def _json(values: Mapping[str, Any]) -> str:
  return json.dumps(values, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def _published(
  path: str | os.PathLike[str], written: re.Pattern, *, first: Collection[str]
) -> Iterator[pathlib.Path]:
  """Yields a folder whose files then move into place; a kill leaves no mixture.

  The file that a reader opens first is removed first and written last. In
  between, loading fails because it is missing.

  Args:
    path: directory of the files, created if necessary.
    written: names of files of earlier calls, which are removed.
    first: names of the file that a reader opens first.

  Raises:
    InputError: The directory cannot be written.
  """
  directory = pathlib.Path(path)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as temp:
      stage = pathlib.Path(temp)
      yield stage
      text = next(stage.glob("*.json"))
      for file in stage.iterdir():
        # Safetensors may restrict a file to its owner.
        shutil.copymode(text, file)
        files.to_disk(file)
      old = [x for x in directory.iterdir() if written.fullmatch(x.name)]
      for file in sorted(old, key=lambda file: file.name not in first):
        file.unlink()
      for file in sorted(stage.iterdir(), key=lambda file: file.name in first):
        os.replace(file, directory / file.name)
      files.to_disk(directory)
  except (OSError, safetensors.SafetensorError) as error:
    raise InputError(
      f"{directory}: cannot be written ({error}); choose another directory or"
      " make room"
    ) from None
