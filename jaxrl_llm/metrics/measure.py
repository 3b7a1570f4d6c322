"""Measurements: pass@k, avg@k with its error, phase times, memory, compiles."""

import collections
import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Estimate(NamedTuple):
  """A mean over problems and its standard error."""

  mean: float
  standard_error: float  # nan for a single problem.


# Dense bfloat16 floating-point operations per second of one device, from the
# vendors' data sheets, by JAX's name of the device.
_PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Returns what the device could do at most, None where it is not known."""
  return _PEAK_FLOPS.get(device_kind)


def pass_at_k(
  num_correct: npt.ArrayLike, num_samples: npt.ArrayLike, *, k: int
) -> np.ndarray:
  """Unbiased estimate of the chance that one of k samples is correct.

    pass@k = 1 − C(n − c, k) / C(n, k) = 1 − ∏_{j<k} (n − c − j) / (n − j)

  The product form needs no large binomials.

  Args:
    num_correct: [N], correct samples c of each problem.
    num_samples: [N] or a scalar, samples n drawn for each problem.
    k: samples a user would draw; at most the smallest n.

  Returns:
    float64 [N], one estimate a problem; average them over a data set.

  Raises:
    ValueError: k is not in 1..n or a count is not in 0..n.

  Reference: Chen et al. 2021, arXiv 2107.03374, equation 1.
  """
  correct, samples = _counts(num_correct, num_samples)
  if k < 1 or np.any(samples < k):
    raise ValueError(f"k must be in 1..{samples.min()} samples, got {k}")
  missed = np.ones(correct.shape)
  for j in range(k):
    # A factor is zero once fewer than k wrong samples exist; keep it there.
    missed *= np.maximum(samples - correct - j, 0) / (samples - j)
  return 1.0 - missed


def avg_at_k(
  num_correct: npt.ArrayLike, num_samples: npt.ArrayLike
) -> Estimate:
  """Mean accuracy of sampled answers, problems being the unit of chance.

    avg@k = mean_i(c_i / n_i),   SE = std_i(c_i / n_i) / √N   (Bessel)

  Samples of one problem are correlated, so the error is taken over problem
  means (clusters), never over all N·k samples.

  Args:
    num_correct: [N], correct samples of each problem.
    num_samples: [N] or a scalar, samples drawn for each problem.

  Returns:
    The mean over problems and its standard error.

  Raises:
    ValueError: a count is not in 0..n, or there is no problem.

  Reference: Miller 2024, arXiv 2411.00640, section 2.2 (clustered errors).
  """
  correct, samples = _counts(num_correct, num_samples)
  return mean_and_standard_error(correct / samples)


def mean_and_standard_error(values: npt.ArrayLike) -> Estimate:
  """Mean of independent values with its standard error, nan for one value."""
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or values.size == 0:
    raise ValueError(f"values must be a filled vector, got {values.shape}")
  error = np.nan
  if values.size > 1:
    error = values.std(ddof=1) / np.sqrt(values.size)
  return Estimate(float(values.mean()), float(error))


def _counts(
  num_correct: npt.ArrayLike, num_samples: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
  correct = np.asarray(num_correct, np.int64)
  if correct.ndim != 1 or correct.size == 0:
    raise ValueError(
      f"num_correct must be a filled vector, got shape {correct.shape}"
    )
  samples = np.broadcast_to(np.asarray(num_samples, np.int64), correct.shape)
  if np.any(samples < 1) or np.any(correct < 0) or np.any(correct > samples):
    raise ValueError(
      "counts must satisfy 0 <= num_correct <= num_samples and num_samples"
      f" >= 1, got {correct.tolist()} of {samples.tolist()}"
    )
  return correct, samples


class PhaseTimer:
  """Collects how long the phases of a step took.

  Phases that occur again add up. A phase must wait for its own results
  (`jax.block_until_ready`), or its time is booked on the next one.
  """

  def __init__(
    self,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_enter: Callable[[str], None] | None = None,
  ):
    """Starts timing.

    Args:
      clock: returns seconds; only differences matter.
      on_enter: told the name of each phase as it begins.
    """
    self._clock = clock
    self._on_enter = on_enter
    self._seconds = collections.defaultdict(float)
    self._step_start = clock()

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Books the body's time on `time/<name>_s`, also when it raises."""
    if self._on_enter is not None:
      self._on_enter(name)
    start = self._clock()
    try:
      yield
    finally:
      self._seconds[name] += self._clock() - start

  def collect(self) -> dict[str, float]:
    """Returns the step's `time/*_s` metrics and starts the next step."""
    now = self._clock()
    metrics = {f"time/{name}_s": s for name, s in self._seconds.items()}
    metrics["time/step_s"] = now - self._step_start
    self._seconds.clear()
    self._step_start = now
    return metrics


class CompileCounter:
  """Counts XLA compilations of this process, so that a recompile is seen.

  An executable fetched from the persistent cache counts too: a step that is
  counted 0 ran what was already loaded. It listens as long as the process
  lives.
  """

  def __init__(self):
    # Imported here: only this class of the room needs jax.
    import jax

    self._count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration: float, **_) -> None:
    del duration
    self._count += event == _COMPILE_EVENT

  def collect(self) -> int:
    """Returns the compilations since the last call."""
    count, self._count = self._count, 0
    return count


def peak_memory_gib() -> float:
  """The largest resident memory of this process so far, in GiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # Linux counts in KiB, macOS in bytes.
  return peak / (2**30 if sys.platform == "darwin" else 2**20)
