"""User-defined logits processors in the engine."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_engine import (
  COMPILED,
  SETTINGS,
  STOP,
  assert_same_responses,
  engine,
  expected,
  generate,
  make_engine,
)

from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling import Engine, SamplingSettings, prompt_lookup
from jaxrl_llm.sampling.processors import LogitsProcessor


def scale(distribution, context, factor):
  """Scales the temperature of every token."""
  shape = distribution.temperature.shape
  assert distribution.logits.shape == (*shape, 67)
  assert context.index.shape == context.min_tokens.shape == shape
  return distribution._replace(temperature=distribution.temperature * factor)


def forbid(distribution, context, state):
  """Forbids even tokens at even indices, and stops before the fourth token."""
  assert state is None
  even = (jnp.arange(67) % 2 == 0)[None] & (context.index % 2 == 0)[:, None]
  early = (context.index < 4)[:, None]
  stops = jnp.isin(jnp.arange(67), context.stop_tokens)[None]
  logits = jnp.where(even | (early & stops), -jnp.inf, distribution.logits)
  return distribution._replace(logits=logits)


def test_one_that_returns_no_distribution_is_named():
  nothing = LogitsProcessor(lambda distribution, context, state: None)
  with pytest.raises(InputError, match="processor 'nothing' returned None; "):
    generate(make_engine(processors={"nothing": nothing}))


class TestStateful:
  def test_follows_its_state_and_is_off_without_one(self):
    own = make_engine(processors={"scale": LogitsProcessor(scale, True)})
    assert_same_responses(generate(own), expected())
    half = {"scale": np.float32(0.5)}
    got = generate(own, processor_states=half)
    halved = dataclasses.replace(SETTINGS, temperature=0.45)
    assert_same_responses(got, generate(settings=halved))
    compiled = len(COMPILED)
    generate(own, processor_states={"scale": np.float32(0.7)})
    assert len(COMPILED) == compiled


class TestStateless:
  @pytest.mark.parametrize("drafts", [False, True])
  def test_applies_to_every_token(self, drafts):
    config = dataclasses.replace(
      engine().config, num_draft_tokens=3 if drafts else 0
    )
    own = Engine(
      engine().fns,
      config,
      processors={"forbid": LogitsProcessor(forbid)},
      drafter=prompt_lookup() if drafts else None,
    )
    out = generate(own, settings=SamplingSettings())
    place = np.arange(out.tokens.shape[1])[None]
    there = place < out.lengths[:, None]
    assert (out.tokens[there & (place % 2 == 0)] % 2 == 1).all()
    assert not np.isin(out.tokens[:, :4], STOP).any()
    assert (out.tokens[there & (place % 2 == 1)] % 2 == 0).any()

  def test_the_order_is_that_of_the_mapping(self):
    double = lambda logits: 2 * logits
    shift = lambda logits: logits.at[:, 5].add(3.0)

    def processor(change):
      return LogitsProcessor(
        lambda distribution, context, state: distribution._replace(
          logits=change(distribution.logits)
        )
      )

    processors = [("double", processor(double)), ("shift", processor(shift))]
    plain = SamplingSettings()
    settings = SamplingSettings(temperature=0.5, logit_bias={5: 1.5})
    first = generate(make_engine(processors=dict(processors)), settings=plain)
    assert_same_responses(first, generate(settings=settings))
    settings = dataclasses.replace(settings, logit_bias={5: 3.0})
    own = make_engine(processors=dict(reversed(processors)))
    last = generate(own, settings=plain)
    assert_same_responses(last, generate(settings=settings))
