"""Settings of the documentation site, which `make docs` builds."""

import pathlib
import re

project = "jaxrl_llm"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "jaxrl_llm"
exclude_patterns = ["accelerator/*"]
myst_heading_anchors = 3

_DOCS = pathlib.Path(__file__).resolve().parent
_LINK = re.compile(r"\[([^\]]+)\]\((?!http|#)([^)#]+)(#[^)]*)?\)")


def _adapt(app, docname, source):
  """Makes the README the first page, and links to code plain text."""
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


def setup(app):
  """Registers what changes the pages."""
  app.connect("source-read", _adapt)
