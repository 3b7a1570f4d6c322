"""Silent corruption: an update done twice must give the same bits twice.

A processor can be wrong now and then without telling (Hochschild et al. 2021,
"Cores that don't count"). Nothing in a loss curve shows it.
"""

import socket
from typing import Any

import jax

from jaxrl_llm import digest, metrics
from jaxrl_llm.errors import TrainingStopped
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.state import LearnerState
from jaxrl_llm.types import Responses

_AGAIN = (
  "take it out of the job; the same --workdir goes on from its checkpoint"
)


def update_twice(
  learner: Learner, state: LearnerState, responses: Responses, timer: Any
) -> tuple[LearnerState, dict[str, float]]:
  """As `Learner.update`, with proof; needs room for a second state.

  Args:
    learner: does the updates; on a GPU they have the same bits only with
      XLA_FLAGS=--xla_gpu_deterministic_ops=true.
    state: before; its arrays are given away.
    responses: the batch.
    timer: times the first one as ever, and the second one as phase `replay`.

  Raises:
    TrainingStopped: the second update came out otherwise, or copies of an array
      that devices have in common differ; nothing of it has been saved.
  """
  with timer.phase("replay"):
    step = state.step + 1
    copies = digest.copies_that_differ(_arrays(state))
    if copies:
      raise TrainingStopped(
        f"before step {step} the copies of {copies[0]} ({len(copies)} in all)"
        f" differ on {socket.gethostname()}; {_AGAIN}"
      )
    before = jax.tree.map(
      lambda x: x.copy() if isinstance(x, jax.Array) else x, state
    )
  after, row = learner.update(state, responses, timer)
  with timer.phase("replay"):
    again, _ = learner.update(before, responses, metrics.PhaseTimer())
    first, second = (digest.checksums(_arrays(x)) for x in (after, again))
    wrong = [name for name in first if first[name] != second[name]]
  if wrong:
    raise TrainingStopped(
      f"step {step}, done twice, has other bits in {wrong[0]} ({len(wrong)} of"
      f" {len(first)} arrays): {socket.gethostname()} calculates wrongly;"
      f" {_AGAIN}"
    )
  return after, row


def _arrays(state: LearnerState) -> dict[str, Any]:
  names = ("policy", "critic", "ema", "kept")
  return {name: getattr(state, name) for name in names}
