"""Detects silent data corruption: repeated updates must be bitwise equal.

A faulty processor can compute wrong results without an error (Hochschild et al.
2021, "Cores that don't count"). Loss curves do not show it.
"""

import socket
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm import digest, metrics
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.state import LearnerState, TrainingBatch
from jaxrl_llm.system import processes
from jaxrl_llm.types import Responses

_AGAIN = "replace this host; the same --workdir continues from its checkpoint"


def update_twice(
  learner: Learner,
  state: LearnerState,
  responses: Responses,
  timer: Any,
  scored: Callable[[TrainingBatch], None] | None = None,
) -> tuple[LearnerState, dict[str, float]]:
  """Runs `Learner.update` twice and compares; needs memory for two states.

  Args:
    learner: runs the updates. On a GPU they are deterministic only with
      XLA_FLAGS=--xla_gpu_deterministic_ops=true.
    state: state before the update; its arrays are donated.
    responses: the batch.
    timer: times the second update and the comparison as phase `replay`.
    scored: as in `Learner.update`.

  Raises:
    TrainingStopped: The updates differ, or replicated arrays differ between
      devices; the update has not been saved.
  """
  with timer.phase("replay"):
    step = state.step + 1
    differ = digest.copies_that_differ(_arrays(state))
    for host, copies in processes.gather((socket.gethostname(), differ)):
      if copies:
        raise TrainingStopped(
          f"before step {step} the copies of {copies[0]} ({len(copies)} in all)"
          f" differ on {host}; {_AGAIN}"
        )
    before = state.replace(**jax.tree.map(lambda x: x.copy(), _arrays(state)))
  after, row = learner.update(state, responses, timer, scored)
  with timer.phase("replay"):
    again, _ = learner.update(before, responses, metrics.PhaseTimer())
    first, second = (digest.checksums(_arrays(x)) for x in (after, again))
    wrong = [name for name in first if first[name] != second[name]]
  if wrong:
    hosts = ", ".join(processes.gather(socket.gethostname()))
    raise TrainingStopped(
      f"step {step}, computed twice, differs in {wrong[0]} ({len(wrong)} of"
      f" {len(first)} arrays): one of {hosts} computes wrong results; {_AGAIN}"
    )
  return after, row


def _arrays(state: LearnerState) -> dict[str, Any]:
  """Returns the trees that an update changes."""
  return {name: getattr(state, name) for name in ("models", "companions")}
