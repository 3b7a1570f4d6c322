"""Gradient noise, estimated from the gradients of micro-batches."""

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_update

from jaxrl_llm.learner import update


def test_by_hand():
  # Contributions (1.5, 0) and (0.5, 1) of halves: |g|² = 5, Σ |g_i|² / w_i = 7.
  found = update._noise(5**0.5, 10.0, 2.25 / 5 + 1.25 / 5, 2.0)
  assert float(found["gradient_noise"]) == pytest.approx(2.0)
  assert float(found["gradient_signal"]) == pytest.approx(3.0)
  alone = update._noise(5**0.5, 10.0, 0.5, 1.0)
  assert set(map(float, alone.values())) == {0.0}


@pytest.mark.parametrize(("masked", "streamed"), [((), True), ((1,), False)])
def test_an_update_measures_it(masked, streamed):
  batch = tiny_update.make_batch("policy", micro_batch_size=2, share=False)
  # Such as responses without a verdict: they carry no information.
  without = lambda x: np.where(
    np.isin(range(len(x)), masked)[:, None, None], 0, x
  )
  inputs = {k: without(x) for k, x in batch.inputs.items()}
  batch = batch.replace(mask=without(batch.mask).astype(bool), inputs=inputs)
  program = tiny_update.make_update("policy")
  state = tiny_update.make_state("policy")
  count = int(batch.packed.count)
  tokens = np.asarray(batch.mask).sum((1, 2))[:count]
  # Each micro-batch is the only one of an update without clipping.
  fns = tiny_update.make_fns("policy")
  objective = tiny_update.objective_of("policy", fns)
  gradient = update._gradient_of(objective)
  each = [
    gradient(state.trained, batch.micro_batch(i), None, {})[0]
    for i in np.flatnonzero(tokens)
  ]
  flat = [
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(one)], dtype=float)
    for one in each
  ]
  square = np.sum(np.sum(flat, axis=0) ** 2)
  parts = sum(np.sum(g**2) / n for g, n in zip(flat, tokens[tokens > 0]))
  noise = (tokens.sum() * parts - square) / (len(each) - 1)
  if streamed:
    sums = program.accumulate(None, state.trained, batch, {})
    _, metrics = program.apply(state, sums, 1.0, np.int32(0))
  else:
    _, metrics = program.whole(state, batch)
  assert len(each) > 1 and noise > 0
  chex.assert_trees_all_close(
    [metrics["policy/gradient_noise"], metrics["policy/gradient_signal"]],
    [np.float32(noise), np.float32(square - noise)],
    rtol=1e-4,
  )
