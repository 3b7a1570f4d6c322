"""The shape of a decoder, as a Hugging Face `config.json` states it.

A `config.json` comes from outside and must not be able to choose code, so a
fixed list of keys is read and all others are ignored. A key that would change
the mathematics and is not supported (sliding windows, quantised weights, other
rope kinds, ...) is refused, never passed over.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import rope
from jaxrl_llm.models.rope import (
  RopeScaling,
  integer_problem,
  number_problem,
  show,
)


@dataclasses.dataclass(frozen=True)
class _Family:
  """What a family fixes and its `config.json` does not say."""

  architecture: str
  qk_norm: bool
  # (attention_bias, attention_output_bias) pairs the family can express.
  attention_biases: tuple[tuple[bool, bool], ...]
  mlp_biases: tuple[bool, ...]
  # Old Llama files leave these out; what they then mean is part of the format.
  optional: tuple[str, ...]


_ALL_OR_NONE = ((False, False), (True, True))
_FAMILIES = {
  "llama": _Family(
    architecture="LlamaForCausalLM",
    qk_norm=False,
    attention_biases=_ALL_OR_NONE,
    mlp_biases=(False, True),
    optional=("rope_theta", "num_key_value_heads", "head_dim"),
  ),
  "qwen2": _Family(
    architecture="Qwen2ForCausalLM",
    qk_norm=False,
    attention_biases=((True, False),),
    mlp_biases=(False,),
    optional=("head_dim",),
  ),
  "qwen3": _Family(
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    attention_biases=_ALL_OR_NONE,
    mlp_biases=(False,),
    optional=(),
  ),
}

# Field -> smallest and largest accepted value. The upper ends are far above
# any real model: they keep a damaged file from asking for terabytes.
_INTEGERS = {
  "vocab_size": (1, 1 << 24),
  "hidden_size": (1, 1 << 17),
  "intermediate_size": (1, 1 << 20),
  "num_layers": (1, 4096),
  "num_heads": (1, 4096),
  "num_kv_heads": (1, 4096),
  "head_dim": (2, 4096),
  "max_position_embeddings": (1, 1 << 30),
}
_NUMBERS = {"rms_norm_eps": (1e-12, 0.1), "rope_theta": (2.0, 1e12)}
_BOOLEANS = (
  "attention_bias",
  "attention_output_bias",
  "mlp_bias",
  "qk_norm",
  "tie_word_embeddings",
)
# Fields whose key in config.json has another name.
_HF_KEYS = {
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "attention_output_bias": "attention_bias",
  "family": "model_type",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Everything that fixes a decoder's parameters and mathematics."""

  family: str  # 'llama' | 'qwen2' | 'qwen3'.
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int  # Query heads.
  num_kv_heads: int  # Key and value heads; divides num_heads.
  head_dim: int  # Even; need not be hidden_size / num_heads.
  max_position_embeddings: int
  rms_norm_eps: float
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  attention_bias: bool = False  # On the q, k and v projections.
  attention_output_bias: bool = False  # On the o projection.
  mlp_bias: bool = False
  qk_norm: bool = False  # RMSNorm over head_dim on q and k, before rope.
  tie_word_embeddings: bool = False

  def __post_init__(self):
    for field, problem in _problems(vars(self)):
      raise ValueError(f"ModelConfig.{field} {problem}")

  @classmethod
  def from_hf(
    cls, values: Mapping[str, Any], where: Any = "config.json"
  ) -> "ModelConfig":
    """Reads the keys of a `config.json` that this library understands.

    Args:
      values: the parsed JSON object. Both spellings of rope are read: the older
        `rope_theta` with `rope_scaling`, and `rope_parameters`.
      where: path of the file, for messages.

    Returns:
      The validated configuration.

    Raises:
      InputError: a key is missing, has a wrong type or value, or asks for
        something that is not supported.
    """
    if not isinstance(values, Mapping):
      raise InputError(f"{where}: must hold a JSON object; restore the file")
    _refuse_unsupported(values, where)
    fields = _fields_from_hf(values, where)
    for field, problem in _problems(fields):
      key = _HF_KEYS.get(field, field)
      raise InputError(f"{where}: key '{key}' {problem}; correct the file")
    return cls(**fields)

  def to_hf(self) -> dict[str, Any]:
    """Returns the `config.json` object that `transformers` loads.

    Rope is written in the older spelling, which every release reads. The
    special token ids belong to the tokenizer and are written as null here:
    left out, Llama's loader would make up its own.
    """
    values = {
      "architectures": [_FAMILIES[self.family].architecture],
      "model_type": self.family,
      "vocab_size": self.vocab_size,
      "hidden_size": self.hidden_size,
      "intermediate_size": self.intermediate_size,
      "num_hidden_layers": self.num_layers,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "hidden_act": "silu",
      "max_position_embeddings": self.max_position_embeddings,
      "rms_norm_eps": self.rms_norm_eps,
      "rope_theta": self.rope_theta,
      "rope_scaling": self.rope_scaling and self.rope_scaling.to_hf(),
      "tie_word_embeddings": self.tie_word_embeddings,
      "bos_token_id": None,
      "eos_token_id": None,
      "pad_token_id": None,
    }
    if self.family != "qwen2":
      values["attention_bias"] = self.attention_bias
    if self.family == "llama":
      values["mlp_bias"] = self.mlp_bias
    else:
      values["use_sliding_window"] = False
    return values

  def num_params(self) -> int:
    """Returns the number of parameters; tied embeddings count once."""
    hidden, inner = self.hidden_size, self.intermediate_size
    queries = self.num_heads * self.head_dim
    keys = self.num_kv_heads * self.head_dim
    layer = 2 * hidden + 2 * hidden * (queries + keys) + 3 * hidden * inner
    layer += self.attention_bias * (queries + 2 * keys)
    layer += self.attention_output_bias * hidden
    layer += self.mlp_bias * (2 * inner + hidden)
    layer += self.qk_norm * 2 * self.head_dim
    tables = 1 if self.tie_word_embeddings else 2
    return tables * self.vocab_size * hidden + self.num_layers * layer + hidden


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
  """Angular frequencies [head_dim / 2] and the scale of cos and sin.

  See `rope.frequencies` for the formulas.
  """
  return rope.frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (field, problem) of a configuration; later ones presume earlier."""
  family = values["family"]
  if not isinstance(family, str) or family not in _FAMILIES:
    supported = ", ".join(_FAMILIES)
    yield "family", f"must be one of {supported}, got {show(family)}"
  for field, (low, high) in _INTEGERS.items():
    if problem := integer_problem(values[field], low, high):
      yield field, problem
  for field, (low, high) in _NUMBERS.items():
    if problem := number_problem(values[field], low, high):
      yield field, problem
  for field in _BOOLEANS:
    if type(values[field]) is not bool:
      yield field, f"must be true or false, got {show(values[field])}"
  heads, kv_heads = values["num_heads"], values["num_kv_heads"]
  if heads % kv_heads:
    yield "num_kv_heads", f"must divide the {heads} query heads, got {kv_heads}"
  if values["head_dim"] % 2:
    yield "head_dim", f"must be even for rope, got {values['head_dim']}"
  rules = _FAMILIES[family]
  biases = (values["attention_bias"], values["attention_output_bias"])
  if biases not in rules.attention_biases:
    yield (
      "attention_bias",
      f"(with attention_output_bias) must be one of {rules.attention_biases}"
      f" in family {family}, got {biases}",
    )
  if values["mlp_bias"] not in rules.mlp_biases:
    yield "mlp_bias", f"does not exist in family {family}"
  if values["qk_norm"] != rules.qk_norm:
    yield "qk_norm", f"must be {rules.qk_norm} in family {family}"


def _required(values: Mapping[str, Any], key: str, where: Any) -> Any:
  if values.get(key) is None:
    raise InputError(
      f"{where}: key '{key}' is missing; use the config.json that was"
      " published with the weights"
    )
  return values[key]


def _refuse_unsupported(values: Mapping[str, Any], where: Any) -> None:
  """Refuses what would load but compute something else."""
  family = _required(values, "model_type", where)
  if not isinstance(family, str) or family not in _FAMILIES:
    raise InputError(
      f"{where}: key 'model_type' is {show(family)}, which is not supported;"
      f" use a model of type {', '.join(_FAMILIES)}"
    )
  architecture = _FAMILIES[family].architecture
  architectures = values.get("architectures")
  if architectures is not None and architectures != [architecture]:
    named = architectures[0] if _is_single(architectures) else architectures
    raise InputError(
      f"{where}: key 'architectures' must be ['{architecture}'] for model_type"
      f" '{family}', got {show(named)}; use a causal language model"
    )
  activation = _required(values, "hidden_act", where)
  if activation != "silu":
    raise InputError(
      f"{where}: key 'hidden_act' must be 'silu', got {show(activation)};"
      " other activations are not supported"
    )
  for key, neutral in (
    ("use_sliding_window", False),
    ("quantization_config", None),
    ("partial_rotary_factor", 1.0),
  ):
    value = values.get(key)
    if value is not None and value != neutral:
      raise InputError(
        f"{where}: key '{key}' is {show(value)}, which is not supported; use a"
        " full-attention model with plain floating-point weights"
      )
  layer_types = values.get("layer_types")
  if layer_types is not None and (
    not isinstance(layer_types, list)
    or any(kind != "full_attention" for kind in layer_types)
  ):
    raise InputError(
      f"{where}: key 'layer_types' holds other kinds than 'full_attention',"
      " which are not supported; use a full-attention model"
    )


def _is_single(value: Any) -> bool:
  return isinstance(value, list) and len(value) == 1


def _fields_from_hf(values: Mapping[str, Any], where: Any) -> dict[str, Any]:
  """Collects the fields of ModelConfig, unchecked but for their presence."""
  family = values["model_type"]
  optional = _FAMILIES[family].optional
  fields = {"family": family, "qk_norm": _FAMILIES[family].qk_norm}
  for field in (*_INTEGERS, "rms_norm_eps"):
    key = _HF_KEYS.get(field, field)
    if key not in optional:
      fields[field] = _required(values, key, where)
  for field, key in (
    ("num_kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
  ):
    if field not in fields:
      value = values.get(key)
      fields[field] = _default(field, fields, where) if value is None else value
  bias = True if family == "qwen2" else values.get("attention_bias", False)
  fields["attention_bias"] = bias
  fields["attention_output_bias"] = False if family == "qwen2" else bias
  fields["mlp_bias"] = (
    values.get("mlp_bias", False) if family == "llama" else False
  )
  fields["tie_word_embeddings"] = values.get("tie_word_embeddings", False)
  fields["rope_theta"], fields["rope_scaling"] = rope.from_hf(
    values, where, require_theta="rope_theta" not in optional
  )
  return fields


def _default(field: str, fields: Mapping[str, Any], where: Any) -> Any:
  """Returns what an absent optional key means: plain multi-head attention."""
  heads, hidden = fields["num_heads"], fields["hidden_size"]
  if field == "num_kv_heads":
    return heads
  if type(heads) is not int or type(hidden) is not int or heads < 1:
    return 2  # Whichever of the two is wrong is reported by its own name.
  if hidden % heads:
    raise InputError(
      f"{where}: key 'head_dim' is missing and hidden_size {show(hidden)} is"
      f" not a multiple of num_attention_heads {show(heads)}; correct the file"
    )
  return hidden // heads
