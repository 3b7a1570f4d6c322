"""Checkpoints of every released format can be read.

`formats/N/` is the folder of a small windowed run in checkpoint format N, after
its second step, with unfinished responses. For a new format, add a folder:

    PYTHONPATH=.:tests:scripts/dev python tests/checkpoint/formats_test.py
"""

import os
import pathlib
import shutil

import pytest
from helpers import tiny_run

from jaxrl_llm import api, checkpoint, digest
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.trainer.workdir import Workdir

_FORMATS = pathlib.Path(__file__).parent / "formats"
# 64 bits of the policy, by format.
_POLICY = {4: 14853822941305320409, 5: 2916830003084079123}


def make_config():
  """Makes the config of a run in the working directory, without paths."""
  return tiny_run.make_config(
    "model",
    run__steps=2,
    schedule__window=5,
    optimizer__value__mini_batch=8,
    checkpoint__keep=2,
    checkpoint__every=2,
    eval__problems=4,
    value__reads_logprobs=False,  # Format 4 is older than the key.
    environment__max_observation_tokens=64,  # The old default.
  )


@pytest.fixture(params=sorted(int(f.name) for f in _FORMATS.glob("*")))
def released(request, tmp_path, monkeypatch):
  """A copy of the run of a format, and the format."""
  monkeypatch.chdir(tmp_path)
  shutil.copytree(_FORMATS / str(request.param), "run")
  return pathlib.Path("run"), request.param


def test_every_format_has_its_run():
  assert {int(f.name) for f in _FORMATS.glob("*")} == {4, commit.FORMAT}
  size = sum(f.stat().st_size for f in _FORMATS.rglob("*") if f.is_file())
  assert size < 2e6


def test_is_read_whole(released):
  folder, number = released
  policy = api.load(folder)
  assert policy.step == 2 and digest.checksum(policy.params) == _POLICY[number]
  tiny_run.write_model(pathlib.Path("model"))
  run = build.make_run(make_config())
  # A default that changed; on a CPU, both values are equivalent. Paths are
  # stored absolute now.
  path = ["model", os.path.abspath("model")]
  changed = Workdir(folder).changes(run.config)
  assert changed == {"model.head_chunk": [128, 0], "model.path": path}
  saver = checkpoint.Checkpointer(folder / "checkpoints", keep=2)
  states, weights = loop.restore(run, saver, 2)
  facts = saver.record(2)["facts"]
  saver.close()
  assert Workdir(folder).check_facts(2, facts, run.inputs, {}) == []
  assert states.step == weights.version == 2
  assert states.learner.critic.optimizer.step == 1  # The first full batch.
  # Unfinished responses, some of them by earlier weights.
  written = states.rollout.store
  assert set(written.lengths.tolist()) == {0, 5, 10}
  assert set(written.version[written.lengths == 10].flat) >= {0, 1}
  assert len(states.learner.waiting.rewards) < 8


if __name__ == "__main__":
  target = _FORMATS / str(commit.FORMAT)
  os.chdir(os.environ.get("TMPDIR", "/tmp"))
  tiny_run.write_model(pathlib.Path("model"))
  loop.train(build.make_run(make_config()), "written")
  shutil.copytree("written", target, ignore=shutil.ignore_patterns("0", "lock"))
  print(digest.checksum(api.load(target).params))
