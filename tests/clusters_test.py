"""The jobs of docs/clusters.md, with local processes as hosts."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from helpers import programs, tiny_run

from jaxrl_llm import workdir

yaml = pytest.importorskip("yaml")

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = (_ROOT / "docs" / "clusters.md").read_text("utf-8")
# Training flags of the jobs; tests replace them with smaller ones.
_TRAINED = re.compile(
  r"--config=configs/\S+(?:[\s\\]+--config\.\S+)+[\s\\]+--workdir=\S+"
)


def _blocks(language):
  pattern = rf"^```{language}\n(.*?)^```$"
  return re.findall(pattern, _PAGE, re.MULTILINE | re.DOTALL)


_SLURM, _GPUS = _blocks("bash")
_JOBSET, _SKYPILOT = map(yaml.safe_load, _blocks("yaml"))
(_RAY,) = _blocks("python")
_FIRST = 2**16 - 2**12  # JAX derives its port from this and the Slurm job ID.
# Stands in for Slurm: each task is a local process with a task's variables.
_SRUN = """#!{python}
import os, subprocess, sys
count = int(os.environ["TASKS"])
tasks = [
  subprocess.Popen(
    sys.argv[2:],
    env=os.environ
    | dict(SLURM_PROCID=str(i), SLURM_LOCALID="0", SLURM_NTASKS=str(count))
    | dict(SLURM_STEP_NUM_NODES=str(count), SLURM_STEP_NODELIST="localhost"),
  )
  for i in range(count)
]
with open("pids", "w") as file:
  file.write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""


def _free_port(candidates=(0,)):
  """Returns a free port of the candidates; for 0, the system chooses one."""
  for port in candidates:
    with contextlib.suppress(OSError), socket.socket() as free:
      free.bind(("localhost", port))
      return free.getsockname()[1]
  raise AssertionError("no free port")


def _small(text, flags):
  """Returns the job's text with its training flags replaced."""
  small, count = _TRAINED.subn(lambda _: shlex.join(flags), text)
  assert count == 1
  return small


@pytest.fixture(scope="module")
def flags(model):
  """(folder, steps) -> flags of a tiny run on all devices."""
  settings = {
    "mesh__data": -1,
    "estimator__name": "group",  # Without a critic there is less to compile.
    "value__pretrain_steps": 0,
    **tiny_run.EVALUATES_LIKE_A_STEP,
  }
  return lambda folder, steps: tiny_run.flags(
    model, folder, run__steps=steps, **settings
  )


def _environment(**more):
  path = os.pathsep.join(
    [str(pathlib.Path(sys.executable).parent), *os.get_exec_path()]
  )
  return programs.environment(PATH=path, **more)


@pytest.mark.parametrize("script", [_SLURM, _GPUS, _SKYPILOT["run"]])
def test_scripts_are_bash(script):
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_jobset_fits_together():
  [hosts] = _JOBSET["spec"]["replicatedJobs"]
  job = hosts["template"]["spec"]
  pod = job["template"]["spec"]
  [container] = pod["containers"]
  [rule] = job["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"]["containerName"] == container["name"]
  assert rule["onExitCodes"]["values"] == [2] and rule["action"] == "FailJob"
  chips = container["resources"]["limits"]["google.com/tpu"]
  x, y, z = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  assert job["completions"] == job["parallelism"]
  assert job["completions"] * chips == int(x) * int(y) * int(z)
  [volume] = pod["volumes"]
  assert [m["name"] for m in container["volumeMounts"]] == [volume["name"]]
  name = f"{_JOBSET['metadata']['name']}-{hosts['name']}-0-0"
  assert f"{name}.{_JOBSET['metadata']['name']}:" in _GPUS
  assert f"--num_processes={job['completions']}" in _GPUS


@pytest.mark.slow(minutes=1)
class TestSlurm:
  @pytest.fixture
  def sbatch(self, tmp_path):
    """(flags, tasks) -> the started job, which runs in the test's folder."""
    (tmp_path / "scripts").symlink_to(_ROOT / "scripts")
    (tmp_path / "configs").symlink_to(_ROOT / "configs")
    for name, text in (
      ("srun", _SRUN.format(python=sys.executable)),
      ("scontrol", '#!/bin/sh\necho "$@" >> requeued\n'),
    ):
      (tmp_path / name).write_text(text)
      (tmp_path / name).chmod(0o755)

    def start(flags, tasks, restarts=0):
      port = _free_port(range(_FIRST, 2**16))
      environment = _environment(
        SLURM_JOB_ID=str(port - _FIRST),
        SLURM_RESTART_COUNT=str(restarts),
        TASKS=str(tasks),
      )
      environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
      return subprocess.Popen(
        ["bash", "-c", _small(_SLURM, [*flags, "--patience_s=10"])],
        cwd=tmp_path,
        env=environment,
      )

    return start

  def test_goes_on_by_itself_with_the_host_that_is_left(
    self, sbatch, flags, tmp_path
  ):
    run, requeued = tmp_path / "run", tmp_path / "requeued"
    job = sbatch(flags(run, 4), 2)
    programs.wait_for_lines(run / "metrics.jsonl", 2)
    pids = (tmp_path / "pids").read_text().split()
    os.kill(int(pids[1]), signal.SIGKILL)
    assert job.wait(120) == 128 + signal.SIGKILL
    assert re.fullmatch(r"requeue \d+\n", requeued.read_text())
    assert sbatch(flags(run, 4), 1, restarts=1).wait(600) == 0
    assert requeued.read_text().count("\n") == 1
    assert workdir.steps(run)[-1] == 4
    assert [r["step"] for r in tiny_run.comparable(run)] == [0, 1, 2, 3, 4]

  def test_bad_input_and_too_many_faults_are_not_queued(
    self, sbatch, flags, tmp_path
  ):
    wrong = [*flags(tmp_path / "run", 4), "--config.no.key=1"]
    assert sbatch(wrong, 1).wait(120) == 2
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    assert sbatch(wrong, 1, restarts=20).wait(60) == 1
    assert not (tmp_path / "requeued").exists()
    assert sbatch(wrong, 1, restarts=19).wait(60) == 1
    assert (tmp_path / "requeued").exists()


@pytest.mark.slow(minutes=0.5)
@pytest.mark.parametrize("kind", ["jobset", "skypilot"])
def test_a_host_finds_the_others(kind, flags, tmp_path):
  port = _free_port()
  script = _small(
    {"jobset": _GPUS, "skypilot": _SKYPILOT["run"]}[kind],
    # It ends once both processes are ready for the first step.
    [*flags(tmp_path / "run", 0), "--patience_s=10"],
  )
  script = script.replace(":1234", f":{port}").replace("=16", "=2")
  script = script.replace("vapo-hosts-0-0.vapo", "localhost")
  hosts = [
    subprocess.Popen(
      ["bash", "-ec", script],
      cwd=_ROOT,
      env=_environment(
        JOB_COMPLETION_INDEX=str(i),
        SKYPILOT_NODE_RANK=str(i),
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2",
      ),
    )
    for i in range(2)
  ]
  assert [host.wait(600) for host in hosts] == [0, 0]
  assert len(list((tmp_path / "run" / "hosts").glob("*.jsonl"))) == 2


# Stands in for Ray: an actor is a process that runs one method at a time.
_FAKE_RAY = """
import contextlib, multiprocessing, os, types
from concurrent import futures

exceptions = types.SimpleNamespace(RayActorError=futures.BrokenExecutor)
util = types.SimpleNamespace(get_node_ip_address=lambda: "localhost")
init = lambda: None


def cluster_resources():
  return {"GPU": 8.0 if os.path.exists("killed") else 16.0}


def _make(kind):
  global own
  own = kind()


def _call(name, *args):
  return getattr(own, name)(*args)


class _Actor:
  def __init__(self, kind):
    fork = multiprocessing.get_context("fork")
    self.pool = futures.ProcessPoolExecutor(1, fork, _make, (kind,))
    self.pid = self.pool.submit(os.getpid).result()
    with open("pids", "a") as file:
      file.write(f"{self.pid} ")

  def __getattr__(self, name):
    call = lambda *args: self.pool.submit(_call, name, *args)
    return types.SimpleNamespace(remote=call)


def remote(num_gpus):
  return lambda kind: types.SimpleNamespace(remote=lambda: _Actor(kind))


def get(calls):
  if isinstance(calls, list):
    return [call.result() for call in calls]
  return calls.result()


def kill(actor):
  with contextlib.suppress(ProcessLookupError):
    os.kill(actor.pid, 9)
"""


@pytest.mark.slow(minutes=1)
def test_ray_starts_again_on_the_host_that_is_left(model, tmp_path):
  run, port = tmp_path / "run", _free_port()
  (tmp_path / "ray.py").write_text(_FAKE_RAY)
  text = _RAY.replace('method("vapo", "qwen2.5-7b", **data)', 'method("vapo")')
  added = r"\1\n    TINY(config)\n"
  text = re.sub(r"    data = .*\n( *config = .*)\n", added, text)
  text = text.replace("/shared/runs/vapo", str(run))
  text = text.replace(":1234", f":{port}").replace("8, 20, 100", "8, 20, 10")
  settings = f"""
def TINY(config):
  from helpers import tiny_run

  settings = tiny_run.overrides({str(model)!r})
  config.data.settings = settings.pop("data.settings")
  more = {{"mesh.data": -1, "estimator.name": "group", "eval.samples": 4}}
  more |= {{"value.pretrain_steps": 0, "run.steps": 4, "eval.problems": 8}}
  config.update_from_flattened_dict(settings | more)

"""
  (tmp_path / "job.py").write_text(settings + text)
  path = map(str, (tmp_path, _ROOT, _ROOT / "tests", *sys.path))
  job = subprocess.Popen(
    [sys.executable, "job.py"],
    cwd=tmp_path,
    env=_environment() | {"PYTHONPATH": os.pathsep.join(path)},
  )
  programs.wait_for_lines(run / "metrics.jsonl", 2)
  (tmp_path / "killed").touch()
  pids = (tmp_path / "pids").read_text().split()
  os.kill(int(pids[1]), signal.SIGKILL)
  assert job.wait(900) == 0
  assert len((tmp_path / "pids").read_text().split()) == 3
  assert [r["step"] for r in tiny_run.comparable(run)] == [0, 1, 2, 3, 4]
