"""Data sources: files of rows, TFDS without TensorFlow, and splits."""

import datetime
import importlib
import json
import os
import sys
import zipfile

import pyarrow
import pytest
from helpers import cases
from pyarrow import parquet

from jaxrl_llm.data import rows, sources, tasks
from jaxrl_llm.errors import InputError

_CASES = cases.load("sources")


def jsonl(path, *lines, name="data"):
  raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
  (path / f"{name}.jsonl").write_bytes(b"\n".join(raw))
  return path / f"{name}.jsonl"


def read(path, kind="jsonl", **columns):
  return sources.make_source(kind, path=str(path), columns=columns)


def example(**fields):
  return rows.to_example(rows.Row("f:1", fields))


GOOD = {"id": "a-1", "question": "1+1?", "answer": "2", "source": "book"}
ASKED = [
  {"role": "system", "content": "be brief"},
  {"role": "user", "content": "1+1?"},
]
VERL = {
  "data_source": "openai/gsm8k",
  "prompt": ASKED,
  "ability": "math",
  "reward_model": {"style": "rule", "ground_truth": "2"},
  "extra_info": {"index": 5, "answer": "it is 2"},
}


class TestLayouts:
  def test_own(self, tmp_path):
    bare = {"question": "\u00e9?", "answer": 4, "level": 3}
    examples = read(jsonl(tmp_path, GOOD, b"", bare, b""))
    assert list(examples) == [
      tasks.Example("a-1", "1+1?", "2", "book", None, GOOD),
      tasks.Example("data-3", "\u00e9?", "4", "data", None, bare),
    ]

  @cases.table("fields, answer", _CASES["answers"])
  def test_answers(self, fields, answer):
    assert example(question="1+1?", **fields).answer == answer

  def test_each_of_several_answers_is_right(self):
    found = example(question="1+1?", answer=["2", None, 2.5, "two"])
    assert (found.answer, found.alternatives) == ("2", ("2.5", "two"))
    with pytest.raises(InputError, match="'answer' is a bool"):
      example(question="1+1?", answer=["2", True])

  def test_verl(self):
    found = example(**VERL)
    assert (found.question, found.answer) == ("1+1?", "2")
    assert found.messages == ASKED and found.source == "openai/gsm8k"
    assert found.columns == VERL

  def test_trl(self):
    text = example(prompt="1+1?", answer=2.5, tests=["x"])
    assert (text.question, text.answer, text.messages) == ("1+1?", "2.5", None)
    assert text.columns["tests"] == ["x"]
    found = example(prompt=ASKED, tests=["x"])
    assert found.messages == ASKED and found.answer == ""

  def test_contents_of_messages(self):
    calls = [{"function": {"name": "add", "arguments": {"a": 7}}}]
    parts = [{"type": "text", "text": x, "image": None} for x in ("1+", "1?")]
    talk = [
      *(ASKED[0], {"role": "user", "content": parts}),
      {"role": "assistant", "content": None, "tool_calls": calls},
      {"role": "tool", "content": "2"},
    ]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    said = [called, talk[3]]
    assert example(prompt=talk).messages == [*ASKED, *said]
    answer = [{"role": "assistant", "content": [{"text": "2"}]}]
    found = example(messages=[*talk, *answer])
    assert found.messages == ASKED and found.question == "1+1?"
    assert found.completion == [*said, {"role": "assistant", "content": "2"}]
    found = example(prompt="1+1?", completion=talk[2:])
    assert found.completion == said
    pairs = [{"x": 1}]
    assert example(prompt="1+1?", solution=pairs).completion == pairs

  @cases.table("message, shown", _CASES["messages"])
  def test_a_message_of_another_kind_is_named(self, message, shown):
    with pytest.raises(InputError, match=f"message 3 of 'prompt' is .*{shown}"):
      example(prompt=[*ASKED, json.loads(message)])

  def test_columns_of_other_names(self, tmp_path):
    path = jsonl(tmp_path, {"problem": "1?", "meta": {"gold": 1, "n": 7}})
    columns = {"question": "problem", "answer": "meta.gold", "id": "meta.n"}
    (found,) = read(path, **columns)
    assert (found.id, found.question, found.answer) == ("7", "1?", "1")


class TestFiles:
  def test_windows_files(self, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n")
    assert read(path)[0].id == "a-1"

  def test_several(self, tmp_path):
    for name in "ba":
      jsonl(tmp_path, GOOD | {"id": None}, name=name)
    both = f"{tmp_path}/b.jsonl,{tmp_path}/a.jsonl"
    assert [x.id for x in read(both)] == ["b-1", "a-1"]
    assert [x.id for x in read(f"{tmp_path}/*.jsonl")] == ["a-1", "b-1"]
    names = [f"{i}-{'x' * 200}" for i in range(30)]
    many = [str(jsonl(tmp_path, GOOD, name=name)) for name in names]
    assert len(",".join(many)) > 4096  # Longer than a path may be.
    assert len(read(",".join(many))) == 30
    with pytest.raises(InputError, match="a.jsonl is named twice; name every"):
      read(f"{both},{tmp_path}/a.json*")

  def test_the_name_of_a_file_is_no_pattern(self, tmp_path):
    names = "a[1]", "a1", "a,1"
    for name in names:
      jsonl(tmp_path, GOOD | {"id": name}, name=name)
    for name in names:
      assert [x.id for x in read(tmp_path / f"{name}.jsonl")] == [name]

  def test_equal_stems_are_told_apart_by_their_folders(self, tmp_path):
    row = {"question": "1+1?", "answer": "2"}
    for name in "ab":
      (tmp_path / name).mkdir()
    jsonl(tmp_path / "a", row, name="train")
    jsonl(tmp_path, row, name="more")
    table = pyarrow.Table.from_pylist([row])
    parquet.write_table(table, tmp_path / "b" / "train.parquet")
    names = "a/train.jsonl", "b/train.parquet", "more.jsonl"
    found = read(",".join(str(tmp_path / name) for name in names))
    assert [x.source for x in found] == ["a_train", "b_train", "more"]
    assert [x.id for x in found] == ["a_train-1", "b_train-1", "more-1"]

  def test_parquet_as_verl_writes_it(self, tmp_path):
    path = tmp_path / "v.parquet"
    more = {"raw": b"\xc3\xa9", "day": datetime.date(2025, 1, 2)}
    table = pyarrow.Table.from_pylist([VERL | more] * 2)
    parquet.write_table(table, path)
    first, second = read(path, "parquet")
    assert (first.id, second.id) == ("v-1", "v-2")
    assert first.columns == VERL | {"raw": "\u00e9", "day": "2025-01-02"}

  def test_a_number_of_parquet_that_json_lacks_is_missing(self, tmp_path):
    path = tmp_path / "n.parquet"
    row = {"prompt": "1?", "answer": float("nan"), "level": float("inf")}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (found,) = read(path, "parquet")
    assert found.answer == ""
    assert found.columns == {"prompt": "1?", "answer": None, "level": None}

  @cases.table(
    "line, match", [*_CASES["malformed"], ["[" * 100_000, "not JSON"]]
  )
  def test_a_malformed_line_is_named(self, tmp_path, line, match):
    path = jsonl(tmp_path, GOOD, line.encode("latin-1"))
    with pytest.raises(InputError, match=match) as caught:
      read(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)

  def test_the_first_five_bad_rows_are_named_at_once(self, tmp_path):
    folder = tmp_path / ("long" * 50)  # Not repeated by every error.
    folder.mkdir()
    for bad in (b"{nope", {"question": "1?", "answer": None}, {}):
      path = jsonl(folder, *[GOOD, bad] * 7)
      with pytest.raises(InputError, match=f"^{path}:2: ") as caught:
        read(path)
      assert [
        f"{path.name}:{n}: " in str(caught.value) for n in range(2, 15, 2)
      ] == [*[True] * 5, False, False]
      assert "\n" not in str(caught.value)

  @pytest.mark.parametrize("kind", ["gzip", "bz2", "lzma", "zip"])
  def test_compressed_files_are_named(self, tmp_path, kind):
    data = json.dumps(GOOD).encode()
    if kind == "zip":
      with zipfile.ZipFile(tmp_path / "c.jsonl", "w") as archive:
        archive.writestr("c", data)
    else:
      data = importlib.import_module(kind).compress(data)
      (tmp_path / "c.jsonl").write_bytes(data)
    with pytest.raises(
      InputError, match="a compressed file; decompress it with"
    ):
      read(tmp_path / "c.jsonl")

  @pytest.mark.parametrize("text", ["", "\n \n"])
  def test_empty_file(self, tmp_path, text):
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(InputError, match="there are no rows"):
      read(tmp_path / "e.jsonl")

  def test_what_is_no_file_of_the_kind(self, tmp_path):
    with pytest.raises(InputError, match="No such file"):
      read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"\*.jsonl: cannot be read"):
      read(tmp_path / "*.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
      read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
      with pytest.raises(InputError, match="it is a pipe or a device"):
        read(path)
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([GOOD]), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="damaged .*; get it again"):
      read(path)

  def test_columns_that_are_not_there(self, tmp_path):
    path = jsonl(tmp_path, GOOD)
    with pytest.raises(InputError, match="data.columns has 'ask'; it maps que"):
      read(path, ask="question")
    for value in (5, None, ["a"], {}):
      with pytest.raises(
        InputError, match="data.columns.'id'.=.*give a column"
      ):
        read(path, id=value)
    with pytest.raises(InputError, match="no field 'a.b', which data.columns"):
      read(path, answer="a.b")
    path = jsonl(tmp_path, GOOD | {"gold": None})
    with pytest.raises(
      InputError, match="'gold', which .* names is null; give"
    ):
      read(path, answer="gold")


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
  """Prepares a dataset of three sums in the array_record format."""
  tfds = pytest.importorskip("tensorflow_datasets")

  class TinySums(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      text = tfds.features.Text()
      return self.dataset_info_from_configs(
        features=tfds.features.FeaturesDict(
          {"prompt": text, "target": text, "empty": text}
        ),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {
        "train": self._generate_examples(3),
        "test": self._generate_examples(2),
      }

    def _generate_examples(self, count):
      for i in range(count):
        yield (
          i,
          {"prompt": f"{i}+1=\u00e9", "target": str(i + 1), "empty": ""},
        )

  path = tmp_path_factory.mktemp("tfds")
  TinySums(data_dir=path, file_format="array_record").download_and_prepare()
  return str(path)


class TestTfds:
  columns = {"question": "prompt", "answer": "target"}

  def make(self, tfds_dir, path="tiny_sums", **changes):
    settings = {"data_dir": tfds_dir, "download": False}
    given = {"columns": self.columns} | changes
    return sources.make_source("tfds", settings, path=path, **given)

  def test_reads_text_without_tensorflow(self, tfds_dir):
    source = self.make(tfds_dir, "tiny_sums:1.0.0")
    assert [source[i] for i in range(len(source))] == [
      tasks.Example(
        id=f"tiny_sums/train-{i}",
        question=f"{i}+1=\u00e9",
        answer=str(i + 1),
        source="tiny_sums/train",
        columns={"prompt": f"{i}+1=\u00e9", "target": f"{i + 1}", "empty": ""},
      )
      for i in range(3)
    ]
    assert "tensorflow" not in sys.modules

  def test_splits(self, tfds_dir):
    source = self.make(tfds_dir, split="train[1:2]")
    assert [e.answer for e in (source[0],)] == ["2"] and len(source) == 1
    # The usual name for evaluation.
    assert self.make(tfds_dir, split="eval")[1].id == "tiny_sums/test-1"

  @cases.table("change, match", _CASES["bad_names_are_one_line"])
  def test_bad_names_are_one_line(self, tfds_dir, change, match):
    with pytest.raises(InputError, match=match) as caught:
      self.make(tfds_dir, **change)
    assert "\n" not in str(caught.value)

  def test_missing_and_empty_features(self, tfds_dir):
    source = self.make(tfds_dir, columns={"question": "asked"})
    with pytest.raises(InputError, match="row 0: no field 'asked'.*'prompt'"):
      source[0]
    source = self.make(tfds_dir, columns={"answer": "empty"})
    with pytest.raises(InputError, match="row 1: 'answer' is ''; give a text"):
      source[1]


class TestMakeSource:
  def test_a_maker_gets_what_it_reads(self, monkeypatch):
    made = []
    makers = {
      "all": lambda path, split, seed, columns: (
        made.append((path, split, seed)) or []
      ),
      "some": lambda *, seed, level=1: made.append((seed, level)) or [],
      "rest": lambda **settings: made.append(settings) or [],
    }
    monkeypatch.setattr(sources, "SOURCES", makers)
    given = {"path": "p", "split": "s", "seed": 3}
    sources.make_source("all", **given)
    sources.make_source("some", {"level": 2}, **given)
    sources.make_source("rest", {"level": 2}, **given)
    assert made == [
      ("p", "s", 3),
      (3, 2),
      {"split": "s", "seed": 3, "level": 2},
    ]

  @cases.table("name, settings, match", _CASES["refusals"])
  def test_refusals(self, name, settings, match):
    with pytest.raises(InputError, match=match):
      sources.make_source(name, settings)

  @pytest.mark.parametrize(
    ("made", "what"),
    [([{"question": "1+1?"}], "list of dict"), (iter(()), "tuple_iterator;")],
  )
  def test_a_source_without_examples_is_refused(self, monkeypatch, made, what):
    monkeypatch.setitem(sources.SOURCES, "mine", lambda: made)
    with pytest.raises(InputError, match=f"'mine' returned a {what}"):
      sources.make_source("mine")


def asked(*questions):
  return [tasks.Example(f"{i}", q, "1", "x") for i, q in enumerate(questions)]


class TestHoldOut:
  def test_no_question_is_on_both_sides(self):
    source = asked(*(f"{i % 40}?" for i in range(60)))
    train, held = sources.hold_out(source, 0.2, "mine")
    sides = [{x.question for x in part} for part in (train, held)]
    assert len(sides[1]) == 8 and not sides[0] & sides[1]
    assert len(train) + len(held) == 60

  def test_it_depends_on_the_questions_alone(self):
    source = asked(*(f"{i}?" for i in range(40)))
    _, held = sources.hold_out(source, 0.2, "mine")
    _, other = sources.hold_out(source[::-1], 0.2, "mine")
    assert {x.question for x in held} == {x.question for x in other}

  def test_bounds(self):
    assert len(sources.hold_out(asked("a", "b"), 0.01, "mine")[1]) == 1
    many = asked(*map(str, range(3000)))
    assert len(sources.hold_out(many, 0.9, "mine")[1]) == 1000

  def test_what_cannot_be_parted(self):
    said = (
      r"mine: too few questions \(1 distinct in . rows?\) to hold .*holdout=0"
    )
    with pytest.raises(InputError, match=said):
      sources.hold_out(asked("a", "a"), 0.5, "mine")
    with pytest.raises(
      InputError, match="choose eval.source, or give the source"
    ):
      sources.hold_out(tasks.ChainSum(), 0.5, "endless")
