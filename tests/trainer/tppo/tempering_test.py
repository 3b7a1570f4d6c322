"""The sampler receives the entropies of the previous batch."""

from unittest import mock

import numpy as np
from helpers import tempered
from helpers.tiny_tppo import record, with_learner

from jaxrl_llm import estimators


class TestTempering:
  def test_the_sampler_goes_by_the_batch_before(self, run, history):
    told, engine = [], run.worker.writer.engine
    write = engine.generate_window

    def untempered(*arguments, processor_states, **settings):
      told.append(processor_states["entropy_tau"])
      return write(*arguments, **settings)

    algorithm = tempered.tempered(run.learner.algorithm, run.config)
    with mock.patch.object(engine, "generate_window", untempered):
      chosen = with_learner(run, algorithm=algorithm)
      steps, (states, _) = record(chosen, 3)
    # Nothing is known before the first step; zeros leave temperatures as is.
    assert all(number == 0 for number in told[0])
    last = states.learner.processor_states["entropy_tau"]
    statistics = [*told[1:], last]
    for step, after in zip(steps, statistics, strict=True):
      (seen,) = step.estimated
      tokens = seen.scores["entropies"][seen.experience["policy_mask"]]
      expected = estimators.entropy_statistics(
        tokens, np.ones(tokens.shape, bool)
      )
      np.testing.assert_allclose(after, expected, rtol=1e-5)
      assert after.rms > 0
    assert [step.row for step in steps] == [step.row for step in history[:3]]
