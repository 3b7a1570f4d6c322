"""Windows with more responses in flight than a step waits for.

../pairs_test.py tests that losses see every token once, and resuming.
"""

from helpers import tiny_run
from helpers.tiny_tppo import GROUP, SLOTS, STEPS, WINDOW, record

from jaxrl_llm.types import Status

IN_FLIGHT = 3 * SLOTS // 2


def test_a_step_waits_for_a_batch_of_those_in_flight(model):
  run = tiny_run.make_run(
    model,
    schedule__window=WINDOW,
    schedule__stop="first_groups",
    schedule__over_provision=1.5,
    sampler__slots=SLOTS,
  )
  cut_early = 0
  for step in record(run, STEPS)[0]:
    rollout = step.collected.rollout
    new = rollout.lengths - rollout.window_start
    assert 0 < new.min() and new.max() <= WINDOW
    paused = (new == WINDOW) | step.collected.ended
    assert paused.sum() >= SLOTS
    assert len(rollout.lengths) <= IN_FLIGHT
    cut_early += (~paused).sum()
    # Everything in flight, begun or not, is carried over or new next step.
    gone = step.collected.ended.sum()
    assert len(step.store.lengths) >= IN_FLIGHT - gone
    assert len(step.store.lengths) < IN_FLIGHT - gone + GROUP
    assert (step.store.status == Status.TRUNCATED).all()
  assert cut_early  # Responses in other slots were cut inside a window.
