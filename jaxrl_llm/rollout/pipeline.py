"""Rollouts that run ahead of the learner by a fixed number of updates.

Batch b is sampled with weights of version max(0, b - lag): while the learner
trains on batch v, the worker samples batch v + lag with the weights of version
v. Other systems only bound the lag, and it varies with timing; here it is
exact, so that a run repeats and resumes bit for bit.
"""

import concurrent.futures
import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.prompt_source import PromptSourceState
from jaxrl_llm.rollout.records import Batch, Collected, RolloutState
from jaxrl_llm.types import Responses


def admit(
  version: int, accepted: int, running: int, *, batch: int, lag: float
) -> float:
  """Returns how many responses may start without exceeding the lag.

    batch · (version + lag + 1) − accepted − running

  Args:
    version: version of the policy: updates so far.
    accepted: responses completed since the run began.
    running: responses in progress.
    batch: responses per update.
    lag: maximum number of updates between sampling and training.

  Reference:
    Fu et al. 2025, AReaL, arXiv 2505.24298, equation 3.
  """
  return max(0, batch * (version + lag + 1) - accepted - running)


# (worker's state, source's state, arrived=None or a callback that receives
# completed groups) -> a batch, and the states after it.
Collect = Callable[..., Collected]


class Pipeline:
  """Samples batches ahead of the learner."""

  def __init__(
    self,
    *,
    lag: int,
    overlap: bool,
    max_staleness: int,
    streaming: bool = False,
  ):
    """Makes the pipeline; nothing is started.

    Args:
      lag: updates between the weights that sample a batch and the weights that
        are trained on it.
      overlap: samples in a thread while the learner trains; False alternates,
        with the same results.
      max_staleness: maximum number of updates between the oldest and the newest
        token of a batch.
      streaming: hands over groups of the batch in progress.
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
    """Samples the batches that are due with the current weights.

    Args:
      collect: samples a batch.
      state: state of the worker.
      source_state: state of the prompt source.
      version: version of the weights.
      ready: completed batches that are not trained on yet.

    Yields:
      A future for each batch, oldest first; all are done when the context
      exits. Errors are raised by `Future.result`.
    """
    states = state, source_state
    self._arrivals = queue.SimpleQueue()
    arrived = self._arrivals.put if self.streaming else None

    def write() -> Collected:
      nonlocal states
      try:
        collected = collect(*states, arrived=arrived)
      finally:
        self._arrivals.put(None)  # Marks the end.
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

  def arriving(
    self,
    written: Sequence[concurrent.futures.Future[Collected]],
    version: int,
    timer: Any,
  ) -> Iterator[Responses]:
    """Yields groups of the batch in progress, in order of completion.

    The order depends on decode steps and not on time, so that sums of gradients
    are reproducible.

    Args:
      written: the batch, as `writing` yields it.
      version: version of the weights.
      timer: times how long the learner waits.
    """
    while True:
      with timer.phase("wait"):
        judged = self._arrivals.get()
        if judged is None:
          written[0].result()  # Raises an error before the update.
          return
        responses = judged.result().responses
      batch = Batch(responses=responses, version=version, metrics={})
      self.check(batch, version)
      yield responses

  def check(self, batch: Batch, version: int) -> None:
    """Checks that the age of a batch matches the lag.

    Its newest tokens were sampled `lag` updates ago, and tokens of partial
    rollouts at most `max_staleness` updates earlier.

    Args:
      batch: the batch to train on.
      version: version of the weights to train.

    Raises:
      RuntimeError: The age does not match, which is a bug.
    """
    rollout, lag = batch.responses.rollout, min(version, self.lag)
    most = lag + self._max_staleness
    new = np.arange(rollout.mask.shape[1]) >= rollout.window_start[:, None]
    new &= rollout.sample_id[:, None] >= 0  # Negative ids are replayed.
    age = version - rollout.version[rollout.mask & new]
    oldest, newest = age.max(initial=lag), age.min(initial=most)
    if version - batch.version != lag or newest < lag or oldest > most:
      raise RuntimeError(
        f"weights of version {version} must be trained on tokens that are"
        f" {lag}..{most} updates old, got {newest}..{oldest} in a batch of"
        f" version {batch.version}"
      )

  def abstract(self, version: int) -> tuple[Batch, ...]:
    """Returns the structure of the batches in a checkpoint.

    Args:
      version: number of updates so far; 0 has no batches.
    """
    batch = Batch(responses=Responses, version=0, metrics={})
    return (batch,) * (self.lag if version else 0)


def _in_turns(function: Callable[[], Any]) -> concurrent.futures.Future:
  """Runs a function immediately and returns a completed future."""
  future = concurrent.futures.Future()
  future.set_result(function())
  return future
