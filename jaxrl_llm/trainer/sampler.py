"""The sampler of a run: its engine, and the transfer of the policy."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl_llm import config as config_lib
from jaxrl_llm import sampling, sharding, sync
from jaxrl_llm.config import Settings
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.learner.algorithm import Algorithm, ProcessorSpec
from jaxrl_llm.learner.state import TrainingBatch
from jaxrl_llm.models import ModelFns, experts
from jaxrl_llm.models.adapters import FACTORS
from jaxrl_llm.rollout.engine import ENGINES, RolloutEngine
from jaxrl_llm.sampling import Engine, EngineConfig
from jaxrl_llm.sampling.allocator import default_page_size
from jaxrl_llm.sampling.processors import LogitsProcessor
from jaxrl_llm.sampling.settings import EXACT_ROWS
from jaxrl_llm.trainer.meshes import Meshes
from jaxrl_llm.trainer.validation import own_settings

DRAFTERS: Mapping[str, Callable[[Any], Any]] = {
  "": lambda fns: None,
  "prompt_lookup": lambda fns: sampling.prompt_lookup(),
  "quantized_copy": sampling.quantized_copy,
}
# Tokens of a parity check after its first page, so that it reads two pages.
_BEYOND_A_PAGE = 16


def make_engine(
  config: Settings,
  fns: ModelFns,
  tokenizer: Tokenizer,
  mesh: jax.sharding.Mesh,
  processors: Mapping[str, ProcessorSpec],
) -> RolloutEngine:
  """Makes the engine, with slots sharded over the sampler's mesh.

  Raises:
    InputError: A stop string is not a single token, or the KV cache cannot hold
      a response.
  """
  slots = config.sampler.slots or config_lib.batch_size(config)
  if not config.sampler.slots and config.schedule.stop != "all":
    slots = config_lib.groups_in_flight(config) * config.data.group_size
  rows = EXACT_ROWS if config.sampler.exact else 1
  split = sharding.slots_size_of(mesh) * rows
  stop = tokenizer.single_tokens(config.sampler.stop, "config.sampler.stop")
  drafter = DRAFTERS[config.sampler.drafter](fns)
  sizes = EngineConfig(
    slots=-(-slots // split) * split,
    max_prompt_length=config.data.max_prompt_length,
    max_response_length=config.sampler.max_response_length,
    stop_tokens=[*tokenizer.stop_tokens, *stop],
    num_draft_tokens=config.sampler.num_draft_tokens if drafter else 0,
    kv_pages=config.sampler.kv_pages,
    exact=config.sampler.exact,
    choices=fns.choices,
  )
  if make := ENGINES[config.sampler.engine]:
    settings = config.sampler.engine_settings
    with own_settings(config, "sampler.engine_settings", config.sampler.engine):
      return make(fns, sizes, tokenizer, **settings)
  return Engine(
    fns,
    sizes,
    processors={
      name: LogitsProcessor(chosen.fn, stateful=chosen.state is not None)
      for name, chosen in processors.items()
    },
    detokenize=tokenizer.decode,
    drafter=drafter,
  )


def make_transfer(
  fns: ModelFns, shapes: Any, meshes: Meshes
) -> sync.WeightTransfer:
  """Makes the transfer of the policy's parameters to the sampler.

  Args:
    fns: the policy.
    shapes: ShapeDtypeStructs of its parameters.
    meshes: meshes of trainer and sampler.
  """
  sampled = jax.eval_shape(fns.for_sampling, shapes)
  adapters = fns.config.adapters
  source, target = (sharding.tree_shardings(sampled, mesh) for mesh in meshes)
  return sync.WeightTransfer(
    fns.for_sampling,
    shapes,
    source=source,
    target=target if meshes.sampler != meshes.trainer else None,
    constant=lambda name: not (adapters is None or name.endswith(FACTORS)),
  )


def make_parity_check(
  config: Settings, fns: ModelFns, meshes: Meshes, transfer: sync.WeightTransfer
) -> Callable[[Any, sync.VersionedWeights], float] | None:
  """Makes the check that both meshes give fixed tokens equal log-probs.

  It is None if a registered engine samples: it would compare another program.
  """
  if config.sampler.engine:
    return None
  longest = config.data.max_prompt_length + config.sampler.max_response_length
  page_size = default_page_size(longest)
  tokens = sync.parity_tokens(
    fns.config.vocab_size,
    # Divisible by the number of row shards on both sides.
    rows=math.lcm(*map(sharding.slots_size_of, meshes)),
    length=min(page_size + _BEYOND_A_PAGE, longest),
    unused=fns.config.unused,
  )
  return sync.make_parity_check(
    fns,
    tokens,
    tolerance=_tolerance(config, meshes).fixed,
    page_size=page_size,
    send=transfer.send if config.sampler.exact else None,
  )


def _tolerance(config: Settings, meshes: Meshes) -> sync.Tolerance:
  model = config.model
  dtypes = [model.dtype, model.sampler_dtype, model.cache_dtype]
  sampled = model.sampler_matmul or model.matmul
  if sampled != model.matmul or "fp8" in (sampled, model.matmul):
    dtypes += [sampled, model.matmul]
  platforms = {mesh.devices.flat[0].platform for mesh in meshes}
  return sync.tolerance(*filter(None, dtypes), platforms=platforms)


def make_batch_check(
  config: Settings,
  fns: ModelFns,
  meshes: Meshes,
  tokenizer: Tokenizer,
  algorithm: Algorithm,
) -> Callable[[TrainingBatch], None]:
  """Makes the check of the log-probs of a scored batch, by any engine.

  There is no limit where the sampler is meant to have another distribution:
  processors change it, and a capacity of experts changes the trainer's. Where
  two experts are equally good, rounding decides between them, so single tokens
  of a model with experts may differ by any amount.

  Raises:
    SyncError: As in `sync.check_sampled`; with `sampler.exact`, if any bit
      differs.
  """
  sampler, tolerance = config.sampler, _tolerance(config, meshes)
  # A temperature below 1 multiplies the logits, with their errors.
  scale = 1 / min(sampler.temperature, 1)
  token = math.inf if experts.kinds(fns.config) else scale * tolerance.token
  tolerance = tolerance._replace(mean=scale * tolerance.mean, token=token)
  differs = algorithm.processors or config.model.expert_capacity
  if sampler.exact:
    tolerance = sync.Tolerance(0, 0, 0)
  elif differs or not sampler.parity_check_every:
    return lambda batch: None
  check = functools.partial(
    sync.check_sampled,
    tolerance=tolerance,
    engine=f"engine {sampler.engine!r}" if sampler.engine else "the sampler",
    decode=functools.partial(tokenizer.decode, skip_special=False),
  )
  return lambda batch: check(
    batch.rollout,
    batch.scores["old_logprobs"],
    batch.scores["scored"],
    version=batch.step,
  )
