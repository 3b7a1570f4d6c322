"""Low-rank adapters (LoRA): small trained factors next to frozen matrices.

A linear layer with an adapter computes y = x W + s (x A) B with A [in, r] and
B [r, out]. B is initialised to zero, so that training starts from the base.

References:
  Hu et al. 2021, LoRA, arXiv 2106.09685.
  Kalajdzievski 2023, rsLoRA, arXiv 2312.03732 (s = α / √r).
"""

import dataclasses
from typing import Any

from flax import nnx

from jaxrl_llm.models import numerics

# Name -> function of (alpha, rank) that returns s.
SCALINGS = {
  "lora": lambda alpha, rank: alpha / rank,
  "rslora": lambda alpha, rank: alpha / rank**0.5,
}
# `model.base_dtype` -> dtype of the parameters as read from files. Formats with
# fewer than 16 bits (see `numerics`) apply only to the kernels of layers;
# everything else is bfloat16.
BASE_DTYPES = {
  "float32": "float32",
  "bfloat16": "bfloat16",
  "int8": "bfloat16",
  "nf4": "bfloat16",
}
FACTORS = ("lora_a", "lora_b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
  """Settings of a model's adapters, and the storage format of its base."""

  rank: int
  alpha: float
  targets: tuple[str, ...]  # Parts of paths such as 'attention/q' and 'mlp'.
  scaling: str = "lora"  # One of `SCALINGS`.
  base_dtype: str = "float32"  # One of `BASE_DTYPES`.

  @property
  def scale(self) -> float:
    """Factor s of the adapters' outputs."""
    return SCALINGS[self.scaling](self.alpha, self.rank)

  @property
  def quantised(self) -> bool:
    """Whether the kernels of layers are stored as codes with scales."""
    return self.base_dtype in numerics.FORMATS

  def targets_layer(self, path: str) -> bool:
    """Returns whether a linear layer, such as 'attention/q', is targeted.

    'mlp' means gate, up and down; a router has to be targeted by name.
    """
    known = path.removeprefix("mlp/") if path.endswith("router") else path
    return any(target in known for target in self.targets)

  def attach(self, layer: nnx.Module, rngs: nnx.Rngs) -> None:
    """Attaches adapters to the targeted linear layers of a layer."""
    for path, module in list(nnx.iter_modules(layer)):
      targeted = self.targets_layer("/".join(map(str, path)))
      if self.quantised and hasattr(module, "attach_scale"):
        module.attach_scale()
      if targeted and hasattr(module, "attach_adapter"):
        module.attach_adapter(self.rank, self.scale, rngs)

  def store(self, params: Any) -> Any:
    """Converts the base parameters to their storage format.

    Args:
      params: nested dict of a model, with these adapters or without adapters.
    """
    if self.quantised:
      params = {
        name: numerics.quantise_kernels(x, self.base_dtype)
        if name.startswith("layers")
        else x
        for name, x in params.items()
      }
    base = numerics.Numerics(weights=BASE_DTYPES[self.base_dtype])
    return base.store(params, kept=FACTORS)

  def merge(self, params: Any) -> Any:
    """Returns the parameters of the equivalent model without adapters.

    Args:
      params: nested dict. Kernels with an adapter become W + s A B in float32.
    """
    return _merged(params, self.scale)


def adapted(config: Any, model_config: Any, *, group: str = "model") -> Any:
  """Returns the architecture of a run's policy or critic, with its adapters.

  Args:
    config: the run's settings.
    model_config: `ModelConfig` that the model's path describes.
    group: 'model' for the policy, 'value' for the critic.
  """
  if not (rank := config[group].lora_rank):
    return model_config
  adapters = Adapters(
    rank=rank,
    alpha=config.model.lora_alpha,
    targets=tuple(config.model.lora_targets),
    scaling=config.model.lora_scaling,
    base_dtype=config.model.base_dtype,
  )
  return dataclasses.replace(model_config, adapters=adapters)


def base_of(params: Any) -> Any:
  """Removes adapters and dequantises the base; keeps other parameters."""
  return _merged(params, None)


def _merged(params: Any, scale: float | None):
  if not isinstance(params, dict):
    return params
  params = {name: _merged(x, scale) for name, x in params.items()}
  if numerics.SCALE in params:
    scales = params.pop(numerics.SCALE)
    params["kernel"] = numerics.dequantise(params["kernel"], scales)
  if "lora_a" in params:
    a, b = (params.pop(name) for name in FACTORS)
    if scale is not None:
      params["kernel"] = params["kernel"].astype(a.dtype) + scale * (a @ b)
  return params
