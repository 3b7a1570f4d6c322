"""Models as pure functions; the only package that imports flax."""

from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.files import hf
from jaxrl_llm.models.adapters import (
  BASE_DTYPES as BASE_DTYPES,
  Adapters as Adapters,
  adapted as adapted,
)
from jaxrl_llm.models.config import ModelConfig as ModelConfig
from jaxrl_llm.models.functional import (
  ModelFns as ModelFns,
  ValueFns as ValueFns,
  make_policy as make_policy,
  make_value as make_value,
)
from jaxrl_llm.models.heads import (
  SCALAR as SCALAR,
  TokenLogprobs as TokenLogprobs,
  ValueHead as ValueHead,
)
from jaxrl_llm.models.kv_cache import (
  BlockTables as BlockTables,
  copy_pages as copy_pages,
  make_block_tables as make_block_tables,
  page_buckets as page_buckets,
  write_pages as write_pages,
)
from jaxrl_llm.models.numerics import Numerics as Numerics
from jaxrl_llm.models.params import (
  Params as Params,
  merge as merge,
  partition as partition,
)
from jaxrl_llm.models.transformer import (
  PackedRows as PackedRows,
  linear_layers as linear_layers,
  num_params as num_params,
  with_adapters as with_adapters,
)


def load(path: str, *, dtype: Any = jnp.float32) -> tuple[ModelFns, Any]:
  """Loads a Hugging Face model directory.

  Args:
    path: directory with config.json and *.safetensors.
    dtype: dtype of parameters and computation.

  Returns:
    `(ModelFns, params)`.

  Raises:
    InputError: A file is missing, damaged or not supported.
  """
  config = hf.read_config(path)
  numerics = Numerics.all(dtype)
  params = hf.read_params(path, config, dtype=numerics.weights)
  return make_policy(config, numerics=numerics), params


def save(
  path: str,
  fns: ModelFns | ValueFns,
  params: Any,
  *,
  tokenizer_from: str | None = None,
) -> None:
  """Writes a Hugging Face directory that `transformers` loads.

  A critic is a token classifier: logit 0 at a token is V of the state after it.
  A categorical critic has one logit per bin, and the interval of the bins is
  `value_support` in config.json. `transformers` has no such class for Gemma 3.

  Args:
    path: directory to write.
    fns: functions of the policy or of the critic.
    params: its parameters, as one nested dict or as `Params`.
    tokenizer_from: directory whose tokenizer files are copied.
  """
  head = fns.head if isinstance(fns, ValueFns) else None
  hf.write_params(
    path, fns.config, merge(params), extra_files_from=tokenizer_from, head=head
  )


def critic_config(config: Any, model_config: ModelConfig) -> ModelConfig:
  """Returns the architecture of a run's critic, with its adapters.

  It is the architecture of the model in `value.init_from`, if there is one.

  Args:
    config: the run's settings.
    model_config: architecture of the policy without adapters.
  """
  if hf.is_model(path := config.value.init_from):
    model_config = hf.read_config(path)
  return adapted(config, model_config, group="value")
