"""Compares rollout schedules on the same requests and devices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm import sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.tools.simulate.cost import CostModel
from jaxrl_llm.tools.simulate.lengths import Requests
from jaxrl_llm.tools.simulate.runs import (
  asynchronous,
  pipelined,
  static_batches,
)

BASELINE = "static"
_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # Fractions of devices for sampling.
_TRIAL = 6  # Steps of the trial run of each fraction.

Summary = dict[str, float]  # Summary of a run by table column.


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison of schedules, for the sizes of a job and a machine's prices.

  Attributes:
    slots: responses decoded concurrently.
    groups: prompts per training step.
    group_size: responses per prompt.
    steps: training steps; the first third is a warm-up.
    prompt_length: tokens per prompt.
    over_provision: groups in flight per trained group; one schedule per number.
    max_staleness: maximum staleness of over-provisioned responses, in steps.
    lags: lags of runs that sample and train concurrently, in steps.
    price: fraction of the devices that sample while the others train -> prices;
      None: all devices alternate.
  """

  slots: int
  groups: int
  group_size: int
  steps: int
  prompt_length: int
  over_provision: Sequence[float]
  max_staleness: float
  lags: Sequence[float]
  price: Callable[[float | None], CostModel]

  def run(self, lengths: np.ndarray, window: int) -> dict[str, Summary]:
    """Simulates every schedule; returns summaries by name.

    Alternating schedules use all devices for sampling and then for training.
    Concurrent schedules split the devices at the best of a few fractions.

    Args:
      lengths: lengths of responses in tokens, int [N, G].
      window: T-PPO's window in tokens.

    Raises:
      InputError: A schedule is invalid.
    """
    requests = Requests(np.full(len(lengths), self.prompt_length), lengths)
    longest = self.prompt_length, int(lengths.max())
    config = sampling.EngineConfig(self.slots, *longest, stop_tokens=())
    run = functools.partial(pipelined, requests, config=config)
    schedules, out = self._schedules(window), {}
    for name, settings in schedules.items():
      rule = static_batches if name == BASELINE else None
      in_turns = functools.partial(run, settings=settings, rule=rule)
      out[name] = self._summary(in_turns, self.price(None), self.steps)
    free = functools.partial(
      asynchronous, requests, config=config, groups=self.groups
    )
    parted = [self.price(share) for share in _SHARES]
    for runs in filter(None, self._side_by_side(run, free, schedules)):
      first, steps = next(iter(runs.values())), min(_TRIAL, self.steps)
      trials = [self._summary(first, cost, steps) for cost in parted]
      best = parted[np.argmax([trial["responses/s"] for trial in trials])]
      for name, one in runs.items():
        out[name] = self._summary(one, best, self.steps)
    base = out[BASELINE]["responses/s"]
    return {
      k: v | {"x static": v["responses/s"] / base} for k, v in out.items()
    }

  def _schedules(self, window: int) -> dict[str, RolloutSettings]:
    """Returns the alternating schedules by name."""
    sizes = {"groups": self.groups, "group_size": self.group_size}
    whole = RolloutSettings(**sizes, in_flight=self.groups)
    windowed = dataclasses.replace(whole, window=window)
    schedules = {BASELINE: whole, "refill": whole, "window": windowed}
    for ratio in self.over_provision:
      try:
        schedules[f"over-provisioned {ratio:g}"] = RolloutSettings(
          **sizes,
          in_flight=math.ceil(ratio * self.groups),
          stop="first_groups",
          max_staleness=self.max_staleness,
        )
      except ValueError as error:
        raise InputError(f"over_provision={ratio:g}: {error}") from error
    return schedules

  def _side_by_side(
    self, run: Callable, free: Callable, schedules: dict[str, RolloutSettings]
  ) -> list[dict[str, Callable]]:
    """Returns runs that sample and train concurrently: by kind, then by name.

    Free-running sampling hands over a group when it ends and takes new weights
    when they arrive. It depends on the clock and is not reproducible.
    """
    partial = functools.partial
    whole, (name, most) = schedules["refill"], list(schedules.items())[-1]
    lags = [int(lag) for lag in self.lags if lag < math.inf]
    fixed = lambda settings, suffix: {
      f"fixed lag {lag}{suffix}": partial(run, settings=settings, lag=lag)
      for lag in lags
    }
    return [
      {"periodic": partial(run, settings=whole, streaming=True)},
      fixed(whole, ""),
      fixed(most, f", {name}"),
      {f"free-running, lag {x:g}": partial(free, lag=x) for x in self.lags},
    ]

  def _summary(self, run: Callable, cost: CostModel, steps: int) -> Summary:
    """Returns means over the steps of a run after the warm-up."""
    rows = run(cost=cost, steps=steps)[steps // 3 :]
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    most = {name: max(row[name] for row in rows) for name in rows[0]}
    host_s = cost.scheduler_step_s * total["decode_calls"]
    seconds = {
      "s/step": total["step_s"],
      "generate": total["wall_s"] - total["host_s"],
      "prefill": total["host_s"] - host_s,
      "train": total["train_s"],
      "sync": cost.sync_s * len(rows),
      "idle": host_s + total["waited_s"],
    }
    return {
      "responses/s": total["responses"] / total["step_s"],
      "x static": 1.0,
      **{name: value / len(rows) for name, value in seconds.items()},
      "slots used": total["tokens"] / (self.slots * total["decode_steps"]),
      "off-policy": total["off_policy"] / total["trained"],
      "max staleness": most["max_staleness"],
      "mean length": total["response_tokens"] / max(total["responses"], 1),
      "peak KV tokens": most["kv_capacity"],
    }
