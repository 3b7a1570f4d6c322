"""Plots the curves of runs in report.png and writes the page report.html.

  python scripts/report.py runs/vapo
  python scripts/report.py runs/seed0 runs/seed1 runs/seed2 --out=docs/seeds

Several runs are overlaid, with their mean if only their seeds differ.
"""

import pathlib
import sys

from parts import program

from jaxrl_llm import config
from jaxrl_llm.tools import report


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  add, names = parser.add_argument, ", ".join(report.PANELS)
  add("dirs", metavar="DIR", nargs="+", help="folder of a run")
  out = "output folder; default: DIR, or the common parent of several"
  add("--out", help=out)
  add("--panels", help=f"comma-separated subset of {names}")
  options = parser.parse_args(arguments)
  out = pathlib.Path(options.out or _folder(options.dirs))
  runs = [report.load_run(path) for path in options.dirs]
  out.mkdir(parents=True, exist_ok=True)
  picture, page = out / "report.png", out / "report.html"
  panels = options.panels.split(",") if options.panels else ()
  report.draw(runs, picture, panels=panels)
  defaults = config.default_config().to_dict()
  report.write_page(runs, picture, page, defaults=defaults)
  print(f"wrote {picture} and {page}")
  for run in runs:
    print(f"{run.name}: {_time_spent(run.rows)}")


def _folder(dirs: list[str]) -> pathlib.Path:
  """Returns the default output folder: DIR, the common parent, or '.'."""
  parents = {pathlib.Path(path).resolve().parent for path in dirs}
  if len(dirs) == 1:
    return pathlib.Path(dirs[0])
  return parents.pop() if len(parents) == 1 else pathlib.Path()


def _time_spent(rows: list) -> str:
  """Returns a line with the seconds of a run by phase, largest first."""
  spent = report.seconds_spent(rows)
  parts = sorted(spent.items(), key=lambda part: -part[1])
  shares = ", ".join(
    f"{name} {seconds:.0f} s" for name, seconds in parts if seconds >= 0.5
  )
  total = sum(spent.values())
  return f"{total:.0f} s, goodput {report.goodput(rows):.0%}: {shares}"


if __name__ == "__main__":
  sys.exit(main())
