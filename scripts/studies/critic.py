"""Draws what a critic thinks of responses that it has not seen.

    python scripts/study.py critic --workdir=runs/vapo [--out=runs/vapo]
    python scripts/study.py critic --workdir=DIR --step=20 --continuations=8

The critic is the one that value pretraining left in the folder of a run, the
responses are those of the run's first policy to the held-out problems; with
--step both are those of a checkpoint. Writes OUT/critic.png with its numbers in
critic.csv; prints the explained variance. A response of the task chain_sum has
its first wrong character marked.

--continuations=K lets the policy write K other ends to every response from ten
places on. How far the outcome is open there bounds what any critic can explain:
the column `ceiling`.
"""

import argparse
import dataclasses
import pathlib
import re
from typing import NamedTuple

import numpy as np
from studies.results import write_csv

from jaxrl_llm import checkpoint, masked, models, workdir
from jaxrl_llm.data.tasks import ChainProblem
from jaxrl_llm.errors import InputError
from jaxrl_llm.report.figure import draw_band, figure
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.trainer import build
from jaxrl_llm.trainer.value_pretraining import FOLDER
from jaxrl_llm.types import Status, take_rows

_BINS = 10
_SHOWN = 4


class Judgement(NamedTuple):
  """Values of responses [B, T], and what became of them."""

  values: np.ndarray
  returns: np.ndarray  # float [B, T].
  mask: np.ndarray  # bool [B, T].
  correct: np.ndarray  # bool [B].
  questions: list[str]
  texts: list[str]
  ceilings: list[float]  # One per bin; empty if not requested.


def judge(
  folder: pathlib.Path, step: int | None, continuations: int
) -> Judgement:
  """Has a critic of the run look at held-out responses.

  Args:
    folder: of the run.
    step: of the checkpoint that has critic and policy; None: the pretrained
      critic, and the policy that it learned from.
    continuations: other ends of every response and bin; 0 is none.

  Raises:
    InputError: it is no folder of a run with a pretrained critic.
  """
  run = build.make_run(workdir.read_config(folder))
  if run.pretraining is None:
    raise InputError(
      f"--workdir={folder}: its run had no value pretraining; choose another"
    )
  learner = restore(run.learner, folder, step)
  params = run.transfer.send(learner.params("policy"), 0).params
  judged = run.evaluators[0](params).judged
  responses = judged.responses
  batch = run.pretraining.learner.measure(
    learner, "critic", responses, np.random.default_rng(0)
  )
  ceilings = []
  writer = dataclasses.replace(
    run.evaluators[0].writer, group_size=continuations or 1
  )
  for bin_ in range(_BINS if continuations else 0):
    print(f"continuations, place {bin_ + 1} of {_BINS}", flush=True)
    ceilings.append(ceiling(writer, Weights(params), judged, bin_))
  run.judge.close()
  run.worker.close()
  return Judgement(
    values=np.asarray(batch.experience["old_values"]),
    returns=np.asarray(batch.experience["returns"]),
    mask=np.asarray(batch.experience["value_mask"]),
    correct=np.asarray(responses.correct),
    questions=[p.question for p in judged.prompts],
    texts=list(judged.texts),
    ceilings=ceilings,
  )


def restore(learner, folder: pathlib.Path, step: int | None):
  """The learner's state, as far as critic and policy go; see `judge`."""
  critic = learner.critic
  if step is None:
    shapes = models.merge(critic.params)
    pretrained = checkpoint.load_tree(folder / FOLDER, shapes)
    return learner.init(critic=lambda _: pretrained)
  step = workdir.find_step(folder, step)
  policy, critic = (
    workdir.restore_params(
      folder, step, name, model.params, base_of="policy" * model.shares_base
    )
    for name, model in (("policy", learner.policy), ("critic", critic))
  )
  state = learner.init(critic=lambda _: critic)
  trained = learner.policy.split(policy).trained
  return state.with_model("policy", state.policy.replace(trained=trained))


def places(lengths: np.ndarray, bin_: int) -> np.ndarray:
  """The token of every response that stands for a bin, int [B]."""
  at = ((bin_ + 0.5) / _BINS * lengths).astype(np.int32)
  return np.minimum(at, lengths - 1)


def ceiling(writer: ResponseWriter, weights: Weights, judged, bin_) -> float:
  """Most that a critic can explain in a bin: 1 - E[Var(R | s)] / Var(R).

  Args:
    writer: of as many continuations as its groups have responses.
    weights: of the policy.
    judged: responses that have ended.
    bin_: index of the bin.
  """
  rollout, count = judged.responses.rollout, writer.group_size
  rows = np.repeat(np.arange(len(rollout.lengths)), count)
  begun = take_rows(rollout, rows)
  at = places(begun.lengths, bin_)
  kept = np.arange(begun.tokens.shape[1]) < at[:, None]
  # No number twice, nor one that a first end had: each has its own noise.
  numbers = (1 + bin_) * len(rows) + np.arange(len(rows))
  begun = begun.replace(
    lengths=at,
    tokens=np.where(kept, begun.tokens, 0),
    mask=begun.mask & kept,
    status=np.full_like(begun.status, Status.TRUNCATED),
    group_id=rows.astype(np.int32),
    sample_id=numbers.astype(np.int32),
  )
  written = writer.write(begun, weights)
  ended = writer.judge(written, [judged.prompts[row] for row in rows])
  returns = ended.responses.rewards.reshape(-1, count)
  if not returns.var():  # The policy is always right, or never.
    return float("nan")
  return 1.0 - float(returns.var(axis=1, ddof=1).mean() / returns.var())


def binned(judgement: Judgement) -> list[dict[str, float]]:
  """A row for each tenth of a response: V of right and wrong ones, and EV."""
  lengths = judgement.mask.sum(axis=1)
  rows = []
  for bin_ in range(_BINS):
    pick = np.arange(len(lengths)), places(lengths, bin_)
    value, outcome = judgement.values[pick], judgement.returns[pick]
    every = np.ones(len(value), bool)
    explained = masked.explained_variance(value, outcome, every)
    row = {"position": (bin_ + 0.5) / _BINS, "explained": float(explained)}
    if judgement.ceilings:
      row["ceiling"] = judgement.ceilings[bin_]
    for name, is_right in (("right", True), ("wrong", False)):
      own = value[judgement.correct == is_right]
      own = own if own.size else np.array([np.nan])
      row[name], row[f"{name}_sd"] = float(own.mean()), float(own.std())
    rows.append(row)
  return rows


def first_wrong(question: str, text: str) -> int | None:
  """Place of the first character that the clean solution has not; or None."""
  if not re.fullmatch(r"[0-9]+([-+][0-9]+)+\?", question):
    return None
  terms = tuple(int(t) for t in re.findall(r"[-+]?[0-9]+", question))
  solution = ChainProblem(terms).solution
  differs = (i for i, (a, b) in enumerate(zip(text, solution)) if a != b)
  return next(differs, None)


def draw(judgement: Judgement, path: pathlib.Path, title: str) -> None:
  """Draws V by position, EV by position, and V along responses."""
  rows = binned(judgement)
  column = lambda name: np.array([row[name] for row in rows])
  with figure(path, 2, 2, title=title) as (_, axes):
    for name in ("right", "wrong"):
      bands = map(column, ("position", name, f"{name}_sd"))
      draw_band(axes[0], *bands, label=f"{name} responses")
    axes[0].set(title="Values: mean and standard deviation")
    axes[1].plot(column("position"), column("explained"), label="the critic")
    if judgement.ceilings:
      label = "the best possible critic"
      axes[1].plot(column("position"), column("ceiling"), label=label)
    axes[1].set(title="Explained variance", ylim=(0, 1))
    for axis in axes[:2]:
      axis.set(xlabel="Part of the response that is written")
      axis.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
    for row in _examples(judgement):
      length = int(judgement.mask[row].sum())
      value = judgement.values[row, :length]
      name = "right" if judgement.correct[row] else "wrong"
      (line,) = axes[2].plot(value, label=f"{judgement.questions[row]} {name}")
      at = first_wrong(judgement.questions[row], judgement.texts[row])
      if at is not None and at < length:
        axes[2].plot(at, value[at], "x", color=line.get_color(), markersize=9)
    axes[2].set(title="Values along four responses", xlabel="Token")
    axes[3].axis("off")
    lines, names = axes[2].get_legend_handles_labels()
    title = "Responses; x: the first wrong character"
    axes[3].legend(lines, names, title=title, loc="center left")


def _examples(judgement: Judgement) -> list[int]:
  """A right and a wrong response to each of a few problems that have both."""
  found = {}
  for row, question in enumerate(judgement.questions):
    own = found.setdefault(question, {})
    own.setdefault(bool(judgement.correct[row]), row)
  both = [own for own in found.values() if len(own) == 2][: _SHOWN // 2]
  return [own[is_right] for own in both for is_right in (True, False)]


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Declares the flags of the command line."""
  add = parser.add_argument
  add("--workdir", required=True, help="folder of a run")
  add("--out", help="folder to write to; the run's by default")
  add("--step", type=int, help="of a checkpoint; that pretrained by default")
  add("--continuations", type=int, default=0, metavar="K", help="at least 2")


def run(options: argparse.Namespace) -> None:
  """Judges, draws and prints."""
  folder = pathlib.Path(options.workdir)
  out = pathlib.Path(options.out or folder)
  if options.continuations == 1 or options.continuations < 0:
    raise InputError(
      f"--continuations={options.continuations} must be 0 or at least 2"
    )
  judgement = judge(folder, options.step, options.continuations)
  explained = masked.explained_variance(
    judgement.values, judgement.returns, judgement.mask
  )
  out.mkdir(parents=True, exist_ok=True)
  when = f"step {options.step}" if options.step else "value pretraining"
  title = f"After {when} the critic explains {explained:.0%} of the variance"
  draw(judgement, out / "critic.png", title)
  rows = binned(judgement)
  write_csv(out / "critic.csv", rows[0], [row.values() for row in rows])
  if judgement.ceilings:
    print(f"at most {np.mean(judgement.ceilings):.3f}, mean over the places")
  print(
    f"explained variance {explained:.3f} on {len(judgement.texts)} held-out"
    f" responses; wrote critic.png and critic.csv into {out}"
  )
