"""The installed package, and its parts that need few dependencies."""

import configparser
import pathlib
import subprocess
import sys

import pytest
from helpers import cases, programs, tiny_run

_PROGRAMS = cases.load("code")

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """A folder with the content of a wheel, and its entry points."""
  pytest.importorskip("setuptools")
  folder = tmp_path_factory.mktemp("installed")
  steps = ["egg_info", f"--egg-base={folder}"]
  steps += ["build_py", f"--build-lib={folder / 'lib'}"]
  subprocess.run(
    [sys.executable, "setup.py", "-q", *steps], cwd=_ROOT, check=True
  )
  entry_points = configparser.ConfigParser()
  entry_points.read(folder / "jaxrl_llm.egg-info" / "entry_points.txt")
  return folder / "lib", dict(entry_points["console_scripts"])


def _run(library, folder, command, *arguments):
  """Runs an installed command in a given folder."""
  return subprocess.run(
    [
      sys.executable,
      "-c",
      _PROGRAMS["package_command"],
      f"/bin/{command}",
      *arguments,
    ],
    cwd=folder,
    env=programs.environment(library),
    capture_output=True,
    text=True,
    timeout=600,
  )


class TestInstalled:
  def test_has_configs_programs_and_assets(self, installed):
    library, _ = installed
    package = library / "jaxrl_llm"
    for folder in ("configs", "scripts"):
      here = {p.name for p in (_ROOT / folder).glob("*.py")}
      assert {p.name for p in (package / folder).glob("*.py")} == here
    assets = _ROOT / "jaxrl_llm" / "assets"
    for file in assets.rglob("*"):
      assert (package / "assets" / file.relative_to(assets)).exists()
    assert (package / "py.typed").exists()
    for file in ("docs/settings.md", "scripts/studies/studies.ini"):
      assert (package / file).exists()

  def test_every_command_has_its_program(self, installed):
    library, commands = installed
    scripts = library / "jaxrl_llm" / "scripts"
    programs = {p.stem for p in scripts.glob("*.py")} - {"__init__"}
    assert {name.removeprefix("jaxrl-") for name in commands} == programs
    assert set(commands.values()) == {"jaxrl_llm.scripts:main"}
    assert not (scripts / "dev").exists()  # For developers only.

  @pytest.mark.parametrize("name", ["train", "report", "detect"])
  def test_a_command_shows_its_help(self, installed, tmp_path, name):
    done = _run(installed[0], tmp_path, f"jaxrl-{name}", "--help")
    assert done.returncode == 0
    assert done.stderr == "with jax" * (name == "report")
    assert f"python scripts/{name}.py" in done.stdout
    if name == "train":
      assert "METHOD: adhint, areal, arrol, asyppo," in done.stdout
      assert "PRESET: long_tail, smollm2, gsm8k," in done.stdout

  def test_programs_are_modules(self, installed, tmp_path):
    run = lambda *arguments, **more: programs.finish(
      *("-m", *arguments),
      cwd=tmp_path,
      env=programs.environment(installed[0]),
      **more,
    )
    shown, _ = run("jaxrl_llm")
    names = [line.split()[0] for line in shown.splitlines() if line[:2] == "  "]
    assert sorted(f"jaxrl-{name}" for name in names) == sorted(installed[1])
    _, error = run("jaxrl_llm", "trian", code=2)
    assert error.startswith("error: no program 'trian'; choose accelerator, ")
    for module in (["jaxrl_llm", "train"], ["jaxrl_llm.scripts.train"]):
      _, error = run(*module, "--config=vapo", "--config.run.stepz=3", code=2)
      assert error == (
        "error: --config.run.stepz: no such key; did you mean run.steps?\n"
      )

  def test_a_bare_name_is_a_method_of_the_package(self, installed, tmp_path):
    arguments = ("--config=vapo:gsm8k", "--config.num_generations=8")
    done = _run(installed[0], tmp_path, "jaxrl-train", *arguments)
    assert done.returncode == 2
    assert "num_generations is data.group_size here" in done.stderr

  def test_starts_a_run_in_an_empty_folder(self, installed, tmp_path):
    model = tiny_run.write_model(tmp_path / "tiny")
    # Without a critic there is less to compile.
    changes = {"run__steps": 0, "value__pretrain_steps": 0}
    flags = tiny_run.flags(model, "runs/a", **changes)
    flags[0] = "--config=grpo"
    done = _run(installed[0], tmp_path, "jaxrl-train", *flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "a" / "metrics.jsonl").exists()


def test_estimators_and_losses_need_only_jax_and_chex(tmp_path):
  program = tmp_path / "program.py"
  readme = (_ROOT / "README.md").read_text("utf-8")
  snippet = readme.split("```python\n")[2].split("```")[0]
  program.write_text(
    f"{_PROGRAMS['package_only_jax_and_chex']}\n{snippet}\nassert total < 1e9\n"
    "from jaxrl_llm import distributions, types\n"
    "try:\n  import flax\nexcept ModuleNotFoundError:\n  print('closed')\n"
  )
  shown, _ = programs.finish(program, cwd=tmp_path)
  assert shown == "closed\n"
