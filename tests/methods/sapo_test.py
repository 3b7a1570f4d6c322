"""Responses of other policies: SAPO's sharing, exact weights, F-TIS's mask."""

import functools
import json
import os
import shutil

import numpy as np
import pytest
from helpers import doors, programs, registries, tiny_run

from jaxrl_llm import metrics, register
from jaxrl_llm.data.replay import KEEP
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import f_tis
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Origin, take_rows


def masked(behavior, old, advantages, *, other=True, bound=3.1):
  """Returns the mask of two tokens before a distant one without a loss."""
  tokens = (*old, -9), (*behavior, -1), (*advantages, -1)
  rows = [np.asarray([x], np.float32) for x in tokens]
  mask = np.asarray([[True, True, False]])
  origin = np.full(mask.shape, int(Origin.OTHER if other else Origin.POLICY))
  found = f_tis.without_far(mask, *rows, origin, max_distance=bound)
  return np.asarray(found)[0, :2].tolist()


def test_negative_advantages_far_from_the_policy_are_masked():
  behavior, old = (-1, -1), (-3, -4)  # D = 1.1353 + 2.0498.
  assert masked(behavior, old, (-1, -1)) == [False, False]
  assert masked(behavior, old, (-1, 1)) == [False, True]
  assert masked(behavior, old, (0, 0.5)) == [True, True]
  assert masked(behavior, old, (-1, -1), bound=3.2) == [True, True]
  assert masked(behavior, old, (-1, -1), other=False) == [True, True]


@pytest.fixture
def own_parts():
  with registries.registered():
    yield


SHARED = {
  "schedule__replay": 0.5,
  "schedule__replay_keep": "foreign",
  "method__use": ("f_tis", "sapo"),
  "data__pool": 8,
}


def sharing(folder, *others, **changes):
  paths = tuple(str(folder / name) for name in others)
  own = {
    "method__sapo__share_in": str(folder / "own"),
    "schedule__replay_keep": "all",
  }
  return SHARED | own | {"method__sapo__replay_from": paths} | changes


def lines_of(run, questions, *, samples=4, seed=0):
  """Makes lines like those of generate.py, with random digits."""
  rng, lines = np.random.default_rng(seed), []
  for question in questions:
    for _ in range(samples):
      tokens = [*rng.integers(2, 12, size=rng.integers(1, 8)).tolist(), 1]
      lines.append(
        {
          "question": question,
          "text": run.tokenizer.decode(tokens),
          "tokens": tokens,
          "logprobs": (-rng.random(len(tokens))).tolist(),
          "stop_reason": "finished",
        }
      )
  return lines


def write(path, lines):
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def questions(run, count):
  return [run.source.example(i, 0).question for i in range(count)]


def test_responses_enter_the_store_as_they_are(model, tmp_path):
  config = doors.make_config(model, **sharing(tmp_path, "given.jsonl"))
  run = build.make_run(config)
  lines = lines_of(run, ["1+1+1+1?", *questions(run, 3)])
  lines[-1]["stop_reason"] = "failed"
  write(tmp_path / "given.jsonl", lines)
  collected = tiny_run.collect(run)[-1]
  batch, known = collected.batch.responses, lines[4:-1]
  foreign = batch.rollout.origin[:, 0] == Origin.OTHER
  assert collected.batch.metrics["rollout/replayed"] == 2
  assert (
    len(foreign) == 8 + foreign.sum()
    and (batch.rollout.sample_id[foreign] < 0).all()
  )
  assert len(np.unique(batch.rollout.group_id)) == 4
  store = collected.state.replay
  given = store.rollout.origin[:, 0] == Origin.OTHER
  assert given.sum() == len(known) and batch.judged[foreign].all()
  np.testing.assert_array_equal(
    KEEP["foreign"](store), given & KEEP["mixed"](store)
  )
  for row, line in zip(np.flatnonzero(given), known):
    length = store.rollout.lengths[row]
    assert store.rollout.tokens[row, :length].tolist() == line["tokens"]
    np.testing.assert_array_equal(
      store.rollout.behavior_logprobs[row, :length],
      np.asarray(line["logprobs"], np.float32),
    )
    asked = run.source.prompt(int(store.rollout.example_id[row]), 0)
    assert asked.question == line["question"]
    count = store.rollout.prompt_lengths[row]
    assert tuple(store.rollout.prompt_tokens[row, :count]) == asked.tokens


def test_a_run_shares_what_it_has_judged(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path)))
  rollout = tiny_run.collect(run)[-1].batch.responses.rollout
  (file,) = (tmp_path / "own").glob("*.jsonl")
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  assert len(lines) == 16
  for row, line in enumerate(lines):
    length = rollout.lengths[row]
    assert line["tokens"] == rollout.tokens[row, :length].tolist()
    np.testing.assert_array_equal(
      np.asarray(line["logprobs"], np.float32),
      rollout.behavior_logprobs[row, :length],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"schedule__lag": 1, "sampler__slots": 4, "model__lora_rank": 2},
    {"estimator__name": "gae", "optimizer__value__mini_batch": 8},
    {
      "schedule__dynamic_sampling": True,
      "schedule__max_rounds": 8,
      "schedule__over_provision": 2.0,
      "reward__name": "even",
      "method__use": ("dars", "f_tis", "sapo"),
    },
  ],
)
def test_trains_and_resumes_bit_for_bit(model, tmp_path, changes, own_parts):
  register.reward("even", lambda tokens: len(tokens) % 2 == 0)
  given = sharing(tmp_path, "other", **changes)
  run = build.make_run(doors.make_config(model, **given))
  for number in range(2):
    lines = lines_of(run, questions(run, 4), seed=number)
    write(tmp_path / "other" / f"{number}.jsonl", lines)
  assert loop.train(run, tmp_path / "run") == 0
  rows = metrics.read_rows(tmp_path / "run" / "metrics.jsonl")
  assert rows[-1]["rollout/replayed"] == 2 and rows[-1]["policy/skipped"] == 0
  assert rows[-1]["correction/weight_mean"] > 0
  # A repeated step does not read lines that were added later.
  lines = lines_of(run, questions(run, 4), seed=9)
  write(tmp_path / "other" / "late.jsonl", lines)
  again = shutil.copytree(tmp_path / "run", tmp_path / "again")
  assert loop.train(run, again, step=1) == 0
  assert tiny_run.comparable(again) == tiny_run.comparable(tmp_path / "run")


@pytest.mark.slow
def test_responses_of_generate_py(model, tmp_path):
  config = doors.make_config(model, **sharing(tmp_path, "given.jsonl"))
  run = build.make_run(config)
  write(tmp_path / "q.jsonl", [{"question": q} for q in questions(run, 8)])
  programs.finish(
    "scripts/generate.py",
    f"--model={model}",
    f"--prompts={tmp_path / 'q.jsonl'}",
    f"--out={tmp_path / 'given.jsonl'}",
    "--max_new_tokens=12",
    "--samples=4",
  )
  states, _, collected = tiny_run.collect(run)
  store = collected.state.replay.rollout
  rollout = take_rows(store, store.origin[:, 0] == Origin.OTHER)
  assert len(rollout.lengths) == 32
  # They are from the same policy: weights are 1.
  old = run.learner.read(states.learner, "old_logprobs", rollout)
  np.testing.assert_allclose(
    old[rollout.mask], rollout.behavior_logprobs[rollout.mask], atol=1e-5
  )


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"method__sapo__share_in": ""}, "set it to a folder"),
    ({"schedule__replay": 0.0}, "set schedule.replay above 0"),
    (
      {"environment__name": "calculator", "sampler__stop": ("=",)},
      "shared responses have no turns",
    ),
    ({"estimator__normalize": "whiten"}, "use estimator.normalize='none'"),
  ],
)
def test_is_refused(model, tmp_path, changes, said):
  given = sharing(tmp_path, "given.jsonl") | changes
  with pytest.raises(InputError, match=said):
    build.make_run(doors.make_config(model, **given))


def reader(run):
  """Returns (number, store) -> what a run reads from other runs."""
  worker = run.worker
  return functools.partial(
    worker.replay.feed.read, source=run.source, writer=worker.writer
  )


def tokens_of(found):
  rollout, prompts, _ = found
  lengths = rollout.lengths if prompts else []
  return [rollout.tokens[i, :n].tolist() for i, n in enumerate(lengths)]


BAD = [
  {"question": "1+1+1+1?"},
  {"question": 7},
  {"question": None},
  {"messages": [[]]},
  {"logprobs": [-1.0]},
  {"logprobs": None},
  {"logprobs": [0.1] * 4},
  {"logprobs": [-1e39] * 4},
  {"logprobs": [-(10**400)] * 4},
  {"logprobs": ["-1"] * 4},
  {"logprobs": [True] * 4},
  {"logprobs": "abcd"},
  {"text": "12"},
  {"turns": []},
  {"stop_reason": "failed"},
  {"stop_reason": ["finished"]},
  {"tokens": [3] * 99, "logprobs": [-1.0] * 99},
  {"tokens": [], "logprobs": []},
  {"tokens": [3, 4, 5, 10**6]},
  {"tokens": [3, 4, 5, 2**70]},
  {"tokens": [3, 4, 5, -1]},
  {"tokens": [3, 4, 5, 1.0]},
  {"tokens": [3, 4, 5, True]},
  {"tokens": {"a": 1}},
]
BAD_LINES = [
  b"[1]",
  b"{",
  b"\xff\xfe",
  b"[" * 100_000,
  b'{"tokens": [NaN]}',
  b'{"n": ' + b"9" * 5000 + b"}",
  b"PAR1" + b"x" * 99,
]


def test_bad_data_are_skipped_and_counted(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path, "given")))
  told = []
  run.worker.writer.judge.tell = told.append
  line = good_line(run)
  lines = [json.dumps(line | change).encode() for change in BAD] + BAD_LINES
  lines.append(json.dumps(line).replace("-1.0", "-1e999").encode())
  lines.insert(5, json.dumps(line).encode())
  (tmp_path / "given").mkdir()
  (tmp_path / "given" / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
  read = reader(run)
  for _ in range(2):  # A repeated batch counts the same.
    found = read(1, None)
    assert tokens_of(found) == [line["tokens"]]
    assert found[2] == len(lines) - 1
  assert 5 < len(told) == len(set(told)) < 20
  said = "a.jsonl, byte 0: its question is not in the training data"
  assert any(said in line for line in told)
  assert read(2, None)[1:] == ([], 0)


def good_line(run):
  (line,) = lines_of(run, questions(run, 1), samples=1)
  tokens = [3, 4, 5, 1]
  text = run.tokenizer.decode(tokens)
  return line | {"tokens": tokens, "text": text, "logprobs": [-1.0] * 4}


def test_only_regular_files_are_read(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path, "given")))
  folder, line = tmp_path / "given", json.dumps(good_line(run)) + "\n"
  (folder / "folder.jsonl").mkdir(parents=True)
  os.mkfifo(folder / "pipe.jsonl")
  (folder / "device.jsonl").symlink_to("/dev/zero")
  (folder / "gone.jsonl").symlink_to(tmp_path / "nothing")
  (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
  with (folder / "huge.jsonl").open("wb") as huge:
    huge.truncate(2**40)
  (folder / "z.jsonl").write_text(line)
  read, again = reader(run), reader(build.make_run(run.config))
  again.func.__self__.run = read.func.__self__.run
  found = read(1, None)
  assert len(found[1]) == 1 and found[2] == 6
  assert read(2, None)[1:] == ([], 0)
  # It depends neither on the files, nor on a journal of another run.
  shutil.rmtree(folder)
  assert tokens_of(again(1, None)) == tokens_of(found)
  assert reader(build.make_run(run.config))(1, None)[1:] == ([], 0)


def test_files_are_told_apart_by_their_content(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path, "given")))
  lines, read = lines_of(run, questions(run, 4), samples=1), reader(run)
  write(tmp_path / "given" / "0.jsonl", lines[:2])
  assert len(read(1, None)[1]) == 2
  # Another run uses the same name; the first one's file has moved.
  os.rename(tmp_path / "given", tmp_path / "moved")
  write(tmp_path / "given" / "0.jsonl", lines[2:])
  assert tokens_of(read(2, None)) == [x["tokens"] for x in lines[2:]]
  feed = run.worker.replay.feed
  feed._others.append(tmp_path / "moved")
  assert read(3, None)[1:] == ([], 0)


def test_a_folder_that_cannot_be_written_costs_no_batch(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path, "given")))
  write(tmp_path / "given" / "0.jsonl", [good_line(run)])
  read, feed = reader(run), run.worker.replay.feed
  told = []
  run.worker.writer.judge.tell = told.append
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / f"{feed.run}-{1:012d}.read.part").mkdir()
  assert read(1, None)[1:] == ([], 1) and "cannot be written" in told[0]
  assert len(read(2, None)[1]) == 1


def test_a_file_may_grow(model, tmp_path):
  run = build.make_run(doors.make_config(model, **sharing(tmp_path, "a.jsonl")))
  lines = lines_of(run, questions(run, 3), samples=1)
  first, second, third = (json.dumps(line) + "\n" for line in lines)
  file, read = tmp_path / "a.jsonl", reader(run)
  for number, (text, new) in enumerate(
    (("", 0), (first + second[:9], 1), (first + second[:-1], 1)), start=1
  ):
    file.write_text(text)
    assert len(read(number, None)[1]) == new
  file.write_text(first + second + third)
  # Restarted, it repeats a batch and then reads the rest.
  again = reader(build.make_run(run.config))
  again.func.__self__.run = read.func.__self__.run
  assert tokens_of(again(3, None)) == [lines[1]["tokens"]]
  assert tokens_of(again(4, None)) == [lines[2]["tokens"]]
  assert not again(5, None)[1]
  file.write_text(first + second + third + second[:9] + "\n")
  assert again(6, None)[1:] == ([], 1)


def test_given_responses_solve_unsolved_prompts(model, tmp_path, own_parts):
  texts = set()
  register.reward("known", lambda response: response in texts)
  given = {"reward__name": "known", "method__use": ("dart", "f_tis", "sapo")}
  given |= {"data__pool": 4, "schedule__replay": 0.9}
  config = doors.make_config(model, **sharing(tmp_path, "a.jsonl", **given))
  run = build.make_run(config)
  lines = lines_of(run, questions(run, 4))
  texts.update(line["text"] for line in lines if len(line["tokens"]) > 4)
  write(tmp_path / "a.jsonl", lines)
  collected = tiny_run.collect(run)[-1]
  store, batch = collected.state.replay, collected.batch.responses
  assert store.correct.all() and set(store.rollout.example_id) == {*range(4)}
  added = batch.rollout.sample_id < 0
  # Correct responses of the other policy, in three of four groups.
  assert added.sum() == 3 and batch.correct[added].all()
  assert (batch.rollout.origin[added, 0] == Origin.OTHER).all()
  own = take_rows(batch, ~added)
  for row in np.flatnonzero(added):
    same = own.rollout.example_id == batch.rollout.example_id[row]
    assert same.any() and not own.correct[same].any()


def test_data_without_an_end_get_a_pool(model, tmp_path):
  given = sharing(tmp_path, "given.jsonl", data__pool=0)
  assert len(build.make_run(doors.make_config(model, **given)).source) == 1024
