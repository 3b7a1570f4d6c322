"""Tests of scripts/detect.py on files of a fleet."""

import json

import detect
import numpy as np
import pytest

_NOW = 1_800_000_000.0


def write(folder, host, rows):
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / f"{host}.jsonl").write_text(text)


def samples(seed, seconds=900, broken=False, **more):
  values = np.random.default_rng(seed).normal(70, 2, (seconds, 2))
  if broken:
    values[300:, 0] -= 15
  return [
    {"time": _NOW + i, "duty_cycle": float(a), "power": float(b), **more}
    for i, (a, b) in enumerate(values)
    if i % 17  # Some seconds are missing.
  ]


def steps(slow=1.0):
  return [
    {
      "step": i,
      "time": _NOW + 4 * i,
      "time/generate_s": 3.0 * (slow if i > 10 else 1),
      "time/score_s": 1.0,
      "time/step_s": 1.0 + 3.0 * (slow if i > 10 else 1),
      "reward/mean": i / 30,
    }
    for i in range(30)
  ]


def run(folder, capsys, *flags):
  code = detect.main([f"--metrics={folder}", *flags])
  out, err = capsys.readouterr()
  return code, out, err


def test_names_who_is_unlike_the_others(tmp_path, capsys):
  for host in range(5):
    write(tmp_path, f"worker-{host}", samples(host, broken=host == 3))
  code, out, _ = run(tmp_path, capsys)
  assert code == 1 and out.count("\n") == 1
  assert out.startswith("worker-3: duty_cycle deviates from the other hosts")
  since = float(out.split("since ")[1].split()[0])
  assert _NOW + 295 <= since <= _NOW + 345


def test_who_fell_silent(tmp_path, capsys):
  for host in range(3):
    write(tmp_path, f"worker-{host}", samples(host, 900 - 100 * (host == 1)))
  code, out, _ = run(tmp_path, capsys)
  assert code == 1 and out.startswith("worker-1: silent for 10")


def test_a_clock_that_is_wrong_hides_nobody(tmp_path, capsys):
  for host in range(4):
    rows = samples(host, broken=host == 1)
    if host == 2:  # In milliseconds.
      rows = [row | {"time": 1000 * row["time"]} for row in rows]
    write(tmp_path, f"worker-{host}", rows)
  code, out, _ = run(tmp_path, capsys)
  ahead, unlike = out.splitlines()
  assert code == 1 and ahead.startswith("worker-2: its clock is ")
  assert unlike.startswith("worker-1: duty_cycle")


def test_a_line_that_is_being_written(tmp_path, capsys):
  for host in range(3):
    write(tmp_path, f"worker-{host}", samples(host))
  with (tmp_path / "worker-1.jsonl").open("a") as file:
    file.write('{"time": 18000')
  assert run(tmp_path, capsys)[0] == 0


def test_who_is_slow(tmp_path, capsys):
  for host in range(3):
    write(tmp_path, f"process-{host}", steps(slow=2.0 if host == 2 else 1.0))
  assert run(tmp_path, capsys)[:2] == (
    1,
    "process-2: time/generate_s takes 2.0 times as long as elsewhere, for"
    " 133 s\n",
  )


def test_who_is_slow_where_all_wait_for_it(tmp_path, capsys):
  for host in range(3):
    slow = {f"host/{p}_s": 1.0 + 2.0 * (host == 1) for p in ("reward", "wait")}
    rows = [row | {"time/wait_s": 7.0} | slow for row in steps()]
    write(tmp_path, f"{host}-worker", rows)
  code, out, _ = run(tmp_path, capsys)
  assert code == 1 and out.count("\n") == 1
  assert out.startswith("1-worker: host/reward_s takes 3.0 times as long")


def test_two_hosts_cannot_be_compared(tmp_path, capsys):
  write(tmp_path, "worker-0", samples(0))
  write(tmp_path, "worker-1", samples(1))
  refusal = f"detect: {tmp_path}: cannot compare 2 host(s); give at least 3"
  code, out, err = run(tmp_path, capsys)
  assert (code, out, err) == (2, "", f"{refusal} per role\n")
  write(tmp_path, "worker-1", samples(1, broken=True))
  code, out, err = run(tmp_path, capsys)
  assert (code, out, err.count("\n")) == (2, "", 1)
  suspicion = "; more likely worker-1: duty_cycle has moved from 69.65 to"
  assert err.startswith(f"{refusal} per role{suspicion}")


def test_the_slower_one_of_two_is_a_suspicion(tmp_path, capsys):
  for host in range(2):
    write(tmp_path, f"process-{host}", steps(slow=3.0 if host == 0 else 1.0))
  code, out, err = run(tmp_path, capsys)
  assert (code, out, err.count("\n")) == (2, "", 1)
  assert err.endswith(
    "; more likely process-0: time/generate_s takes 3.0 times as long as on"
    " process-1\n"
  )


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_one_of_two(tmp_path, capsys, silent):
  for host in range(2):
    write(tmp_path, f"w-{host}", samples(host, 900 - 200 * (host == silent)))
  code, out, _ = run(tmp_path, capsys)
  assert code == 1 and out.startswith(f"w-{silent}: silent for 20")


def test_says_which_roles_are_too_small(tmp_path, capsys):
  for host in range(5):
    role = ("trainer", "reward")[host >= 3]
    write(tmp_path, f"worker-{host}", samples(host, role=role))
  code, out, _ = run(tmp_path, capsys)
  assert code == 0
  assert out.splitlines() == [
    "none of the 5 hosts is faulty",
    "not compared: 2 of role 'reward' (at least 3)",
  ]
