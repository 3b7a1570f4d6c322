"""Windows of responses to a few prompts: truncated and continued."""

import functools

import jax
import numpy as np
from helpers import tiny, tiny_engine
from helpers.tiny_engine import KEY, SETTINGS, G, make_engine

from jaxrl_llm.sampling import SamplingSettings, new_requests
from jaxrl_llm.types import Status, join_rows

N = 4
PROMPTS, IDS = tiny_engine.PROMPTS[:N], tiny_engine.IDS[:N]
GROUP_IDS = np.array([70, 50, 30, 10])
PLAIN = SamplingSettings()


@functools.cache
def window_engine():
  """The shared engine, which prefills truncated rows two at a time."""
  return make_engine(slots=16)


@functools.cache
def weights(which=0):
  """Returns (trainer, sampler) parameters of one of two similar policies."""
  fns, params = tiny.tiny_policy()
  for _ in range(which):
    noise = tiny.widen(params, jax.random.key(9))
    params = jax.tree.map(lambda x, y: x + 0.3 * (y - x), params, noise)
  return params, fns.for_sampling(params)


def write_window(
  unfinished=None,
  which=range(0),
  *,
  ids=None,
  window,
  engine=None,
  params=None,
  settings=SETTINGS,
  version=0,
  group_ids=None,
  **more,
):
  """Runs one window that starts the prompts `which`; default: all their ids."""
  which, engine = list(which), engine or window_engine()
  new = new_requests(
    [PROMPTS[i] for i in which],
    [IDS[i] for i in which] if ids is None else ids,
    GROUP_IDS[which] if group_ids is None else group_ids,
    engine.config,
  )
  # Without new requests, unfinished ones are passed on unchanged.
  requests = (
    unfinished if not len(new.lengths) else join_rows([unfinished, new])
  )
  return engine.generate_window(
    weights()[1] if params is None else params,
    new if requests is None else requests,
    window=window,
    settings=settings,
    version=version,
    **{"group_size": G, "key": KEY} | more,
  )


@functools.cache
def uncut():
  return tiny_engine.generate(
    window_engine(), PROMPTS, IDS, group_ids=GROUP_IDS
  )


def cut(rollout):
  """Returns the truncated rows, None if there are none."""
  rows = np.flatnonzero(rollout.status == Status.TRUNCATED)
  return tiny_engine.rows(rollout, rows) if len(rows) else None


def to_the_end(out, **call):
  """Continues all rows to their end; returns them ordered by sample id."""
  ended = []
  while out is not None:
    ended.append(tiny_engine.rows(out, out.status != Status.TRUNCATED))
    rest = cut(out)
    out = None if rest is None else write_window(rest, **call)
  joined = jax.tree.map(lambda *x: np.concatenate(x), *ended)
  return tiny_engine.rows(joined, np.argsort(joined.sample_id))


def assert_same_rows(got, expected):
  tiny_engine.assert_same_responses(got, expected)
  for name in (
    *("group_id", "example_id"),
    *("prompt_tokens", "prompt_lengths", "origin"),
  ):
    np.testing.assert_array_equal(got[name], expected[name])
