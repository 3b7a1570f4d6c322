"""An exact engine scores its own samples bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny
from helpers.tiny_engine import (
  IDS,
  KEY,
  PROMPTS,
  SETTINGS,
  STOP,
  G,
  P,
  T,
  write,
)
from helpers.tiny_engine import rows as take

from jaxrl_llm import models, sharding
from jaxrl_llm.sampling import (
  Engine,
  EngineConfig,
  SamplingSettings,
  new_requests,
  rules,
  score,
)
from jaxrl_llm.types import Origin, Status

PLAIN = SamplingSettings(temperature=0.9)


@functools.cache
def policy(dtype, mesh=None):
  """Returns (fns, sampler's parameters) of the tiny policy."""
  config, numbers = tiny.tiny_config(), jnp.dtype(dtype)
  fns = models.make_policy(
    config,
    numerics=models.Numerics(activations=numbers),
    sampler_sharding=mesh and sharding.slot_sharding(mesh, config.num_kv_heads),
  )
  params = jax.jit(fns.for_sampling)(tiny.tiny_policy()[1])
  if mesh is not None:
    params = jax.device_put(params, sharding.tree_shardings(params, mesh))
  return fns, params


@functools.cache
def engine(dtype, slots=8, page_size=16, kv_pages=0, exact=True, mesh=None):
  """Returns an engine, shared by calls with equal arguments."""
  sizes = EngineConfig(
    slots=slots,
    max_prompt_length=P,
    max_response_length=T,
    stop_tokens=STOP,
    page_size=page_size,
    kv_pages=kv_pages,
    exact=exact,
  )
  return Engine(policy(dtype, mesh)[0], sizes, detokenize=str)


def sample(own, params, settings=PLAIN, prompts=PROMPTS):
  return write(own, params, prompts, IDS, key=KEY, settings=settings)


def begin(own):
  """Makes responses to all prompts, to be continued by `go_on`."""
  return new_requests(PROMPTS, IDS, np.arange(len(PROMPTS)), own.config)


def go_on(own, params, rollout, window, version=0, **more):
  """Continues the unfinished responses."""
  return own.generate_window(
    params,
    take(rollout, rollout.status == Status.TRUNCATED),
    window=window,
    version=version,
    **{"group_size": G, "key": KEY, "settings": PLAIN},
    **more,
  )


def assert_equal_bits(got, wanted):
  for name in ("tokens", "behavior_logprobs"):
    np.testing.assert_array_equal(got[name], wanted[name])


def largest(own, params, rollout, settings=PLAIN):
  """Returns the largest |difference| when scored in another order and batch."""
  order = np.random.default_rng(0).permutation(len(rollout.lengths))
  shuffled = take(rollout, order)
  scored = score(own, params, shuffled, settings=settings)
  assert not scored[~shuffled.mask].any()
  assert shuffled.mask.sum() > 50
  return np.abs(scored - shuffled.behavior_logprobs)[shuffled.mask].max()


class TestScore:
  @pytest.mark.parametrize(
    ("dtype", "slots", "page_size", "kv_pages"),
    [
      # Enough pages for full sequences, or too few.
      ("float32", 8, 16, 0),
      ("float32", 16, 8, 12),
      ("bfloat16", 24, 8, 0),
      ("bfloat16", 8, 4, 24),
    ],
  )
  def test_gives_the_log_probs_of_the_draw(
    self, dtype, slots, page_size, kv_pages
  ):
    own, params = engine(dtype, slots, page_size, kv_pages), policy(dtype)[1]
    before = own.stats
    rollout = sample(own, params)
    preempted = (own.stats - before).preemptions
    assert bool(preempted) == bool(kv_pages)
    assert (own.stats - before).tokens == rollout.lengths.sum()
    assert (own.stats - before).prefill_calls == 0
    assert largest(own, params, rollout) == 0
    # Only one half: the other slots are idle.
    assert largest(own, params, take(rollout, slice(0, None, 2))) == 0

  def test_does_not_say_it_of_other_responses(self):
    own, params = engine("float32"), policy("float32")[1]
    prefilled = sample(engine("float32", exact=False), params)
    assert 0 < largest(own, params, prefilled) < 1e-5
    other = jax.tree.map(lambda x: x, params)
    scale = params["final_norm"]["scale"]
    other["final_norm"] = {"scale": scale.at[2].multiply(1.01)}
    assert largest(own, other, sample(own, params)) > 1e-5

  def test_leaves_the_responses_and_other_rows_alone(self):
    own, params = engine("float32"), policy("float32")[1]
    rollout = sample(own, params)
    rollout.mask[3] = False
    copy = jax.tree.map(np.copy, rollout)
    scored = score(own, params, rollout, settings=PLAIN)
    jax.tree.map(np.testing.assert_array_equal, rollout, copy)
    assert not scored[3].any() and scored[4].any()
    nothing = rollout.replace(mask=np.zeros_like(rollout.mask))
    assert not score(own, params, nothing, settings=PLAIN).any()

  def test_under_filters_and_a_logit_bias(self):
    settings = dataclasses.replace(
      SETTINGS, min_new_tokens=3, logit_bias={5: 1.0, 6: -np.inf}
    )
    own, params = engine("bfloat16"), policy("bfloat16")[1]
    rollout = sample(own, params, settings)
    assert largest(own, params, rollout, settings) == 0
    greedy = SamplingSettings(temperature=0.0)
    assert largest(own, params, sample(own, params, greedy), greedy) == 0

  def test_on_a_mesh_of_eight_devices(self):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    own, params = engine("float32", 64, mesh=mesh), policy("float32", mesh)[1]
    assert largest(own, params, sample(own, params)) == 0


class TestTokens:
  """Exact sampling draws what plain sampling draws, up to rounding."""

  def test_are_those_of_a_prefill(self):
    # A stop token at the end of a prompt ends nothing.
    prompts = [*PROMPTS[:-1], [*PROMPTS[-1], STOP[0]]]
    rollout, plain = (
      sample(
        engine("float32", exact=exact), policy("float32")[1], prompts=prompts
      )
      for exact in (True, False)
    )
    np.testing.assert_array_equal(rollout.tokens, plain.tokens)
    np.testing.assert_array_equal(rollout.status, plain.status)
    np.testing.assert_array_equal(rollout.mask, plain.mask)


class TestContinued:
  def test_windows_under_new_weights(self):
    own, (fns, params) = engine("bfloat16", 16, 4), policy("bfloat16")
    other = tiny.widen(tiny.tiny_policy()[1], jax.random.key(2))
    other = jax.jit(fns.for_sampling)(other)
    first = go_on(own, params, begin(own), window=9)
    # As after a checkpoint: the KV cache is lost.
    own.reset()
    rollout = go_on(own, other, first, window=5, version=1)
    written = rollout.lengths - rollout.window_start
    assert written.max() == 5 and (rollout.window_start == 9).all()
    scored = score(own, other, rollout, settings=PLAIN)
    new = rollout.mask & (rollout.version == 1)
    assert new.any() and (rollout.mask & ~new).any()
    errors = np.abs(scored - rollout.behavior_logprobs)
    assert errors[new].max() == 0
    assert errors[rollout.mask & ~new].max() > 0.01

  def test_the_same_in_windows_or_at_once(self):
    own, params = engine("bfloat16", 16, 4), policy("bfloat16")[1]
    whole = sample(own, params)
    rollout = begin(own)
    for window in (3, 1, T):
      unfinished = rollout.status == Status.TRUNCATED
      for name, column in go_on(own, params, rollout, window).items():
        if column is not None:
          rollout[name][unfinished] = column
      if window == 1:
        own.reset()  # The third window has no cache.
    assert_equal_bits(rollout, whole)

  @pytest.mark.parametrize("kv_pages", [0, 24])
  def test_after_tokens_of_a_tool(self, kv_pages):
    # With few pages, responses that wait for the tool lose theirs.
    own, params = engine("bfloat16", 8, 4, kv_pages), policy("bfloat16")[1]
    rollout = begin(own)
    own.set_params(params, 0)
    own.add(
      rollout, key=KEY, settings=PLAIN, group_size=G, window=6, extendable=True
    )
    answered = set()
    while own.requests():
      for request in own.step():
        if request not in answered and request.length <= T - 8:
          answered.add(request)
          request.pause_at += 1  # For one more token.
          own.answer(request, [7, 8, 9, STOP[0], 10], Origin.FOREIGN)
    assert len(answered) > 10
    foreign = rollout.origin == Origin.FOREIGN
    assert (foreign & ~rollout.mask).any()
    assert largest(own, params, rollout) == 0

  def test_halted_while_it_reads_its_context(self):
    own, params = engine("bfloat16", 8, 4), policy("bfloat16")[1]
    steps = []

    def rule(view):
      steps.append(view)
      halt = len(steps) > 2
      return rules.Decision(insert=0 if halt else view.free, halt=halt)

    # Two calls of four tokens: prompts of up to twelve are partly read.
    cut = go_on(own, params, begin(own), window=T, rule=rule)
    assert (cut.lengths == 0).any() and (cut.lengths > 0).any()
    rest = go_on(own, params, cut, window=T)
    whole = sample(own, params)
    assert_equal_bits(rest, take(whole, cut.status == Status.TRUNCATED))
    assert largest(own, params, rest) == 0
