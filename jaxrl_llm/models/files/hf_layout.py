"""The tensors of a Hugging Face model directory: names, shapes and layout.

The family's table maps parameter paths to tensor names, and shapes come from
the model.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxrl_llm.models import families, transformer
from jaxrl_llm.models.adapters import FACTORS
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.files import hf_files


class Leaf(NamedTuple):
  """A parameter, stored in files as one tensor or as one per layer.

  Experts have a tensor for each layer and expert.
  """

  path: tuple[str, ...]  # Path in the parameter tree.
  shape: tuple[int, ...]  # Including the stacked axes, if any.
  name: str  # Name of its tensors, with {} for each stacked axis.
  stacks: tuple[range, ...]  # Indices in the names, by stacked axis.

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
    """Returns the names of its tensors, in the order of the stacked axes."""
    return [self.name.format(*at) for at in itertools.product(*self.stacks)]


class Entry(NamedTuple):
  """A tensor to write: a part of a leaf."""

  name: str
  leaf: Leaf
  array: Any  # The entire leaf, on any devices.
  part: tuple[int, ...]  # Index along the stacked axes.

  @property
  def size(self) -> int:
    """Size in the file, in bytes."""
    return math.prod(self.leaf.tensor_shape) * self.array.dtype.itemsize

  def to_host(self) -> np.ndarray:
    """Copies the tensor to the host, in the layout of the file."""
    value = np.asarray(self.array[self.part])
    return np.ascontiguousarray(value.T if self.leaf.transposed else value)


def shapes_of(config: ModelConfig, outputs: int | None) -> dict[tuple, Any]:
  """Returns parameter shapes by path; see `read_params` for `outputs`."""
  shapes = traverse_util.flatten_dict(transformer.param_shapes(config))
  if outputs is None:
    return shapes
  shapes = {path: x for path, x in shapes.items() if path[0] != "lm_head"}
  head = {"kernel": (config.hidden_size, outputs), "bias": (outputs,)}
  for name, shape in head.items():
    shapes["value_head", name] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return shapes


def leaves_of(config: ModelConfig, outputs: int | None = None) -> list[Leaf]:
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
  for path, leaf in shapes_of(config, outputs).items():
    first = "layers" if path[0] in layers else path[0]
    name = ".".join(words.get(word, word) for word in (first, *path[1:]))
    stacks = (layers[path[0]],) if path[0] in layers else ()
    if name.count("{}") > len(stacks):
      stacks += (range(leaf.shape[len(stacks)]),)
    leaves.append(Leaf(path, leaf.shape, name, stacks))
  return leaves


def tensor_shapes(
  config: ModelConfig, outputs: int | None = None
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a model's tensors by name; see `read_params`."""
  leaves = leaves_of(config.base, outputs)
  return {name: leaf.tensor_shape for leaf in leaves for name in leaf.names()}


def entries_of(
  leaves: Sequence[Leaf], params: Mapping[str, Any]
) -> list[Entry]:
  """Lists the tensors to write."""
  arrays = traverse_util.flatten_dict(params)
  leaves = {leaf.path: leaf for leaf in leaves}
  wanted = {path: leaf.shape for path, leaf in leaves.items()}
  found = {path: tuple(array.shape) for path, array in arrays.items()}
  for path in wanted | found:
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f"params at {'/'.join(path)}: the configuration requires shape"
        f" {wanted.get(path)}, got {found.get(path)}"
      )
  for array in arrays.values():
    if array.dtype not in hf_files.DTYPES.values():
      raise ValueError(f"weights must have a float dtype, got {array.dtype}")
  return [
    Entry(name, leaf, arrays[path], part)
    for path, leaf in leaves.items()
    for name, part in zip(leaf.names(), np.ndindex(*map(len, leaf.stacks)))
  ]
