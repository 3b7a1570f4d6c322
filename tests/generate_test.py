"""Tests of scripts/generate.py and the functions that it uses."""

import io
import json
import pathlib

import generate as script
import jax
import numpy as np
import psutil
import pytest
from helpers import cases, chat_model, programs

from jaxrl_llm import base_models, models
from jaxrl_llm.data import rows
from jaxrl_llm.data.prompt_source import TEMPLATES
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.progress import Progress
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings
from jaxrl_llm.tools import generate

_CASES = cases.load("generate")

_ROOT = pathlib.Path(__file__).parents[1]
_ROOM = 18  # Response tokens; responses to the second prompt are cut off.
_SAMPLES = 4
_SLOTS = 2
_PROMPTS = [
  {"prompt": "3+5?", "id": "a"},
  {"prompt": "7+5-1?", "level": [2, None]},
  {"prompt": "8-3?"},
]


def _lines(records):
  return "".join(json.dumps(record) + "\n" for record in records)


def _read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _requests(records=_PROMPTS):
  return rows.parse_rows(_lines(records).encode(), "p.jsonl")


def _prompts(requests, tokenizer=None, *, name="completion", **settings):
  tokenizer = tokenizer or Tokenizer(base_models.BASE)
  return generate.make_prompts(
    requests,
    TEMPLATES[name](tokenizer),
    **{"context": 9, "max_new_tokens": 3} | settings,
  )


def _by_number(records):
  return sorted(records, key=lambda r: (r["prompt_index"], r["sample_index"]))


def _assert_same(records, others, *, but=()):
  """Compares up to rounding, in any order, and without the keys of `but`."""
  assert len(records) == len(others)
  for a, b in zip(_by_number(records), _by_number(others)):
    np.testing.assert_allclose(a["logprobs"], b["logprobs"], rtol=0, atol=1e-5)
    differ = {"logprobs", *but}
    assert a.keys() == b.keys()
    assert all(a[key] == b[key] for key in a.keys() - differ)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
  """Makes chunks so small that there are several."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(generate, "_ROUNDS", 2)
    yield


@pytest.fixture(scope="module")
def job():
  """The shipped base with two slots, fewer than the samples of a prompt."""
  tokenizer = Tokenizer(base_models.BASE)
  fns, params = models.load(str(base_models.BASE))
  room = EngineConfig(_SLOTS, 6, _ROOM, stop_tokens=tokenizer.stop_tokens)
  engine = Engine(fns, room, detokenize=tokenizer.decode)
  key, sampling = jax.random.key(3), SamplingSettings()
  return generate.Generation(
    writer=ResponseWriter(engine, sampling, key, group_size=_SLOTS),
    params=jax.jit(fns.for_sampling)(params),
    prompts=_prompts(_requests(), context=512, max_new_tokens=_ROOM),
    decode=tokenizer.decode,
    settings="same",
  )


def _write(job, path, *, done=(), halted=lambda: False):
  """Appends missing samples; returns all samples in the file."""
  work = generate.chunks(len(_PROMPTS), _SAMPLES, done=done, slots=_SLOTS)
  progress = Progress(1, stream=io.StringIO())
  with path.open("a") as file:
    generate.write(job, work, file, progress, halted=halted)
  return _read(path)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
  """All samples, written in one uninterrupted call."""
  return _write(job, tmp_path_factory.mktemp("whole") / "out.jsonl")


def _children():
  """Returns child processes that are still running."""
  return {child.pid for child in psutil.Process().children()}


class TestSamples:
  def test_lines_are_complete(self, job, whole):
    places = [(r["prompt_index"], r["sample_index"]) for r in whole]
    assert places == [(p, s) for p in range(3) for s in range(_SAMPLES)]
    for record in whole:
      fields = _PROMPTS[record["prompt_index"]]
      own = set(generate.KEYS) - {"turns"}  # There is no environment.
      assert set(record) == own | set(fields)
      assert fields.items() <= record.items()
      assert record["text"] == job.decode(record["tokens"])
      assert len(record["logprobs"]) == len(record["tokens"]) <= _ROOM
      assert max(record["logprobs"]) <= 0
      as_float32 = np.asarray(record["logprobs"], np.float32)
      assert [float(str(x)) for x in as_float32] == record["logprobs"]
      finished = record["tokens"][-1] == 1
      assert record["stop_reason"] == ("finished" if finished else "overlong")
    assert "#8." in {r["text"][-3:] for r in whole}


class TestResume:
  def test_what_was_interrupted_is_completed(self, job, whole, tmp_path):
    path = tmp_path / "out.jsonl"
    looks = iter(range(1000))
    # Halts in the second of three chunks.
    halted = lambda: path.stat().st_size > 0 and next(looks) >= 3
    part = _write(job, path, halted=halted)
    assert 4 <= len(part) < len(whole)
    places = [(r["prompt_index"], r["sample_index"]) for r in part]
    kept = [whole[p * _SAMPLES + s] for p, s in places]
    _assert_same(part, kept)
    # The last line is cut off, too.
    path.write_text(_lines(part)[:-9])
    done = generate.resume(path, job.prompts, settings="same")
    assert done == set(places[:-1])
    assert path.read_text() == _lines(part[:-1])
    _assert_same(_write(job, path, done=done), whole)

  @cases.table("change, message", _CASES["refuses_and_keeps_other_samples"])
  def test_refuses_and_keeps_other_samples(self, change, message, tmp_path):
    record = {"prompt_index": 0, "sample_index": 0, "settings": "same"}
    record |= _PROMPTS[0]
    path = tmp_path / "out.jsonl"
    text = _lines([record, record | change]) + '{"cut'
    path.write_text(text)
    with pytest.raises(InputError, match=message):
      generate.resume(path, _prompts(_requests()), settings="same")
    assert path.read_text() == text


class TestChunks:
  @pytest.mark.parametrize("samples, slots", [(4, 4), (4, 3), (10, 4), (7, 64)])
  def test_every_missing_sample_once(self, samples, slots):
    done = {(0, 0), (2, 1), (5, 3), (9, 0)}
    work = list(generate.chunks(12, samples, done=done, slots=slots))
    every = [(p, i) for p in range(12) for i in range(samples)]
    assert sum(work, []) == [place for place in every if place not in done]
    assert all(len(part) == 2 * slots for part in work[:-1])


class TestRequests:
  def test_text_is_a_prompt_a_line(self):
    data = "\ufeff 3+5?\r\n\n \t\n2\u20283?".encode()
    found = rows.parse_rows(data, "f.txt", text=True)
    assert found == [
      ("f.txt:1", {"prompt": " 3+5?"}),
      ("f.txt:4", {"prompt": "2\u20283?"}),
    ]

  @cases.table("line, message", _CASES["a_bad_line_is_named"])
  def test_a_bad_line_is_named(self, line, message):
    data = f'{{"prompt": "1"}}\n{line}'.encode()
    with pytest.raises(InputError, match=message):
      _prompts(rows.parse_rows(data, "f"))

  def test_chat(self, tmp_path):
    chat = Tokenizer(chat_model.write(tmp_path / "chat"))
    base = Tokenizer(base_models.BASE)
    messages = [{"role": "user", "content": x} for x in "12"]
    requests = _requests(
      [
        {"prompt": "3+5?"},
        {"messages": messages},
        # From a training data set; other columns are copied to the output.
        {"question": "3+5?", "answer": "8"},
      ]
    )
    conversation = chat.apply_chat(messages)
    asked = chat.apply_chat([{"role": "user", "content": "3+5?"}])
    for name, first in (("completion", chat.encode("3+5?")), ("chat", asked)):
      prompts = _prompts(requests, chat, name=name, context=512)
      found = [list(prompt.tokens) for prompt in prompts]
      assert found == [first, conversation, first]
    for name, line in (("completion", 2), ("chat", 1)):
      said = f"p.jsonl:{line}: .* has no chat template"
      with pytest.raises(InputError, match=said):
        _prompts(requests, base, name=name)


class TestProgress:
  def test_a_bar_on_a_terminal_and_lines_elsewhere(self, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (True, False):
      stream, now = io.StringIO(), [0.0]
      stream.isatty = lambda terminal=terminal: terminal
      with Progress(8, stream=stream, clock=lambda now=now: now[0]) as progress:
        now[0] = 2.0
        progress.report(1, 10)
        progress.complete(2, 50)
        now[0] = 4.0
        progress.complete(6, 350)
      text = stream.getvalue()
      assert "100 tokens/s  left 0:00:00" in text
      assert ("\x1b" in text) == terminal
      if not terminal:
        first, _ = text.splitlines()
        assert first == "2/8 responses  25 tokens/s  left 0:00:06"


class TestScript:
  @pytest.mark.slow
  def test_with_other_slots_it_writes_the_same(self, whole, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(_lines(_PROMPTS))
    flags = [f"--prompts={prompts}", f"--out={out}", f"--samples={_SAMPLES}"]
    flags += [f"--max_new_tokens={_ROOM}", "--seed=3", "--slots=7"]
    shown, said = programs.finish("scripts/generate.py", *flags)
    assert shown == "" and "12/12 responses" in said
    assert "12 responses, " in said.splitlines()[-1]
    finished = sum(r["stop_reason"] == "finished" for r in whole)
    assert 0 < finished < 12
    expected = f"; {finished} finished; {12 - finished} overlong"
    assert expected in said
    _assert_same(_read(out), whole, but=("settings",))

  @pytest.mark.slow
  def test_turns_of_a_calculator_whose_process_ends(self, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--prompt=7+5+3?", "--environment=calculator", "--stop=="]
    flags += [f"--out={out}", "--samples=2", "--slots=2", "--temperature=0"]
    before = _children()
    assert script.main([*flags, "--max_new_tokens=32"]) == 0
    assert _children() == before
    for record in _read(out):
      assert "".join(t["text"] for t in record["turns"]) == record["text"]
      assert record["turns"][:3] == [
        {"role": "model", "text": "7+5="},
        {"role": "environment", "text": "12;"},
        {"role": "model", "text": "12+3="},
      ]

  def test_flags_read_new_lines(self):
    options = script.make_parser().parse_args(
      [r"--stop=\n\n", r"--stop=\\nu", r"--stop=\text", "--forbid=é"]
    )
    assert options.stop == ["\n\n", r"\nu", r"\text"]
    assert options.forbid == ["é"]
