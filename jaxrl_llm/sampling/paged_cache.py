"""The paged KV cache: its arrays on the device, and its page allocator.

All changes of the cache are made here: prefilled contexts are inserted into
pages, pages are copied, contexts are extended, and decode calls append tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.models import context
from jaxrl_llm.sampling import buckets
from jaxrl_llm.sampling import requests as requests_lib
from jaxrl_llm.sampling.allocator import PageAllocator
from jaxrl_llm.sampling.requests import Request, Rows
from jaxrl_llm.sampling.rules import min_free
from jaxrl_llm.sampling.settings import EngineConfig
from jaxrl_llm.sampling.slots import DecodeOutput, SamplingMetadata
from jaxrl_llm.sampling.stats import EngineStats
from jaxrl_llm.system import processes


class Programs(NamedTuple):
  """The compiled functions of `slots.ModelRunner`."""

  init_kv_cache: Callable[[], tuple]
  prefill: Callable[..., tuple]
  insert: Callable[..., tuple]  # `models.write_pages`.
  copy_pages: Callable[..., tuple]
  extend: Callable[..., tuple]
  decode: Callable[..., tuple[tuple, DecodeOutput]]


class PagedCache:
  """P pages on each of D shards, and the programs that read and write them."""

  def __init__(
    self,
    programs: Programs,
    config: EngineConfig,
    *,
    sharding: jax.sharding.NamedSharding | None,
    shares_pages: bool,
  ):
    """Makes the cache; nothing is allocated on the device yet.

    Args:
      programs: the compiled functions.
      config: sizes.
      sharding: sharding of the slot axis, with D shards.
      shares_pages: whether several slots may read the same page.
    """
    self.programs, self._config = programs, config
    self.shares_pages = shares_pages
    self._sharding = sharding
    self.shards = context.num_shards(sharding, 0)
    self._pages = config.pages_per_shard(self.shards)
    self._length_buckets = buckets.length_buckets(config.max_length)
    # Only drafters and exact decoding read the tokens of a sequence.
    history = config.num_draft_tokens or config.exact
    self._history = config.max_length if history else 0
    self.stats = EngineStats()  # Counters of prefills.
    self.reset()

  def reset(self) -> None:
    """Drops weights and contents, and the arrays on the device."""
    self._kv_cache = None
    self.set_params(None)

  def set_params(self, params: Any) -> None:
    """Sets new weights, which invalidate the contents of all pages."""
    self.params = params
    self.allocator = PageAllocator(shards=self.shards, pages=self._pages)

  def insert(
    self,
    contexts: Sequence[list[Request]],
    copies: Sequence[tuple[int, int, int]],
    extended: Sequence[Request],
  ) -> None:
    """Fills the pages of requests that have just been inserted into slots.

    Args:
      contexts: contexts to prefill; each is a list of the requests that have
        it, one per shard.
      copies: (shard, from, to) of pages to copy after the prefill.
      extended: requests whose pages lack only the newest tokens.
    """
    if self._kv_cache is None:
      self._kv_cache = self.programs.init_kv_cache()
    if contexts:
      self._prefill(contexts)
    self._copy_pages(copies)
    self._extend(extended)

  def decode(
    self, rows: Rows, metadata: SamplingMetadata, min_active: int, draft: int
  ) -> DecodeOutput:
    """Runs a decode call.

    Args:
      rows: the batch; its pages have room for the tokens of the call.
      metadata: sampling parameters shared by all tokens.
      min_active: the call returns when fewer slots are active, >= 1.
      draft: draft tokens per step.

    Returns:
      NumPy arrays.
    """
    # First, because this may move pages, which replaces the cache.
    arguments = self._put(self.decode_arguments(rows))
    self._kv_cache, output = self.programs.decode(
      self.params,
      self._kv_cache,
      *arguments,
      metadata,
      np.int32(min_active),
      num_draft_tokens=draft,
    )
    return processes.to_host(output)

  def decode_arguments(self, rows: Rows) -> tuple:
    """Returns block tables, slots and the mask of active slots."""
    active = np.asarray([request is not None for request in rows])
    slots = requests_lib.as_slots(rows, self._history, self._config.exact)
    return self._block_tables(rows), slots, active

  def rows(self, requests: Sequence[Request], size: int) -> Rows:
    """Returns `size` rows, equally many per shard; idle ones are None."""
    rows: list[Request | None] = []
    for shard in range(self.shards):
      mine = [r for r in requests if r.shard == shard]
      rows += mine + [None] * (size // self.shards - len(mine))
    return rows

  def _put(self, arguments: tuple) -> tuple:
    """Puts arrays with an axis of slots or shards onto their devices."""
    place = lambda x: processes.put(x, self._sharding) if np.ndim(x) else x
    return jax.tree.map(place, arguments)

  def _prefill(self, contexts: Sequence[list[Request]]) -> None:
    """Prefills each context once, and inserts it into its pages."""
    config, group_size = self._config, contexts[0][0].params.group_size
    new = [same for same in contexts if not same[0].length]
    continued = [same for same in contexts if same[0].length]
    few, many = config.prompts_per_prefill(group_size)
    # The large batch, unless more than half of it would be padding.
    count = few if len(new) <= max(few, many // 2) else many
    self._prefill_parts(new, count, config.max_prompt_length, None)
    count = config.continued_per_prefill(self.shards)
    self._prefill_parts(continued, count, config.max_length, self._sharding)

  def _prefill_parts(self, contexts, count, limit, sharding) -> None:
    """Prefills contexts `count` at a time, grouped by similar length."""
    lengths = np.asarray([same[0].context_length for same in contexts])
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(contexts), count):
      chosen = np.sort(order[start : start + count])
      part, longest = [contexts[i] for i in chosen], lengths[chosen].max()
      width = min(buckets.round_up(longest, self._length_buckets), limit)
      tokens = np.zeros((count, width), np.int32)
      shape = (count, self.shards, self._config.pages_of(width))
      pages = np.full(shape, self._pages, np.int32)
      for i, same in enumerate(part):
        length = same[0].context_length
        tokens[i, :length] = same[0].context()
        held = self._config.pages_of(length)
        for request in same:
          pages[i, request.shard, :held] = request.pages[:held]
      computed = int(lengths[chosen].sum())
      self.stats += EngineStats(prefill_calls=1, prefill_tokens=computed)
      prefilled = self.programs.prefill(
        self.params, processes.put(tokens, sharding)
      )
      self._kv_cache = self.programs.insert(self._kv_cache, prefilled, pages)

  def _pages_read(self, rows: Rows) -> int:
    """Returns how many pages of each shard a call reads, from the first on.

    This is a bucket that covers the pages of all rows. If it can be halved,
    pages are first moved to the front: the last responses of a batch are few,
    and their pages are scattered between free ones.
    """
    requests = [r for r in rows if r is not None]
    # Exact decoding has one shape. Shared pages are all in one array.
    if self._config.exact or self.shares_pages or not requests:
      return self._pages
    sizes = models.page_buckets(self._kv_cache)
    last = lambda: max(page for r in requests for page in r.pages)
    held = np.bincount([r.shard for r in requests for _ in r.pages]).max()
    limit = buckets.round_up(held, sizes)
    if last() >= 2 * limit:
      move = self.allocator.move
      moved = [x for r in requests for x in move(r.shard, r.pages, limit)]
      self._copy_pages(moved)
    return buckets.round_up(last() + 1, sizes)

  def _copy_pages(self, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copies pages: (shard, from, to)."""
    mine = [
      [pair for home, *pair in copies if home == shard]
      for shard in range(self.shards)
    ]
    size = min_free(self._config.slots)
    for start in range(0, max(map(len, mine)), size):
      pages = np.zeros((2, self.shards, size), np.int32)
      pages[1] = self._pages
      for shard, pairs in enumerate(mine):
        part = np.reshape(pairs[start : start + size], (-1, 2))
        pages[:, shard, : len(part)] = part.T
      self._kv_cache = self.programs.copy_pages(self._kv_cache, *pages)

  def _extend(self, requests: Sequence[Request]) -> None:
    """Computes the KV of tokens that were appended outside of the slots.

    The last token from before is not in the cache yet, and the last new token
    is read by the next decode step.
    """
    size = self._config.continued_per_prefill(self.shards)
    width, at_a_time = self._config.page_size, size // self.shards
    for start in range(0, len(requests), at_a_time):
      rows = self.rows(requests[start : start + at_a_time], size)
      new = [r.context()[r.cached - 1 : -1] if r else [] for r in rows]
      begin = np.asarray([r.cached - 1 if r else 0 for r in rows], np.int32)
      lengths = np.asarray([len(tokens) for tokens in new])
      self.stats += EngineStats(prefill_tokens=int(lengths.sum()))
      for done in range(0, lengths.max(), width):
        index = done + np.arange(width, dtype=np.int32)[None]
        tokens = np.zeros((size, width), np.int32)
        for row, part in zip(tokens, new):
          row[: len(part[done:])] = part[done : done + width]
        given = tokens, begin[:, None] + index, index < lengths[:, None]
        # First, because this may move pages, which replaces the cache.
        arguments = self._put((self._block_tables(rows), *given))
        self._kv_cache = self.programs.extend(
          self.params, self._kv_cache, *arguments
        )

  def _block_tables(self, rows: Rows) -> models.BlockTables:
    shape = len(rows), self._config.pages_of(self._config.max_length)
    pages = self._pages_read(rows)
    page_indices = np.full(shape, pages, np.int32)
    for indices, request in zip(page_indices, rows):
      if request is not None:
        indices[: len(request.pages)] = request.pages
    return models.make_block_tables(
      page_indices,
      shards=self.shards,
      pages=pages,
      page_size=self._config.page_size,
    )
