"""Tests of scripts/benchmark.py and scripts/benchmarks."""

import json
import math
import sys

import benchmark
import numpy as np
import pytest
import reference
from benchmarks import peers, summary, workloads
from helpers import programs

from jaxrl_llm.errors import InputError

_TUNIX = {
  "library": "google-tunix",
  "shape": "smollm135m",
  "sampler": {"tokens_per_s": 100.0, "best_tokens_per_s": 120.0},
  "grpo": {"step_s": 4.0, "rollout_s": 3.0, "update_s": 1.0},
  "peak_rss_gb": 2.5,
}
_TRL = {
  "versions": {"trl": "1"},
  "results": {
    "tiny": {"trl": {"generate_tokens_per_s": 1.0}},
    "smollm2": {
      "trl": {
        "generate_s": 7.0,
        "generate_tokens_per_s": 200.0,
        "generate_best_tokens_per_s": 220.0,
        "fwd_bwd_tokens_per_s": 380.0,
        "grpo_step_s": 8.0,
        "grpo_generation_s": 5.0,
        "grpo_train_s": 2.0,
        "grpo_all_step_s": [8.0, 9.0],
        "peak_rss_mib": 2048.0,
      }
    },
  },
}


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ('loading\n{"a": 1}\n{\'loss\': 0.1}\n{"b": 2}\n', {"b": 2}),
    # An object over several lines: the outermost one counts.
    ("{'loss': 0.1}\n" + json.dumps(_TRL, indent=1) + "\nbye\n", _TRL),
    # A truncated object is skipped for the one before.
    ('{"a": 1}\n{\n "b": {\n  "c": 1\n }\n', {"a": 1}),
    ('{"a": 1} seconds\n', None),  # Followed by other text.
    *((text, None) for text in ("", "\n", "[1]\n", "{\n", 'x {"a": 1}')),
  ],
)
def test_last_json_object(text, found):
  assert peers.last_json_object(text) == found


# Records of CPU seconds, and without any structure.
_CPU = {
  "sampler": {"cpu_s": [3.0, 1.0, 2.0]},
  "grpo": {"cpu_s": [9.0, 4.0, 5.0]},
}
_FLAT = {"tokens_per_s": 5, "step_s": 2.0, "update_s": 1.0, "note": "x"}


class TestReadNumbers:
  @pytest.mark.parametrize(
    ("record", "part", "shape", "numbers"),
    [
      (
        *(_TUNIX, "sampler", "smollm2-135m"),
        {"tokens_per_s": 100.0, "best_tokens_per_s": 120.0},
      ),
      (
        *(_TUNIX, "train_step", "smollm2-135m"),
        {"step_s": 4.0, "generate_s": 3.0, "update_s": 1.0}
        | {"peak_rss_gib": 2.5},
      ),
      # The median of all but the first.
      (_CPU, "sampler", "tiny", {"cpu_s": 2.0}),
      (_CPU, "train_step", "tiny", {"step_cpu_s": 5.0}),
      (
        *(_TRL, "train_step", "smollm2-135m"),
        # The time of its step, not of its other measurement.
        {"step_s": 8.0, "generate_s": 5.0, "update_s": 2.0}
        | {"update_tokens_per_s": 380.0, "peak_rss_gib": 2.0},
      ),
      (_TRL, "sampler", "tiny", {"tokens_per_s": 1.0}),
      (_FLAT, "sampler", "tiny", {"tokens_per_s": 5.0}),
      (_FLAT, "train_step", "tiny", {"step_s": 2.0, "update_s": 1.0}),
    ],
  )
  def test_of_every_library(self, record, part, shape, numbers):
    assert peers.read_numbers(record, part=part, shape=shape) == numbers

  @pytest.mark.parametrize(
    "record, message",
    [
      ({"tokens": 1}, "none of tokens_per_s"),
      ({"tokens_per_s": 0}, "tokens_per_s is 0"),
      ({"tokens_per_s": math.nan}, "not a positive number"),
      ({"tokens_per_s": "1"}, "not a positive number"),
      ({"cpu_s": []}, "not a positive number"),
      ({"cpu_s": [1.0, 0.0]}, "not a positive number"),
      ({"shape": "smollm135m", "tokens_per_s": 1}, "measured shape"),
      ({"results": {"smollm2": {}}}, "measured .'smollm2'."),
    ],
  )
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
  @pytest.mark.parametrize(
    "arguments, message",
    [
      (["sampler", "--batch=0"], "--batch=0 must be at least 1"),
      (["train_step", "--batch=6"], "--batch=6 must be a multiple of"),
      (["train_step", "--max_tokens_per_row=9"], "_per_row=9 must fit"),
      (["sampler", "--peer=x"], "--peer='x' must be NAME=COMMAND"),
      (["sampler", "--peer=ours=x"], "with a name other than 'ours'"),
      (["sampler", "--peer=a=x", "--peer=a=y"], "two peers are named 'a'"),
    ],
  )
  def test_bad_input_is_one_line(self, arguments, message):
    assert message in programs.refused(benchmark.main, *arguments)

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
