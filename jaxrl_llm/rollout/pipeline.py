"""Rollouts that run ahead of the learner by a fixed number of updates.

Batch b is written by weights of version max(0, b - lag): while the learner
trains on batch v, the worker writes batch v + lag with the weights of version
v. Other systems bound how late a batch may be and let the clock decide; here
the bound is met exactly, so a run repeats, and resumes, bit for bit.
"""

import concurrent.futures
import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.prompt_source import PromptSourceState
from jaxrl_llm.rollout.worker import (
  Arrived,
  Batch,
  Collected,
  RolloutState,
)
from jaxrl_llm.types import Responses


def admit(
  version: int, accepted: int, running: int, *, batch: int, lag: float
) -> float:
  """Returns how many responses may start without exceeding the lag.

    batch · (version + lag + 1) − accepted − running

  Args:
    version: version of the policy: updates so far.
    accepted: what has been written since the run began.
    running: what is being written.
    batch: what an update trains on, in the same unit.
    lag: most updates between the weights that write and those that are trained.

  Reference:
    Fu et al. 2025, AReaL, arXiv 2505.24298, equation 3.
  """
  return max(0, batch * (version + lag + 1) - accepted - running)


# (worker's state, source's state) -> a batch, and the states after it.
Collect = Callable[[RolloutState, PromptSourceState], Collected]


class Pipeline:
  """Has batches written before the learner comes to them."""

  def __init__(
    self,
    *,
    lag: int,
    overlap: bool,
    max_staleness: int,
    streaming: bool = False,
  ):
    """Begins nothing yet.

    Args:
      lag: updates between the weights that write a batch and those that it
        trains.
      overlap: write in a thread of its own while the learner trains; the same
        is done in turns otherwise.
      max_staleness: most updates between the tokens of a batch.
      streaming: hand over groups of the batch that is being written.
    """
    self.streaming, self._arrivals = streaming, queue.SimpleQueue()
    self.lag, self._max_staleness = lag, max_staleness
    self._thread = None
    if (lag or streaming) and overlap:
      self._thread = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix="rollouts"
      )

  @contextlib.contextmanager
  def writing(
    self,
    collect: Collect,
    state: RolloutState,
    source_state: PromptSourceState,
    *,
    version: int,
    ready: int,
  ) -> Iterator[list[concurrent.futures.Future[Collected]]]:
    """Writes the batches that the weights of now are to write.

    Args:
      collect: writes one.
      state: state of the worker, before.
      source_state: where prompts are drawn from.
      version: version of the weights.
      ready: batches that are written and not trained on.

    Yields:
      A future for each of them, the oldest first; none is under way after the
      context. What went wrong is raised by its result.
    """
    states = state, source_state
    self._arrivals = queue.SimpleQueue()

    def write() -> Collected:
      nonlocal states
      try:
        collected = collect(*states)
      finally:
        self._arrivals.put(None)  # No more will come.
      states = collected.state, collected.source_state
      return collected

    count = admit(version, version + ready, 0, batch=1, lag=self.lag)
    submit = _in_turns if self._thread is None else self._thread.submit
    futures = [submit(write) for _ in range(count)]
    try:
      yield futures
    finally:
      for future in futures:
        future.cancel()
      concurrent.futures.wait(futures)

  @property
  def arrived(self) -> Arrived | None:
    """The callback that receives completed groups; None without streaming."""
    return self._arrivals.put if self.streaming else None

  def arriving(
    self,
    written: Sequence[concurrent.futures.Future[Collected]],
    version: int,
    timer: Any,
  ) -> Iterator[Responses]:
    """Groups of the batch that is being written, in the order of their ends.

    How long a response takes is counted in decode steps, so the order, and
    with it every sum of gradients, repeats.

    Args:
      written: the batch, as `writing` yields it.
      version: version of the weights.
      timer: times how long the learner waits.
    """
    while True:
      with timer.phase("wait"):
        judged = self._arrivals.get()
        if judged is None:
          written[0].result()  # Tells what went wrong, before an update.
          return
        responses = judged.result().responses
      batch = Batch(responses=responses, version=version, metrics={})
      self.check(batch, version)
      yield responses

  def check(self, batch: Batch, version: int) -> None:
    """Refuses a batch that is not as late as the lag says.

    Its newest tokens were written lag updates ago, and what a partial rollout
    began before then at most `max_staleness` updates earlier.

    Args:
      batch: is to be trained on.
      version: version of the weights that it is to train.

    Raises:
      RuntimeError: it is not; a fault of ours.
    """
    rollout, lag = batch.responses.rollout, min(version, self.lag)
    most = lag + self._max_staleness
    new = np.arange(rollout.mask.shape[1]) >= rollout.window_start[:, None]
    age = version - rollout.version[rollout.mask & new]
    oldest, newest = age.max(initial=lag), age.min(initial=most)
    if version - batch.version != lag or newest < lag or oldest > most:
      raise RuntimeError(
        f"weights of version {version} were to be trained on tokens of"
        f" {lag}..{most} updates before, got {newest}..{oldest} in a batch of"
        f" version {batch.version}"
      )

  def abstract(self, version: int) -> tuple[Batch, ...]:
    """Batches as a checkpoint is read into them, see `Learner.abstract`.

    Args:
      version: updates so far; before the first nothing has been written.
    """
    batch = Batch(responses=Responses, version=0, metrics={})
    return (batch,) * (self.lag if version else 0)


def _in_turns(function: Callable[[], Any]) -> concurrent.futures.Future:
  """Done at once."""
  future = concurrent.futures.Future()
  future.set_result(function())
  return future
