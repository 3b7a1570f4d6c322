"""Tests of scripts/benchmark.py and scripts/benchmarks."""

import json
import sys

import benchmark
import numpy as np
import pytest
import reference
from benchmarks import peers, summary, workloads
from helpers import cases

from jaxrl_llm.errors import InputError

_CASES = cases.load("benchmark")


@cases.table("text, found", _CASES["last_json_object"])
def test_last_json_object(text, found):
  assert peers.last_json_object(text) == found


class TestReadNumbers:
  @cases.table("name, part, shape, numbers", _CASES["numbers"])
  def test_of_every_library(self, name, part, shape, numbers):
    record = _CASES["records"][name]
    assert peers.read_numbers(record, part=part, shape=shape) == numbers

  @cases.table("record, message", _CASES["refused"])
  def test_refused(self, record, message):
    with pytest.raises(InputError, match=message):
      peers.read_numbers(record, part="sampler", shape="tiny")


class TestSpeedRatios:
  def test_over_one_is_better_for_rates_times_and_memory(self):
    ours = {"tokens_per_s": 30.0, "step_s": 2.0, "peak_rss_gib": 4.0, "a": 1.0}
    peer = {"tokens_per_s": 10.0, "step_s": 1.0, "peak_rss_gib": 8.0}
    assert summary.speed_ratios(ours, peer) == {
      "tokens_per_s": 3.0,
      "step_s": 0.5,
      "peak_rss_gib": 2.0,
    }


class TestRunProgram:
  def test_last_object(self):
    code = "print('hi'); print('{\"a\": 1}')"
    command = [sys.executable, "-c", code]
    assert peers.run_program(command, timeout_s=60) == {"a": 1}

  @pytest.mark.parametrize(
    "command, message",
    [
      ("echo first >&2; echo last >&2; exit 3", "exit code 3: last"),
      ("exit 4", "exit code 4: no error output"),
      ("echo hello", "no JSON object"),
      ("no-such-program-at-all", "exit code 127"),
    ],
  )
  def test_failures_are_one_line(self, command, message):
    with pytest.raises(InputError, match=message):
      peers.run_program(command, timeout_s=60)

  def test_too_long_is_killed_with_its_children(self):
    with pytest.raises(InputError, match="more than 0.2 s"):
      peers.run_program("sleep 600 & sleep 600", timeout_s=0.2)


class TestGaeLoop:
  def test_is_the_definition(self):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3, 9)).astype(np.float32)
    mask = rng.random((3, 9)) < 0.7
    lambda_ = np.asarray([0.0, 0.5, 1.0], np.float32)
    expected = reference.gae(rewards, values, mask, 1.0, lambda_[:, None])
    loop = workloads.gae_loop(rewards, values, mask, lambda_)
    np.testing.assert_allclose(loop, expected, atol=1e-5)


@pytest.fixture
def small_shape(monkeypatch):
  """A shape that compiles quickly."""
  small = peers._fields(1, 16, 16, 1, 1, 32)
  monkeypatch.setitem(peers.SHAPES, "small", small)


def measured(capsys, *flags):
  """Returns the JSON object that scripts/benchmark.py prints."""
  assert benchmark.main([*flags]) == 0
  return json.loads(capsys.readouterr().out.splitlines()[-1])


class TestScript:
  def test_estimators_end_in_one_json_object(self, capsys):
    flags = "--rows=4", "--length=70", "--repeats=2"
    record = measured(capsys, "estimators", *flags)
    assert record["part"] == "estimators"
    assert record["settings"]["length"] == 70
    medians = record["medians"]
    assert medians["gae_difference_max"] < 1e-5
    low, high = record["spread"]["gae_s"]
    assert 0 < low <= medians["gae_s"] <= high
    assert record["ratios"]["numpy_loop"]["gae_s"] == pytest.approx(
      medians["numpy_loop_gae_s"] / medians["gae_s"]
    )
    assert {"machine", "versions", "load_before", "load_after"} <= set(record)

  def test_checkpoint_costs(self, capsys):
    flags = "--megabytes=1", "--repeats=1"
    medians = measured(capsys, "checkpoint", *flags)["medians"]
    ratio = medians["save_blocking_s"] / medians["orbax_blocking_s"]
    assert medians["blocking_ratio"] == pytest.approx(ratio)
    assert 0 < medians["checksums_share_of_restore"] < 1

  def test_peers_take_turns_and_one_that_failed_is_not_run_again(
    self, tmp_path, capsys, monkeypatch
  ):
    log = tmp_path / "log"
    say = lambda name, then: f"echo {name} >> {log}; {then}"
    ours = say("ours", """echo '{"medians": {"step_s": 1}}'""")
    monkeypatch.setattr(benchmark, "alone_command", lambda options: ours)
    peers = say("a", """echo '{"step_s": 2}'"""), say("b", "exit 5")
    flags = (f"--peer={name}={run}" for name, run in zip("ab", peers))
    assert benchmark.main(["train_step", *flags, "--rounds=3"]) == 1
    assert log.read_text().split() == "ours a b a ours ours a".split()
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert record["medians"] == {"step_s": 1}
    assert record["peers"]["a"]["spread"] == {"step_s": [2, 2]}
    assert record["ratios"] == {"a": {"step_s": 2}}
    assert record["errors"] == {"b": "exit code 5: no error output"}
    assert "benchmark: peer b: exit code 5" in captured.err.splitlines()[-1]

  def test_fresh_process_measures_with_the_same_settings(self):
    parse = benchmark.make_parser().parse_args
    given = ["--batch=8", "--remat_policy=none", "--peer=a=x", "--rounds=9"]
    options = parse(["train_step", *given])
    benchmark.check(options)
    again = parse(benchmark.alone_command(options)[2:])
    benchmark.check(again)
    own = ("peer", "peers", "rounds")
    kept = lambda x: {k: v for k, v in vars(x).items() if k not in own}
    assert not again.peers and kept(again) == kept(options)

  @pytest.mark.usefixtures("small_shape")
  def test_train_step_measures_all_phases(self, capsys):
    flags = "--shape=small", "--batch=4", "--group_size=2"
    lengths = "--prompt_length=4", "--new_tokens=4", "--max_tokens_per_row=12"
    flags = *flags, *lengths, "--micro_batch_size=2"
    medians = measured(capsys, "train_step", *flags)["medians"]
    for part in ("generate_s", "prepare_s", "update_s", "sync_s"):
      assert 0 < medians[part] < medians["step_s"]
    assert medians["step_cpu_s"] > 0
    assert medians["compilations_after_first_step"] == 0
    assert medians["update_tokens_per_s"] == pytest.approx(
      4 * 8 / medians["update_s"]
    )

  @pytest.mark.usefixtures("small_shape")
  def test_new_sampling_settings_compile_nothing(self, capsys):
    flags = "--shape=small", "--batch=2", "--group_size=1"
    lengths = "--prompt_length=4", "--new_tokens=4"
    medians = measured(capsys, "sampler", *flags, *lengths)["medians"]
    assert medians["compilations_of_first_call"] > 0
    assert medians["compilations_after_changes"] == 0
