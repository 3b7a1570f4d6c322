"""One small engine and its requests, shared by tests of the sampler."""

import functools

import jax
import numpy as np
from helpers import tiny

from jaxrl_llm.sampling import (
  Engine,
  EngineConfig,
  SamplingSettings,
  new_requests,
)
from jaxrl_llm.types import Rollout, Status

P, T = 12, 20  # Two pages of 16 for the longest sequence.
N, G = 5, 4
STOP = (3, 11, 42, 60)
KEY = jax.random.key(5)
PROMPTS = [
  np.random.default_rng(i).integers(0, 67, length).tolist()
  for i, length in enumerate([12, 1, 5, 10, 7])
]
IDS = 100 + np.arange(N * G).reshape(N, G)
SETTINGS = SamplingSettings(temperature=0.9, top_k=40, top_p=0.95)
COMPILED = []  # Durations of all compilations of this process.


def _listen(event, duration, **_):
  if event == "/jax/core/compile/backend_compile_duration":
    COMPILED.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


def detokenize(tokens):
  """Returns one letter per token."""
  return "".join(chr(0x100 + token) for token in tokens)


def make_engine(fns=None, *, stop=STOP, drafter=None, processors=None, **sizes):
  """Makes a new engine, which compiles its own programs."""
  config = EngineConfig(
    max_prompt_length=P,
    max_response_length=T,
    stop_tokens=stop,
    **{"slots": 8} | sizes,
  )
  return Engine(
    fns or tiny.tiny_policy()[0],
    config,
    detokenize=detokenize,
    drafter=drafter,
    processors=processors,
  )


@functools.cache
def engine():
  """The engine that tests share if they can; two groups fit its slots."""
  return make_engine()


@functools.cache
def params():
  """The sampler's parameters."""
  fns, trained = tiny.tiny_policy()
  return fns.for_sampling(trained)


def write(engine, params, prompts, ids, *, group_ids=None, **call) -> Rollout:
  """Generates complete responses to N prompts; `ids` are sample ids [N, G]."""
  groups = np.arange(len(prompts)) if group_ids is None else group_ids
  rollout = new_requests(prompts, ids, groups, engine.config)
  call = {"version": 0, "window": engine.config.max_response_length} | call
  return engine.generate_window(
    params, rollout, group_size=np.shape(ids)[1], **call
  )


def generate(
  own=None, prompts=PROMPTS, ids=IDS, settings=SETTINGS, key=KEY, **more
) -> Rollout:
  """Generates complete responses, by default with the shared engine."""
  call = {"key": key, "settings": settings} | more
  return write(own or engine(), params(), prompts, ids, **call)


@functools.cache
def expected() -> Rollout:
  """The responses that every engine must generate for these prompts and ids."""
  return generate()


def go_on(rollout, own=None, settings=SETTINGS, window=10**6, **more):
  """Continues the unfinished rows of a rollout."""
  return (own or engine()).generate_window(
    params(),
    rows(rollout, rollout.status == Status.TRUNCATED),
    group_size=G,
    window=window,
    key=KEY,
    settings=settings,
    version=0,
    **more,
  )


def rows(rollout, which) -> Rollout:
  return jax.tree.map(lambda x: np.asarray(x)[which], rollout)


def sequences(out):
  """Returns sequences without gaps [B, P + T] and their response positions."""
  count = len(out.lengths)
  tokens = np.zeros((count, P + T), np.int32)
  where = out.prompt_lengths[:, None] + np.arange(T)
  for row, length in enumerate(out.prompt_lengths):
    tokens[row, :length] = out.prompt_tokens[row, :length]
    tokens[row, length : length + T] = out.tokens[row]
  return tokens, where


def law(out, trained=None):
  """Computes log π of every token at every response position, [B, T, V]."""
  fns, first = tiny.tiny_policy()
  tokens, where = sequences(out)
  logits = fns.logits(
    first if trained is None else trained, tokens, np.ones(tokens.shape, bool)
  )
  rows = np.arange(len(tokens))[:, None]
  logits = np.asarray(logits, np.float64)[rows, where - 1]
  return np.array(jax.nn.log_softmax(logits, axis=-1), np.float64)


def assert_same_responses(got, wanted):
  """Compares rows; log-probs up to rounding, since matmul shapes differ."""
  for name in ("sample_id", "tokens", "lengths", "mask", "status"):
    np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
  np.testing.assert_allclose(
    got.behavior_logprobs, wanted.behavior_logprobs, rtol=0, atol=1e-5
  )
