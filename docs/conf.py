"""Settings of the documentation site, which `make docs` builds."""

import importlib
import inspect
import operator
import pathlib
import re
import textwrap

project = "jaxrl_llm"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "jaxrl_llm"
exclude_patterns = ["accelerator/*"]
myst_heading_anchors = 3
default_role = "code"  # Docstrings write `name`.
autodoc_typehints = "none"  # Docstrings give shapes.
autodoc_preserve_defaults = True

_DOCS = pathlib.Path(__file__).resolve().parent
_SECTIONS = ("Args", "Returns", "Raises", "Example")
_LINK = re.compile(r"\[([^\]]+)\]\((?!http|#)([^)#]+)(#[^)]*)?\)")


def _adapt(app, docname, source):
  """Completes the first page and the API; links to code become plain text."""
  del app
  if docname == "index":
    source[0] = (_DOCS.parent / "README.md").read_text("utf-8") + source[0]

  def link(match):
    text, path, anchor = match.groups("")
    path = path.removeprefix("docs/")
    target = (_DOCS / docname).parent.joinpath(path).resolve()
    known = target.is_file() and _DOCS in target.parents
    return f"[{text}]({path}{anchor})" if known else text

  source[0] = _LINK.sub(link, source[0])
  if docname == "api":
    source[0] = _with_docstrings(source[0])


def _with_docstrings(page):
  """Adds the docstrings of the names of each table below it."""
  title, *sections = re.split(r"(?m)^(?=## )", page)
  done = [title]
  for section in sections:
    module = re.search(r"^Module `([\w.]+)`", section, re.M)[1]
    names = re.findall(r"(?m)^\| `([\w.]+)` \|", section)
    entries = "\n".join(_entry(module, name) for name in names)
    section = re.sub(
      r"(?m)^\| `([\w.]+)` \|", rf"| {{py:obj}}`\1 <{module}.\1>` |", section
    )
    done.append(f"{section}\n```{{eval-rst}}\n{entries}\n```\n\n")
  return "".join(done)


def _indent(text):
  return textwrap.indent(text, "   ")


def _entry(module, name):
  """Returns the directive of a function; of a class, with its source."""
  thing = operator.attrgetter(name)(importlib.import_module(module))
  if not inspect.isclass(thing):
    kind = "method" if thing.__qualname__ != thing.__name__ else "function"
    return f".. auto{kind}:: {module}::{name}\n"
  block = f".. code-block:: python\n\n{_indent(inspect.getsource(thing))}"
  return f".. py:class:: {module}.{name}\n\n{_indent(block)}\n"


def _escape(app, what, name, thing, options, lines):
  """Makes a docstring reStructuredText: equations verbatim, no stray marks."""
  del app, what, name, thing, options
  done, section, reference = [], "", False
  for before, line in zip(["", *lines], lines):
    reference = line.startswith("Reference:") or (reference and bool(line))
    if reference:
      line = line.strip()
    if line and line[0] != " ":
      section = line if line.removesuffix(":") in _SECTIONS else ""
    equation = line.startswith(" ") and not section
    if equation and not before:
      done += ["::", ""]
    if not equation and section != "Example:":
      parts = re.split(r"(`[^`]*`|\*\w+\*)", line)  # Code and emphasis stay.
      parts[::2] = [re.sub(r"[*|\\]|_\b", r"\\\g<0>", x) for x in parts[::2]]
      line = "".join(parts)
    done.append(line)
  lines[:] = done


def setup(app):
  """Registers what changes the pages."""
  app.connect("source-read", _adapt)
  app.connect("autodoc-process-docstring", _escape, priority=400)
