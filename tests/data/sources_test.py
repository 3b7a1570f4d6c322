"""Sources: JSONL files line by line, TFDS without TensorFlow."""

import json
import sys

import pytest

from jaxrl_llm.data import sources, tasks
from jaxrl_llm.errors import InputError


def jsonl(path, *lines):
  raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
  (path / "data.jsonl").write_bytes(b"\n".join(raw))
  return path / "data.jsonl"


GOOD = {"id": "a-1", "question": "1+1?", "answer": "2", "source": "book"}


class TestJsonl:
  def test_fields_and_defaults(self, tmp_path):
    bare = {"question": "\u00e9?", "answer": "4", "level": 3}
    examples = sources.load_jsonl(jsonl(tmp_path, GOOD, b"", bare, b""))
    assert list(examples) == [
      tasks.Example("a-1", "1+1?", "2", "book"),
      tasks.Example("data-3", "\u00e9?", "4", "data"),
    ]

  def test_windows_files(self, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n")
    assert sources.load_jsonl(path)[0].id == "a-1"

  @pytest.mark.parametrize(
    "line, match",
    [
      (b"{nope", "not JSON"),
      (b"[" * 100_000, "not JSON"),
      (b'"text"', "holds a str"),
      (b"null", "holds a NoneType"),
      (b"\xff", r"not UTF-8 \(byte 1\)"),
      ({"question": "1?"}, "no field 'answer'"),
      ({"answer": "1"}, "no field 'question'"),
      ({**GOOD, "answer": 2}, "field 'answer' is a int"),
      ({**GOOD, "question": " "}, "field 'question' is empty"),
      ({**GOOD, "id": None}, "field 'id' is a NoneType"),
      (b'{"question": "\\ud800", "answer": "1"}', "surrogate"),
    ],
  )
  def test_a_malformed_line_is_named(self, tmp_path, line, match):
    path = jsonl(tmp_path, GOOD, line)
    with pytest.raises(InputError, match=match) as caught:
      sources.load_jsonl(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)

  @pytest.mark.parametrize("text", ["", "\n \n"])
  def test_empty_file(self, tmp_path, text):
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(InputError, match="no examples"):
      sources.load_jsonl(tmp_path / "e.jsonl")

  def test_missing_file_and_directory(self, tmp_path):
    with pytest.raises(InputError, match="No such file"):
      sources.load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
      sources.load_jsonl(tmp_path)


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
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      for i in range(3):
        yield (
          i,
          {"prompt": f"{i}+1=\u00e9", "target": str(i + 1), "empty": ""},
        )

  path = tmp_path_factory.mktemp("tfds")
  TinySums(data_dir=path, file_format="array_record").download_and_prepare()
  return str(path)


class TestTfds:
  keys = {"question_key": "prompt", "answer_key": "target"}

  def test_reads_text_without_tensorflow(self, tfds_dir):
    source = sources.make_source(
      "tfds", path="tiny_sums:1.0.0", data_dir=tfds_dir, **self.keys
    )
    assert [source[i] for i in range(len(source))] == [
      tasks.Example(
        id=f"tiny_sums/train-{i}",
        question=f"{i}+1=\u00e9",
        answer=str(i + 1),
        source="tiny_sums/train",
      )
      for i in range(3)
    ]
    assert "tensorflow" not in sys.modules

  def test_split_slices(self, tfds_dir):
    source = sources.TfdsSource(
      "tiny_sums", split="train[1:2]", data_dir=tfds_dir, **self.keys
    )
    assert [e.answer for e in (source[0],)] == ["2"] and len(source) == 1

  @pytest.mark.parametrize(
    "change, match",
    [
      ({"split": "test"}, "cannot be opened"),
      ({"name": "no_such_sums"}, "cannot be opened"),
      ({"split": "train[:0]"}, "cannot be opened|is empty"),
    ],
  )
  def test_bad_names_are_one_line(self, tfds_dir, change, match):
    settings = {"name": "tiny_sums", "data_dir": tfds_dir, **self.keys}
    with pytest.raises(InputError, match=match) as caught:
      sources.TfdsSource(**{**settings, **change}, download=False)
    assert "\n" not in str(caught.value)

  def test_missing_and_empty_features(self, tfds_dir):
    source = sources.TfdsSource("tiny_sums", data_dir=tfds_dir)
    with pytest.raises(InputError, match="'question' is missing.*prompt"):
      source[0]
    keys = {"question_key": "prompt", "answer_key": "empty"}
    source = sources.TfdsSource("tiny_sums", data_dir=tfds_dir, **keys)
    with pytest.raises(InputError, match="row 1: feature 'empty' is empty"):
      source[1]


class TestMakeSource:
  def test_tasks_and_files(self, tmp_path):
    source = sources.make_source("sums", split="eval", digits=1)
    assert len(source) == 20
    path = str(jsonl(tmp_path, GOOD))
    assert sources.make_source("jsonl", path=path)[0].id == "a-1"

  def test_unknown_name_and_missing_path(self):
    with pytest.raises(InputError, match="'csv' is unknown.*chain_sum"):
      sources.make_source("csv")
    with pytest.raises(InputError, match="needs data.path"):
      sources.make_source("jsonl")
