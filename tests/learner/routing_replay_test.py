"""Routing replay: the trainer uses the experts that the sampler chose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_experts

from jaxrl_llm import models, sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import packing, scoring
from jaxrl_llm.models.numerics import Numerics

BFLOAT16 = Numerics.all(jnp.bfloat16)
PER_TOKEN = 2 * 2  # Layers x experts per layer.


def make_fns(**settings):
  return models.make_policy(tiny_experts.CONFIG, head_chunk=8, **settings)


def sampled(fns, params, *, drafter=None, window=None):
  """Samples 48 responses of up to 24 tokens."""
  config = sampling.EngineConfig(
    slots=16,
    max_prompt_length=6,
    max_response_length=24,
    stop_tokens=[3],
    num_draft_tokens=2 if drafter else 0,
    choices=fns.choices,
  )
  engine = sampling.Engine(fns, config, drafter=drafter)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(4, 60, 6).tolist() for _ in range(12)]
  rollout = sampling.new_requests(
    prompts, np.arange(48).reshape(12, 4), np.arange(12), config
  )
  weights = jax.jit(fns.for_sampling)(params)
  while (rows := np.flatnonzero(rollout.status == 2)).size:
    part = jax.tree.map(lambda x, rows=rows: x[rows], rollout)
    part = engine.generate_window(
      weights,
      part,
      group_size=4,
      window=window or 24,
      key=jax.random.key(0),
      settings=sampling.SamplingSettings(),
      version=0,
    )
    for name, x in part.items():
      if x is not None:
        rollout[name][rows] = x
  return rollout


def scored(fns, params, rollout):
  """Computes the trainer's log-probs, [B, T]."""
  packed, layout = packing.pack(
    rollout, capacity=64, rows=4, micro_batches=12, share=fns.shares_prompts
  )
  score = jax.jit(
    lambda params, packed: scoring.score_logprobs(params, packed, 1.0, fns=fns)
  )
  return layout.gather(score(params, packed).logprobs)


@pytest.fixture(scope="module")
def params():
  return tiny_experts.make_model()[1]


@pytest.fixture(scope="module")
def replayed(params):
  """A model that replays its experts, and responses sampled from it."""
  fns = make_fns(replay_routing=True)
  return fns, sampled(fns, params)


def test_the_difference_of_sampler_and_trainer_is_smaller(params):
  fns = make_fns(sampler=BFLOAT16, replay_routing=True)
  rollout = sampled(fns, params)
  difference = {}
  for name, of in {"replayed": fns, "own": make_fns(sampler=BFLOAT16)}.items():
    found = scored(of, params, rollout)
    difference[name] = np.abs(found - rollout.behavior_logprobs)[rollout.mask]
  assert difference["replayed"].mean() < difference["own"].mean()
  assert difference["replayed"].max() < difference["own"].max() / 2


def test_equal_numerics_change_no_bit(params, replayed):
  (fns, rollout), plain = replayed, sampled(make_fns(), params)
  np.testing.assert_array_equal(rollout.tokens, plain.tokens)
  np.testing.assert_array_equal(
    rollout.behavior_logprobs, plain.behavior_logprobs
  )
  assert plain.choices is None
  assert rollout.choices.shape == (*rollout.tokens.shape, PER_TOKEN)
  assert rollout.choices.dtype == np.int8
  np.testing.assert_array_equal((rollout.choices >= 0).all(-1), rollout.mask)
  np.testing.assert_array_equal(
    scored(fns, params, rollout), scored(make_fns(), params, plain)
  )


def test_other_choices_are_followed_and_have_gradients(params, replayed):
  fns, rollout = replayed
  packed, _ = packing.pack(
    rollout, capacity=64, rows=48, micro_batches=1, share=False
  )
  packed = jax.device_get(packed.rows(0))
  here = packed.choices >= 0
  # Each token uses the other two of four experts, in every layer.
  pairs = packed.choices.reshape(*packed.tokens.shape, 2, 2, 1)
  used = np.any(pairs == np.arange(4).reshape(1, 1, 1, 1, 4), axis=-2)
  other = np.argsort(used, kind="stable", axis=-1)[..., :2].reshape(here.shape)
  changed = packed.replace(choices=np.where(here, other, -1).astype(np.int8))

  def loss(params, packed):
    return jnp.sum(fns.logprobs(params, packed)[0].logprobs)

  gradient = jax.jit(jax.value_and_grad(loss))
  value, slope = gradient(params, packed)
  other_value, other_slope = gradient(params, changed)
  assert abs(value - other_value) > 1.0
  router = other_slope["layers"]["mlp"]["router"]["kernel"]
  assert np.isfinite(router).all() and np.abs(router).max() > 1e-3
  assert not np.allclose(router, slope["layers"]["mlp"]["router"]["kernel"])


@pytest.mark.parametrize("how", ["drafter", "window"])
def test_choices_do_not_depend_on_how_tokens_are_sampled(params, replayed, how):
  fns, rollout = replayed
  other = {
    "drafter": {"drafter": sampling.prompt_lookup(ngram=1)},
    "window": {"window": 5},
  }[how]
  again = sampled(fns, params, **other)
  np.testing.assert_array_equal(rollout.tokens, again.tokens)
  np.testing.assert_array_equal(rollout.choices, again.choices)


def test_a_model_without_experts_is_refused():
  with pytest.raises(InputError, match="this model has no experts"):
    models.make_policy(tiny.tiny_config(), replay_routing=True)
