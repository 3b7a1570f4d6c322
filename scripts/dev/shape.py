"""Prints what the package costs to read and to change.

    python scripts/dev/shape.py [--run]

Every line is a measure and its goal. `--run` also trains VAPO for one step on a
CPU, and counts the files that it imports and the calls that lead to its loss.
"""

import ast
import collections
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / name) for name in ("", "scripts")]

from parts import program  # noqa: E402

from jaxrl_llm import config  # noqa: E402

_PACKAGE = _ROOT / "jaxrl_llm"
_ZOO = "estimators", "losses", "methods"
# Names, settings and inputs of single methods.
_OF_A_METHOD = re.compile(
  r"""hapo|evpo|maxrl|turn_gae|["']ewma["']|interpolate|likelihood|["']given["']|"""
  r"policy_gradient\b|cispo|gspo|demonstrations|halves|[\"']categorical[\"']|"
  r"arrol|unsolved|drop_pivot|agree_share|max_distance|ess_scale|entropy_tau|"
  r"gradient_norms|keep_weights|answer_format|ensemble|share_in|replay_for|"
  r"distillation|poise|temperature_state"
)
# Measure -> (what it is, its goal).
GOALS = {
  "named": ("lines outside methods, estimators and losses that name one", 15),
  "tables": ("tables of parts in learner/", 6),
  "untyped_config": ("`config: Any`", 5),
  "untyped": ("parameters without a type", 500),
  "keys": ("keys of a config, without those of single methods", 186),
  "lines": ("lines of code", 21_500),
}
GOALS_OF_A_RUN = {
  "imported": ("files that one step of VAPO on a CPU imports", 150),
  "frames": ("calls from train.py to the policy loss, in our files", 14),
}
# Runs train.py, prints the stack at the first policy loss, then the modules.
_WATCHED = """
import runpy, sys, traceback
from jaxrl_llm import losses
real, seen = losses.clipped_policy_loss, []
def watched(*args, **kwargs):
  if not seen:
    seen.append(0)
    own = [x for x in traceback.extract_stack()[:-1]
           if "jaxrl_llm/" in x.filename or "/scripts/" in x.filename]
    print("frames", len(own))
  return real(*args, **kwargs)
watched.__wrapped__ = real
losses.clipped_policy_loss = watched
try:
  runpy.run_path(sys.argv[0], run_name="__main__")
finally:
  print("imported", sum(x.split(".")[0] == "jaxrl_llm" for x in sys.modules))
"""


@functools.cache
def _files() -> dict[pathlib.Path, str]:
  return {x: x.read_text("utf-8") for x in sorted(_PACKAGE.rglob("*.py"))}


def code_lines(text: str) -> int:
  """Counts lines that are neither empty nor comments nor docstrings."""
  kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
  documented = (x for x in ast.walk(ast.parse(text)) if isinstance(x, kinds))
  left = dict(enumerate(text.splitlines(), start=1))
  for node in documented:
    if ast.get_docstring(node) is not None:
      for line in range(node.body[0].lineno, node.body[0].end_lineno + 1):
        left.pop(line, None)
  return sum(x.strip()[:1] not in ("", "#") for x in left.values())


def _untyped(text: str) -> int:
  kinds = ast.FunctionDef, ast.AsyncFunctionDef
  functions = (x for x in ast.walk(ast.parse(text)) if isinstance(x, kinds))
  every = (
    x
    for f in functions
    for x in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
  )
  return sum(
    x.annotation is None and x.arg not in ("self", "cls") for x in every
  )


def _tables(text: str) -> int:
  """Counts dictionaries of a module; sets of names are none."""
  kinds = ast.Assign, ast.AnnAssign
  found = (x for x in ast.parse(text).body if isinstance(x, kinds))
  return sum(isinstance(x.value, ast.Dict) for x in found)


def measures() -> collections.Counter[str]:
  """Returns the measures of `GOALS`."""
  of_all = [x for x in config.KEYS if not re.match(r"method\.\w+\.", x)]
  found = collections.Counter(keys=len(of_all))
  for path, text in _files().items():
    room, *_ = path.relative_to(_PACKAGE).parts
    # That file lists the names of earlier versions.
    if room not in _ZOO and path.stem != "moved":
      found["named"] += sum(
        map(bool, map(_OF_A_METHOD.search, text.splitlines()))
      )
    if room == "learner":
      found["tables"] += _tables(text)
    found["untyped_config"] += text.count("config: Any")
    found["untyped"] += _untyped(text)
    found["lines"] += code_lines(text)
  return found


def of_a_run() -> dict[str, int]:
  """Trains for a step, and returns the measures of `GOALS_OF_A_RUN`."""
  with tempfile.TemporaryDirectory() as folder:
    arguments = ["--config=vapo", f"--workdir={folder}/run"]
    small = {
      "run.steps": 1,
      "value.pretrain_steps": 0,
      "data.prompts_per_step": 4,
      "data.group_size": 4,
      "optimizer.policy.mini_batch": 16,
      "optimizer.value.mini_batch": 16,
      "sampler.max_response_length": 16,
      "reward.overlong_buffer": 0,
      "eval.problems": 2,
      "eval.samples": 1,
    }
    arguments += [f"--config.{key}={value}" for key, value in small.items()]
    code = (
      f"import sys; sys.argv = {['scripts/train.py', *arguments]}" + _WATCHED
    )
    done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=_ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ".:scripts"},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
  pairs = re.findall(r"^(frames|imported) (\d+)$", done.stdout, re.M)
  return {name: int(value) for name, value in pairs}


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command line."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--run", action="store_true", help="also train a step")
  options = parser.parse_args(arguments)
  found, goals = dict(measures()), dict(GOALS)
  if options.run:
    found |= of_a_run()
    goals |= GOALS_OF_A_RUN
  for name, (what, goal) in goals.items():
    print(f"{found[name]:6,}  {what}; goal {goal:,}")


if __name__ == "__main__":
  sys.exit(main())
