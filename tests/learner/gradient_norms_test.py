"""Gradient norms of single responses, and the baseline from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import tiny_run
from helpers.tiny_algorithm import make_algorithm
from helpers.tiny_tppo import record
from helpers.tiny_update import (
  TEMPERATURE,
  make_data,
  make_fns,
  make_params,
  plain_logprobs,
)

from jaxrl_llm import models
from jaxrl_llm.methods import vcpo
from jaxrl_llm.types import take_rows

VCPO = {
  "method__use": ("vcpo",),
  "method__vcpo__scale_steps": False,
  "value__pretrain_steps": 0,
}
EXACT = {"method__vcpo__gradient_norms": "exact"}


@functools.cache
def expected(frozen=()):
  """Computes the norms from the plain model's gradient for each response."""
  rollout, _ = make_data()

  @jax.jit
  @jax.grad
  def gradient(params, i):
    said, _ = plain_logprobs(params)
    return jnp.sum(jnp.where(jnp.asarray(rollout.mask)[i], said[i], 0.0))

  params = make_params("policy")
  found = [gradient(params, i) for i in range(len(rollout.lengths))]
  trained = [models.partition(x, frozen).trained for x in found]
  return np.asarray(list(map(optax.global_norm, trained)))


class TestNorms:
  @pytest.mark.parametrize(("rows", "frozen"), [(1, ()), (2, ("embed",))])
  def test_are_those_of_the_plain_model(self, rows, frozen):
    rollout, _ = make_data()
    count = len(rollout.lengths)
    packed = vcpo.one_by_one(
      rollout, capacity=16, rows=rows, micro_batches=count + 2
    )
    score = functools.partial(vcpo.score_gradient_norms, fns=make_fns("policy"))
    params = models.partition(make_params("policy"), frozen)
    packed = packed.replace(temperature=TEMPERATURE)
    got = jax.jit(score)(params, packed)
    assert got.dtype == jnp.float32
    assert got.shape == (count + 2,) and not np.asarray(got)[count:].any()
    got = np.asarray(got)[:count]
    np.testing.assert_allclose(got, expected(frozen), rtol=2e-5, atol=1e-6)
    # An empty response has no gradient; the other norms differ.
    empty = ~rollout.mask.any(axis=1)
    assert empty.any() and not got[empty].any()
    assert np.ptp(expected(frozen)) > 1.0

  def test_carry_the_experts_that_the_sampler_chose(self):
    rollout, _ = make_data()
    choices = np.arange(rollout.tokens.size * 3).reshape(
      *rollout.tokens.shape, 3
    )
    sizes = {"capacity": 16, "rows": 2, "micro_batches": len(choices) + 1}
    packed = vcpo.one_by_one(rollout.replace(choices=choices), **sizes)
    assert packed.choices.shape == (*packed.tokens.shape, 3)
    for row, written in enumerate(choices):
      found = packed.choices[row][packed.choices[row] >= 0]
      expected = written[: rollout.lengths[row]]
      np.testing.assert_array_equal(np.sort(found), np.sort(expected, None))


class TestRun:
  @pytest.mark.slow
  def test_an_update_reads_those_of_its_policy(self, model):
    run = tiny_run.make_run(model, **VCPO, **EXACT, mesh__fsdp=2)
    (step,), _ = record(run, 1)
    (seen,) = step.estimated
    rollout, norms = seen.rollout, seen.scores["gradient_norms"]
    params = jax.device_get(run.learner.initial_params())
    fns = run.learner.policy.fns

    @jax.jit
    @jax.grad
    def gradient(params, rows):
      return jnp.sum(fns.logprobs(params, rows)[0].logprobs)

    lengths = rollout.prompt_lengths + rollout.lengths
    for i in (*np.argsort(lengths)[[0, 5, 16, -1]], 0, 31):
      alone = vcpo.one_by_one(
        take_rows(rollout, [i]), capacity=24, rows=2, micro_batches=1
      )
      norm = optax.global_norm(gradient(params, alone.rows(0)))
      np.testing.assert_allclose(norms[i], norm, rtol=1e-4)
    assert (norms > 0).all() and step.row["policy/grad_norm"] > 0

  def test_the_length_needs_no_gradient(self):
    exact, proxy = make_algorithm(**VCPO, **EXACT), make_algorithm(**VCPO)
    assert exact.leaves - proxy.leaves == {"gradient_norms"}
    others = make_algorithm(estimator__name="group", **EXACT)
    assert "gradient_norms" not in others.leaves
