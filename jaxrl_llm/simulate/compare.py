"""Schedules side by side on the same requests and prices."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxrl_llm import report
from jaxrl_llm.simulate import runs
from jaxrl_llm.simulate.cost import CostModel
from jaxrl_llm.simulate.lengths import Requests
from jaxrl_llm.simulate.runs import Setting, Trace

BASELINE = "static"
_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # Of the devices, for sampling.
_TRIAL = 6  # Steps that find the best of them.


def compare(
  requests: Requests,
  cost: CostModel,
  setting: Setting,
  *,
  window: int,
  over_provision: Sequence[float],
  max_staleness: float,
  lags: Sequence[float],
) -> dict[str, Trace]:
  """Runs every schedule; name -> its trace.

  The schedules that take turns have all devices for sampling and then for
  training. An asynchronous run divides the same devices, in the way that gives
  the most of a few shares.

  Args:
    requests: what all of them are asked.
    cost: prices.
    setting: slots, groups and steps.
    window: W, tokens.
    over_provision: N' / N.
    max_staleness: steps after which a response is awaited.
    lags: of asynchronous runs; none leaves them out.
  """
  args = requests, cost, setting
  out = {
    BASELINE: runs.static(*args),
    "refill": runs.refill(*args),
    "window": runs.window(*args, window=window),
  }
  for ratio in over_provision:
    out[f"over-provisioned {ratio:g}"] = runs.over_provisioned(
      *args,
      in_flight=math.ceil(ratio * setting.groups),
      max_staleness=max_staleness,
    )
  if lags:
    trial = setting._replace(steps=min(_TRIAL, setting.steps))

    def speed(share):
      divided = cost.divided(share)
      run = runs.asynchronous(requests, divided, trial, lag=min(lags))
      return run.after(trial.steps // 3).responses_per_s

    best = cost.divided(max(_SHARES, key=speed))
    for lag in lags:
      out[f"asynchronous, lag {lag:g}"] = runs.asynchronous(
        requests, best, setting, lag=lag
      )
  return out


def table(traces: Mapping[str, Trace], *, warm_up: int) -> str:
  """A Markdown table, one row a schedule; every number is simulated.

  Args:
    traces: of `compare`.
    warm_up: first steps that are left out.
  """
  after = {name: trace.after(warm_up) for name, trace in traces.items()}
  base = after[BASELINE].responses_per_s
  parts = ("wall", "generate", "prefill", "train", "sync", "idle")
  rows = []
  for name, trace in after.items():
    means = {part: getattr(trace, f"{part}_s").mean() for part in parts}
    seconds = {part: f"{value:.3g}" for part, value in means.items()}
    rows.append(
      {
        "simulated": name,
        "responses/s": f"{trace.responses_per_s:.3g}",
        "x static": f"{trace.responses_per_s / base:.2f}",
        "s/step": seconds.pop("wall"),
        **seconds,
        "slots used": f"{trace.utilisation:.0%}",
        "off-policy": f"{trace.off_policy_share:.0%}",
        "max staleness": f"{trace.max_staleness.max()}",
        "mean length": f"{trace.mean_length:.0f}",
        "peak KV tokens": f"{trace.peak_kv_capacity.max():.3g}",
      }
    )
  return report.markdown(rows)


def describe(cost: CostModel) -> str:
  """The prices in a line."""
  fields = dataclasses.asdict(cost)
  of_what = "whole programs" if fields.pop("padded") else "what is in use"
  decode = ", or if larger ".join(
    "{:.3g} + {:.3g} slots + {:.3g} KV tokens".format(*plane)
    for plane in fields.pop("decode")
  )
  rest = ", ".join(f"{key} {value:.3g}" for key, value in fields.items())
  return f"Prices of {of_what}: seconds of a decoding step {decode}; {rest}."
