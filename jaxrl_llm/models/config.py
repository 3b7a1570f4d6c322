"""Configuration of a decoder, read from a Hugging Face `config.json`.

The file is untrusted and cannot select code: only a fixed list of keys is read,
others are ignored. Keys that would change the computation in an unsupported way
(sliding windows, quantised weights, other rope kinds, ...) are rejected.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import located
from jaxrl_llm.models import families, rope
from jaxrl_llm.models.adapters import Adapters
from jaxrl_llm.models.rope import RopeScaling, check_range, show

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
  # Not part of config.json.
  adapters: Adapters | None = None
  # Ids that are no tokens of the tokenizer: the rows that pad a vocabulary.
  # Neither sampler nor trainer gives them any probability.
  unused: tuple[int, ...] = ()

  def __post_init__(self):
    rules, extra = families.get(self.family), dict(self.extra)
    for field, bounds in _RANGES.items():
      check_range(_HF_KEYS.get(field, field), getattr(self, field), *bounds)
    for field in _BOOLEANS:
      if type(value := getattr(self, field)) is not bool:
        raise ValueError(
          f"{field} must be true or false, got {show(value)}; correct it"
        )
      if value is not rules.fixed.get(field, value):
        raise ValueError(
          f"{field} must be {not value} in family {self.family}; correct it"
        )
    for key, bounds in rules.extra.items():
      if extra.get(key) is not None or key not in rules.optional:
        check_range(key, extra.get(key), *bounds)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_key_value_heads must divide the {self.num_heads} query heads, got"
        f" {self.num_kv_heads}; correct it"
      )
    if self.head_dim % 2:
      raise ValueError(
        f"head_dim must be even for rope, got {self.head_dim}; correct it"
      )
    if self.num_layers % len(self.period):
      raise ValueError(
        f"num_hidden_layers must be a multiple of the {len(self.period)} layers"
        f" that repeat in family {self.family}, got {self.num_layers}"
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
    with located(where):
      rules = families.get(values.get("model_type"))
      values = rules.respelled(values)
      config = cls(**_fields_from_hf(values, rules))
      _refuse_unsupported(values, rules, config)
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
    values |= {
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
    return rules.spelled(values)

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


def _fields_from_hf(
  values: Mapping[str, Any], rules: families.Family
) -> dict[str, Any]:
  """Collects the fields of ModelConfig; checks only that they are present."""
  theta, scaling = rope.from_hf(values)
  values = {**values, "rope_theta": theta}
  extra = tuple((key, values.get(key)) for key in rules.extra)
  fields = {"family": values["model_type"], "extra": extra}
  fields["rope_scaling"] = scaling
  for field in _RANGES:
    key = _HF_KEYS.get(field, field)
    fields[field] = values.get(key)
    if fields[field] is None and key not in rules.optional:
      raise ValueError(
        f"key '{key}' is missing; use the config.json that was published with"
        " the weights"
      )
  for field in _BOOLEANS:
    fields[field] = rules.fixed.get(field, values.get(field, False))
  # Defaults of absent keys: plain multi-head attention.
  absent = [field for field in _RANGES if fields[field] is None]
  heads, hidden = fields["num_heads"], fields["hidden_size"]
  defaults = {"num_kv_heads": heads, "rope_theta": rope.LLAMA_THETA}
  if "head_dim" in absent:
    defaults["head_dim"] = _default_head_dim(hidden, heads)
  return fields | {field: defaults[field] for field in absent}


def _default_head_dim(hidden: Any, heads: Any) -> int:
  if type(heads) is not int or type(hidden) is not int or heads < 1:
    return 2  # ModelConfig reports the invalid key under its own name.
  if hidden % heads:
    raise ValueError(
      f"key 'head_dim' is missing and hidden_size {hidden} is not a multiple of"
      f" num_attention_heads {heads}; correct the file"
    )
  return hidden // heads


def _refuse_unsupported(
  values: Mapping[str, Any], rules: families.Family, config: ModelConfig
) -> None:
  """Rejects files that would load but describe a different computation."""
  supported = {
    "architectures": ([rules.architecture], None),
    "is_causal": (True, None),
  }
  for key, allowed in (supported | rules.supported(config)).items():
    if values.get(key) not in allowed:
      raise ValueError(
        f"key '{key}' is {show(values.get(key))}, which is not supported, but"
        f" {show(allowed[0])} is; use a causal language model with full"
        " attention and plain floating-point weights"
      )
