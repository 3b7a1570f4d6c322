"""Scores critics against Monte Carlo values of the same states.

    python scripts/study.py critic --workdir=RUN [--step=N] [--out=DIR]
        [--critics=RUN,RUN:20,CRITIC_DIR] [--positions=10] [--continuations=8]
        [--tokens=1e6] [--set KEY=VALUE ...]
    python scripts/study.py critic --workdir=MODEL_DIR --config=METHOD[:PRESET]

The policy is that of --workdir: a run's initial policy, its checkpoint with
--step, or a model directory for the problems of --config. It answers held-out
problems and continues every response --continuations times from each of
--positions states; their mean return is the true value of the state. Critics
are those of runs (RUN: the pretrained critic, RUN:STEP: the critic of a
checkpoint) and exported ones; by default the run's own.

OUT/truth.jsonl has the continuations. Running the same command again resumes,
and --tokens limits the generated tokens; responses are continued in random
order, so that a part of them gives the same table with larger errors.

OUT/critic.csv and critic.png have, by position, difficulty (quartiles of the
problems, 1 is the hardest) and turn: the number of states, the mean true value,
and the ceiling, 1 - E[Var(R | s)] / Var(R), the maximum explained variance of
any critic. For every critic they have its explained variance,
1 - Var(R - V) / Var(R), the rank correlation of V with the true value, and the
bias, the mean of V minus the true value. In responses of chain_sum, the first
wrong character is marked.
"""

import argparse
import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from parts import program
from scipy import stats
from studies.results import write_csv
from studies.truth import States, sample_truth

from jaxrl_llm import checkpoint, models, workdir
from jaxrl_llm import config as config_lib
from jaxrl_llm.data.tasks import ChainProblem
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import core
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.tools.report.figure import figure
from jaxrl_llm.trainer import build
from jaxrl_llm.trainer.value_pretraining import FOLDER

_SHOWN = 4


def values_of(name: str, config: Any, judged: Any) -> np.ndarray:
  """Returns the values of a critic before every token, [B, T].

  Args:
    name: RUN, RUN:STEP, or the directory of an exported critic.
    config: settings of the policy's run, which an exported critic uses.
    judged: B responses.

  Raises:
    InputError: The critic does not exist.
  """
  path, _, step = name.rpartition(":")
  if not (path and step.isdecimal()):
    path, step = name, None
  folder = pathlib.Path(path)
  of_run = workdir.is_workdir(folder)
  if of_run:
    config = workdir.read_config(folder)
  else:
    config = config.copy_and_resolve_references()
    config.value.init_from = path
    if not core.compose(config).critic:
      config.estimator.name, config.method.use = "gae", ()
  run = build.make_run(config)
  critic, make = run.learner.critic, run.critic_params
  if critic is None:
    raise InputError(f"{name}: this run has no critic; choose another run")
  if of_run and step is None:
    shapes = models.merge(critic.params)
    make = lambda _: checkpoint.load_tree(folder / FOLDER, shapes)
  elif of_run:
    number = workdir.find_step(folder, step)
    make = lambda _: workdir.restore_params(
      folder, number, "critic", critic.params
    )
  learner = run.learner
  if view := learner.algorithm.critic.view:
    # The run's own data may differ: take the answers from these prompts.
    answers = {prompt.example_id: prompt.answer for prompt in judged.prompts}
    view = functools.partial(view.fn, answers.__getitem__, run.tokenizer)
    learner = dataclasses.replace(learner, views={"critic": view})
  rollout, state = judged.responses.rollout, learner.init(critic=make)
  values = learner.read(state, "values", rollout)
  run.judge.close()
  run.worker.close()
  return values


def ceiling(returns: np.ndarray) -> float:
  """Returns 1 - E[Var(R | s)] / Var(R), a critic's maximum, of R [S, K]."""
  if not returns.var():  # The policy is always right, or never.
    return float("nan")
  return 1.0 - float(returns.var(axis=1, ddof=1).mean() / returns.var())


def scores(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
  """Returns the scores of a critic's values [S] for returns [S, K]."""
  truth, spread = returns.mean(axis=1), returns.var()
  varied = np.ptp(values) and np.ptp(truth)
  error = (returns - values[:, None]).var()
  return {
    "explained": 1.0 - float(error / spread) if spread else float("nan"),
    "rank": stats.spearmanr(values, truth)[0] if varied else float("nan"),
    "bias": float((values - truth).mean()),
  }


def tabulate(
  states: States,
  problems: np.ndarray,
  critics: Mapping[str, np.ndarray],
  positions: int,
) -> list[dict[str, Any]]:
  """Returns the rows of the table: all states, then groups of states.

  Args:
    states: S states.
    problems: int [S], the problem of each state.
    critics: critic -> values [S].
    positions: number of groups by position.
  """
  truth = states.returns.mean(axis=1)
  _, index = np.unique(problems, return_inverse=True)
  solved = np.bincount(index, truth) / np.bincount(index)
  quarter = stats.rankdata(solved) / len(solved) * 4
  bins = np.minimum((states.position * positions).astype(int), positions - 1)
  groups = {
    "all": np.zeros(len(truth), int),
    "position": (bins + 0.5) / positions,
    "difficulty": np.ceil(quarter).astype(int)[index],
    "turn": states.turn + 1,
  }
  rows = []
  for by, keys in groups.items():
    for key in np.unique(keys):
      own = keys == key
      returns = states.returns[own]
      row = {"by": by, "group": key, "states": int(own.sum())}
      row |= {"truth": float(truth[own].mean()), "ceiling": ceiling(returns)}
      for name, values in critics.items():
        found = scores(values[own], returns)
        row |= {f"{name} {k}": x for k, x in found.items()}
      rows.append(row)
  return rows


def first_wrong(question: str, text: str) -> int | None:
  """Returns the index of the first character that differs from the solution.

  Returns None if there is none, or if the question is not of chain_sum.
  """
  if not re.fullmatch(r"[0-9]+([-+][0-9]+)+\?", question):
    return None
  terms = tuple(int(t) for t in re.findall(r"[-+]?[0-9]+", question))
  solution = ChainProblem(terms).solution
  differs = (i for i, (a, b) in enumerate(zip(text, solution)) if a != b)
  return next(differs, None)


def draw(path, title, rows, states, critics, judged, values) -> None:
  """Plots the table, calibration, and values along four responses.

  Args:
    path: PNG file to write.
    title: title of the figure.
    rows: result of `tabulate`.
    states: S states.
    critics: critic -> values [S].
    judged: B responses.
    values: values of the first critic along the responses, [B, T]; None without
      a critic.
  """
  lines = {"ceiling": "ceiling"} | {f"{x} explained": x for x in critics}
  with figure(path, 2, 3, title=title) as (_, axes):
    for axis, by in zip(axes, ("position", "difficulty", "turn")):
      own = [row for row in rows if row["by"] == by]
      x = [row["group"] for row in own]
      for key, label in lines.items():
        axis.plot(x, [row[key] for row in own], "o-", label=label)
      axis.set(title=f"Explained variance by {by}", ylim=(-0.05, 1.02))
      if by != "position":
        axis.set_xticks(x)
    axes[0].legend(loc="upper left")
    truth = states.returns.mean(axis=1)
    for name, x in critics.items():
      tenths = np.array_split(np.argsort(x, kind="stable"), 10)
      pairs = [(x[i].mean(), truth[i].mean()) for i in tenths if len(i)]
      axes[3].plot(*zip(*pairs), "o-", label=name)
    ends = truth.min(), truth.max()
    axes[3].plot(ends, ends, "--", color="#999999")
    axes[3].set(title="Calibration", xlabel="V", ylabel="Mean return")
    axes[5].axis("off")
    shown = examples(judged) if values is not None else []
    if not shown:  # For example, with one response per problem.
      axes[4].axis("off")
      return
    axes[4].set(title="Values along four responses", xlabel="Token")
    for row in shown:
      length = judged.responses.rollout.lengths[row]
      question = judged.prompts[row].question
      right = "right" if judged.responses.correct[row] else "wrong"
      along = values[row, :length]
      (line,) = axes[4].plot(along, label=f"{question[:30]} {right}")
      at = first_wrong(question, judged.texts[row])
      if at is not None and at < length:
        axes[4].plot(at, along[at], "x", color=line.get_color(), markersize=9)
    names = axes[4].get_legend_handles_labels()
    mark = "Responses; x: the first wrong character"
    axes[5].legend(*names, title=mark, loc="center left")


def examples(judged: Any) -> list[int]:
  """Returns rows of a right and a wrong response for each of two problems."""
  found = {}
  for row, prompt in enumerate(judged.prompts):
    own = found.setdefault(prompt.question, {})
    own.setdefault(bool(judged.responses.correct[row]), row)
  both = [own for own in found.values() if len(own) == 2][: _SHOWN // 2]
  return [own[is_right] for own in both for is_right in (True, False)]


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of the command line."""
  add = parser.add_argument
  add("--workdir", required=True, help="folder of a run or of a model")
  add("--config", metavar="METHOD[:PRESET]", help="data of a model")
  add("--set", **program.REPEATED, metavar="KEY=VALUE", help="a setting")
  add("--out", help="output folder; default: that of the run")
  add("--step", help="checkpoint of the policy; default: the initial policy")
  add("--critics", help="names, such as A,B:20; default: the run's own")
  add("--positions", type=int, default=10, help="states per response")
  add("--continuations", type=int, default=8, help="number per state")
  add("--tokens", type=float, default=float("inf"), help="token budget")


def make_config(options: argparse.Namespace) -> Any:
  """Returns the settings of the run, or of --config for a model.

  Raises:
    InputError: --config is missing, or --set is invalid.
  """
  folder = pathlib.Path(options.workdir)
  if workdir.is_workdir(folder):
    config = workdir.read_config(folder)
  elif options.config:
    config = config_lib.method(*options.config.split(":"))
    config.model.path = options.workdir
  else:
    raise InputError(
      f"--workdir={folder} has no run; for a model give --config"
    )
  changes = {}
  for change in options.set:
    key, _, text = change.partition("=")
    try:
      changes[key] = ast.literal_eval(text)
    except (SyntaxError, ValueError):
      changes[key] = text
  config_lib.update(config, changes)
  return config


def own_critic(folder: pathlib.Path, step: str | None) -> str:
  """Returns the name of a run's own critic; '' without one."""
  if step is not None and core.compose(workdir.read_config(folder)).critic:
    return f"{folder}:{workdir.find_step(folder, step)}"
  return str(folder) if (folder / FOLDER).exists() else ""


def run(options: argparse.Namespace) -> None:
  """Samples continuations, scores critics, plots and prints."""
  folder = pathlib.Path(options.workdir)
  least = {"positions": (1, np.inf), "continuations": (2, np.inf)}
  program.check_ranges(options, **least)
  config = make_config(options)
  options.out = out = pathlib.Path(options.out or folder)
  critics = options.critics
  if critics is None:
    critics = own_critic(folder, options.step)
  owner = build.make_run(config)
  policy = owner.learner.policy
  if options.step is None:
    params = models.Params(*policy.split(owner.learner.initial_params()))
  else:
    step = workdir.find_step(folder, options.step)
    params = workdir.restore_params(folder, step, "policy", policy.params)
  weights = Weights(owner.transfer.send(params, 0).params)
  judged = owner.evaluators[0](weights.params).judged
  out.mkdir(parents=True, exist_ok=True)
  states = sample_truth(owner, weights, judged, options)
  owner.judge.close()
  owner.worker.close()
  along = {
    name: values_of(name, config, judged)
    for name in filter(None, critics.split(","))
  }
  at = states.row.astype(int), states.at.astype(int)
  found = {name: x[at] for name, x in along.items()}
  problems = np.asarray([x.example_id for x in judged.prompts])[at[0]]
  rows = tabulate(states, problems, found, options.positions)
  short = lambda x: f"{x:.4g}" if isinstance(x, float) else x
  lines = [[short(x) for x in row.values()] for row in rows]
  write_csv(out / "critic.csv", rows[0], lines)
  best = f"at most {rows[0]['ceiling']:.3f}"
  reached = [f"{x} explains {rows[0][f'{x} explained']:.3f}" for x in found]
  title = "; ".join([*reached, best])
  first = next(iter(along.values()), None)
  draw(out / "critic.png", title, rows, states, found, judged, first)
  count = f"{len(states.at)} states, {options.continuations} returns each"
  print(f"{title}; {count}; wrote critic.png and critic.csv into {out}")
