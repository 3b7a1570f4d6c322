"""Rotary position embedding: frequencies, and their keys in `config.json`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError

# Fields of each kind of scaling. YaRN's other constants are from the paper.
_FIELDS = {
  "linear": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
  "yarn": ("factor", "original_max_position_embeddings"),
}
# Field -> smallest and largest accepted value.
_RANGES = {
  "factor": (1.0, 1e6),
  "low_freq_factor": (1e-3, 1e6),
  "high_freq_factor": (1e-3, 1e6),
  "original_max_position_embeddings": (1, 1 << 30),
}
_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # Turns over the original context.
LLAMA_THETA = 10000.0  # Default of Llama files without one.


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of rotary frequencies for a longer context.

  Every kind has a `factor`. `llama3` and `yarn` also have the original context
  length in tokens, and `llama3` two bounds. Other fields are None.
  """

  kind: str  # 'linear' | 'llama3' | 'yarn'.
  factor: float
  low_freq_factor: float | None = None
  high_freq_factor: float | None = None
  original_max_position_embeddings: int | None = None

  def __post_init__(self):
    for field, problem in _problems(vars(self)):
      raise ValueError(f"RopeScaling.{field} {problem}")

  def to_hf(self) -> dict[str, Any]:
    """Returns the object under `rope_scaling` in config.json."""
    values = {name: getattr(self, name) for name in _FIELDS[self.kind]}
    return {"rope_type": self.kind} | values


def frequencies(
  head_dim: int, rope_theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
  """Returns the angular frequencies of the rotary embedding.

  θ_i = rope_theta^(-2i / head_dim), i = 0 .. head_dim/2 - 1, is rescaled to
    θ'_i = (1 - s_i) θ_i / factor + s_i θ_i,   s_i = 1 keeps a frequency:
    none:   s_i = 1
    linear: s_i = 0
    llama3: s_i = clip((n_i - low) / (high - low), 0, 1), where n_i =
      original context · θ_i / 2π is the number of turns of pair i
    yarn:   s_i = 1 - clip((i - a) / (b - a), 0, 1), where a and b are the
      (rounded outwards, clipped) indices of the pairs that make 32 turns and
      1 turn; cos and sin are also scaled by 0.1 ln(factor) + 1.

  Args:
    head_dim: size of a head, even.
    rope_theta: the base.
    scaling: scaling for a longer context, or None.

  Returns:
    `(frequencies, scale)`: float32 [head_dim / 2], the angle of pair i at
    position p being p · θ'_i, and the factor of cos and sin. Computed in
    float64, so that only the final rounding is to float32.

  Reference: Su et al. 2021 (2104.09864) section 3.2.2; Chen et al. 2023
    (2306.15595) for linear; Llama team 2024 (2407.21783) for llama3; Peng et
    al. 2023 (2309.00071) section 3.4 for YaRN.
  """
  pairs = np.arange(head_dim // 2, dtype=np.float64)
  theta = rope_theta ** (-2 * pairs / head_dim)
  if scaling is None:
    return theta.astype(np.float32), 1.0
  scale, context = 1.0, scaling.original_max_position_embeddings
  if scaling.kind == "linear":
    keep = np.zeros_like(theta)
  elif scaling.kind == "llama3":
    turns = context * theta / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
  else:
    # The (fractional) index of the pair that makes this number of turns.
    pair = lambda turns: (
      head_dim
      * math.log(context / (turns * 2 * math.pi))
      / (2 * math.log(rope_theta))
    )
    first = max(math.floor(pair(_YARN_FAST)), 0)
    last = min(math.ceil(pair(_YARN_SLOW)), head_dim - 1)
    width = last - first if last != first else 1e-3
    keep = 1 - np.clip((pairs - first) / width, 0.0, 1.0)
    scale = 0.1 * math.log(scaling.factor) + 1
  theta = (1 - keep) * theta / scaling.factor + keep * theta
  return theta.astype(np.float32), scale


def from_hf(
  values: Mapping[str, Any], where: Any
) -> tuple[Any, RopeScaling | None]:
  """Reads either spelling of rope: `rope_parameters`, or theta and scaling.

  Args:
    values: the whole `config.json` object.
    where: path of the file, for messages.

  Returns:
    `(theta, scaling)`; theta is not validated, and None if absent.

  Raises:
    InputError: a value is wrong, not supported, or the spellings disagree.
  """
  thetas, scalings = [values.get("rope_theta")], []
  for key in ("rope_parameters", "rope_scaling"):
    block = values.get(key)
    if block is None:
      continue
    if not isinstance(block, Mapping):
      raise InputError(
        f"{where}: key '{key}' must be an object, got {show(block)}; correct"
        " the file"
      )
    thetas.append(block.get("rope_theta"))
    scalings.append(_scaling_from_hf(block, f"{where}: key '{key}"))
  thetas = [theta for theta in thetas if theta is not None]
  if thetas[1:] != thetas[:-1] or scalings[1:] != scalings[:-1]:
    raise InputError(
      f"{where}: key 'rope_parameters' contradicts 'rope_theta' or"
      " 'rope_scaling'; keep one spelling"
    )
  return (thetas or [None])[0], (scalings or [None])[0]


def _scaling_from_hf(
  block: Mapping[str, Any], where: str
) -> RopeScaling | None:
  """Reads one rope object; `where` ends in its key, without the last quote."""
  fields = {name: block.get(name) for name in _RANGES}
  other = {key: value for key, value in block.items() if key not in _RANGES}
  other.pop("rope_theta", None)
  if other.get("partial_rotary_factor") == 1:
    del other["partial_rotary_factor"]
  older = other.pop("type", None)
  kind = other.pop("rope_type", older)
  for key, value in other.items():
    if value is not None:
      raise InputError(
        f"{where}' contains {show(key)}, which is not supported; use a model"
        " without it"
      )
  if kind is None and all(value is None for value in fields.values()):
    kind = "default"  # An object with only theta.
  if kind == "default":
    return None
  fields["kind"] = kind
  for field, problem in _problems(fields):
    name = "rope_type" if field == "kind" else field
    raise InputError(f"{where}.{name}' {problem}; correct the file")
  return RopeScaling(**fields)


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (field, problem); later checks assume that earlier ones passed."""
  kind = values["kind"]
  if not isinstance(kind, str) or kind not in _FIELDS:
    supported = ", ".join(["default", *_FIELDS])
    yield "kind", f"must be one of {supported}, got {show(kind)}"
  for field, (low, high) in _RANGES.items():
    value = values[field]
    if field in _FIELDS[kind]:
      problem = range_problem(value, low, high)
    else:
      problem = None if value is None else f"does not apply to {kind} rope"
    if problem:
      yield field, problem
  low, high = values["low_freq_factor"], values["high_freq_factor"]
  if kind == "llama3" and low >= high:
    yield "low_freq_factor", f"must be below high_freq_factor {high}, got {low}"


def range_problem(value: Any, low: float, high: float) -> str | None:
  """Returns what is wrong with an untrusted number (int if `low` is one)."""
  # `type`, not isinstance: bool is a subclass of int.
  kinds = (int,) if type(low) is int else (int, float)
  # The chained comparison is also False for NaN.
  if type(value) in kinds and low <= value <= high:
    return None
  kind = "an integer" if kinds == (int,) else "a number"
  return f"must be {kind} in [{low}, {high}], got {show(value)}"


def show(value: Any) -> str:
  """Returns a short representation of an untrusted value, on one line."""
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
