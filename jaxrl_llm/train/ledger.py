"""The ledger: every response token is trained on once by each loss.

Responses live across iterations: a window cuts them, the critic may wait for
more of them. Each carries how often its tokens were part of an update.
"""

from typing import Any

import numpy as np

from jaxrl_llm.train import runstate
from jaxrl_llm.train.build import Job
from jaxrl_llm.train.packing import MiniBatch
from jaxrl_llm.train.runstate import Responses, RunState


def enough(job: Job, ended_rows: np.ndarray) -> bool:
  """Whether there is a critic and it has enough ended responses."""
  return (
    job.value is not None and ended_rows.size >= job.config.schedule.min_ended
  )


def visit(visits: np.ndarray, batch: MiniBatch, prepared: Any) -> None:
  """Counts the tokens that a prepared mini-batch trains on."""
  visits[batch.rows] += batch.layout.gather(prepared.packed.mask)


def keep_open(
  job: Job,
  state: RunState,
  everything: Responses,
  *,
  trained: np.ndarray,
  parked: Responses | None = None,
) -> None:
  """Carries over what goes on: cut responses, and ended ones that wait.

  A response that is released has been part of each loss exactly once, token
  by token; anything else is a fault of ours and stops the run.

  Args:
    job: the objects of the run.
    state: gets what goes on.
    everything: responses of this step.
    trained: rows that the critic has seen.
    parked: responses that were no part of this step.
  """
  ended = everything.ended
  rows = np.arange(len(ended))
  cut = rows[~ended]
  waiting = np.setdiff1d(rows[ended], trained)
  if job.value is None:
    waiting = waiting[:0]
  released = np.setdiff1d(rows[ended], waiting)
  check_visits(job, runstate.take(everything, released))
  state.unfinished = runstate.take(everything, cut) if cut.size else parked
  state.waiting = None
  if waiting.size:
    kept = runstate.take(everything, waiting)
    # Nothing in them is new to the policy any more.
    rollout = kept.rollout.replace(window_start=kept.rollout.lengths)
    state.waiting = kept.replace(rollout=rollout)


def check_visits(job: Job, released: Responses) -> None:
  """Every token of a released response was trained on exactly once.

  Raises:
    RuntimeError: it was not.
  """
  # What the verifier could not judge, or a mask left out, is not visited.
  judged, mask = released.judged, released.rollout.mask
  checked = [
    ("policy", released.policy_visits, judged & (not job.recipe.policy_masks))
  ]
  if job.value is not None:
    checked.append(("value", released.value_visits, judged))
  for name, visits, whole in checked:
    exact, most = visits == mask, visits <= mask
    if not np.where(whole[:, None], exact, most).all():
      raise RuntimeError(
        f"tokens of a finished response were trained on {visits[mask].min()} to"
        f" {visits[mask].max()} times by the {name} loss, not once"
      )
