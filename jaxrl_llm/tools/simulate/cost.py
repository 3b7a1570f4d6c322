"""Cost models of a simulated machine, fitted or computed.

Costs come from measured decode calls (`fit`), or from a roofline on the numbers
of data sheets and model cards (`Rates`, `accelerator`); nothing is measured.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import numpy as np
import scipy.optimize

from jaxrl_llm.metrics.chips import CHIPS, Chip
from jaxrl_llm.sampling.stats import DecodeCall


class Rates(NamedTuple):
  """Numbers per resource of a chip: fractions of its peaks, or seconds."""

  compute: float  # Floating-point operations.
  memory: float  # Reading and writing memory.
  links: float  # Communication with other devices.


# Assumed fractions of the vendors' peak figures, defined only here.
SHARES = Rates(compute=0.4, memory=0.6, links=0.7)


class Work(NamedTuple):
  """Work of one device on different resources, done concurrently."""

  flops: float = 0.0
  moved: float = 0.0  # Bytes to and from memory.
  sent: float = 0.0  # Bytes received from other devices.

  def seconds(self, chip: Chip) -> Rates:
    """Returns the seconds that each resource would take on its own."""
    peaks = chip.flops, chip.bandwidth, chip.links
    return Rates(*(x / (s * p) for x, s, p in zip(self, SHARES, peaks)))


def bound(parts: Sequence[Work], chip: Chip) -> tuple[float, str]:
  """Returns the total seconds of sequential parts, and the limiting resources.

  A part takes as long as its slowest resource (roofline model).
  """
  spent = collections.Counter()
  for part in parts:
    seconds = part.seconds(chip)._asdict()
    slowest = max(seconds, key=seconds.get)
    spent[slowest] += seconds[slowest]
  total = sum(spent.values())
  limits = [name for name, s in spent.most_common() if s > 0.1 * total]
  return total, " + ".join(limits)


class Plane(NamedTuple):
  """Seconds of a decoding step: fixed + per_slot · slots + per_token · n."""

  fixed: float
  per_slot: float
  per_token: float  # n tokens in the KV cache.

  def seconds(self, slots: chex.Array, tokens: chex.Array) -> np.ndarray:
    return self.fixed + self.per_slot * slots + self.per_token * tokens


@dataclasses.dataclass(frozen=True)
class CostModel:
  """Prices in seconds.

  A decoding step takes as long as its slowest resource: the maximum over the
  planes. Their fixed part includes latency.
  """

  decode: tuple[Plane, ...]
  prefill_call_s: float = 0.0
  prefill_token_s: float = 0.0
  prefill_pair_s: float = 0.0  # Per pair of a token and an earlier one.
  train_step_s: float = 0.0
  train_token_s: float = 0.0  # Per token of prompt, prefix and response.
  train_pair_s: float = 0.0
  sync_s: float = 0.0  # Time of a weight sync.
  scheduler_step_s: float = 0.0  # Host time between two decode calls.
  # Whether steps are charged for the shapes of their program, including idle
  # slots and free pages; otherwise only for slots and tokens in use.
  padded: bool = False

  def decode_s(self, slots: chex.Array, tokens: chex.Array) -> np.ndarray:
    """Returns the seconds of steps with these slots and tokens in the cache."""
    return np.max([p.seconds(slots, tokens) for p in self.decode], axis=0)

  def prefill_s(self, contexts: chex.Array, calls: int) -> float:
    """Returns the seconds of `calls` prefills of contexts of these lengths."""
    work_s = _work(contexts, self.prefill_token_s, self.prefill_pair_s)
    return self.prefill_call_s * calls + work_s

  def train_s(self, contexts: chex.Array) -> float:
    """Returns the seconds of a training step on contexts of these lengths."""
    work_s = _work(contexts, self.train_token_s, self.train_pair_s)
    return self.train_step_s + work_s


def fit(decode_calls: chex.Array) -> CostModel:
  """Fits prices to the measured times of an engine by least squares.

    seconds = scheduler_step + prefill_call · calls + prefill_token · tokens
      + steps · (fixed + per_slot · slots + per_token · n)

  No price is negative. The engine's programs are padded, so `slots` are all
  slots of the program, including idle ones, and n is the capacity of its KV
  cache in tokens.

  Args:
    decode_calls: [m, 6], rows as `sampling.stats.DecodeCall`, excluding calls
      that compiled.

  Raises:
    ValueError: There are too few rows, or their shape is wrong.
  """
  rows = np.asarray(decode_calls, np.float64)
  columns = len(DecodeCall._fields)
  if rows.ndim != 2 or rows.shape[1] != columns or len(rows) < columns:
    raise ValueError(
      f"decode_calls must have {columns} columns and at least {columns} rows,"
      f" got shape {rows.shape}"
    )
  slots, steps, tokens, *prefills, seconds = rows.T
  terms = [steps, steps * slots, steps * tokens, *prefills]
  if np.ptp(steps):  # Otherwise the fixed part is not identifiable.
    terms.append(np.ones_like(steps))
  table = np.stack(terms, axis=1)
  scale = np.abs(table).max(axis=0, initial=1e-300)
  prices = scipy.optimize.nnls(table / scale, seconds)[0] / scale
  *plane, call_s, token_s, step_s = [*prices.tolist(), 0.0][:6]
  return CostModel(
    decode=(Plane(*plane),),
    prefill_call_s=call_s,
    prefill_token_s=token_s,
    scheduler_step_s=step_s,
    padded=True,
  )


def accelerator(
  *,
  devices: float = 64,
  train_devices: float | None = None,
  parameters: float = 7.6e9,
  bytes_per_parameter: float = 2,
  kv_bytes_per_token: float = 57_344,
  flops_per_pair: float = 401_408,
  bandwidth: float = CHIPS["v5p"].bandwidth,
  peak_flops: float = CHIPS["v5p"].flops,
  bandwidth_use: float = SHARES.memory,
  flops_use: float = SHARES.compute,
  step_latency_s: float = 2e-3,
  call_latency_s: float = 10e-3,
  scheduler_step_s: float = 2e-3,
  train_forwards: float = 5,
  train_latency_s: float = 2.0,
  sync_bandwidth: float = 10e9,
) -> CostModel:
  """Computes the prices of a pod with a roofline on the vendor's numbers.

  A decoding step takes the longer of two times: reading all weights and the KV
  cache, or multiplying. Every device has all weights and an equal part of the
  slots. The defaults are a 7B model (28 layers of width 3584, 4 KV heads of
  size 128, bfloat16) on 64 chips with Google's numbers for TPU v5p.

  Args:
    devices: devices that sample, and also train unless `train_devices` is set.
    train_devices: separate devices that train.
    parameters: number of parameters of the policy.
    bytes_per_parameter: bytes per parameter in the sampler.
    kv_bytes_per_token: bytes per token of the KV cache, all layers.
    flops_per_pair: attention FLOPs per pair of tokens, 4 · layers · heads ·
      head size.
    bandwidth: bandwidth of a device's memory, bytes/s.
    peak_flops: peak FLOP/s of a device.
    bandwidth_use: fraction of the bandwidth that decoding reaches.
    flops_use: fraction of the peak that prefill, training and decoding reach.
    step_latency_s: latency of a decoding step, in addition to its roofline.
    call_latency_s: latency of a prefill call.
    scheduler_step_s: host time between two decode calls.
    train_forwards: work per trained token in forward passes of the policy: 1
      for the old log-probs, 3 for the update, 1 for recomputation.
    train_latency_s: latency of a training step, in addition to multiplying.
    sync_bandwidth: bandwidth of a weight sync per device, bytes/s.

  Reference:
    Williams et al. 2009, Roofline, Communications of the ACM 52(4). The
    chip: `jaxrl_llm.metrics.chips`.
  """
  weights = parameters * bytes_per_parameter
  read = 1 / (bandwidth * bandwidth_use)
  multiply = 1 / (peak_flops * flops_use)
  token, pair = 2 * parameters * multiply, flops_per_pair * multiply
  kv_read, trainers = kv_bytes_per_token * read, train_devices or devices
  return CostModel(
    decode=(
      Plane(step_latency_s + weights * read, 0.0, kv_read / devices),
      Plane(step_latency_s, token / devices, pair / devices),
    ),
    prefill_call_s=call_latency_s,
    prefill_token_s=token / devices,
    prefill_pair_s=pair / devices,
    train_step_s=train_latency_s,
    train_token_s=train_forwards * token / trainers,
    train_pair_s=train_forwards * pair / trainers,
    sync_s=weights / sync_bandwidth,
    scheduler_step_s=scheduler_step_s,
  )


def _work(contexts: chex.Array, per_token: float, per_pair: float) -> float:
  contexts = np.asarray(contexts, np.float64)
  pairs = (contexts * (contexts + 1)).sum() / 2
  return float(per_token * contexts.sum() + per_pair * pairs)
