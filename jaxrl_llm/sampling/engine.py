"""The engine: prompts and cut responses in, responses out.

It lives as long as the run. Requests are added, each step writes some tokens to
those that have a slot, and hands over those that have ended or paused.
`generate_window` adds requests and steps until none is left.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.errors import check_number
from jaxrl_llm.models import ModelFns
from jaxrl_llm.sampling import buckets, speculation
from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling import slots as slots_lib
from jaxrl_llm.sampling.paged_cache import PagedCache, Programs
from jaxrl_llm.sampling.processors import LogitsProcessor
from jaxrl_llm.sampling.requests import Request, SamplingParams
from jaxrl_llm.sampling.scheduler import Scheduler
from jaxrl_llm.sampling.settings import (
  EngineConfig,
  SamplingSettings,
  logit_bias_of,
  max_tokens_of,
)
from jaxrl_llm.types import Rollout


class Engine(Scheduler):
  """Continuous batching over a paged KV cache of fixed size.

  New responses of one prompt share one prefill and its full pages, and a slot
  that is free takes the next response. A response depends on weights, prompt
  and sample id, and not on what else is written, when, or in which pages.
  """

  def __init__(
    self,
    fns: ModelFns,
    config: EngineConfig,
    *,
    processors: Mapping[str, LogitsProcessor] | None = None,
    detokenize: Callable[[Sequence[int]], str] | None = None,
    drafter: speculation.Drafter | None = None,
  ):
    """Makes the engine; nothing is compiled or allocated yet.

    Args:
      fns: the model.
      config: sizes.
      processors: further logits processors by name, in order.
      detokenize: tokens to text, which stop strings need.
      drafter: proposes draft tokens, so that a step may write several;
        responses are the same without.

    Raises:
      InputError: the KV cache cannot hold the longest sequence.
    """
    if (config.num_draft_tokens > 0) != (drafter is not None):
      raise ValueError(
        "a drafter and num_draft_tokens >= 1 belong together, got"
        f" num_draft_tokens={config.num_draft_tokens}"
        f" {'with a' if drafter else 'without'} drafter"
      )
    self.fns, self._drafter = fns, drafter or speculation.NO_DRAFTER
    self._drafter_params = jax.jit(self._drafter.params)
    slots = (config.slots,)
    sharding = fns.slots_sharding
    shard_slots = sharding.shard_shape(slots) if sharding else slots
    shards = config.slots // shard_slots[0]
    size = shards, config.pages_per_shard(shards), config.page_size
    programs = _programs(
      fns, self._drafter, size, tuple((processors or {}).items())
    )
    super().__init__(
      config,
      lambda: PagedCache(
        programs,
        config,
        shards=shards,
        sharding=sharding,
        shares_pages=fns.shares_pages,
      ),
      speculation=speculation.AdaptiveSpeculation(config.num_draft_tokens),
      detokenize=detokenize,
    )

  def set_params(self, params: Any, version: int) -> None:
    """Sets sampler parameters (`fns.for_sampling`); see `Scheduler`."""
    both = self._cache.params  # And the drafter's.
    if both is None or params is not both[0]:
      both = params, self._drafter_params(params)
    super().set_params(both, version)

  def add(
    self,
    rollout: Rollout,
    *,
    key: chex.PRNGKey,
    settings: SamplingSettings,
    group_size: int,
    window: int | None = None,
    processor_states: Mapping[str, Any] | None = None,
    extendable: bool = False,
  ) -> list[Request]:
    """Responses that begin or go on wait for a slot.

    Args:
      rollout: rows of `new_requests`, or unfinished ones; NumPy arrays, which
        are written in place.
      key: a key that stays the same for the whole run; with the sample id it
        fixes the randomness of a response.
      settings: how to sample.
      group_size: new responses of a prompt: slots // group_size prompts are
        prefilled at a time. The same in every call compiles least.
      window: most new tokens of a response before it pauses; None is no bound.
        `max_new_tokens` of the settings is over all windows.
      processor_states: trees of arrays by the name of their logits processor;
        a stateful one without is off.
      extendable: keep the KV of responses that ended, for `answer`, while
        nobody needs its pages; that of paused ones is kept in any case.

    Returns:
      A request for each row, by which it is known from now on.

    Raises:
      ValueError: a row or setting is out of range.
    """
    check_number("window", window, "[1, inf)")
    check_number("group_size", group_size, "[1, inf)")
    if settings.stop_strings and self._detokenize is None:
      raise ValueError(
        f"stop_strings={settings.stop_strings!r} need an engine that was made"
        " with detokenize"
      )
    limit = max_tokens_of(
      settings, max_response_length=self.config.max_response_length
    )
    requests_lib.check_requests(rollout, self.config, limit=limit)
    params = SamplingParams(
      settings,
      self._metadata(key, settings, processor_states),
      group_size,
      extendable,
    )
    limits = np.full(len(rollout.lengths), limit)
    requests = requests_lib.make_requests(
      rollout, params, limits, limit if window is None else window
    )
    self.enqueue(requests)
    return requests

  def lower(
    self,
    params: Any,
    *,
    prompts: int,
    window: bool = False,
    processor_states: Mapping[str, Any] | None = None,
  ) -> dict:
    """Lowers the sampler at its largest shapes, running nothing.

    Args:
      params: ShapeDtypeStructs of sampler parameters.
      prompts: prompts that are prefilled at a time.
      window: lower the prefill of cut responses too.
      processor_states: as in `add`, or its ShapeDtypeStructs.

    Returns:
      name -> `jax.stages.Lowered`.
    """
    shape, config = jax.ShapeDtypeStruct, self.config
    cache, programs = self._cache, self._cache.programs
    params = (params, jax.eval_shape(self._drafter.params, params))
    key = jax.eval_shape(jax.random.key, 0)
    prefill = programs.prefill.lower
    placed = lambda x: shape(
      x.shape, x.dtype, sharding=self.fns.slots_sharding if x.ndim else None
    )
    lowered = {}
    if not config.exact:
      tokens = shape((prompts, config.max_prompt_length), jnp.int32)
      lowered["sampler prefill"] = prefill(params, tokens)
    lowered["sampler decode"] = programs.decode.lower(
      params,
      # With its shardings, so that its buffers are donated.
      programs.init_kv_cache.eval_shape(),
      *jax.tree.map(placed, cache.decode_arguments([None] * config.slots)),
      self._metadata(key, SamplingSettings(), processor_states),
      np.int32(1),
      num_draft_tokens=0,
    )
    if window and not config.exact:
      contexts = config.continued_per_prefill(cache.shards)
      size = contexts, buckets.length_buckets(config.max_length)[-1]
      lowered["sampler prefill cut responses"] = prefill(
        params, shape(size, jnp.int32, sharding=self.fns.slots_sharding)
      )
    return lowered

  def prompts_at_a_time(self, group_size: int) -> int:
    """Prompts whose responses fill the slots."""
    return max(1, self.config.slots // group_size)

  def _metadata(
    self,
    key: chex.PRNGKey,
    settings: SamplingSettings,
    states: Mapping[str, Any] | None,
  ) -> slots_lib.SamplingMetadata:
    vocab_size = self.fns.config.vocab_size
    stop_tokens = list(self.config.stop_tokens) or [vocab_size]  # Or no token.
    return slots_lib.SamplingMetadata(
      key,
      np.asarray(stop_tokens, np.int32),
      {"logit_bias": logit_bias_of(settings, vocab_size), **(states or {})},
    )


@functools.lru_cache(maxsize=16)
def _programs(
  fns: ModelFns,
  drafter: speculation.Drafter,
  size: tuple[int, int, int],
  processors: slots_lib.Processors,
) -> Programs:
  """Returns the programs of an engine; equal engines share them.

  Args:
    fns: the model.
    drafter: proposes draft tokens.
    size: shards, pages of each, tokens of a page.
    processors: logits processors by name.
  """
  jit = functools.partial(jax.jit, out_shardings=fns.kv_sharding)
  runner = slots_lib.ModelRunner(fns, drafter, processors, size[-1])
  return Programs(
    init_kv_cache=jit(
      lambda: fns.init_kv_cache(*size) + drafter.init_kv_cache(*size)
    ),
    prefill=jax.jit(runner.prefill),
    insert=jit(models.write_pages, donate_argnums=0),
    copy_pages=jit(models.copy_pages, donate_argnums=0),
    extend=jit(runner.extend, donate_argnums=1),
    decode=jax.jit(
      runner.decode,
      out_shardings=(fns.kv_sharding, fns.slots_sharding),
      static_argnames="num_draft_tokens",
      donate_argnums=1,
    ),
  )
