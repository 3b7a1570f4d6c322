"""The engine: prompts and cut responses in, responses out.

The engine lives as long as the run. Each step appends tokens to the requests in
slots and returns the requests that have ended or paused. `generate_window` adds
requests and steps until none are left.
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
from jaxrl_llm.models import ModelFns, context
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

  New responses to one prompt share one prefill and its full pages, and a free
  slot takes the next response. A response depends only on weights, prompt and
  sample id, not on the rest of the batch, on timing, or on its pages.
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
      processors: additional logits processors by name, in order.
      detokenize: tokens to text; required for stop strings.
      drafter: proposes draft tokens, so that a step may append several tokens;
        it does not change the responses.

    Raises:
      InputError: The KV cache cannot hold the longest sequence.
    """
    if (config.num_draft_tokens > 0) != (drafter is not None):
      raise ValueError(
        "a drafter requires num_draft_tokens >= 1 and vice versa, got"
        f" num_draft_tokens={config.num_draft_tokens}"
        f" {'with a' if drafter else 'without'} drafter"
      )
    self.fns, self._drafter = fns, drafter or speculation.Drafter()
    self._drafter_params = jax.jit(self._drafter.params)
    shards = context.num_shards(fns.slots_sharding, 0)
    size = shards, config.pages_per_shard(shards), config.page_size
    programs = _programs(
      fns, self._drafter, size, tuple((processors or {}).items())
    )
    super().__init__(
      config,
      PagedCache(
        programs,
        config,
        sharding=fns.slots_sharding,
        shares_pages=fns.shares_pages,
      ),
      speculation=speculation.AdaptiveSpeculation(config.num_draft_tokens),
      detokenize=detokenize,
    )

  def set_params(self, params: Any, version: int) -> None:
    """Sets sampler parameters (`fns.for_sampling`); see `Scheduler`."""
    both = self._cache.params  # Parameters of the sampler and of the drafter.
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
    """Enqueues new or unfinished responses.

    Args:
      rollout: rows of `new_requests`, or unfinished ones; NumPy arrays, which
        are updated in place.
      key: key of the run, the same in every call; with the sample id it
        determines the randomness of a response.
      settings: sampling parameters.
      group_size: new responses per prompt: slots // group_size prompts are
        prefilled at a time. A constant value avoids recompilation.
      window: maximum number of new tokens of a response before it pauses; None
        sets no limit. `max_new_tokens` of the settings counts all windows.
      processor_states: trees of arrays by logits processor; a stateful
        processor without a state is off.
      extendable: whether to cache the KV of ended responses for `answer`, until
        its pages are needed. The KV of paused responses is always cached.

    Returns:
      One request per row.

    Raises:
      ValueError: A row or setting is out of range.
    """
    check_number("window", window, "[1, inf)")
    check_number("group_size", group_size, "[1, inf)")
    if settings.stop_strings and self._detokenize is None:
      raise ValueError(
        f"stop_strings={settings.stop_strings!r} require an engine with"
        " detokenize"
      )
    limit = max_tokens_of(
      settings, max_response_length=self.config.max_response_length
    )
    requests_lib.check_requests(rollout, self.config, limit=limit)
    params = SamplingParams(
      settings,
      self._metadata(
        np.asarray(jax.random.key_data(key)), settings, processor_states
      ),
      group_size,
      extendable,
    )
    pending = self.requests()
    if pending and _equal(pending[-1].params, params):
      params = pending[-1].params  # They share decode calls.
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
    """Lowers the sampler's programs at their largest shapes; runs nothing.

    Args:
      params: ShapeDtypeStructs of sampler parameters.
      prompts: prompts that are prefilled at a time.
      window: whether to also lower the prefill of cut responses.
      processor_states: as in `add`, or its ShapeDtypeStructs.

    Returns:
      name -> `jax.stages.Lowered`.
    """
    shape, config = jax.ShapeDtypeStruct, self.config
    cache, programs = self._cache, self._cache.programs
    params = (params, jax.eval_shape(self._drafter.params, params))
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
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

  def _metadata(
    self,
    key: np.ndarray | jax.ShapeDtypeStruct,
    settings: SamplingSettings,
    states: Mapping[str, Any] | None,
  ) -> slots_lib.SamplingMetadata:
    vocab_size = self.fns.config.vocab_size
    # Without stop tokens, an id that is never drawn.
    stop_tokens = list(self.config.stop_tokens) or [vocab_size]
    return slots_lib.SamplingMetadata(
      key,
      np.asarray(stop_tokens, np.int32),
      {"logit_bias": logit_bias_of(settings, vocab_size), **(states or {})},
    )


def _equal(one: SamplingParams, other: SamplingParams) -> bool:
  """Returns whether requests with these parameters may be decoded together."""
  (leaves, tree), (others, other_tree) = map(jax.tree.flatten, (one, other))
  return tree == other_tree and all(map(np.array_equal, leaves, others))


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
    size: shards, pages per shard, tokens per page.
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
