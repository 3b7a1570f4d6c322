"""Tests of jaxrl_llm.metrics."""

import concurrent.futures
import errno
import io
import itertools
import json
import math
import os
import pathlib
import resource
import socket
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases, programs

from jaxrl_llm import metrics
from jaxrl_llm.metrics.console import ConsoleWriter
from jaxrl_llm.metrics.trackers import tensorboard

_PROGRAMS = cases.load("code")


class Clock:
  """A clock that tests advance."""

  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


def _sample(**changes) -> metrics.Sample:
  fields = "7+5?", "7+5=12;#12.", "12", "12", 1.0, 11, "finished"
  return metrics.Sample(*fields)._replace(**changes)


def _read(path: pathlib.Path) -> list[dict]:
  """Parses strictly: NaN and Infinity are not JSON."""

  def refuse(constant):
    raise AssertionError(f"not JSON: {constant}")

  text = path.read_text()
  assert text == "" or text.endswith("\n")
  return [json.loads(x, parse_constant=refuse) for x in text.splitlines()]


class TestJsonlWriter:
  def test_one_object_a_step_with_exact_floats(self, tmp_path):
    clock = Clock()
    writer = metrics.JsonlWriter(tmp_path / "m.jsonl", clock=clock)
    writer.log(0, {"a/b": 0.1, "n": 3})
    clock.now = 101.5
    half = jnp.asarray(0.5, jnp.bfloat16)
    row = {"a/b": np.float32(0.1), "n": jnp.asarray(4), "h": half}
    writer.log(1, row | {"x": -math.inf})
    writer.close()
    assert _read(tmp_path / "m.jsonl") == [
      {"step": 0, "time": 100.0, "a/b": 0.1, "n": 3},
      {"step": 1, "time": 101.5, "a/b": float(np.float32(0.1)), "n": 4}
      | {"h": 0.5, "x": None, "nonfinite": {"x": "-inf"}},
    ]

  def test_death_at_any_byte_then_resume_gives_each_row_once(
    self, tmp_path, monkeypatch
  ):
    monkeypatch.setattr("os.fsync", lambda file: None)
    path = tmp_path / "m.jsonl"

    def run(first: int, last: int):
      writer = metrics.JsonlWriter(path, clock=Clock())
      writer.truncate_after(first - 1)
      for step in range(first, last + 1):
        writer.log(step, {"x": 1.5 * step})
      writer.close()

    run(0, 3)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
      complete = whole[:size].count(b"\n")
      # The checkpoint may be of any step with a complete row, or missing.
      for checkpoint in range(-1, complete):
        path.write_bytes(whole[:size])
        run(checkpoint + 1, 3)
        assert path.read_bytes() == whole

  def test_torn_line_is_dropped_on_opening(self, tmp_path):
    path = tmp_path / "m.jsonl"
    whole = b"\0\0\0\0\n", b"[]\n", b'{"step": "1"}\n'
    for torn in (b'{"step": 1, "ti', b'{"step": 1}', *whole):
      path.write_bytes(b'{"step": 0}\n' + torn)
      writer = metrics.JsonlWriter(path, clock=Clock())
      writer.log(1, {})
      writer.close()
      assert [row["step"] for row in _read(path)] == [0, 1]

  def test_a_short_write_leaves_no_part_of_the_row(self, tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    writer = metrics.JsonlWriter(path, clock=Clock())
    writer.log(0, {"x": 1.0})
    before = path.read_bytes()
    write, parts = metrics.writers.os.write, [7]

    def until_it_is_full(file, data):
      if not parts:
        raise OSError(errno.ENOSPC, "No space left on device")
      return write(file, data[: parts.pop()])

    with monkeypatch.context() as patch:
      patch.setattr(metrics.writers.os, "write", until_it_is_full)
      with pytest.raises(
        OSError, match=r"No space left on device: '.*m\.jsonl'"
      ):
        writer.log(1, {"x": 2.0})
    assert path.read_bytes() == before
    writer.log(1, {"x": 2.0})
    assert [row["step"] for row in _read(path)] == [0, 1]

  @pytest.mark.parametrize("how", ["removed", "replaced"])
  def test_a_file_that_is_gone_is_restored(self, tmp_path, how):
    path = tmp_path / "m.jsonl"
    writer = metrics.JsonlWriter(path, clock=Clock())
    writer.log(0, {"x": 1.0})
    path.unlink()
    if how == "replaced":
      path.write_text("other")
    writer.log(1, {"x": 2.0})
    writer.close()
    assert [row["x"] for row in _read(path)] == [1.0, 2.0]

  def test_damage_and_something_else_than_a_file_are_refused(self, tmp_path):
    os.mkfifo(tmp_path / "m.jsonl")
    with pytest.raises(OSError, match="not a regular file.*m.jsonl"):
      metrics.JsonlWriter(tmp_path / "m.jsonl")
    (tmp_path / "n.jsonl").write_bytes(b'{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"n\.jsonl, line 2"):
      metrics.JsonlWriter(tmp_path / "n.jsonl")

  def test_steps_increase_and_a_metric_is_one_number(self, tmp_path):
    writer = metrics.JsonlWriter(tmp_path / "m.jsonl")
    writer.log(4, {})
    for step, row, said in (
      *((step, {}, f"> 4, got {step}") for step in (0, 4)),
      *((5, {"a/b": x}, "metric a/b") for x in (np.zeros(2), "1.0", None)),
    ):
      with pytest.raises(ValueError, match=said):
        writer.log(step, row)
    assert len(_read(tmp_path / "m.jsonl")) == 1


class TestSampleRows:
  def test_samples_come_back_and_later_steps_are_dropped(self, tmp_path):
    path = tmp_path / "s.jsonl"
    odd = "line\nbreak \x1b[31m \ud800 \u2028 [red]"
    writer = metrics.JsonlWriter(path)
    writer.append(
      [_sample(response=odd).row(1), _sample(extracted=None).row(1)]
    )
    writer.append([_sample(reward=math.nan).row(2)])
    assert _read(path)[2]["reward"] is None
    writer.truncate_after(1)
    assert writer.last_step == 1
    writer.append([_sample(per_token={"tokens": ["#", "12"]}).row(2)])
    writer.append([])
    writer.close()
    rows = _read(path)
    assert [row["step"] for row in rows] == [1, 1, 2]
    assert rows[0]["response"] == odd
    fields = _sample(extracted=None)._asdict()
    assert fields.pop("per_token") == {}
    assert rows[1] == {"step": 1} | fields
    assert rows[2]["tokens"] == ["#", "12"] and "per_token" not in rows[2]


class TestTensorBoard:
  def test_scalars_are_in_the_event_file(self, tmp_path):
    with tensorboard(tmp_path, last_step=-1) as log:
      log(7, {"reward/mean": 0.25, "policy/loss": math.nan})
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars = {v.tag: (s, v.simple_value) for s, v in _events(file)}
    assert scalars["reward/mean"] == (7, 0.25)
    assert math.isnan(scalars["policy/loss"][1])


def _events(path: pathlib.Path):
  """Yields (step, value) of an event file: length, crc, record, crc."""
  from tensorboardX.proto import event_pb2

  data = path.read_bytes()
  while data:
    size = int.from_bytes(data[:8], "little")
    event = event_pb2.Event.FromString(data[12 : 12 + size])
    for value in event.summary.value:
      yield event.step, value
    data = data[16 + size :]


class Terminal(io.StringIO):
  """A stream that claims to be a terminal."""

  def isatty(self) -> bool:
    return True


def _logger(folder, **changes):
  given = {"total_steps": 2, "last_step": -1, "stream": io.StringIO()}
  return metrics.MetricsLogger(folder, **given | changes)


def _console(steps=10, stream=None, **how):
  stream = stream or io.StringIO()
  return ConsoleWriter(total_steps=steps, stream=stream, **how), stream


class TestConsoleWriter:
  def test_one_plain_line_a_step_without_terminal(self):
    clock = Clock()
    console, stream = _console(clock=clock)
    row = {
      "reward/mean": 0.5,
      "policy/entropy": 0.25,
      "time/generate_s": 1.5,
      "time/step_s": 2.0,
      "perf/tokens_per_second": 1234.5,
      "not/shown": 1.0,
    }
    console.log(1, row | {"policy/loss": 1.5})
    clock.now += 2.0
    console.log(2, row)
    console.log(3, {"policy/loss": 1.5})  # The loss without a reward.
    console.log(4, {"health/all_wrong": 1.0, "health/ratio_explosion": 1.0})
    console.log(5, {"eval/sums/avg@4": 0.5, "eval/sums/avg@4_se": 0.02})
    console.close()
    shown = "reward 0.500  entropy 0.250  tokens/s 1,234"
    first, second, third, warned, _, evaluated = stream.getvalue().splitlines()
    assert [first, second] == [
      f"step 1/10  {shown}  left ?  step 2.00s  generate 1.50s",
      f"step 2/10  {shown}  left 0:00:16  step 2.00s  generate 1.50s",
    ]
    assert "loss 1.500" in third
    assert "health: all wrong, ratio explosion" in warned
    said = "evaluation at step 5: sums/avg@4 0.500 (se 0.020)"
    assert evaluated == said

  def test_time_left_forgets_slow_steps(self):
    clock = Clock()
    console, stream = _console(clock=clock)
    for step, seconds in enumerate((0.0, 60.0, 2.0, 2.0)):
      clock.now += seconds
      console.log(step, {})
    assert stream.getvalue().splitlines() == [
      "step 0/10  left ?",
      "step 1/10  left 0:09:00",
      "step 2/10  left 0:04:08",
      "step 3/10  left 0:00:14",
    ]

  def test_a_log_says_what_takes_its_time_once(self):
    console, stream = _console()
    for _ in range(2):
      for phase in ("data", "generate", "between phases"):
        console.phase(phase)
      console.compiling("decode")
      console.compiled("decode", 61.2)
      console.compiled("small", 0.1)
    console.close()
    compiled = ["compiled decode in 61 s"]
    assert stream.getvalue().splitlines() == ["generate ...", *2 * compiled]

  def test_live_on_a_terminal(self, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    console, stream = _console(stream=Terminal())
    console.phase("generate")
    console.compiling("decode")
    console._bar.refresh()  # A thread does this ten times a second.
    assert "generate, compiling decode" in stream.getvalue()
    console.compiled("decode", 61.2)
    console.log(3, {"reward/mean": 0.5})
    console.event("saved [red]step 3[/red]")
    console.close()
    text = stream.getvalue()
    assert "compiled" not in text
    assert "step 3/10" in text and "reward 0.500" in text
    assert "saved [red]step 3[/red]" in text
    assert text.rstrip().endswith("\x1b[?25h")  # The cursor is visible again.

  def test_a_narrow_encoding_shows_escapes(self):
    raw = io.BytesIO()
    console, stream = _console(1, io.TextIOWrapper(raw, encoding="ascii"))
    console.samples(1, [_sample(response="π≈3")])
    console.log(1, {})
    stream.flush()
    assert b"\\u03c0\\u22483" in raw.getvalue()


class TestSampleLines:
  def test_shows_all_fields_and_tails(self):
    long = _sample(prompt="a" * 150 + "Q?", extracted=None, stop="overlong")
    assert list(metrics.sample_lines([long])) == [
      "reward 1.00  length 11  stop overlong  gold 12  extracted (none)",
      "  prompt: ..." + "a" * 118 + "Q?",
      "  response: 7+5=12;#12.",
    ]
    failed = _sample(extracted=None, error="error: KeyError: 'oops'")
    assert "KeyError" in next(metrics.sample_lines([failed]))
    unjudged = next(metrics.sample_lines([_sample(reward=math.nan)]))
    assert unjudged.startswith("reward (none)  length 11")

  @pytest.mark.parametrize("terminal", [True, False])
  def test_text_of_a_model_neither_styles_nor_moves(
    self, terminal, monkeypatch
  ):
    monkeypatch.setenv("TERM", "xterm")
    hostile = "[red]x[/red] [/] \x1b[31my \x07 \r\n \u202e :smile: [link=u]z"
    console, stream = _console(1, Terminal() if terminal else None)
    console.samples(1, [_sample(response=hostile), _sample(gold=hostile)])
    console.close()
    text = stream.getvalue()
    shown = "[red]x[/red] [/] \\x1b[31my \\x07 \\r\\n \\u202e :smile: [link=u]z"
    assert text.count(shown) == 2
    for control in ("\x1b[31m", "\x07", "\u202e", "\x1b]8"):
      assert control not in text


def test_printable_text_keeps_letters_and_escapes_the_rest():
  assert metrics.printable("a é 日本 \\n") == "a é 日本 \\n"
  escaped = "a\\tb\\n\\x7f\\x9b\\ud800"
  assert metrics.printable("a\tb\n\x7f\x9b\ud800") == escaped


def test_the_console_shows_a_few_of_all_samples(tmp_path):
  out = io.StringIO()
  with _logger(tmp_path, stream=out) as logger:
    logger.samples(1, [_sample(response=f"no {i}") for i in range(9)])
  assert len(_read(tmp_path / "samples.jsonl")) == 9
  assert "no 3" in out.getvalue() and "no 4" not in out.getvalue()


class TestTrackers:
  @pytest.mark.parametrize("name", ["wandb", "trackio"])
  def test_a_run_of_a_service(self, tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text(_PROGRAMS["metrics_fake"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "sums")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for step in (0, 1):  # The second one resumes.
      metrics.check_trackers(("tensorboard", name))
      how = {"tracked_by": (name,), "settings": {"run": {"seed": 3}}}
      with _logger(folder, last_step=step - 1, **how) as logger:
        logger.samples(step, [_sample()])
        logger.log(step, {"a/b": np.float32(0.5)})
    calls = sys.modules[name].calls
    assert [call[0] for call in calls] == ["init", "log", "finish"] * 2
    assert [calls[1], calls[4]] == [("log", k, {"a/b": 0.5}) for k in (0, 1)]
    options = calls[0][1]
    assert calls[3][1] == options
    assert options["project"] == "sums" and options["resume"] == "allow"
    assert options["config"] == {"run": {"seed": 3}}
    assert options["name"].startswith("run-")
    assert options.get("id") == (options["name"] if name == "wandb" else None)
    assert len(_read(folder / "metrics.jsonl")) == 2
    assert not (folder / "tensorboard").exists()

  def test_one_that_is_not_installed(self, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_llm\[wandb\]'"):
      metrics.check_trackers(("tensorboard", "wandb"))


def test_pass_at_k():
  # 1 - C(3,2)/C(5,2) = 0.7; 1 - C(9,5)/C(10,5) = 0.5; c > n - k gives 1.
  found = metrics.pass_at_k([2, 0, 5, 4], 5, 2)
  np.testing.assert_allclose(found, [0.7, 0.0, 1.0, 1.0])
  np.testing.assert_allclose(metrics.pass_at_k([1], 10, 5), [0.5])


def test_mean_and_standard_error():
  # Variance 1/6 with Bessel's correction, over 4 problems.
  found = metrics.mean_and_standard_error([0, 0.5, 1, 0.5])
  assert found == pytest.approx((0.5, math.sqrt(1 / 6 / 4)))
  mean, error = metrics.mean_and_standard_error([0.25])
  assert mean == 0.25 and math.isnan(error)


class TestPhaseTimer:
  def test_adds_up_phases_and_starts_over(self):
    clock, seen = Clock(), []
    timer = metrics.PhaseTimer(clock=clock, on_enter=seen.append)
    with timer.phase("generate"):
      clock.now += 2.0
    clock.now += 0.5
    with timer.phase("update_policy"):
      clock.now += 1.0
    with pytest.raises(KeyError), timer.phase("update_policy"):
      clock.now += 1.0
      raise KeyError
    assert timer.collect() == {
      "time/generate_s": 2.0,
      "time/update_policy_s": 2.0,
      "time/step_s": 4.5,
    }
    between = "between phases"
    assert seen == ["generate", between, *["update_policy", between] * 2]
    clock.now += 1.0
    assert timer.collect() == {"time/step_s": 1.0}

  def test_compiling_is_in_no_other_phase(self):
    class Compiles:
      spent = 0.0
      seconds = lambda self: self.spent
      collect = lambda self: 7

    clock, compiles = Clock(), Compiles()
    timer = metrics.PhaseTimer(
      clock=clock, compiles=compiles, spent={"start": 9.0}
    )
    for name in ("generate", "score"):
      with timer.phase(name):
        clock.now += 3.0
        compiles.spent += 2.0
    assert timer.collect() == {
      "time/start_s": 9.0,
      "time/generate_s": 1.0,
      "time/compile_s": 4.0,
      "time/score_s": 1.0,
      "time/step_s": 6.0,
      "compile/count": 7,
    }
    assert timer.collect() == {"time/step_s": 0.0, "compile/count": 7}

  def test_tells_what_a_phase_did_without_waiting(self):
    clock, waits = Clock(), [0.0]
    timer = metrics.PhaseTimer(clock=clock, waited=lambda: waits[0])
    for _ in range(2):
      with timer.phase("reward"):
        clock.now += 3.0
        waits[0] += 2.5
      waits[0] += 10.0
    assert timer.collect() == {
      "time/reward_s": 6.0,
      "host/reward_s": 1.0,
      "time/step_s": 6.0,
    }
    assert timer.collect() == {"time/step_s": 0.0}


def test_a_phase_that_goes_on_is_named_when_another_ends():
  seen = []
  timer = metrics.PhaseTimer(on_enter=seen.append)
  with timer.phase("update_policy"):  # The sampler generates meanwhile.
    with timer.phase("generate"):
      pass
  assert seen[1:] == ["generate", "update_policy", "between phases"]


def test_a_watchdog_ends_what_stands_still_and_says_where(tmp_path):
  program = _PROGRAMS["metrics_stands_still"]
  _, said = programs.finish("-c", program, tmp_path, code=1)
  assert "stuck: 'generate' has taken" in said
  assert f"on {socket.gethostname()} (process 0 of 1)" in said
  named, _, stacks = said.partition("suspect host 1-a\n")
  assert named and "in wait_for_a_host_that_died" in stacks


class TestCompileCounter:
  def test_seconds_are_those_of_the_thread(self):
    counter = metrics.CompileCounter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(jax.jit(lambda x: 2 * x), np.zeros(11, np.float32)).result()
      assert pool.submit(counter.seconds).result() > 0
    assert counter.seconds() == 0.0 and counter.collect() == 1

  def test_a_clock_that_is_set_back_does_not_count(self, monkeypatch):
    now = itertools.count(1e9, -3600.0)
    monkeypatch.setattr("time.time", lambda: next(now))
    counter = metrics.CompileCounter()
    jax.jit(lambda x: 5 * x)(np.zeros(13, np.float32))
    assert 0 < counter.seconds() < 600 and counter.collect() == 1

  def test_counts_new_shapes_only(self):
    function = jax.jit(lambda x: 3 * x + 1)
    small, large = np.zeros(3, np.float32), np.zeros(5, np.float32)
    counter = metrics.CompileCounter()
    function(small).block_until_ready()
    assert counter.collect() == 1
    function(small + 1).block_until_ready()
    assert counter.collect() == 0
    function(large).block_until_ready()
    function(small).block_until_ready()
    assert counter.collect() == 1


def test_programs_are_named_while_they_compile():
  told, argument = [], np.zeros(17, np.float32)

  def doubled(x):
    return 2 * x

  end = lambda name, seconds: told.append((name, seconds > 0))
  stop = metrics.watch_compilations(told.append, end)
  jax.jit(doubled)(argument)
  stop()
  jax.jit(lambda x: 3 * x)(argument)
  assert told == ["doubled", ("doubled", True)]


def test_peak_memory_is_in_gib(monkeypatch):
  usage = types.SimpleNamespace(ru_maxrss=3 * 2**20)
  monkeypatch.setattr(resource, "getrusage", lambda who: usage)
  assert metrics.peak_memory_gib() == 3.0
