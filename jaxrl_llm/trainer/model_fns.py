"""The models of a run: their functions and the parameters they start from."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import models, sharding
from jaxrl_llm.config import Settings
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.algorithm import Critic
from jaxrl_llm.models.files import hf
from jaxrl_llm.trainer import data
from jaxrl_llm.trainer.meshes import Meshes


def read_model(
  config: Settings, path: str
) -> tuple[models.ModelConfig, Tokenizer]:
  """Reads the architecture and the tokenizer of a model.

  Args:
    config: settings of the run, whose samples must fit its context.
    path: directory of the model.

  Raises:
    InputError: The model cannot be read, or cannot read the samples.
  """
  model_config, tokenizer = hf.read_config(path), Tokenizer(path)
  data.check_context(config, model_config, tokenizer)
  unused = tokenizer.unused(model_config.vocab_size)
  return dataclasses.replace(model_config, unused=unused), tokenizer


def make_policy_fns(
  config: Settings, model_config: models.ModelConfig, both: Meshes
) -> models.ModelFns:
  """Makes the functions of the policy, with its adapters.

  Raises:
    InputError: An adapter target matches no layer, or no layer has an adapter.
  """
  linear = models.linear_layers(model_config)
  for target in config.model.lora_targets:
    if not any(target in path for path in linear):
      raise InputError(
        f"config.model.lora_targets: {target!r} is not part of any linear"
        f" layer's path; choose from {', '.join(linear)}, or parts of these"
      )
  adapted = models.adapted(config, model_config)
  _check_adapters(adapted)
  replay = config.model.replay_routing
  return make_model_fns(config, adapted, both, replay_routing=replay)


def make_critic_fns(
  config: Settings,
  critic: Critic,
  model_config: models.ModelConfig,
  both: Meshes,
) -> models.ValueFns:
  """Makes the functions of the critic, with its adapters.

  Args:
    config: settings of the run.
    critic: what the algorithm says of it.
    model_config: architecture of the policy without adapters.
    both: meshes of trainer and sampler.

  Raises:
    InputError: No layer has an adapter.
  """
  value_config = models.critic_config(config, model_config)
  _check_adapters(value_config)
  value = models.make_value(
    value_config,
    reads_logprobs=config.value.reads_logprobs,
    head=critic.head,
    **_trainer_settings(config, value_config, both),
  )
  return critic.wrap_fns(value) if critic.wrap_fns else value


def _check_adapters(model_config: models.ModelConfig) -> None:
  own, paths = model_config.adapters, models.linear_layers(model_config)
  # Without any adapter, all parameters would be trained.
  if own and not any(map(own.targets_layer, paths)):
    raise InputError(
      "config.model.lora_targets: 'mlp' does not include the router, so no"
      " layer of this model would have an adapter; add another target"
    )


def _trainer_settings(
  config: Settings, model_config: models.ModelConfig, both: Meshes
) -> dict[str, Any]:
  return {
    "numerics": models.Numerics(
      activations=jnp.dtype(config.model.dtype), matmul=config.model.matmul
    ),
    "remat_policy": config.model.remat_policy,
    "kernels": config.model.kernels,
    "expert_capacity": config.model.expert_capacity,
    "sharding": sharding.packed_kv_sharding(
      both.trainer, model_config.num_kv_heads
    ),
  }


def make_model_fns(
  config: Settings,
  model_config: models.ModelConfig,
  both: Meshes,
  **settings: Any,
) -> models.ModelFns:
  """Makes the functions of a language model; `settings` override the run's."""
  sampled = jnp.dtype(config.model.sampler_dtype or config.model.dtype)
  return models.make_policy(
    model_config,
    sampler=models.Numerics.all(
      sampled,
      kv=jnp.dtype(config.model.cache_dtype or sampled),
      matmul=config.model.sampler_matmul or config.model.matmul,
    ),
    head_chunk=config.model.head_chunk,
    head_sharding=sharding.head_sharding(both.trainer, model_config.vocab_size),
    sampler_sharding=sharding.slot_sharding(
      both.sampler, model_config.num_kv_heads
    ),
    kv_block=config.sampler.kv_block,
    **(_trainer_settings(config, model_config, both) | settings),
  )


def read_policy_params(
  path: str, shapes: Any, model_config: models.ModelConfig, *, seed: int = 0
) -> Any:
  """Reads the parameters of a model with the shardings of `shapes`.

  Adapters, if any, are newly initialized with the seed.
  """
  adapters = model_config.adapters
  places = jax.tree.map(lambda x: x.sharding, shapes)
  dtype = models.BASE_DTYPES[adapters.base_dtype] if adapters else "float32"
  params = hf.read_params(path, model_config, dtype=dtype, places=places)
  if adapters is None:
    return params
  begin = functools.partial(models.with_adapters, config=model_config)
  begin = jax.jit(begin, out_shardings=places, donate_argnums=0)
  return begin(params, jax.random.key(seed))
