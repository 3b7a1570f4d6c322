"""Tests of report.html in a browser: its content and its filters."""

import json
import pathlib
import re
import shutil
import subprocess
import urllib.parse

import pytest
from helpers import cases, html_page

from jaxrl_llm.tools import report

_CASES = cases.load("report")

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
pytestmark = pytest.mark.skipif(
  _BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)"
)
_HOSTILE = "</script><script>document.title='x'</script><b>&amp;\u202e<!--"


class Dom(html_page.Page):
  """A page as rendered by a browser."""

  def find(self, inside: str, tag: str):
    """Returns elements with a tag inside the element with an id."""
    return [
      x
      for x in self.elements
      if x["tag"] == tag and any(y.get("id") == inside for y in x["path"])
    ]

  def listed(self):
    """Returns the displayed rows of the list of responses."""
    rows = [x for x in self.find("list", "tr") if "class" in x]
    cells = [x for x in self.find("list", "td")]
    return [
      [cell["text"] for cell in cells if any(y is row for y in cell["path"])]
      for row in rows
    ]

  def facts(self) -> dict[str, str]:
    names, values = self.find("facts", "th"), self.find("facts", "td")
    return {k["text"]: x["text"] for k, x in zip(names, values, strict=True)}


def browse(page: pathlib.Path, folder: pathlib.Path, **state) -> Dom:
  """Returns the page as rendered by a browser, with the state in the URL."""
  url = f"{page.as_uri()}#{urllib.parse.urlencode(state)}"
  quiet = "background-networking component-update sync".split()
  done = subprocess.run(
    [_BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    + [f"--disable-{name}" for name in quiet]
    + [f"--user-data-dir={folder / 'browser'}", "--dump-dom", url],
    capture_output=True,
    timeout=300,
    check=True,
  )
  drawn = re.sub(rb"<script .*?</script>", b"", done.stdout, flags=re.DOTALL)
  return Dom(drawn.decode())


def make_sample(step: int, number: int, **changes):
  """Makes a row of samples.jsonl with an environment turn."""
  text = f"{number}+1=[{number + 1}]so {number + 1}"
  tokens = [f"{number}+1", "=", f"[{number + 1}]", "so", f" {number + 1}"]
  signs = (-1, 1) if number % 2 else (1, -1)
  return {
    "step": step,
    "prompt": f"What follows {number // 4}?",
    "response": text,
    "gold": str(number + 1),
    "extracted": str(number + 1),
    "reward": 0.25 * (number % 4),
    "length": 5,
    "stop": "overlong" if number % 3 == 0 else "finished",
    "error": None,
    "correct": number % 2 == 0,
    "parts": {"format": 0.5},
    "example": f"set-{number // 4}",
    "group": number // 4,
    "sample": number,
    "tokens": tokens,
    "origin": [["policy", 2], ["environment", 1], ["policy", 2]],
    "advantage": [0.5 * signs[0], 1.0 * signs[0], None, 0.25 * signs[1], 0.0],
    "value": [0.1, 0.2, None, 0.3, 0.4],
    "logprob_diff": [0.0, 0.01, None, -0.02, 0.0],
  } | changes


def old_sample(step: int):
  """Makes a row in the old format without tokens."""
  names = ("step", "prompt", "response", "gold", "extracted", "reward")
  sample = make_sample(step, 90, response="the old one")
  return {k: sample[k] for k in (*names, "length", "stop", "error")}


def write_run(folder: pathlib.Path, samples) -> pathlib.Path:
  """Writes the page of a run with these samples."""
  folder.mkdir()
  rows = [
    {"step": 0, "eval/set/avg@4": 0.125, "eval/set/avg@4_se": 0.01},
    {"step": 1, "reward/mean": -0.5, "policy/entropy": 1.5, "other/x": 7.0},
    {"step": 2, "reward/mean": 0.5, "eval/set/avg@4": 0.75, "other/x": 8.0},
  ]
  config = {"run": {"seed": 7, "note": _HOSTILE}, "loss": {"clip_low": 0.3}}
  (folder / "config.json").write_text(json.dumps(config))
  for name, lines in (("metrics", rows), ("samples", samples)):
    with open(folder / f"{name}.jsonl", "w") as file:
      file.writelines(json.dumps(line) + "\n" for line in lines)
  (folder / "curves.png").write_bytes(b"")
  report.write_page(
    [report.load_run(folder)],
    folder / "curves.png",
    folder / "report.html",
    defaults={"run": {"seed": 0, "note": ""}, "loss": {"clip_low": 0.3}},
  )
  return folder / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  samples = [make_sample(1, number) for number in range(8)]
  samples += [make_sample(2, 8, response=_HOSTILE, prompt=_HOSTILE)]
  samples += [old_sample(2)]
  return write_run(tmp_path_factory.mktemp("report") / "run", samples)


class TestPage:
  def test_what_was_reached_steps_settings_and_all_responses(
    self, page, tmp_path
  ):
    dom = browse(page, tmp_path)
    reached = [x["text"] for x in dom.elements if x.get("class") == "reached"]
    assert reached == ["set avg@4 0.125 → 0.750 (steps 0 and 2)"]
    heads = [x["text"] for x in dom.find("steps", "th")]
    assert heads == ["step", "set avg@4", "reward", "entropy"]
    cells = [x["text"] for x in dom.find("steps", "td")]
    assert cells[:4] == ["0", "0.125 ±0.01", "–", "–"]
    assert cells[8:] == ["2", "0.75", "0.5", "–"]
    differ = [x["text"] for x in dom.elements if x.get("class") == "differs"]
    assert set(differ) == {
      f"run.note{_HOSTILE}".replace("\u202e", "\\u202e"),
      "run.seed70",
    }
    assert "2 settings that differ" in dom.text("settings")
    assert dom.text("count") == "10 of 10 responses"
    assert len(dom.listed()) == 10
    assert dom.listed()[1][:6] == ["1", "0", "0.25", "no", "5", "finished"]
    assert dom.listed()[9][3] == "no verdict"

  @cases.table("state, groups", _CASES["filters"])
  def test_filters(self, page, tmp_path, state, groups):
    dom = browse(page, tmp_path, **state)
    rows = dom.listed()
    assert [row[1] for row in rows] == groups
    assert dom.text("count") == f"{len(groups)} of 10 responses"
    if "sort" in state:
      assert [row[2] for row in rows] == ["0.75", "0.5", "0.25", "0"]

  def test_an_open_response_has_turns_and_colours(self, page, tmp_path):
    dom = browse(page, tmp_path, open=3, color="advantage")
    facts = dom.facts()
    assert facts["reward"] == "0.75" and facts["part format"] == "0.5"
    assert facts["correct"] == "no" and facts["example"] == "set-0"
    assert facts["gold"] == facts["extracted"] == "4"
    assert dom.text("prompt") == "What follows 0?"
    authors = [
      x["text"]
      for x in dom.find("response", "div")
      if x.get("class") == "author"
    ]
    assert authors == [
      "policy, 2 tokens",
      "environment, 1 tokens",
      "policy, 2 tokens",
    ]
    tokens = dom.find("response", "span")
    assert [x["text"] for x in tokens] == ["3+1", "=", "[4]", "so", " 4"]
    # Orange below 0, blue above, darker away from 0; nothing without a number.
    styles = [x.get("style", "") for x in tokens]
    assert "rgba(213, 94, 0, 0.37" in styles[0]
    assert "rgba(213, 94, 0, 0.75)" in styles[1]
    assert "rgba(0, 114, 178" in styles[3] and "rgba" not in styles[2]
    assert "advantage: -1\n" in tokens[1]["title"]
    assert "trainer: 0.01" in tokens[1]["title"]
    assert dom.text("legend").startswith("-11 (white: 0")
    values = browse(page, tmp_path, open=3, color="value")
    assert values.text("legend").startswith("0.10.4 (white: 0.25")
    origins = browse(page, tmp_path, open=3, color="origin")
    assert origins.text("legend") == "policyenvironmentgiven"
    styles = [x["style"] for x in origins.find("response", "span")]
    assert styles[0] == styles[1] == styles[3] != styles[2]

  def test_text_is_never_markup(self, page, tmp_path):
    dom = browse(page, tmp_path, open=8)
    shown = _HOSTILE.replace("\u202e", "\\u202e")
    assert dom.text("prompt") == shown
    assert not [x for x in dom.elements if x["tag"] == "b"]
    (title,) = [x["text"] for x in dom.elements if x["tag"] == "title"]
    assert title.startswith("run: ")

  def test_a_sample_of_an_old_run(self, page, tmp_path):
    dom = browse(page, tmp_path, open=9)
    assert dom.text("response") == "the old one"
    assert dom.facts()["correct"] == "no verdict"
    assert "color" not in [x.get("id") for x in dom.elements]

  def test_a_run_without_samples(self, tmp_path):
    page = write_run(tmp_path / "run", [])
    dom = browse(page, tmp_path)
    assert "logged no responses" in dom.text("responses")


@pytest.mark.slow
def test_fifty_thousand_responses(tmp_path):
  samples = (
    make_sample(1 + number // 500, number, response=f"{number}. " + "la " * 200)
    for number in range(50_000)
  )
  page = write_run(tmp_path / "run", samples)
  dom = browse(page, tmp_path, step="70..71", text="34999. ", open=34999)
  assert dom.text("count") == "1 of 50000 responses"
  assert [row[:2] for row in dom.listed()] == [["70", "8749"]]
  assert dom.facts()["sample"] == "34999"
  tokens = [x["text"] for x in dom.find("response", "span")]
  assert tokens[0] == "34999+1"
  # Only visible rows are rendered.
  everything = browse(page, tmp_path)
  assert everything.text("count") == "50000 of 50000 responses"
  assert 10 < len(everything.listed()) < 100
