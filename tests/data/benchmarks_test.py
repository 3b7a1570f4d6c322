"""Data sets by name, with a Hub's cache of the test's own."""

import json

import pytest

from jaxrl_llm.data import benchmarks
from jaxrl_llm.data.benchmarks import Dataset, find_sets
from jaxrl_llm.errors import InputError


def cache(folder, repository, files):
  """Writes a snapshot of a data set as `hf download` does."""
  cached = folder / f"datasets--{repository.replace('/', '--')}"
  (cached / "refs").mkdir(parents=True)
  (cached / "refs" / "main").write_text("abc")
  for name in files:
    path = cached / "snapshots" / "abc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"question": "1+1?", "answer": name}) + "\n")
  return cached / "snapshots" / "abc"


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
  """A cached GSM8K, and an empty folder to work in."""
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
  (tmp_path / "here").mkdir()
  monkeypatch.chdir(tmp_path / "here")
  names = ["main/test-0.jsonl", "main/train-0.jsonl", "socratic/test-0.jsonl"]
  return cache(tmp_path, "openai/gsm8k", [*names, "main/test-1.jsonl"])


class TestFindSets:
  def test_every_kind_of_name(self, gsm8k):
    found = find_sets("gsm8k,a/own.jsonl,tfds:math/all:1.0.0,chain_sum")
    test = ",".join(str(gsm8k / f"main/test-{i}.jsonl") for i in (0, 1))
    assert found == [
      Dataset("gsm8k", "jsonl", test, known=True),
      Dataset("own", "jsonl", "a/own.jsonl"),
      Dataset("all", "tfds", "math/all:1.0.0"),
      Dataset("chain_sum", "chain_sum"),
    ]

  def test_a_pattern_is_one_set(self):
    assert find_sets("data/test*.jsonl")[0].name == "test"
    many = [f"data/{number}.jsonl" for number in range(1000)]
    assert [one.path for one in find_sets(",".join(many))] == many

  def test_a_file_of_that_name_goes_first(self, gsm8k, tmp_path):
    (tmp_path / "here" / "gsm8k").write_text("")
    assert find_sets("gsm8k") == [Dataset("gsm8k", "jsonl", "gsm8k")]

  def test_a_file_whose_name_has_a_comma(self, tmp_path):
    path = tmp_path / "a,b.jsonl"
    path.write_text("")
    assert [one.path for one in find_sets(str(path))] == [str(path)]

  def test_a_source_with_paths_of_its_own_takes_every_name(self):
    found = find_sets("gsm8k,math/all:1.0.0", "tfds")
    assert [one[:3] for one in found] == [
      ("gsm8k", "tfds", "gsm8k"),
      ("all", "tfds", "math/all:1.0.0"),
    ]

  def test_equal_stems_are_told_apart_by_their_folders(self, gsm8k):
    names = lambda paths: [one.name for one in find_sets(paths)]
    found = names("a/test.jsonl,b/test.parquet,other.jsonl")
    assert found == ["a_test", "b_test", "other"]
    assert names("gsm8k,own/gsm8k.jsonl") == ["gsm8k", "own_gsm8k"]
    twice = "a/test.jsonl,b/a/test.jsonl"
    with pytest.raises(InputError, match="two sets are named 'a_test'; rename"):
      find_sets(twice)

  @pytest.mark.parametrize("name", ["math", "sumz", "", "a.jsonl,"])
  def test_what_is_no_set(self, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
      InputError, match="is not an evaluation set.*olympiadbench"
    ):
      find_sets(name)


class TestTrainingFiles:
  def test_names_stand_for_the_training_split(self, gsm8k):
    train = str(gsm8k / "main/train-0.jsonl")
    assert benchmarks.training_files("gsm8k", "tfds") == "gsm8k"
    assert benchmarks.training_files("gsm8k", "jsonl") == train
    assert (
      benchmarks.training_files("a.jsonl,gsm8k", "parquet")
      == f"a.jsonl,{train}"
    )

  def test_what_is_for_evaluation_only(self):
    with pytest.raises(InputError, match="math500 is for evaluation only"):
      benchmarks.training_files("math500", "jsonl")

  def test_what_is_not_in_the_cache(self, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="`hf download openai/gsm8k"):
      benchmarks.training_files("gsm8k", "jsonl")
