"""A checkpoint that an earlier version wrote can be read.

`formats/N/` is the folder of a small windowed run in the current checkpoint
format N, after its second step, with unfinished responses. For a new format,
replace it:

    PYTHONPATH=.:tests:scripts/dev python tests/checkpoint/formats_test.py
"""

import os
import pathlib
import shutil

from helpers import tiny_run

from jaxrl_llm import api, checkpoint, digest
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.trainer.workdir import Workdir

_FORMATS = pathlib.Path(__file__).parent / "formats"
_WRITTEN_IN = "/tmp"
_POLICY = 7308278740802703949  # 64 bits.


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
  )


def test_the_format_has_its_run():
  assert [f.name for f in _FORMATS.glob("*")] == [str(commit.FORMAT)]
  size = sum(f.stat().st_size for f in _FORMATS.rglob("*") if f.is_file())
  assert size < 2e6


def test_is_read_whole(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder = shutil.copytree(_FORMATS / str(commit.FORMAT), pathlib.Path("run"))
  policy = api.load(folder)
  assert policy.step == 2 and digest.checksum(policy.params) == _POLICY
  tiny_run.write_model(pathlib.Path("model"))
  run = build.make_run(make_config())
  path = [f"{_WRITTEN_IN}/model", os.path.abspath("model")]
  assert Workdir(folder).changes(run.config) == {"model.path": path}
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
  os.chdir(_WRITTEN_IN)
  tiny_run.write_model(pathlib.Path("model"))
  loop.train(build.make_run(make_config()), "written")
  shutil.copytree("written", target, ignore=shutil.ignore_patterns("0", "lock"))
  print(digest.checksum(api.load(target).params))
