"""Measurements: pass@k, means with errors, phase times, memory, compiles."""

import collections
import contextlib
import math
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def pass_at_k(num_correct: Iterable[int], n: int, k: int) -> np.ndarray:
  """Unbiased estimate of the probability that any of k samples is correct.

    pass@k = 1 − C(n − c, k) / C(n, k)

  Args:
    num_correct: [N], number of correct samples c of each problem, 0 to n.
    n: number of samples drawn for each problem.
    k: number of samples a user would draw, 1 to n.

  Returns:
    float64 [N], one estimate per problem; average them over a dataset.

  Reference: Chen et al. 2021, arXiv 2107.03374, equation 1.
  """
  every = math.comb(n, k)
  return np.array([1 - math.comb(n - int(c), k) / every for c in num_correct])


def mean_and_standard_error(values: npt.ArrayLike) -> tuple[float, float]:
  """Returns the mean of independent values and its standard error.

  The error is NaN for a single value. Pass accuracies of problems, not of
  samples, because samples of one problem are correlated.

  Reference: Miller 2024, arXiv 2411.00640, section 2.2 (clustered errors).
  """
  values = np.asarray(values, np.float64)
  error = np.nan
  if values.size > 1:
    error = values.std(ddof=1) / np.sqrt(values.size)
  return float(values.mean()), float(error)


class PhaseTimer:
  """Measures the times of the phases of a step.

  Repeated phases add up. A phase must wait for its results
  (`jax.block_until_ready`), or their time is attributed to the next phase.
  """

  def __init__(
    self,
    *,
    clock: Callable[[], float] = time.perf_counter,
    compiles: "CompileCounter | None" = None,
    waited: Callable[[], float] | None = None,
    spent: Mapping[str, float] = {},
    on_enter: Callable[[str], None] = lambda name: None,
  ):
    """Starts timing.

    Args:
      clock: returns seconds; only differences matter.
      compiles: measures compilation time and counts compilations per step.
      waited: returns the seconds that the calling thread has waited for devices
        and other processes so far; each phase's `host/<name>_s` is then the
        time it did not wait.
      spent: seconds by phase to add to the first step.
      on_enter: called with the name of each phase at its start and, at its end,
        with the enclosing phase or 'between phases'.
    """
    self._clock, self._compiles = clock, compiles
    self._compiled = compiles.seconds if compiles else lambda: 0.0
    self._waited, self._on_enter = waited, on_enter
    self._entered = []  # Includes phases of other threads.
    self._seconds = collections.defaultdict(float, spent)
    self._host = collections.defaultdict(float)
    self._step_start = clock()

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Adds the body's time to `time/<name>_s`, also if it raises.

    Its compilation time is added to `time/compile_s` instead.
    """
    self._entered.append(name)
    self._on_enter(name)
    start, compiled = self._clock(), self._compiled()
    waited = self._waited() if self._waited else 0.0
    try:
      yield
    finally:
      compiled = self._compiled() - compiled
      seconds = self._clock() - start - compiled
      self._seconds[name] += seconds
      if compiled:
        self._seconds["compile"] += compiled
      self._entered.remove(name)
      self._on_enter(["between phases", *self._entered][-1])
      if self._waited:
        self._host[name] += max(seconds - (self._waited() - waited), 0.0)

  def collect(self) -> dict[str, float]:
    """Returns the step's `time/*_s` and `host/*_s`, and starts the next step.

    With `compiles`, also returns `compile/count`.
    """
    now = self._clock()
    metrics = {f"time/{name}_s": s for name, s in self._seconds.items()}
    metrics |= {f"host/{name}_s": s for name, s in self._host.items()}
    metrics["time/step_s"] = now - self._step_start
    if self._compiles:
      metrics["compile/count"] = self._compiles.collect()
    self._seconds.clear()
    self._host.clear()
    self._step_start = now
    return metrics


class CompileCounter:
  """Counts XLA compilations of this process, to detect recompilation.

  Executables loaded from the persistent cache count too: a step with count 0
  used only executables already in memory. Listens until the process ends.
  """

  def __init__(self):
    self._count, self._seconds = 0, collections.defaultdict(float)
    watch_compilations(lambda program: None, self._add)

  def _add(self, program: str, seconds: float) -> None:
    self._count += 1
    self._seconds[threading.get_ident()] += seconds

  def seconds(self) -> float:
    """Returns the compilation time of the calling thread so far."""
    return self._seconds[threading.get_ident()]

  def collect(self) -> int:
    """Returns the number of compilations since the last call."""
    count, self._count = self._count, 0
    return count


def watch_compilations(
  begin: Callable[[str], None], end: Callable[[str, float], None]
) -> Callable[[], None]:
  """Reports compilations of this process until the result is called.

  Args:
    begin: called with the name of a program when its compilation begins.
    end: called with its name and compilation time in seconds when it ends.

  Returns:
    A function that ends the reports.
  """
  from jax import monitoring  # Imported here: little here needs jax.

  # By thread. JAX's own durations are differences of the system's time, which
  # may be set back meanwhile.
  begun = {}
  program = lambda name: name.removeprefix("jit(").removesuffix(")")

  def on_begin(event: str, value: float, *, fun_name: str = "", **_) -> None:
    if event == _COMPILE_EVENT:
      begun[threading.get_ident()] = time.perf_counter()
      begin(program(fun_name))

  def on_end(event: str, duration: float, *, fun_name: str = "", **_) -> None:
    if event == _COMPILE_EVENT and threading.get_ident() in begun:
      seconds = time.perf_counter() - begun.pop(threading.get_ident())
      end(program(fun_name), seconds)

  def stop() -> None:
    monitoring.unregister_scalar_listener(on_begin)
    monitoring.unregister_event_duration_listener(on_end)

  monitoring.register_scalar_listener(on_begin)
  monitoring.register_event_duration_secs_listener(on_end)
  return stop


def peak_memory_gib() -> float:
  """Returns the peak resident memory of this process, in GiB."""
  # Linux counts in KiB.
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
