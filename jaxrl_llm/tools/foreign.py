"""Training states of other frameworks: a model's weights and AdamW moments.

A folder holds the state of one model in one of three forms:

  dcp    a torch distributed checkpoint of {"model": ..., "optim": ...} from
         `torch.distributed.checkpoint.state_dict.get_state_dict`
  trl    a checkpoint of the transformers Trainer, on which TRL's trainers
         build: a Hugging Face model directory with optimizer.pt
  tunix  a step of Tunix's checkpoint manager (Orbax), for Llama and Qwen3

Moments have the layout of their parameters. Parameters are named as in Hugging
Face files or, in Tunix, by names derived from these, so layouts and names come
from `models.files.hf`.

Reading executes nothing that a file contains: `torch.load(weights_only=True)`
reads optimizer.pt and the tensors of a distributed checkpoint. Its .metadata is
a pickle, which torch would load without restrictions. It is read here instead,
with inert placeholders for the objects that it describes.
"""

import io
import os
import pathlib
import pickle
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.checkpoint import trees as trees_lib
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.files import hf, hf_files

# Weights by tensor name, moments by tensor name and kind: NAME.exp_avg.
Arrays = dict[str, np.ndarray]

_EMBEDDING = "model.embed_tokens.weight"
_METADATA, _OPTIMIZER = ".metadata", "optimizer.pt"
_ADVICE = "see docs/foreign.md; torch comes with pip install -e '.[parity]'"
_ITEMS = "model_params", "optimizer_state"  # Items of a Tunix step.


class ModelState(NamedTuple):
  """Weights and AdamW state of a model; trees as `hf.read_params` returns."""

  params: Any
  mu: Any  # First moments: `exp_avg` in torch.
  nu: Any  # Second moments: `exp_avg_sq` in torch.
  step: int  # Number of updates.


def read(
  path: str | os.PathLike, config: ModelConfig, outputs: int | None = None
) -> ModelState:
  """Reads a training state in any form.

  Args:
    path: the folder.
    config: configuration of the model.
    outputs: number of outputs of the value head; None for a policy.

  Returns:
    The state, in float32.

  Raises:
    InputError: It cannot be read, or has another model or optimizer.
  """
  folder, reader = hf_files.directory(path), _read_trl
  if (folder / _METADATA).exists():
    reader = _read_dcp
  elif (folder / _ITEMS[0]).exists():
    reader = _read_tunix
  elif not (folder / "config.json").exists():
    raise InputError(
      f"{folder}: has no training state; give a folder in one of the forms of"
      " docs/foreign.md (for tunix, the folder of a step)"
    )
  # Torch, pickle and Orbax raise errors of many kinds.
  what = f"{folder}: cannot be read as a training state"
  with as_input_error(what, _ADVICE, Exception):
    weights, state = {}, {"exp_avg": {}, "exp_avg_sq": {}, "step": {}}
    for key, array in reader(folder, config, outputs).items():
      name, _, kind = key.rpartition(".")
      state.get(kind, weights)[name if kind in state else key] = array
    steps = {int(count) for count in state.pop("step").values()}
    trees = [
      hf.from_arrays(folder / kind, arrays, config, outputs)
      for kind, arrays in (("", weights), *state.items())
    ]
    if len(steps) != 1:
      raise InputError(f"{folder}: has several update counts, {sorted(steps)}")
    return ModelState(*trees, *steps)


def write(
  path: pathlib.Path,
  form: str,
  state: ModelState,
  config: ModelConfig,
  outputs: int | None = None,
  **adamw: Any,
) -> None:
  """Writes a training state.

  Args:
    path: the folder; for 'trl', a model directory with the weights.
    form: a name in `FORMS`.
    state: the state, in float32.
    config: configuration of the model.
    outputs: as in `read`.
    **adamw: keyword arguments of torch.optim.AdamW.

  Raises:
    InputError: It cannot be written, or the form does not support the model.
  """
  what = f"{path}: cannot be written"
  with as_input_error(what, _ADVICE, Exception):
    arrays = {
      name + end: array
      for tree, end in zip(state, ("", ".exp_avg", ".exp_avg_sq"))
      for name, array in hf.to_arrays(tree, config, outputs).items()
    }
    FORMS[form](path, config, outputs, arrays, state.step, **adamw)


class _Inert:
  """Placeholder for any object in a pickle; it only holds the data."""

  def __init__(self, *args: Any):
    """Takes what the pickle gives, and does nothing with it."""

  def __setstate__(self, state: Any) -> None:
    self.state = state


class _Unpickler(pickle.Unpickler):
  """Unpickles data; imports and calls nothing that the pickle names."""

  def find_class(self, module: str, name: str) -> type:
    if module.split(".")[0] not in ("torch", "pathlib"):
      raise InputError(f"{_METADATA} names {module}.{name}: do not trust it")
    return tuple if (module, name) == ("torch", "Size") else _Inert


def _load(file: Any) -> Any:
  """Loads a file saved by torch without executing code from it."""
  import torch

  if torch.__version__ < (2, 6):
    raise InputError(f"torch {torch.__version__} is unsafe; install 2.6")
  return torch.load(file, map_location="cpu", weights_only=True)


def _read_dcp(folder: pathlib.Path, *_: Any) -> Arrays:
  pickled = io.BytesIO((folder / _METADATA).read_bytes())
  metadata, found = _Unpickler(pickled).load().state, {}
  for index, place in metadata["storage_data"].items():
    key, offset, at = index.state["fqn"], index.state.get("offset"), place.state
    named = re.fullmatch(r"(model|optim\.state)\.(.*)", key)
    if offset is None or not named:  # A pickle, or not part of the state.
      continue
    with hf_files.member(folder, at["relative_path"]).open("rb") as file:
      file.seek(at["offset"])
      part = _load(io.BytesIO(file.read(at["length"])))
    size = metadata["state_dict_metadata"][key].state["size"]
    whole = found.setdefault(named[2], np.full(size, np.nan, np.float32))
    slices = tuple(slice(o, o + n) for o, n in zip(offset, part.shape))
    whole[slices] = part.float().numpy()
  return found


def _read_trl(
  folder: pathlib.Path, config: ModelConfig, outputs: int | None
) -> Arrays:
  if hf.read_config(folder) != config:
    raise InputError(f"{folder}: its model has another configuration")
  if not (folder / _OPTIMIZER).is_file():
    raise InputError(
      f"{folder}: has no {_OPTIMIZER}; weights alone can start a run"
      " with --config.model.path or --config.value.init_from"
    )
  saved = _load(folder / _OPTIMIZER)
  _, params, optimizer = _make(config, outputs, len(saved["param_groups"]))
  optimizer.load_state_dict(saved)
  _, tensors = hf_files.read_headers(folder)
  return {k: hf_files.read_tensor(x) for k, x in tensors.items()} | {
    f"{name}.{kind}": value.numpy()
    for name, param in params.items()
    for kind, value in optimizer.state[param].items()
  }


def _make(
  config: ModelConfig, outputs: int | None, num_groups: int = 2, **adamw
) -> tuple[Any, dict, Any]:
  """Makes a transformers model, its parameters by name, and torch's AdamW.

  Values are not initialised. The optimizer numbers parameters in the order of
  the model; the Trainer's optimizer has two groups, and only the first one, the
  matrices, has weight decay.
  """
  import torch
  import transformers as hub

  values = hub.AutoConfig.for_model(**config.to_hf(), num_labels=outputs or 1)
  kinds = hub.AutoModelForCausalLM, hub.AutoModelForTokenClassification
  with torch.device("meta"):
    model = kinds[bool(outputs)].from_config(values)
  model.to_empty(device="cpu").tie_weights()
  params = dict(model.named_parameters())
  if params.keys() != hf.tensor_shapes(config, outputs).keys():
    raise InputError(
      f"transformers {hub.__version__} names parameters of {config.family}"
      " differently in memory than in files, so moments cannot be assigned"
    )
  decayed = [x for x in params.values() if num_groups == 1 or x.ndim > 1]
  others = [x for x in params.values() if num_groups != 1 and x.ndim < 2]
  groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
  return model, params, torch.optim.AdamW(groups[:num_groups], **adamw)


def _make_trained(
  config: ModelConfig, outputs: int | None, arrays: Arrays, step: int, **adamw
) -> tuple[Any, Any]:
  """Makes a transformers model and its optimizer with a given state."""
  import torch

  model, params, optimizer = _make(config, outputs, **adamw)
  for name, param in params.items():
    param.data.copy_(torch.tensor(arrays[name]))
    moments = ("exp_avg", "exp_avg_sq")
    state = {kind: torch.tensor(arrays[f"{name}.{kind}"]) for kind in moments}
    optimizer.state[param] = {"step": torch.tensor(float(step)), **state}
  return model, optimizer


def _write_dcp(out: pathlib.Path, *state: Any, **adamw: Any) -> None:
  from torch.distributed.checkpoint import save, state_dict

  warnings.filterwarnings("ignore", "torch.distributed is disabled")
  model, optim = state_dict.get_state_dict(*_make_trained(*state, **adamw))
  save({"model": model, "optim": optim}, checkpoint_id=out, no_dist=True)


def _write_trl(out: pathlib.Path, *state: Any, **adamw: Any) -> None:
  import torch
  import transformers

  (_, optimizer), step = _make_trained(*state, **adamw), state[-1]
  torch.save(optimizer.state_dict(), out / _OPTIMIZER)
  # The Trainer does not resume without the next two files.
  schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
  schedule.last_epoch = step
  torch.save(schedule.state_dict(), out / "scheduler.pt")
  trained = transformers.TrainerState(global_step=step, train_batch_size=1)
  trained.save_to_json(out / "trainer_state.json")


def _tunix_keys(
  config: ModelConfig, outputs: int | None, adam: str
) -> Iterator[tuple[Any, ...]]:
  """Yields how Tunix stores each array; AdamW's arrays are below a prefix.

  Each tuple has the key, the path in Tunix, the shapes here and in Tunix, and
  whether the array is transposed. In Tunix, attention projections have an axis
  for heads, and matrices are [in, out].
  """
  shapes, size = hf.tensor_shapes(config, outputs), config.head_dim
  biases = any(not name.endswith(".weight") for name in shapes)
  if config.family not in ("llama", "qwen3") or outputs or biases:
    raise InputError("Tunix has policies of Llama and Qwen3, without biases")
  for name, own in shapes.items():
    path = re.sub("^norm", "final_norm", name.removeprefix("model."))
    path = path.replace("embed_tokens.weight", "embedder.input_embedding")
    path = path.replace("weight", "kernel" if ".mlp." in name else "w")
    path = path.replace("self_attn", "attn")
    transposed = len(own) == 2 and name != _EMBEDDING
    shape = own[::-1] if transposed else own
    if re.search(r"\.[qkv]_proj", name):
      shape = shape[0], shape[1] // size, size
    elif ".o_proj" in name:
      shape = shape[0] // size, size, shape[1]
    yield name, path, own, shape, transposed
    yield f"{name}.exp_avg", f"{adam}mu.{path}", own, shape, transposed
    yield f"{name}.exp_avg_sq", f"{adam}nu.{path}", own, shape, transposed


def _read_tunix(
  folder: pathlib.Path, config: ModelConfig, outputs: int | None
) -> Arrays:
  flat, end = {}, "mu.embedder.input_embedding"
  for item in _ITEMS:
    tree = trees_lib.load_item(folder / item)
    flat |= ocp.tree.to_flat_dict(tree, sep=".")
  flat = {key.removesuffix(".value"): array for key, array in flat.items()}
  adam = next((k.removesuffix(end) for k in flat if k.endswith(end)), "")
  found = {f"{_EMBEDDING}.step": flat.pop(f"{adam}count")}
  for key, path, own, shape, transposed in _tunix_keys(config, outputs, adam):
    array = flat.pop(path, np.empty(0))
    if array.shape != shape:
      raise InputError(f"{folder}: {path} has {array.shape}, not {shape}")
    found[key] = array.reshape(own[::-1]).T if transposed else array
  # Scalars are the trainer's step and the count of a schedule.
  return found | {key: array for key, array in flat.items() if array.shape}


def _write_tunix(
  out: pathlib.Path,
  config: ModelConfig,
  outputs: int | None,
  arrays: Arrays,
  step: int,
  **_: Any,
) -> None:
  # As in Tunix's examples: optax.chain(clip_by_global_norm(...),
  # adamw(schedule)).
  adam, params, count = "opt_state.1.0.", {}, np.int32(step)
  state = {
    f"{adam}count.value": count,
    "opt_state.1.2.count.value": count,
    "step.value": np.uint32(step),
  }
  for key, path, _, shape, transposed in _tunix_keys(config, outputs, adam):
    array = arrays[key].T if transposed else arrays[key]
    item = state if path.startswith(adam) else params
    item[f"{path}.value"] = array.reshape(shape)
  nested = [ocp.tree.from_flat_dict(x, sep=".") for x in (params, state)]
  trees_lib.save_items(out / str(step), dict(zip(_ITEMS, nested)))


FORMS = {"dcp": _write_dcp, "trl": _write_trl, "tunix": _write_tunix}
