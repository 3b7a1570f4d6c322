"""Writes the pages and the picture of docs/ that follow from the code.

    python scripts/docs.py [--out=docs]

config.md from the table of settings, api.md from the docstrings of the public
names, architecture.png from the rooms. tests/docs_test.py holds the pages that
are in the repository against what this writes.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import pathlib
import sys
import textwrap

from jaxrl_llm import config as config_lib

# Title of a section, its module, and its names: all that the module makes or
# hands on unless some are given.
_API = (
  ("Advantage estimators", "estimators", None),
  ("Losses", "losses", None),
  ("Masked reductions", "masked", None),
  ("Distributions", "distributions", None),
  (
    "Models",
    "models",
    ("load", "save", "make_policy", "make_value", "ModelFns", "ValueFns"),
  ),
  ("Settings", "config", ("default_config", "scaled", "describe")),
  ("A run from Python", "train.build", ("make_run",)),
  ("", "train.loop", ("train",)),
  ("Parts of your own", "register", None),
)
# Rooms from the top down: a room imports its own layer and those below it.
LAYERS = (
  (
    "a run",
    "config presets register workdir evaluate train",
  ),
  ("owners", "rollout learner"),
  ("parts", "data rewards sampling sync checkpoint metrics report"),
  ("functions", "estimators losses models sharding"),
  (
    "basics",
    "types masked distributions digest errors files signals processes workers"
    " plugin base_models",
  ),
)
TOOLS = "generate simulate fleet"


def config_page() -> str:
  """Every key, its default, what is allowed, and what it means."""
  lines = [
    "# Settings",
    "",
    "Every key of a config, written by `python scripts/docs.py` from",
    "`jaxrl_llm/config.py`, which validation and `--help_config` read too.",
    "The defaults are plain PPO on the embedded task; `configs/METHOD.py` sets",
    "what makes a method, `:PRESET` a scale, `--config.KEY=VALUE` anything",
    "once more. `None` is no number, where there may be one. Names of TRL and",
    "verl: [settings.md](settings.md).",
  ]
  by_group = itertools.groupby(
    config_lib.KEYS.items(), key=lambda item: item[0].split(".")[0]
  )
  for group, keys in by_group:
    lines += ["", f"## {group}", "", "| key | default | allowed | meaning |"]
    lines += ["|---|---|---|---|"]
    for path, key in keys:
      allowed = str(key.allowed) if key.allowed else ""
      cells = (f"`{path}`", f"`{key.default!r}`", allowed, key.meaning)
      row = " | ".join(cell.replace("|", "\\|") for cell in cells)
      lines.append(f"| {row} |")
  return "\n".join(lines) + "\n"


def api_page() -> str:
  """Signature and docstring of every public name."""
  lines = [
    "# API",
    "",
    "The public names, written by `python scripts/docs.py` from their",
    "docstrings. Arrays come first, every setting is a keyword; `[..., T]` is",
    "any number of leading axes with time last. The tests run the examples,",
    "which take `import jax`, `import jax.numpy as jnp` and the function as",
    "given.",
  ]
  for title, module_name, names in _API:
    module = importlib.import_module(f"jaxrl_llm.{module_name}")
    names = names or _public(module)
    lines += ["", f"## {title}"] if title else []
    for name in names:
      lines += ["", f"### {module_name}.{name}", ""]
      lines += _entry(getattr(module, name))
  return "\n".join(lines) + "\n"


def _public(module) -> list[str]:
  """Public functions of a file in its order, of a folder with its classes."""
  folder = hasattr(module, "__path__")
  names = [
    name
    for name, thing in vars(module).items()
    if (inspect.isfunction(thing) or (folder and inspect.isclass(thing)))
    and thing.__module__.startswith(module.__name__)
    and not name.startswith("_")
  ]
  return sorted(names) if folder else names


def _entry(thing) -> list[str]:
  source = textwrap.dedent(inspect.getsource(thing)).rstrip()
  if inspect.isclass(thing):  # Its fields say the rest, one a line.
    return ["```python", source, "```"]
  body = ast.parse(source).body[0].body[0]
  signature = source.split("\n")[: body.lineno - 1]
  summary, _, rest = inspect.getdoc(thing).partition("\n")
  lines = ["```python", *signature, "```", "", summary]
  return lines + (["", "```text", rest.strip("\n"), "```"] if rest else [])


def draw(path: pathlib.Path) -> None:
  """The way of data between the owners, and the rooms in their layers."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axis = plt.subplots(figsize=(10, 7.4), layout="constrained")
  axis.set(xlim=(0, 100), ylim=(0, 74))
  axis.axis("off")
  _draw_data(axis)
  _draw_rooms(axis)
  figure.savefig(path, dpi=130)
  plt.close(figure)


def _box(axis, x, y, width, height, color, title, text="") -> None:
  from matplotlib.patches import FancyBboxPatch

  axis.add_patch(
    FancyBboxPatch(
      (x, y),
      width,
      height,
      boxstyle="round,pad=0,rounding_size=0.8",
      facecolor=color,
      edgecolor="0.4",
      linewidth=0.8,
    )
  )
  middle = x + width / 2
  if not text:
    # Long names of narrow rooms: a letter of size 10 is about 0.78 wide.
    size = min(10, 10 * (width - 0.8) / (0.78 * len(title)))
    axis.text(
      middle, y + height / 2, title, ha="center", va="center", size=size
    )
    return
  axis.text(
    middle, y + height - 2.6, title, ha="center", size=11, weight="bold"
  )
  axis.text(middle, y + height - 3.6, text, ha="center", va="top", size=9)


def _arrow(axis, points, text, at) -> None:
  for start, end in itertools.pairwise(points):
    style = "-|>" if end is points[-1] else "-"
    arrow = {"arrowstyle": style, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, start, arrowprops=arrow)
  axis.text(*at, text, ha="center", va="bottom", size=9, style="italic")


def _draw_data(axis) -> None:
  axis.text(0, 71.5, "The way of data: one iteration of train/loop.py", size=12)
  owners = (
    (
      "PromptSource",
      "data/",
      "1  draw prompts\n\nsource, template,\norder, tokenizer",
    ),
    (
      "RolloutWorker",
      "rollout/ with sampling/, rewards/",
      "2  generate: the engine\n3  reward: workers judge\n\npartial responses",
    ),
    (
      "Learner",
      "learner/ with estimators/, losses/",
      "4  score   5  estimate\n6  pack     7  update\n\n"
      "policy, critic, optimizers",
    ),
  )
  for k, (title, rooms, text) in enumerate(owners):
    _box(axis, 36 * k, 54, 28, 14.5, "#dce9f5", title, f"{rooms}\n\n{text}")
  _arrow(axis, [(28, 61), (36, 61)], "prompts", (32, 61.6))
  _arrow(axis, [(64, 61), (72, 61)], "judged\nresponses", (68, 61.6))
  _arrow(
    axis,
    [(86, 54), (86, 48.5), (54, 48.5), (54, 54)],
    "8  weights and their version, checked by sync/",
    (70, 49),
  )
  _arrow(
    axis, [(46, 54), (46, 48.5), (14, 48.5), (14, 54)], "outcomes", (30, 49)
  )
  axis.text(
    50,
    44.2,
    "9  metrics/ logs, evaluate asks held-out problems, checkpoint/ keeps the"
    " states of the three owners.",
    ha="center",
    size=9,
  )


def _draw_rooms(axis) -> None:
  axis.text(0, 38.5, "The rooms: imports go down, never up", size=12)
  colors = ("#f6e3cf", "#dce9f5", "#e3f0dd", "#f3f0d2", "#ececec")
  for k, ((layer, rooms), color) in enumerate(zip(LAYERS, colors)):
    y = 30.5 - 6.4 * k
    axis.text(0, y + 2.4, layer, va="center", size=9, color="0.35")
    names = rooms.split()
    width = 88 / len(names)
    for j, name in enumerate(names):
      _box(axis, 12 + j * width, y, width - 1, 4.8, color, name)
  axis.text(
    12,
    1.2,
    f"Beside them, needed by no room: {', '.join(TOOLS.split())}. rollout and"
    " learner do not know each other.",
    size=9,
    color="0.35",
  )


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", default="docs", help="folder; docs")
  out = pathlib.Path(parser.parse_args(arguments).out)
  out.mkdir(parents=True, exist_ok=True)
  (out / "config.md").write_text(config_page(), encoding="utf-8")
  (out / "api.md").write_text(api_page(), encoding="utf-8")
  try:
    draw(out / "architecture.png")
  except ImportError:
    print("matplotlib is missing: pip install -e '.[plot]'", file=sys.stderr)
    return 2
  print(f"wrote config.md, api.md and architecture.png into {out}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
