"""How well the detector finds the broken host of simulated fleets.

    python scripts/dev/fleet_campaign.py --episodes=2000
    python scripts/dev/fleet_campaign.py --cost    # of one call at 1,024 hosts

Half of the episodes are healthy. An alarm counts as right if it names the
broken host after it broke. Prints a table of detectors and profiles.
"""

import argparse
import functools
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from benchmarks import fleets

from jaxrl_llm import fleet
from jaxrl_llm.fleet import denoiser

_SIZES = (4, 8, 16, 32, 64, 128)  # Hosts; larger ones are like these.


class Outcome(NamedTuple):
  """What a detector said of an episode."""

  right: bool
  wrong: bool  # An alarm, and not the right one.
  delay: float  # Seconds from onset to a right alarm.
  kind: str  # Of the fault; '' without one.


def fitted(episodes: int = 8, **training: int):
  """Denoisers that learned from healthy fleets of seeds of their own."""
  windows = []
  for i in range(episodes):
    drawn = fleets.episode(10**6 + i, hosts=16, faulty=False)
    x = fleet.fill_gaps(drawn.x[[r == "trainer" for r in drawn.roles]])
    windows.append(denoiser.cut(denoiser.standardized(x)))
  return denoiser.fit(jax.random.key(0), np.concatenate(windows), **training)


def detectors(params) -> dict[str, Callable]:
  """What is compared; thresholds were chosen on seeds from 2·10⁶ on."""
  median = functools.partial(fleet.detect, score=fleet.median_scores)
  joint = lambda x: fleet.joint(fleet.median_scores(x))
  return {
    "median": median,
    "LSTM-VAE": functools.partial(
      fleet.detect,
      score=functools.partial(denoiser.denoised_scores, params),
      threshold=THRESHOLD_VAE,
    ),
    "median, no continuity": functools.partial(median, hold_s=0.0),
    "median, all metrics as one": functools.partial(
      fleet.detect, score=joint, threshold=THRESHOLD_JOINT
    ),
  }


THRESHOLD_VAE, THRESHOLD_JOINT = 2.7, 0.6


def judge(detect: Callable, drawn: fleets.Episode) -> Outcome:
  """Runs a detector on an episode."""
  alarms = detect(drawn.x, roles=drawn.roles)
  right = [a for a in alarms if a.host == drawn.host and a.until > drawn.onset]
  wrong = len(alarms) > len(right)
  delay = right[0].until - drawn.onset if right else np.nan
  return Outcome(bool(right) and not wrong, wrong, delay, drawn.kind)


def summary(outcomes: list[Outcome]) -> dict[str, float]:
  """Precision, recall, F1, silence where all is well, and the delay."""
  faulty = [o for o in outcomes if o.kind]
  healthy = [o for o in outcomes if not o.kind]
  right, wrong = sum(o.right for o in outcomes), sum(o.wrong for o in outcomes)
  precision, recall = right / max(right + wrong, 1), right / max(len(faulty), 1)
  weak = [o.right for o in faulty if o.kind == "PCIe downgrading"]
  return {
    "precision": precision,
    "recall": recall,
    "F1": 2 * right / max(right + wrong + len(faulty), 1),
    "silent if healthy": 1 - np.mean([o.wrong for o in healthy]),
    "PCIe recall": np.mean(weak) if weak else np.nan,
    "median delay s": np.nanmedian([o.delay for o in faulty]),
  }


def campaign(
  episodes: int,
  *,
  hard: bool,
  compared: Mapping[str, Callable],
  first: int = 0,
  odd: float = fleets.ODD,
) -> dict[str, dict[str, float]]:
  """Detector -> what `summary` says of it."""
  found = {name: [] for name in compared}
  for i in range(first, first + episodes):
    drawn = fleets.episode(
      i,
      hosts=_SIZES[i // 2 % len(_SIZES)],
      hard=hard,
      faulty=i % 2 == 0,
      odd=odd,
    )
    for name, detect in compared.items():
      found[name].append(judge(detect, drawn))
  return {name: summary(outcomes) for name, outcomes in found.items()}


def cost(hosts: int, seconds: int = 900) -> None:
  """Prints what one call takes."""
  x = np.random.default_rng(0).standard_normal(
    (hosts, seconds, len(fleets.METRICS)), np.float32
  )
  x[np.random.default_rng(1).random(x.shape) < 0.01] = np.nan
  params = fitted(1)
  roles = ["trainer"] * hosts
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for name, detect in list(detectors(params).items())[:2]:
    took = []
    for _ in range(3):
      begun = time.perf_counter()
      detect(x, roles=roles)
      took.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
      f"{name}: {hosts} hosts x {seconds} s x {x.shape[2]} metrics"
      f" ({x.nbytes / 2**20:.0f} MiB): {min(took):.2f} s, memory"
      f" +{(peak - before) / 2**10:.0f} MiB"
    )


def main(arguments: list[str] | None = None) -> int:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--episodes", type=int, default=100, help="per profile")
  parser.add_argument("--first", type=int, default=0, help="seed of the first")
  parser.add_argument(
    "--odd", type=float, default=fleets.ODD, help="size of odd healthy hosts"
  )
  parser.add_argument("--cost", action="store_true", help="time one call")
  options = parser.parse_args(arguments)
  if options.cost:
    cost(1024)
    return 0
  compared = detectors(fitted())
  for hard in (False, True):
    table = campaign(
      options.episodes,
      hard=hard,
      compared=compared,
      first=options.first,
      odd=options.odd,
    )
    print(f"\n{'hard' if hard else 'normal'}, {options.episodes} episodes\n")
    print("| detector |", " | ".join(table["median"]), "|")
    print("|---" * (1 + len(table["median"])) + "|")
    for name, row in table.items():
      print(f"| {name} |", " | ".join(f"{x:.3f}" for x in row.values()), "|")
  return 0


if __name__ == "__main__":
  sys.exit(main())
