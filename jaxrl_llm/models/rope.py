"""Rotary position embedding: frequencies, and their keys in `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import located

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
    if self.kind not in list(_FIELDS):  # Untrusted, so perhaps unhashable.
      supported = ", ".join(["default", *_FIELDS])
      raise ValueError(
        f"rope_type must be one of {supported}, got {show(self.kind)}; use a"
        " model with one of them"
      )
    for field, bounds in _RANGES.items():
      value = getattr(self, field)
      if field in _FIELDS[self.kind]:
        check_range(field, value, *bounds)
      elif value is not None:
        raise ValueError(
          f"{field} does not apply to {self.kind} rope; remove it"
        )
    low, high = self.low_freq_factor, self.high_freq_factor
    if self.kind == "llama3" and low >= high:
      raise ValueError(
        f"low_freq_factor must be below high_freq_factor {high}, got {low};"
        " correct it"
      )

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
    scale = _yarn_scale(scaling.factor)
  theta = (1 - keep) * theta / scaling.factor + keep * theta
  return theta.astype(np.float32), scale


def _yarn_scale(factor: float) -> float:
  return 0.1 * math.log(factor) + 1


def from_hf(values: Mapping[str, Any]) -> tuple[Any, RopeScaling | None]:
  """Reads either spelling of rope: `rope_parameters`, or theta and scaling.

  Args:
    values: the whole `config.json` object.

  Returns:
    `(theta, scaling)`; theta is not validated, and None if absent.

  Raises:
    ValueError: a value is wrong, not supported, or the spellings disagree.
  """
  thetas, scalings = [values.get("rope_theta")], []
  for key in ("rope_parameters", "rope_scaling"):
    if (block := values.get(key)) is not None:
      with located(f"key '{key}'"):
        theta, scaling = _from_block(
          block, values.get("max_position_embeddings")
        )
      thetas.append(theta)
      scalings.append(scaling)
  thetas = [theta for theta in thetas if theta is not None]
  if thetas[1:] != thetas[:-1] or scalings[1:] != scalings[:-1]:
    raise ValueError(
      "key 'rope_parameters' contradicts 'rope_theta' or 'rope_scaling'; keep"
      " one spelling"
    )
  return (thetas or [None])[0], (scalings or [None])[0]


def _from_block(block: Any, context: Any) -> tuple[Any, RopeScaling | None]:
  """Reads one rope object; returns its theta, None if absent, and scaling.

  YaRN's original context is by default the model's, in tokens.
  """
  if not isinstance(block, Mapping):
    raise ValueError(f"must be an object, got {show(block)}; correct the file")
  fields = {name: block.get(name) for name in _RANGES}
  other = {key: value for key, value in block.items() if key not in _RANGES}
  theta = other.pop("rope_theta", None)
  older = other.pop("type", None)
  kind = other.pop("rope_type", older)
  length = fields["original_max_position_embeddings"]
  if isinstance(length, float) and length.is_integer():
    fields["original_max_position_embeddings"] = int(length)
  # The only supported values of other keys.
  usual = {"partial_rotary_factor": 1}
  if kind == "yarn":
    if length is None:
      fields["original_max_position_embeddings"] = context
    usual |= {"beta_fast": _YARN_FAST, "beta_slow": _YARN_SLOW}
    usual |= {"truncate": True}
    if isinstance(fields["factor"], int | float) and fields["factor"] >= 1:
      usual |= {"attention_factor": _yarn_scale(fields["factor"])}
  for key, value in other.items():
    number = value if isinstance(value, int | float) else math.nan
    same = math.isclose(number, usual.get(key, math.nan), rel_tol=1e-6)
    if value is not None and not same:
      raise ValueError(
        f"contains {show(key)}, which is not supported; use a model without it"
      )
  if kind is None and all(value is None for value in fields.values()):
    kind = "default"  # An object with only theta.
  return theta, None if kind == "default" else RopeScaling(kind, **fields)


def check_range(key: str, value: Any, low: float, high: float) -> None:
  """Checks an untrusted number, which is an integer if `low` is one.

  Raises:
    ValueError: The value is no such number in [low, high].
  """
  # `type`, not isinstance: bool is a subclass of int.
  kinds = (int,) if type(low) is int else (int, float)
  # The chained comparison is also False for NaN.
  if not (type(value) in kinds and low <= value <= high):
    kind = "an integer" if kinds == (int,) else "a number"
    raise ValueError(
      f"{key} must be {kind} in [{low}, {high}], got {show(value)}; correct it"
    )


def show(value: Any) -> str:
  """Returns a short representation of an untrusted value, on one line."""
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
