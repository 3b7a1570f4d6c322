"""From the folders of finished runs to numbers per variant."""

import csv
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from studies.tables import Study

from jaxrl_llm import metrics, report
from jaxrl_llm.errors import InputError, as_input_error

# Phases outside of training: evaluation and saving.
_NOT_TRAINING = {"time/evaluate_s", "time/checkpoint_s"}
_CURVES = ("steps", "seconds", "tokens", "decode_steps", "accuracy")
# Phases of a step whose shares of the time are shown.
_PHASES = ("generate", "score", "update_value", "update_policy")


class Outcome(NamedTuple):
  """The evaluations of a run, K of them, and what it had cost until then."""

  steps: np.ndarray
  seconds: np.ndarray  # Training time only.
  tokens: np.ndarray  # Generated.
  decode_steps: np.ndarray  # Sequential decode steps.
  accuracy: np.ndarray
  split: Mapping[str, float] = {}  # Phase -> share of the training time.
  seed: int = 0

  def at_target(self, axis: str, target: float) -> float:
    """An axis at the first evaluation of at least `target`, or NaN."""
    reached = np.flatnonzero(self.accuracy >= target)
    return float(getattr(self, axis)[reached[0]]) if reached.size else np.nan

  def lead(self, other: "Outcome", axis: str) -> float:
    """Returns the lead in accuracy over another run, along an axis.

    It is the mean over the other's evaluations but the first, as far as both
    have come; accuracy between two evaluations lies on a line.
    """
    places = getattr(other, axis)
    shared = (places > 0) & (places <= getattr(self, axis)[-1])
    own = np.interp(places, getattr(self, axis), self.accuracy)
    return float((own - other.accuracy)[shared].mean())


def load_outcomes(
  study: Study, folder: pathlib.Path, seeds: Sequence[int]
) -> dict[str, list[Outcome]]:
  """Reads the runs of a study that have begun.

  Args:
    study: which variants.
    folder: has VARIANT/seedS, see `run_folder`.
    seeds: which seeds.

  Returns:
    variant name -> outcomes, one a seed whose run exists.
  """
  outcomes = {}
  for variant in study.variants:
    for seed in seeds:
      path = run_folder(folder, variant.name, seed)
      if (path / "metrics.jsonl").exists():
        run = outcome(report.load_run(path).rows)._replace(seed=seed)
        outcomes.setdefault(variant.name, []).append(run)
  return outcomes


def read_curves(
  study: Study, paths: Sequence[pathlib.Path]
) -> dict[str, list[Outcome]]:
  """Reads what `write_curves` wrote, here or in the docs, as `load_outcomes`.

  Raises:
    InputError: a file is no table of curves, or one of another study.
  """
  points = {}
  kinds = KeyError, TypeError, ValueError, csv.Error
  for path in paths:
    what, advice = f"{path}: not a curves.csv of this program", "name another"
    with as_input_error(what, advice, *kinds):
      text = path.read_text(encoding="utf-8")
      for row in csv.DictReader(text.splitlines()):
        key = row["variant"], int(row["seed"])
        point = [float(row[name]) for name in _CURVES]
        points.setdefault(key, []).append(point)
  names = [variant.name for variant in study.variants]
  for name in sorted({name for name, _ in points} - set(names)):
    raise InputError(f"{name!r} is no variant of this study")
  outcomes = {}
  for name, seed in sorted(points, key=lambda k: (names.index(k[0]), k[1])):
    columns = np.array(points[name, seed]).T
    outcomes.setdefault(name, []).append(Outcome(*columns, seed=seed))
  return outcomes


def run_folder(folder: pathlib.Path, variant: str, seed: int) -> pathlib.Path:
  """Returns the folder of the run of a variant and a seed."""
  name = "".join(c if c.isascii() and c.isalnum() else "_" for c in variant)
  return folder / name / f"seed{seed}"


def outcome(rows: Sequence[Mapping[str, Any]]) -> Outcome:
  """Curve and time split of a run's metrics, of its first evaluation set."""

  def totals(name: str) -> np.ndarray:
    return np.cumsum([row.get(name) or 0.0 for row in rows])

  # The start holds value pretraining, a price that some methods pay.
  seconds = totals("time/start_s") + totals("time/step_s")
  seconds -= sum(totals(name) for name in _NOT_TRAINING)
  names = [next(iter(report.accuracy_names([row])), "") for row in rows]
  accuracy = [row.get(name) for name, row in zip(names, rows)]
  accuracy = np.array(accuracy, np.float64)  # NaN where there is none.
  steps = np.array([row["step"] for row in rows], np.float64)
  costs = totals("rollout/tokens"), totals("rollout/decode_steps")
  evaluated, whole_s = np.isfinite(accuracy), max(seconds[-1], 1e-9)
  split = {p: totals(f"time/{p}_s")[-1] / whole_s for p in _PHASES}
  columns = (steps, seconds, *costs, accuracy)
  return Outcome(*(x[evaluated] for x in columns), split=split)


def write_table(
  study: Study, outcomes: Mapping[str, list[Outcome]], path: pathlib.Path
) -> str:
  """Writes a Markdown table: one row a variant, mean ± standard error.

  Args:
    study: its first variant gives the ratios.
    outcomes: of `load_outcomes`.
    path: file to write.

  Returns:
    The text.
  """
  base, target = outcomes.get(study.baseline, []), study.target
  rows = [_row(name, own, base, target) for name, own in outcomes.items()]
  text = (
    f"# {study.title}\n\n{study.question}\n\n"
    "Mean ± standard error over seeds. Accuracy is that of sampled answers to"
    " held-out problems, at the end and as the mean over all evaluations but"
    " the first. Seconds are those of training steps, and shares are of them;"
    " value pretraining counts, evaluation and saving do not. Tokens are those"
    " generated, decode steps the sampler's, one after the other. Ratios"
    f" compare what it took to {study.target:g} with {study.baseline}, and"
    " leads are of accuracy over the same seed's, the mean over the run, at"
    " equal steps and at equal tokens.\n\n"
    f"{report.markdown(rows)}\n"
  )
  path.write_text(text, encoding="utf-8")
  return text


def write_curves(
  outcomes: Mapping[str, list[Outcome]], path: pathlib.Path
) -> None:
  """Writes every evaluation as a line of CSV, to be drawn elsewhere."""
  rows = [
    [variant, run.seed, *(f"{x:.6g}" for x in point)]
    for variant, results in outcomes.items()
    for run in results
    for point in zip(*(getattr(run, name) for name in _CURVES))
  ]
  write_csv(path, ["variant", "seed", *_CURVES], rows)


def write_csv(
  path: pathlib.Path, names: Iterable[str], rows: Iterable[Iterable[Any]]
) -> None:
  """Writes rows below the names of their columns."""
  with open(path, "w", encoding="utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)


def _row(
  name: str, results: list[Outcome], base: list[Outcome], target: float
) -> dict[str, str]:
  """The cells of a variant, by the titles of their columns."""
  done = [r for r in results if r.steps.size]
  means = [r.accuracy[1:].mean() for r in done if r.accuracy.size > 1]
  seconds, ratio = _to_target(results, base, "seconds", target)
  decoded, their_ratio = _to_target(results, base, "decode_steps", target)
  return {
    "variant": name,
    "seeds": str(len(results)),
    "steps": str(min((int(r.steps[-1]) for r in done), default=0)),
    "final accuracy": mean_and_error([r.accuracy[-1] for r in done], ".3f"),
    "mean accuracy": mean_and_error(means, ".3f"),
    "lead by steps": mean_and_error(leads(done, base, "steps"), "+.3f"),
    "by tokens": mean_and_error(leads(done, base, "tokens"), "+.3f"),
    "seconds": mean_and_error([r.seconds[-1] for r in done], ".0f"),
    f"s to {target:g}": seconds,
    "ratio": ratio,
    f"decode steps to {target:g}": decoded,
    "their ratio": their_ratio,
    "tokens (M)": mean_and_error([r.tokens[-1] / 1e6 for r in done], ".2f"),
  } | {
    p: f"{np.mean([r.split[p] for r in results]):.0%}"
    for p in _PHASES
    if all(r.split for r in results)
  }


def leads(
  results: Sequence[Outcome], base: Sequence[Outcome], axis: str
) -> list[float]:
  """Leads over the baseline's runs of the same seeds, where both have come.

  Empty for the baseline itself.
  """
  others = {run.seed: run for run in base if run.steps.size > 1}
  pairs = [(run, others[run.seed]) for run in results if run.seed in others]
  return [
    run.lead(other, axis)
    for run, other in pairs
    if run is not other and run.steps.size > 1
  ]


def _to_target(
  results: list[Outcome], base: list[Outcome], axis: str, target: float
) -> tuple[str, str]:
  """Returns the cost to the target per seed, and its ratio to the baseline."""
  own = [r.at_target(axis, target) for r in results]
  theirs = [r.at_target(axis, target) for r in base]
  if not any(own):
    return "-", "-"  # These metrics do not have it.
  ratio = np.mean(own) / np.mean(theirs) if any(theirs) else np.nan
  return mean_and_error(own, ".0f"), mean_and_error([ratio], ".2f")


def mean_and_error(values: Sequence[float], form: str) -> str:
  """`mean ± standard error`; a dash where a seed has no value."""
  if not values or not np.isfinite(values).all():
    return "-"
  mean, error = metrics.mean_and_standard_error(values)
  if len(values) == 1:
    return f"{mean:{form}}"
  return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"
