"""Writes the pages of docs/ that are generated from the code.

    python scripts/dev/docs.py [--out=docs]

config.md is generated from the table of settings, api.md from the docstrings of
the public names. tests/docs_test.py checks that the pages in the repository are
up to date.
"""

import ast
import importlib
import inspect
import itertools
import operator
import pathlib
import sys
import textwrap

from jaxrl_llm import config as config_lib

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from parts import program  # noqa: E402

_OF_MODELS = ("load", "save", "make_policy", "make_value")
_OF_MODELS += ("ModelFns", "ValueFns")
_FRONT = ("train", "load", "Policy.generate", "Policy.evaluate", "Policy.save")
# Title of a section, its module, and its names (None: all public names that
# the module defines or re-exports).
_API = (
  ("Advantage estimators", "estimators", None),
  ("Losses", "losses", None),
  ("Masked reductions", "masked", None),
  ("Distributions", "distributions", None),
  ("Models", "models", _OF_MODELS),
  ("Settings", "config", ("method", "default_config", "scaled", "describe")),
  ("Training and using a policy", "", _FRONT),
  ("The parts of a run", "trainer.build", ("make_run",)),
  ("", "trainer.loop", ("train",)),
  ("Custom parts", "register", None),
)


_CONFIG_PAGE = """\
# Settings

All settings, as `--help_config` prints them; this page is generated from
`jaxrl_llm/config/` by `python scripts/dev/docs.py`. The defaults are plain
PPO on the built-in task. `configs/METHOD.py` sets the keys of a method,
`:PRESET` those of a scale, and `--config.KEY=VALUE` overrides both. `None`
means that no number is set. [settings.md](settings.md) has the names of
these settings in TRL and verl."""
_API_PAGE = """\
# API

The public functions and classes; this page is generated from their
docstrings by `python scripts/dev/docs.py`. Arrays are positional arguments
and settings are keyword arguments; `[..., T]` means any number of leading
axes, with time last. The tests run the examples, which assume `import jax`,
`import jax.numpy as jnp` and an import of the function."""


def config_page() -> str:
  """Returns config.md: default, allowed values and meaning of every key."""
  lines = [_CONFIG_PAGE]
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
  """Returns api.md: signature and docstring of every public name."""
  lines = [_API_PAGE]
  for title, module_name, names in _API:
    path = [module_name] if module_name else []
    module = importlib.import_module(".".join(["jaxrl_llm", *path]))
    names = names or _public(module)
    lines += ["", f"## {title}"] if title else []
    for name in names:
      lines += ["", f"### {'.'.join([*path, name])}", ""]
      lines += _entry(operator.attrgetter(name)(module))
  return "\n".join(lines) + "\n"


def _public(module) -> list[str]:
  """Returns a file's public functions; of a folder, also its classes."""
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
  if inspect.isclass(thing):  # The whole source, for the fields.
    return ["```python", source, "```"]
  (function,) = ast.parse(source).body
  # Without the decorators.
  begin, end = function.lineno - 1, function.body[0].lineno - 1
  signature = source.split("\n")[begin:end]
  summary, _, rest = inspect.getdoc(thing).partition("\n")
  lines = ["```python", *signature, "```", "", summary]
  return lines + (["", "```text", rest.strip("\n"), "```"] if rest else [])


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--out", default="docs", help="folder; default: docs")
  out = pathlib.Path(parser.parse_args(arguments).out)
  out.mkdir(parents=True, exist_ok=True)
  (out / "config.md").write_text(config_page(), encoding="utf-8")
  (out / "api.md").write_text(api_page(), encoding="utf-8")
  print(f"wrote config.md and api.md into {out}")


if __name__ == "__main__":
  sys.exit(main())
