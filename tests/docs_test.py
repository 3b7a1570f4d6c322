"""Generated pages of docs/ are current, and pages name only what exists."""

import pathlib
import re

import pytest
import shape
import study
from helpers import programs, registries, tiny_run
from studies import tables

from jaxrl_llm import config as config_lib
from jaxrl_llm import register
from jaxrl_llm.learner import core

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGES = [
  pytest.param(path, id=path.name)
  for path in [*_ROOT.glob("*.md"), *sorted((_ROOT / "docs").rglob("*.md"))]
]
_STUDIES = sorted((_ROOT / "docs" / "studies").glob("*.md"))


def test_pages_are_what_the_code_says(tmp_path):
  # In a separate process: other tests register parts.
  programs.finish(_ROOT / "scripts" / "dev" / "docs.py", f"--out={tmp_path}")
  for name in ("config.md", "api.md"):
    written = (tmp_path / name).read_text("utf-8")
    kept = (_ROOT / "docs" / name).read_text("utf-8")
    assert written == kept, "run `python scripts/dev/docs.py`"


def test_the_site_has_every_page_and_no_broken_link(tmp_path):
  pytest.importorskip("sphinx")
  pytest.importorskip("myst_parser")
  command = ("-m", "sphinx", "-q", "-W", _ROOT / "docs", tmp_path)
  programs.finish(*command)
  for path in [*(_ROOT / "docs").glob("*.md"), *_STUDIES]:
    page = path.relative_to(_ROOT / "docs").with_suffix(".html")
    assert (tmp_path / page).exists()
  index = (tmp_path / "index.html").read_text("utf-8")
  assert (
    "trains reasoning language models" in index and 'href="guide.html"' in index
  )
  # The rest of a docstring, to which the table of the page links.
  api = (tmp_path / "api.html").read_text("utf-8")
  assert 'href="#jaxrl_llm.estimators.gae"' in api
  assert 'id="jaxrl_llm.estimators.gae"' in api
  assert "the next <em>unmasked</em> token" in api


def test_the_tour_is_short_and_true():
  text = (_ROOT / "docs" / "tour.md").read_text("utf-8")
  files = re.findall(r"^(\d+)\. \[`([\w/.]+)`\]", text, re.M)
  assert [int(number) for number, _ in files] == [*range(1, 19)]
  read = [(_ROOT / file).read_text("utf-8") for _, file in files]
  assert sum(map(shape.code_lines, read)) <= 2700


def test_the_method_of_the_page_on_methods_works():
  text = (_ROOT / "docs" / "your_method.md").read_text("utf-8")
  made = {}
  exec(text.split("```python\n")[1].split("```")[0], made)
  with registries.registered():
    register.method("mine", made["wrong_entropy"])
    changes = {"method.use": ("mine",), "estimator.name": "group"}
    algorithm = core.make_algorithm(tiny_run.make_config("none", **changes))
  assert algorithm.auxiliary["wrong_entropy"].coefficient == 0.01
  assert {"correct", "judged"} <= algorithm.leaves
  assert algorithm.metrics.keys() == {"wrong"}


@pytest.mark.parametrize("path", _PAGES)
def test_links_lead_somewhere(path):
  links = re.findall(r"\]\(([^)#]+)", path.read_text("utf-8"))
  files = [link for link in links if not link.startswith("http")]
  assert [f for f in files if not (path.parent / f).exists()] == []


@pytest.mark.parametrize("path", _PAGES)
def test_keys_are_keys(path):
  groups = "|".join({key.split(".")[0] for key in config_lib.KEYS})
  text = path.read_text("utf-8")
  if path.name == "settings.md":  # Our keys are on the right.
    rows = (line.split(" | ")[2:] for line in text.splitlines())
    text = "\n".join(" | ".join(cells) for cells in rows)
  # Written as `group.key`, alone or with a value, and as a flag.
  named = re.findall(rf"`((?:{groups})\.[a-z_.0-9]+)[`=]", text)
  named += re.findall(rf"--config\.((?:{groups})\.[a-z_.0-9]+)", text)
  unknown = {
    name
    for name in named
    if not name.endswith((".pt", ".safetensors"))  # Files.
    and not any(f"{key}.".startswith(f"{name}.") for key in config_lib.KEYS)
  }
  assert unknown == set()


def test_claims_and_studies_name_commands_that_are_there():
  pages = [_ROOT / "docs" / "claims.md", *_STUDIES]
  text = "\n".join(path.read_text("utf-8") for path in pages)
  files = re.findall(r"(?:python|pytest) ((?:scripts|tests)[\w/.]*)", text)
  assert len(files) > 20
  assert [f for f in files if not (_ROOT / f).exists()] == []
  studied = set(re.findall(r"scripts/study\.py (\w+)", text))
  assert studied >= {*tables.STUDIES}
  assert studied <= {*tables.STUDIES, *study.PICTURES, "evpo"}


def test_every_study_has_a_row_of_the_claims():
  text = (_ROOT / "docs" / "studies.md").read_text("utf-8")
  linked = set(re.findall(r"\(studies/(\w+\.md)", text))
  assert linked == {path.name for path in _STUDIES}
