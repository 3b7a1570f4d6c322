"""Settings that a resume may change, and how a run records the changes."""

import fcntl
import json
import pathlib
import shutil

import pytest
from helpers import cases, registries, tiny_run

from jaxrl_llm import config as config_lib
from jaxrl_llm import register
from jaxrl_llm import workdir as workdir_lib
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.config import presets
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.trainer.workdir import Workdir

SWITCHES, ALLOWED = (
  {k: tuple(x) if isinstance(x, list) else x for k, x in table.items()}
  for table in cases.load("resumes").values()
)


def keys_that(resume):
  """Returns the keys with the given rule for resumes."""
  return [k for k, key in config_lib.KEYS.items() if key.resume == resume]


def make(**changes):
  return tiny_run.make_config("model", **changes)


def other(value):
  """Returns a different value of the same type."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, dict):
    return {**value, "x": 1}
  if value is None:
    return 0.5
  if isinstance(value, list):
    return [*value, "x"]
  return value + ("x" if isinstance(value, str) else 1)


def changed(changes, **others):
  config = make(**others)
  for key, value in changes.items():
    group, _, name = key.rpartition(".")
    config_lib.get(config, group)[name] = value
  return config


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
  """The files that `workdir` copies from a model directory without reading."""
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "model"
  folder.mkdir()
  for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
    (folder / name).write_text(name)
  (folder / "model.safetensors").write_text("large")
  return folder


def save(folder, *steps):
  for step in steps:
    (folder / "checkpoints" / str(step)).mkdir(parents=True)
    (folder / "checkpoints" / str(step) / "COMMIT").touch()


def unsave(folder):
  shutil.rmtree(folder / "checkpoints" / "3")


@pytest.fixture
def start(tmp_path):
  """start(config) -> folder of a run that has saved step 3."""

  def run(config):
    folder = tmp_path / "run"
    with Workdir(folder).held():
      assert Workdir(folder).changes(config) == {}
      Workdir(folder).begin(config)
    save(folder, 3)
    return folder

  return run


def refusal(folder, config):
  before = tiny_run.snapshot(folder)
  with pytest.raises(InputError) as error:
    Workdir(folder).changes(config)
  assert tiny_run.snapshot(folder) == before
  text = str(error.value)
  assert "\n" not in text and str(folder) in text
  assert "use the old values or another --workdir" in text
  return text


class TestRefused:
  def test_every_switch_is_tried_and_every_setting_is_compared(self):
    assert set(SWITCHES) == set(keys_that(config_lib.SWITCH))
    # In the compared form: the settings of a data source are one value.
    known = set(workdir_lib.flat(config_lib.default_config().to_dict()))
    assert {*keys_that(config_lib.FIXED), *SWITCHES, *ALLOWED} <= known

  def test_a_fixed_setting(self, start):
    # These are read to compare the rest.
    others = {"data.source": "sums", "estimator.name": "group"}
    others |= {"loss.name": "other", "method.use": ["gspo"]}
    folder, fixed = start(make()), keys_that(config_lib.FIXED)
    assert {"run.seed", "model.path", "data.path", "estimator.name"} < {*fixed}
    with registries.registered():
      register.loss("other", lambda logprobs, advantages: None)
      for key in fixed:
        old = config_lib.get(make(), key)
        old = old.to_dict() if hasattr(old, "to_dict") else old
        old = list(old) if isinstance(old, tuple) else old  # As in JSON.
        new = others.get(key) or other(old)
        text = refusal(folder, changed({key: new}))
        assert f"config.{key}: {old!r} -> {new!r}" in text

  def test_the_model_may_be_moved_but_not_replaced(self, start, model):
    folder = start(make())
    moved = model.rename(model.with_name("moved"))
    config = changed({"model.path": str(moved)})
    found = Workdir(folder).changes(config)
    assert found == {"model.path": ["model", str(moved)]}
    (moved / "chat_template.jinja").unlink()
    assert "config.model.path" in refusal(folder, config)

  def test_all_of_them_are_named_in_one_line(self, start):
    changes = {"run.seed": 1, "method.use": ("gspo",), "run.steps": 9}
    text = refusal(start(make()), changed(changes))
    assert "config.run.seed: 0 -> 1; " in text
    assert "config.method.use: [] -> ['gspo']" in text
    assert "run.steps" not in text

  @pytest.mark.parametrize("key", SWITCHES)
  def test_a_switch(self, start, key):
    off, on = config_lib.get(make(), key), SWITCHES[key]
    folder = start(make())
    text = refusal(folder, changed({key: on}))
    listed = lambda x: list(x) if isinstance(x, tuple) else x  # As in JSON.
    off, on = listed(off), listed(on)
    assert f"config.{key}: {off!r} -> {on!r}" in text
    unsave(folder)
    start(changed({key: on}))
    assert f"config.{key}: {on!r} -> {off!r}" in refusal(folder, make())
    # Not off, only stronger.
    found = Workdir(folder).changes(changed({key: 2 * on}))
    assert found == {key: [on, 2 * on]}

  @pytest.mark.parametrize(
    "schedule", [{"schedule__window": 3}, {"schedule__stop": "first_groups"}]
  )
  def test_responses_in_flight_keep_their_slots(self, start, schedule):
    folder = start(make(**schedule))
    for key in keys_that(config_lib.IN_FLIGHT):
      text = refusal(folder, changed({key: 2}, **schedule))
      assert f"config.{key}: " in text

  def test_what_is_held_out_stays_so(self, start):
    file = {"data__source": "jsonl", "data__path": "x.jsonl"}
    folder = start(make(**file))
    for key in keys_that(config_lib.HELD_OUT):
      value = {"data.holdout": 0.5, "eval.source": "sums"}.get(key, "y.jsonl")
      text = refusal(folder, changed({key: value}, **file))
      assert f"config.{key}: " in text

  def test_a_source_with_splits_holds_nothing_out(self, start):
    changes = Workdir(start(make())).changes(changed({"eval.path": "y.jsonl"}))
    assert list(changes) == ["eval.path"]

  def test_a_damaged_record_or_a_run_without_its_settings(self, start):
    folder = start(make())
    said = "config_changes.jsonl: 'changes' must map keys"
    for text in ("", ', "changes": {"a": 3}'):
      (folder / "config_changes.jsonl").write_text(f'{{"step": 1{text}}}\n')
      with pytest.raises(InputError, match=said):
        Workdir(folder).changes(make())
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="config.json: cannot be read"):
      Workdir(folder).changes(make())


class TestDamaged:
  """Settings that are damaged come from the newest checkpoint."""

  @pytest.fixture
  def folder(self, start):
    folder = start(make())
    new = make(run__steps=9)
    workdir = Workdir(folder)
    workdir.record(3, workdir.changes(new))
    (folder / "metrics.jsonl").touch()
    facts = workdir.facts(new, {})
    commit.write(folder / "checkpoints" / "3", {}, {}, facts=facts)
    return folder

  @pytest.mark.parametrize("how", ["empty", "cut", "text", "gone", "folder"])
  @pytest.mark.parametrize("name", ["config.json", "config_changes.jsonl"])
  def test_a_file(self, folder, name, how):
    file, workdir = folder / name, Workdir(folder)
    before, intact = workdir_lib.read_config(folder), file.read_bytes()
    file.unlink()
    if how == "folder":
      file.mkdir()
    elif how != "gone":
      text = {"empty": b"", "cut": intact[:20], "text": b"\xff?\n{}\n"}[how]
      file.write_bytes(text)
    found = workdir_lib.read_config(folder)
    assert found.to_dict() == before.to_dict() and found.run.steps == 9
    assert workdir.changes(make(run__steps=9)) == {}
    (line,) = workdir.repair(before)
    assert line == f"{name} was damaged: written again"
    now = workdir_lib.read_settings(folder)
    assert now[2] == [] and json.loads(file.read_bytes()) == json.loads(intact)

  def test_a_changed_value_of_a_change(self, folder):
    file = folder / "config_changes.jsonl"
    file.write_text(file.read_text().replace("9]", "8]"))
    assert workdir_lib.read_config(folder).run.steps == 9

  def test_nothing(self, folder, model):
    before = tiny_run.snapshot(folder)
    assert Workdir(folder).repair(make()) == []
    assert tiny_run.snapshot(folder) == before
    (model / "tokenizer.json").write_text("other")
    said = "changed since checkpoint 3 was saved; restore it from a copy"
    facts = workdir_lib.facts(folder) | {"inputs": {"model.path": "x"}}
    with pytest.raises(InputError, match=said):
      Workdir(folder).check_facts(3, facts, {"model.path": "y"}, {})


class TestAllowed:
  def test_are_kept_beside_the_settings_of_the_start(self, start):
    folder = start(make())
    before = tiny_run.snapshot(folder)
    Workdir(folder).record(3, Workdir(folder).changes(make()))
    assert tiny_run.snapshot(folder) == before
    given = {}
    for key, value in ALLOWED.items():
      given[key] = value
      config = changed(given)
      changes = Workdir(folder).changes(config)
      assert list(changes) == [key]
      Workdir(folder).record(3, changes)
      assert workdir_lib.read_config(folder).to_dict() == config.to_dict()
      assert Workdir(folder).changes(config) == {}
    first = pathlib.Path("config.json")
    assert tiny_run.snapshot(folder)[first] == before[first]

  def test_data_that_was_moved(self, start):
    source = {"data__source": "jsonl", "data__path": "x.jsonl"}
    workdir = Workdir(start(make(**source)))
    (workdir.path / "metrics.jsonl").touch()
    facts = workdir.facts(make(**source), {"data.path": "one"})
    changes = workdir.changes(changed({"data.path": "y.jsonl"}, **source))
    same, other = {"data.path": "one"}, {"data.path": "two"}
    assert workdir.check_facts(3, facts, same, changes) == []
    said = "cannot change on resume: config.data.path: 'x.jsonl' -> 'y.jsonl'"
    with pytest.raises(InputError, match=said):
      workdir.check_facts(3, facts, other, changes)
    assert len(workdir.check_facts(3, facts, other, {})) == 1  # Edited there.

  def test_one_line_a_resume_and_back(self, start):
    folder = start(make())
    changes = {"run.steps": 9, "loss.clip_high": 0.5}
    for step, config in ((3, changed(changes)), (5, make(run__steps=7))):
      Workdir(folder).record(step, Workdir(folder).changes(config))
    text = (folder / "config_changes.jsonl").read_text()
    first = {"loss.clip_high": [0.28, 0.5], "run.steps": [6, 9]}
    second = {"loss.clip_high": [0.5, 0.28], "run.steps": [9, 7]}
    assert [json.loads(line) for line in text.splitlines()] == [
      {"step": 3, "changes": first},
      {"step": 5, "changes": second},
    ]
    found = workdir_lib.read_config(folder)
    assert found.to_dict() == make(run__steps=7).to_dict()

  def test_a_key_that_the_run_did_not_know_had_its_default(self, start):
    folder = start(make())
    saved = json.loads((folder / "config.json").read_text())
    del saved["sampler"]["num_draft_tokens"]
    (folder / "config.json").write_text(json.dumps(saved))
    assert Workdir(folder).changes(make()) == {}


class TestStart:
  def test_without_a_checkpoint_a_run_starts_anew(self, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    Workdir(folder).begin(make())
    (folder / "config_changes.jsonl").write_text("of another run")
    config = make(run__seed=1)
    assert Workdir(folder).changes(config) == {}
    Workdir(folder).begin(config)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "checkpoints", "base_model"}
    assert workdir_lib.read_config(folder).run.seed == 1

  def test_keeps_what_the_model_is(self, start, model):
    folder = start(make())
    kept = {x.name: x.read_text() for x in (folder / "base_model").iterdir()}
    names = ("config.json", "tokenizer.json", "chat_template.jinja")
    assert kept == {name: name for name in names}
    # A run of another model in the same folder keeps no file of the first.
    unsave(folder)
    (model / "chat_template.jinja").unlink()
    Workdir(folder).begin(make())
    assert not (folder / "base_model" / "chat_template.jinja").exists()
    found = workdir_lib.model_path(folder)
    assert found == str(folder / "base_model")

  def test_a_folder_that_cannot_be(self, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/run: cannot be written"):
      with Workdir(tmp_path / "file" / "run").held():
        pass
    (tmp_path / "config.json.part").mkdir()
    with pytest.raises(InputError, match="choose another directory"):
      Workdir(tmp_path).begin(make())


class TestHeld:
  def test_by_one_process_at_a_time(self, tmp_path):
    with Workdir(tmp_path / "run").held():
      with pytest.raises(InputError, match="run: another process trains in it"):
        with Workdir(tmp_path / "run").held():
          pass
    with Workdir(tmp_path / "run").held():  # A leftover file blocks nothing.
      pass

  @pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
  def test_a_file_of_the_wrong_kind(self, tmp_path, name):
    place = tmp_path / "run" / name
    place.parent.mkdir()
    place.touch() if name == "checkpoints" else place.mkdir()
    with pytest.raises(InputError, match=f"{name}: not a .*; move it away"):
      with Workdir(tmp_path / "run").held():
        pass

  def test_a_folder_that_is_moved_or_deleted(self, tmp_path):
    folder, new = tmp_path / "run", tmp_path / "new"
    with Workdir(folder).held() as _:
      pass
    workdir = Workdir(folder)
    with workdir.held():
      workdir.check()
      folder.rename(new)
      said = f"moved to {new} while it trained; resume with --workdir={new}"
      with pytest.raises(TrainingStopped, match=said):
        workdir.check()
      folder.mkdir()  # Another one of the old name.
      with pytest.raises(TrainingStopped, match="moved to"):
        workdir.check()
      shutil.rmtree(new)
      with pytest.raises(TrainingStopped, match="deleted while it trained"):
        workdir.check()

  def test_the_folder_of_a_model(self, model):
    before = tiny_run.snapshot(model)
    with pytest.raises(InputError, match="contains a model, whose"):
      with Workdir(model).held():
        pass
    assert tiny_run.snapshot(model) == before

  def test_a_file_system_without_locks(self, tmp_path, monkeypatch, capsys):
    def refuse(file, operation):
      raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Workdir(tmp_path).held():
      pass
    assert "cannot be locked; do not start" in capsys.readouterr().out


class TestSetAside:
  def rows(self, folder, count):
    text = "".join(f'{{"step": {step}}}\n' for step in range(count))
    (folder / "metrics.jsonl").write_text(text)
    return text

  def test_rows_without_a_checkpoint(self, start):
    folder = start(make())
    unsave(folder)
    text = self.rows(folder, 3)
    for number in (1, 2):  # A second time is kept separately.
      line = Workdir(folder).set_aside(-1)
      aside = folder / f"set_aside_{number}"
      assert line == f"the earlier rows are set aside in {aside}"
      assert (aside / "metrics.jsonl").read_text() == text
      assert (aside / "config.json").is_file()
    shutil.rmtree(folder / "set_aside_1")
    for number in (1, 3):
      assert Workdir(folder).set_aside(-1).endswith(f"set_aside_{number}")

  def test_what_is_later_than_a_step(self, start):
    folder = start(make())
    save(folder, 5, 10)
    (folder / "checkpoints" / "4").mkdir()  # Left by a kill, without a COMMIT.
    text = self.rows(folder, 11)
    line = Workdir(folder).set_aside(3)
    aside = folder / "set_aside_1"
    assert line.startswith("checkpoints 4, 5, 10 and earlier rows are set asid")
    assert (aside / "checkpoints" / "4").is_dir()
    assert (aside / "metrics.jsonl").read_text() == text
    assert workdir_lib.steps(folder) == [3]
    assert workdir_lib.steps(aside) == [5, 10]

  def test_nothing(self, start):
    folder = start(make())
    self.rows(folder, 9)  # A kill leaves rows after step 3.
    before = tiny_run.snapshot(folder)
    assert Workdir(folder).set_aside(3) == ""
    (folder / "metrics.jsonl").write_text("")
    unsave(folder)
    assert Workdir(folder).set_aside(-1) == ""
    gone = set(before) - {*tiny_run.snapshot(folder)}
    assert {str(x) for x in gone} == {"checkpoints/3", "checkpoints/3/COMMIT"}


class TestFindStep:
  def test_by_number_and_the_best(self, start):
    folder = start(make(checkpoint__best="eval/s/avg@2"))
    save(folder, 5, 7)
    values = {3: 0.5, 4: 0.9, 5: 0.7, 6: None, 7: 0.7}
    rows = [{"step": k, "eval/s/avg@2": x} for k, x in values.items()]
    (folder / "metrics.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in [{"step": 0}, *rows])
    )
    find = lambda step: workdir_lib.find_step(folder, step)
    assert [find(None), find("5"), find(3)] == [7, 5, 3]
    assert find("best") == 5  # The first of equals; step 4 was not saved.
    assert workdir_lib.best_step(folder, "eval/s/avg@2") == 4
    assert workdir_lib.best_step(folder, "") is None
    for step in ("4", "bst", -1):
      with pytest.raises(InputError, match=f"no step {step}; choose from 3, 5"):
        find(step)

  @pytest.mark.parametrize("best", ["", "eval/s/avg@2"])
  def test_no_best(self, start, best):  # Nor any rows.
    with pytest.raises(InputError, match="no step best; choose from 3"):
      workdir_lib.find_step(start(make(checkpoint__best=best)), "best")


class TestEffect:
  """Settings of a critic for methods that have none."""

  def of(self, method, preset="", **changes):
    settings = {"model.path": "model", **tiny_run.dotted(changes)}
    return config_lib.method(method, preset, **settings)

  @pytest.mark.parametrize("preset", presets.SCALES)
  def test_methods_and_presets_are_accepted(self, tmp_path, preset):
    for method in ("grpo", "dapo", "vapo"):
      Workdir(tmp_path / "run").changes(self.of(method, preset))

  def test_a_new_run_is_refused_and_a_resume_is_not(self, tmp_path):
    config = self.of("grpo", "qwen2.5-7b-lora", value__lora_rank=8)
    with pytest.raises(InputError, match="value.lora_rank=8: grpo has no crit"):
      Workdir(tmp_path / "run").changes(config)
    (tmp_path / "run").mkdir()
    Workdir(tmp_path / "run").begin(config)
    save(tmp_path / "run", 3)
    assert Workdir(tmp_path / "run").changes(config) == {}

  def test_a_study_may_share_settings(self, tmp_path):
    changes = {"estimator__name": "group", "value__pretrain_steps": 9}
    Workdir(tmp_path / "run").changes(self.of("vapo", **changes))
