"""Routing replay: the trainer uses the experts that the sampler chose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny, tiny_experts, tiny_run

from jaxrl_llm import models, sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import packing, providers, scoring
from jaxrl_llm.models.numerics import Numerics
from jaxrl_llm.trainer import build

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
  score = jax.jit(functools.partial(scoring.score_logprobs, fns=fns))
  packed = packed.replace(temperature=np.float32(1.0))
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


def test_other_weights_follow_only_their_own_choices(tmp_path):
  model = tiny_run.write_model(tmp_path / "model", tiny_experts.RUN_CONFIG)
  config = tiny_run.make_config(
    model,
    model__replay_routing=True,
    loss__kl_coefficient=0.1,
    schedule__lag=1,
    method__use=("kept_weights",),
  )
  learner = build.make_run(config).learner
  state = learner.init()
  kept = learner.companions["kept"]
  moved = jax.tree.map(lambda x: x + 0.1, state.policy.trained)
  companions = {"kept": kept.record(state.companions["kept"], moved, 1)}
  state = state.replace(step=2, companions=companions)
  rng = np.random.default_rng(0)
  rollout = tiny_run.random_rollout(rng, rows=8, vocab=19)
  shape = rollout.mask.shape
  # The router would choose other experts.
  choices = np.tile(np.int8([0, 1]), (*shape, 2))
  rollout = rollout.replace(
    version=rng.integers(0, 2, shape).astype(np.int32),
    choices=np.where(rollout.mask[..., None], choices, np.int8(-1)),
  )
  every = np.arange(8)

  def scored(trained, theirs):
    """Returns log-probs with the choices of some tokens."""
    own = np.where(theirs[..., None], rollout.choices, np.int8(-1))
    fns = models.make_policy(tiny_experts.RUN_CONFIG, replay_routing=True)
    packed, layout = packing.pack(
      rollout.replace(choices=own), capacity=64, rows=8, micro_batches=1
    )
    packed = packed.replace(temperature=np.float32(config.sampler.temperature))
    score = jax.jit(functools.partial(scoring.score_logprobs, fns=fns))
    return layout.gather(score(trained, packed).logprobs)

  mini_batches = {
    "policy": learner._packer.mini_batches("policy", rollout, every)
  }
  scores = providers.Scoring(learner, state, rollout, mini_batches)
  version, written = rollout.version, rollout.mask
  initial, later = state.reference, kept.read(state.companions["kept"], 1)
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  reference = providers.PROVIDERS["ref_logprobs"].give(scores)["ref_logprobs"]
  close(reference[written], scored(initial, version == 0)[written])
  provided = learner.algorithm.providers["writer_logprobs"]
  found = provided.give(scores)
  found, mine = found["writer_logprobs"], written & (version == 1)
  close(found[mine], scored(later, version == 1)[mine])
  average = learner.score(state, "policy", mini_batches["policy"][0], later)
  average = mini_batches["policy"][0].layout.gather(average.logprobs)
  order = mini_batches["policy"][0].rows
  close(
    average[written[order]], scored(later, version < 0)[order][written[order]]
  )
  # The policy itself replays all choices, and would differ.
  policy = scores.policy["old_logprobs"]
  close(policy[written], scored(state.policy.trained, version >= 0)[written])
  assert np.abs(policy - reference)[written].max() > 1e-3


def test_a_model_without_experts_is_refused():
  with pytest.raises(InputError, match="this model has no experts"):
    models.make_policy(tiny.tiny_config(), replay_routing=True)
