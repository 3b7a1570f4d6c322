"""Configuration of a decoder, read from a Hugging Face `config.json`.

The file is untrusted and cannot select code: only a fixed list of keys is read,
others are ignored. Keys that would change the computation in an unsupported way
(sliding windows, quantised weights, other rope kinds, ...) are rejected.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import families, rope
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.rope import RopeScaling, range_problem, show

# Field -> smallest and largest accepted value. The upper bounds are far beyond
# any real model; they keep a damaged file from requesting terabytes.
_RANGES = {
  "vocab_size": (1, 1 << 24),
  "hidden_size": (1, 1 << 17),
  "intermediate_size": (1, 1 << 20),
  "num_layers": (1, 4096),
  "num_heads": (1, 4096),
  "num_kv_heads": (1, 4096),
  "head_dim": (2, 4096),
  "max_position_embeddings": (1, 1 << 30),
  "rms_norm_eps": (1e-12, 0.1),
  "rope_theta": (2.0, 1e12),
}
_BOOLEANS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
# Fields that have a different name in config.json.
_HF_KEYS = {
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Settings that determine a decoder's parameters and computation."""

  family: str  # One of `families.names`.
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
  attention_bias: bool = False  # Bias of q, k, v and, except in Qwen2, o.
  mlp_bias: bool = False
  tie_word_embeddings: bool = False
  extra: tuple[tuple[str, float], ...] = ()  # See `Family.extra`.
  adapters: Adapters | None = None  # Not part of config.json.

  def __post_init__(self):
    for field, problem in _problems(vars(self)):
      raise ValueError(f"ModelConfig.{field} {problem}")
    if self.num_layers % len(self.period):
      raise ValueError(
        f"ModelConfig.num_layers must be a multiple of the {len(self.period)}"
        f" layers that repeat in family {self.family}, got {self.num_layers}"
      )

  @classmethod
  def from_hf(
    cls, values: Mapping[str, Any], where: Any = "config.json"
  ) -> "ModelConfig":
    """Reads the supported keys of a `config.json`.

    Args:
      values: the parsed JSON object, with either spelling of rope: `rope_theta`
        and `rope_scaling`, or the newer `rope_parameters`.
      where: path of the file, for messages.

    Returns:
      The validated configuration.

    Raises:
      InputError: A key is missing, invalid or not supported.
    """
    if not isinstance(values, Mapping):
      raise InputError(f"{where}: must contain a JSON object; restore the file")
    fields = _fields_from_hf(values, where)
    for field, problem in _problems(fields):
      key = _HF_KEYS.get(field, field)
      raise InputError(f"{where}: key '{key}' {problem}; correct the file")
    config = cls(**fields)
    _refuse_unsupported(values, config, where)
    return config

  def to_hf(self) -> dict[str, Any]:
    """Returns the `config.json` object that `transformers` loads.

    Rope uses the older spelling, which every release reads. Special token ids
    belong to the tokenizer and are null here; without these keys, Llama's
    loader would use its own defaults.
    """
    rules = families.get(self.family)
    values = {
      _HF_KEYS.get(field, field): getattr(self, field)
      for field in (*_RANGES, *_BOOLEANS)
      if field not in rules.fixed
    }
    return {
      **values,
      "architectures": [rules.architecture],
      "model_type": self.family,
      "hidden_act": "silu",
      "rope_scaling": self.rope_scaling and self.rope_scaling.to_hf(),
      "bos_token_id": None,
      "eos_token_id": None,
      "pad_token_id": None,
      **rules.written,
      **dict(self.extra),
    }

  @property
  def base(self) -> "ModelConfig":
    """The configuration without adapters, as in model files."""
    return dataclasses.replace(self, adapters=None)

  @property
  def period(self) -> tuple[Any, ...]:
    """Layer kinds of the first period, which repeats up to the last layer."""
    return families.get(self.family).period(self)

  @property
  def layers(self) -> tuple[Any, ...]:
    """Layer kind of every layer."""
    return self.period * (self.num_layers // len(self.period))

  @property
  def attention_kinds(self) -> tuple[Any, ...]:
    """Distinct kinds of attention of all layers."""
    return tuple(dict.fromkeys(kind.attention for kind in self.period))


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (field, problem); later checks assume that earlier ones passed."""
  family, known = values["family"], families.names()
  if family not in known:
    yield "family", f"must be one of {', '.join(known)}, got {show(family)}"
  for field, (low, high) in _RANGES.items():
    if problem := range_problem(values[field], low, high):
      yield field, problem
  for field in _BOOLEANS:
    if type(values[field]) is not bool:
      yield field, f"must be true or false, got {show(values[field])}"
  rules, extra = families.get(family), dict(values["extra"])
  for field, fixed in rules.fixed.items():
    if values[field] is not fixed:
      yield field, f"must be {fixed} in family {family}"
  for key, (low, high) in rules.extra.items():
    absent = extra.get(key) is None and key in rules.optional
    if problem := not absent and range_problem(extra.get(key), low, high):
      yield key, problem
  heads, kv_heads = values["num_heads"], values["num_kv_heads"]
  if heads % kv_heads:
    yield "num_kv_heads", f"must divide the {heads} query heads, got {kv_heads}"
  if values["head_dim"] % 2:
    yield "head_dim", f"must be even for rope, got {values['head_dim']}"


def _fields_from_hf(values: Mapping[str, Any], where: Any) -> dict[str, Any]:
  """Collects the fields of ModelConfig; checks only that they are present."""
  family, known = values.get("model_type"), families.names()
  if family not in known:
    raise InputError(
      f"{where}: key 'model_type' is {show(family)}, which is not supported;"
      f" use a model of type {', '.join(known)}"
    )
  rules = families.get(family)
  values = rules.respelled(values)
  theta, scaling = rope.from_hf(values, where)
  values = {**values, "rope_theta": theta}
  extra = tuple((key, values.get(key)) for key in rules.extra)
  fields = {"family": family, "rope_scaling": scaling, "extra": extra}
  for field in _RANGES:
    key = _HF_KEYS.get(field, field)
    fields[field] = values.get(key)
    if fields[field] is None and key not in rules.optional:
      raise InputError(
        f"{where}: key '{key}' is missing; use the config.json that was"
        " published with the weights"
      )
  for field in _BOOLEANS:
    fields[field] = rules.fixed.get(field, values.get(field, False))
  # Defaults of absent keys: plain multi-head attention.
  absent = [field for field in _RANGES if fields[field] is None]
  heads, hidden = fields["num_heads"], fields["hidden_size"]
  defaults = {"num_kv_heads": heads, "rope_theta": rope.LLAMA_THETA}
  if "head_dim" in absent:
    defaults["head_dim"] = _default_head_dim(hidden, heads, where)
  return fields | {field: defaults[field] for field in absent}


def _default_head_dim(hidden: Any, heads: Any, where: Any) -> int:
  if type(heads) is not int or type(hidden) is not int or heads < 1:
    return 2  # `_problems` reports the invalid key under its own name.
  if hidden % heads:
    raise InputError(
      f"{where}: key 'head_dim' is missing and hidden_size {hidden} is not a"
      f" multiple of num_attention_heads {heads}; correct the file"
    )
  return hidden // heads


def _refuse_unsupported(
  values: Mapping[str, Any], config: ModelConfig, where: Any
) -> None:
  """Rejects files that would load but describe a different computation."""
  family = families.get(config.family)
  values = family.respelled(values)
  supported = {
    "architectures": ([family.architecture], None),
    "is_causal": (True, None),
  }
  for key, allowed in (supported | family.supported(config)).items():
    if values.get(key) not in allowed:
      raise InputError(
        f"{where}: key '{key}' is {show(values.get(key))}, which is not"
        f" supported, but {show(allowed[0])} is; use a causal language model"
        " with full attention and plain floating-point weights"
      )
