"""Reads finished runs, and writes tables and curves per variant."""

import csv
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from studies.tables import Study

from jaxrl_llm import metrics
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.tools import report

# Phases outside of training: evaluation and saving.
_NOT_TRAINING = {"time/evaluate_s", "time/checkpoint_s"}
_CURVES = ("steps", "seconds", "tokens", "decode_steps", "accuracy")
# Phases of a step whose shares of the time are listed.
_PHASES = ("generate", "score", "update_value", "update_policy")


class Outcome(NamedTuple):
  """The K evaluations of a run, and its costs up to each of them."""

  steps: np.ndarray
  seconds: np.ndarray  # Training time only.
  tokens: np.ndarray  # Generated.
  decode_steps: np.ndarray  # Sequential decode steps.
  accuracy: np.ndarray
  split: Mapping[str, float] = {}  # Phase -> share of the training time.
  seed: int = 0

  def at_target(self, axis: str, target: float) -> float:
    """Returns the axis value where accuracy first reaches `target`, or NaN."""
    reached = np.flatnonzero(self.accuracy >= target)
    return float(getattr(self, axis)[reached[0]]) if reached.size else np.nan

  def lead(self, other: "Outcome", axis: str) -> float:
    """Returns the lead in accuracy over another run, along an axis.

    It is the mean over the other run's evaluations except the first, as far as
    both runs extend; accuracy is interpolated linearly between evaluations.
    """
    places = getattr(other, axis)
    shared = (places > 0) & (places <= getattr(self, axis)[-1])
    own = np.interp(places, getattr(self, axis), self.accuracy)
    return float((own - other.accuracy)[shared].mean())


def load_outcomes(
  study: Study, folder: pathlib.Path, seeds: Sequence[int]
) -> dict[str, list[Outcome]]:
  """Reads the started runs of a study.

  Args:
    study: the study.
    folder: folder with VARIANT/seedS, see `run_folder`.
    seeds: seeds to read.

  Returns:
    Variant name -> outcomes, one per seed whose run exists.
  """
  outcomes = {}
  for variant in study.variants:
    for seed in seeds:
      path = run_folder(folder, variant.name, seed)
      rows = path / "metrics.jsonl"
      if rows.exists() and rows.stat().st_size:  # Else it has just started.
        run = outcome(report.load_run(path).rows)._replace(seed=seed)
        outcomes.setdefault(variant.name, []).append(run)
  return outcomes


def read_curves(
  study: Study, paths: Sequence[pathlib.Path]
) -> dict[str, list[Outcome]]:
  """Reads files of `write_curves`; returns the same as `load_outcomes`.

  Raises:
    InputError: a file is not a table of curves, or is of another study.
  """
  points = {}
  kinds = KeyError, TypeError, ValueError, csv.Error
  for path in paths:
    what, advice = f"{path}: not a curves.csv of this program", "give another"
    with as_input_error(what, advice, *kinds):
      text = path.read_text(encoding="utf-8")
      for row in csv.DictReader(text.splitlines()):
        key = row["variant"], int(row["seed"])
        point = [float(row[name]) for name in _CURVES]
        points.setdefault(key, []).append(point)
  names = [variant.name for variant in study.variants]
  for name in sorted({name for name, _ in points} - set(names)):
    raise InputError(f"{name!r} is not a variant of this study")
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
  """Returns curve and time split of a run, for its first evaluation set."""

  def totals(name: str) -> np.ndarray:
    return np.cumsum([row.get(name) or 0.0 for row in rows])

  # The start includes value pretraining, a cost of some methods.
  seconds = totals("time/start_s") + totals("time/step_s")
  seconds -= sum(totals(name) for name in _NOT_TRAINING)
  names = [next(iter(metrics.accuracy_names([row])), "") for row in rows]
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
  """Writes a Markdown table: one row per variant, mean ± standard error.

  Args:
    study: the study; ratios are to its first variant.
    outcomes: result of `load_outcomes`.
    path: file to write.

  Returns:
    The text.
  """
  base, target = outcomes.get(study.baseline, []), study.target
  rows = [_row(name, own, base, target) for name, own in outcomes.items()]
  text = (
    f"# {study.title}\n\n{study.question}\n\n"
    "Mean ± standard error over seeds. Accuracy is that of sampled answers to"
    " held-out problems, at the end and as the mean over all evaluations except"
    " the first. Seconds, and the shares of them, are of training, including"
    " value pretraining but not evaluation and saving. Tokens are generated"
    " tokens; decode steps are the sampler's sequential steps. Ratios compare"
    f" the cost to reach {study.target:g} with {study.baseline}. Leads are in"
    " accuracy over the run of the same seed, averaged over the run, at equal"
    " steps and at equal tokens.\n\n"
    f"{report.markdown(rows)}\n"
  )
  path.write_text(text, encoding="utf-8")
  return text


def write_curves(
  outcomes: Mapping[str, list[Outcome]], path: pathlib.Path
) -> None:
  """Writes every evaluation as a line of CSV, for `read_curves`."""
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
  """Writes a CSV file: column names, then rows."""
  with open(path, "w", encoding="utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)


def _row(
  name: str, results: list[Outcome], base: list[Outcome], target: float
) -> dict[str, str]:
  """Returns the cells of a variant, by column title."""
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
  """Returns leads over the baseline's runs, for seeds that both have.

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
    return "-", "-"  # The metrics lack this axis.
  ratio = np.mean(own) / np.mean(theirs) if any(theirs) else np.nan
  return mean_and_error(own, ".0f"), mean_and_error([ratio], ".2f")


def mean_and_error(values: Sequence[float], form: str) -> str:
  """Returns `mean ± standard error`; a dash if a seed has no value."""
  if not values or not np.isfinite(values).all():
    return "-"
  mean, error = metrics.mean_and_standard_error(values)
  if len(values) == 1:
    return f"{mean:{form}}"
  return f"{mean:{form}} ± {error:{form.removeprefix('+')}}"
