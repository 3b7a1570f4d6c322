"""From the folders of finished runs to numbers per arm."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm import report
from jaxrl_llm.study.tables import Study

# What is no part of training: evaluation and saving.
_NOT_TRAINING = ("time/evaluate_s", "time/checkpoint_s")


class Curve(NamedTuple):
  """Evaluations of one run, K of them, and what it had cost until then."""

  steps: np.ndarray
  seconds: np.ndarray  # Of training alone.
  tokens: np.ndarray  # Generated.
  accuracy: np.ndarray


class Outcome(NamedTuple):
  """What a run came to."""

  curve: Curve
  seconds_to_target: float  # NaN where the target was not reached.
  tokens_to_target: float
  split: dict[str, float]  # Phase -> share of the training time.


def load_outcomes(
  study: Study, folder: pathlib.Path, seeds: Sequence[int]
) -> dict[str, list[Outcome]]:
  """Reads the runs of a study that have begun.

  Args:
    study: which arms.
    folder: has ARM/seedS, see `run_folder`.
    seeds: which seeds.

  Returns:
    arm name -> outcomes, one a seed whose run exists.
  """
  outcomes = {}
  for arm in study.arms:
    paths = [run_folder(folder, arm.name, seed) for seed in seeds]
    found = [p for p in paths if (p / "metrics.jsonl").exists()]
    if found:
      runs = [report.load_run(path) for path in found]
      outcomes[arm.name] = [outcome(run.rows, study.target) for run in runs]
  return outcomes


def run_folder(folder: pathlib.Path, arm: str, seed: int) -> pathlib.Path:
  """Where the run of an arm and a seed lives."""
  name = "".join(c if c.isascii() and c.isalnum() else "_" for c in arm)
  return folder / name / f"seed{seed}"


def outcome(rows: Sequence[Mapping[str, float]], target: float) -> Outcome:
  """Curve, moment of the target and time split of a run's metrics."""
  seconds = tokens = 0.0
  spent: dict[str, float] = {}
  points = []
  for row in rows:
    # The start holds value pretraining, a price that some methods pay.
    seconds += row.get("time/start_s", 0.0) + row.get("time/step_s", 0.0)
    seconds -= sum(row.get(name, 0.0) for name in _NOT_TRAINING)
    tokens += row.get("rollout/tokens", 0.0)
    for name, value in row.items():
      if name.startswith("time/") and name not in _NOT_TRAINING:
        spent[name] = spent.get(name, 0.0) + value
    accuracy = _accuracy(row)
    if accuracy is not None:
      points.append((row["step"], seconds, tokens, accuracy))
  curve = Curve(*np.asarray(points, np.float64).reshape(-1, 4).T)
  reached = np.flatnonzero(curve.accuracy >= target)
  first = reached[0] if reached.size else None
  spent.pop("time/step_s", None)
  total = max(seconds, 1e-9)
  return Outcome(
    curve=curve,
    seconds_to_target=np.nan if first is None else curve.seconds[first],
    tokens_to_target=np.nan if first is None else curve.tokens[first],
    split={
      name.removeprefix("time/").removesuffix("_s"): value / total
      for name, value in spent.items()
    },
  )


def _accuracy(row: Mapping[str, float]) -> float | None:
  """avg@k of the row's only evaluation set."""
  for name, value in row.items():
    if name.startswith("eval/") and "/avg@" in name:
      if not name.endswith("_se"):
        return value
  return None


def write_table(
  study: Study, outcomes: Mapping[str, list[Outcome]], path: pathlib.Path
) -> str:
  """Writes a Markdown table: one row an arm, mean ± standard error.

  Args:
    study: its baseline gives the ratios.
    outcomes: of `load_outcomes`.
    path: file to write.

  Returns:
    The text.
  """
  reached = f"s to {study.target:g}"
  lines = [
    f"# {study.title}",
    "",
    study.question,
    "",
    "Mean ± standard error over seeds. Accuracy is that of sampled answers to"
    " held-out problems. Seconds are those of training steps, and shares are"
    " of them; value pretraining counts, evaluation and saving do not. A ratio"
    f" compares the seconds to {study.target:g} with those of"
    f" {study.baseline}.",
    "",
    f"| arm | seeds | steps | final accuracy | best | seconds | {reached} |"
    " ratio | generated tokens | generate | score | value | policy |",
    "|---" * 13 + "|",
  ]
  base = _to_target(outcomes.get(study.baseline, []))
  for name, results in outcomes.items():
    lines.append(_line(name, results, base))
  text = "\n".join(lines) + "\n"
  path.write_text(text, encoding="utf-8")
  return text


def _line(name: str, results: list[Outcome], base: float) -> str:
  curves = [r.curve for r in results if r.curve.steps.size]
  own = _to_target(results)
  cells = [
    name,
    str(len(results)),
    str(min((int(c.steps[-1]) for c in curves), default=0)),
    mean_and_error([c.accuracy[-1] for c in curves], ".3f"),
    mean_and_error([c.accuracy.max() for c in curves], ".3f"),
    mean_and_error([c.seconds[-1] for c in curves], ".0f"),
    mean_and_error([r.seconds_to_target for r in results], ".0f"),
    f"{own / base:.2f}" if base > 0.0 and np.isfinite(own) else "-",
    mean_and_error([c.tokens[-1] / 1e6 for c in curves], ".2f", unit=" M"),
    *(
      f"{np.mean([r.split.get(phase, 0.0) for r in results]):.0%}"
      for phase in ("generate", "score", "update_value", "update_policy")
    ),
  ]
  return "| " + " | ".join(cells) + " |"


def _to_target(results: Sequence[Outcome]) -> float:
  """Mean seconds to the target; NaN unless every seed reached it."""
  seconds = [r.seconds_to_target for r in results]
  return float(np.mean(seconds)) if seconds else np.nan


def mean_and_error(
  values: Sequence[float], form: str, *, unit: str = ""
) -> str:
  """`mean ± standard error`; a dash where a seed has no value."""
  values = np.asarray(values, np.float64)
  if not values.size or not np.isfinite(values).all():
    return "-"
  text = f"{values.mean():{form}}"
  if values.size > 1:
    error = values.std(ddof=1) / np.sqrt(values.size)
    text += f" ± {error:{form}}"
  return text + unit
