"""Measures how well the detector finds the broken host of simulated fleets.

    python scripts/dev/fleet_campaign.py --episodes=1000
    python scripts/dev/fleet_campaign.py --simulator=unseen --only=median
    python scripts/dev/fleet_campaign.py --cost    # of one call at 1,024 hosts

Half of the episodes are healthy. An alarm is right if it names the broken host
after it broke; every other alarm counts as wrong. Prints a table of detectors
and profiles. Settings of the detector were chosen on the simulators `fleets`
and `units`, on seeds from 2,000,000 on; `unseen` is for reports alone.
"""

import argparse
import functools
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import fleet_variants
import fleets
import jax
import numpy as np

from jaxrl_llm import fleet
from jaxrl_llm.fleet import denoiser

_SIZES = (4, 8, 16, 32, 64, 128)  # Hosts; larger ones are like these.
SIMULATORS = {
  "fleets": fleets.episode,
  "units": fleet_variants.units,
  "unseen": fleet_variants.unseen,
}


class Outcome(NamedTuple):
  """Result of a detector on an episode."""

  right: bool  # The broken host was named after it broke.
  wrong: int  # Other alarms.
  delay: float  # Seconds from onset to a right alarm.
  kind: str  # Kind of the fault; '' without one.


def fitted(episodes: int = 8, **training: int):
  """Denoisers that learned from healthy fleets of seeds of their own."""
  windows = []
  for i in range(episodes):
    drawn = fleets.episode(10**6 + i, hosts=16, faulty=False)
    x = drawn.x[[role == "trainer" for role in drawn.roles]]
    windows.append(denoiser.cut(denoiser.standardized(x)))
  return denoiser.fit(jax.random.key(0), np.concatenate(windows), **training)


def detectors(params) -> dict[str, Callable]:
  """Returns the detectors that are compared, by name."""
  median = functools.partial(fleet.detect, score=fleet.median_scores)
  joint = lambda x: np.sqrt(
    np.mean(fleet.median_scores(x) ** 2, axis=-1, keepdims=True)
  )
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
  alarms = detect(drawn.x, None, drawn.roles)
  right = [a for a in alarms if a.host == drawn.host and a.until > drawn.onset]
  delay = right[0].until - drawn.onset if right else np.nan
  return Outcome(bool(right), len(alarms) - len(right), delay, drawn.kind)


def summary(outcomes: list[Outcome]) -> dict[str, float]:
  """Returns precision, recall, F1, share of silent healthy episodes, delay."""
  faulty = [o for o in outcomes if o.kind]
  healthy = [o for o in outcomes if not o.kind]
  right, wrong = sum(o.right for o in outcomes), sum(o.wrong for o in outcomes)
  return {
    "precision": right / max(right + wrong, 1),
    "recall": right / max(len(faulty), 1),
    "F1": 2 * right / max(right + wrong + len(faulty), 1),
    "silent if healthy": np.mean([o.wrong == 0 for o in healthy]),
    "median delay s": np.nanmedian([o.delay for o in faulty]),
  }


def recalls(outcomes: list[Outcome]) -> str:
  """Returns the recall of each kind of fault in one line."""
  kinds = sorted({o.kind for o in outcomes} - {""})
  found = {k: [o.right for o in outcomes if o.kind == k] for k in kinds}
  return ", ".join(f"{k} {sum(r)}/{len(r)}" for k, r in found.items())


def campaign(
  episodes: int,
  *,
  hard: bool,
  compared: Mapping[str, Callable],
  first: int = 0,
  simulator: str = "fleets",
) -> dict[str, list[Outcome]]:
  """Returns the outcomes of each detector."""
  found = {name: [] for name in compared}
  for i in range(first, first + episodes):
    drawn = SIMULATORS[simulator](
      i,
      hosts=_SIZES[i // 2 % len(_SIZES)],
      hard=hard,
      faulty=i % 2 == 0,
    )
    for name, detect in compared.items():
      found[name].append(judge(detect, drawn))
  return found


def cost(hosts: int, seconds: int = 900) -> None:
  """Prints what one call takes."""
  x = np.random.default_rng(0).standard_normal(
    (hosts, seconds, len(fleets.METRICS)), np.float32
  )
  x[np.random.default_rng(1).random(x.shape) < 0.01] = np.nan
  params = fitted(1)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for name, detect in list(detectors(params).items())[:2]:
    took = []
    for _ in range(3):
      begun = time.perf_counter()
      detect(x)
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
  parser.add_argument("--simulator", choices=SIMULATORS, default="fleets")
  parser.add_argument(
    "--only", choices=["median"], help="leave the other detectors out"
  )
  parser.add_argument("--cost", action="store_true", help="time one call")
  options = parser.parse_args(arguments)
  if options.cost:
    cost(1024)
    return 0
  if options.only == "median":
    compared = {"median": fleet.detect}
  else:
    compared = detectors(fitted())
  for hard in (False, True):
    outcomes = campaign(
      options.episodes,
      hard=hard,
      compared=compared,
      first=options.first,
      simulator=options.simulator,
    )
    table = {name: summary(found) for name, found in outcomes.items()}
    profile = "hard" if hard else "normal"
    print(f"\n{options.simulator}, {profile}, {options.episodes} episodes\n")
    print("| detector |", " | ".join(table["median"]), "|")
    print("|---" * (1 + len(table["median"])) + "|")
    for name, row in table.items():
      print(f"| {name} |", " | ".join(f"{x:.3f}" for x in row.values()), "|")
    print("\nmedian found:", recalls(outcomes["median"]), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
