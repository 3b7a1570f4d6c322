"""Helper processes: limits, what they import, and what they leave behind."""

import json
import os

import psutil
from helpers import cases, programs

from jaxrl_llm.rollout import tools

# Seconds; identifies processes that must not remain.
_LONG = f"87654.{os.getpid()}"
_DAEMON = f"subprocess.Popen(['sleep', '{_LONG}'], start_new_session=True)\n"


def run(code):
  """Returns what a model is told about a program, which leaves nothing."""
  call = json.dumps({"name": "python", "arguments": {"code": code}})
  said = tools.call({"python": tools.python}, call)
  found = psutil.process_iter(["cmdline"])
  assert not [p for p in found if _LONG in (p.info["cmdline"] or ())]
  return said


@cases.table("code, said", cases.load("contained")["programs"])
def test_a_program_is_bounded_and_leaves_nothing(code, said):
  code = code.replace("DAEMON", _DAEMON).replace("SECONDS", _LONG)
  shown = run(f"import os, subprocess\n{code}")
  assert shown.startswith(said) and len(shown) < 2 * 2**20
  if said == "/":
    assert not os.path.exists(shown.strip())


def test_inherited_limits_stay():
  program = (
    "import resource, sys\n"
    "from jaxrl_llm.data import chat_template\n"
    "from jaxrl_llm.rollout import tools\n"
    "limit = lambda name, x: resource.setrlimit(name, (x, x))\n"
    "limit(resource.RLIMIT_AS, 900 * 2**20)\n"
    "limit(resource.RLIMIT_CPU, 77)\n"
    "print(chat_template.render('{{ 1 + 1 }}', {}))\n"
    "print(tools.python('import resource as r; print(r.getrlimit(r.RLIMIT_AS),"
    " r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_CPU)[1] <= 77)'))\n"
  )
  shown, _ = programs.finish("-c", program)
  limit = 900 * 2**20
  assert shown.split("\n")[:2] == ["2", f"({limit}, {limit}) (0, 0) True"]


def test_limits_are_only_lowered():
  code = (
    "import resource as r\nfrom jaxrl_llm.system import contained\n"
    "r.setrlimit(r.RLIMIT_NOFILE, (90, 100))\n"
    "contained.limit(NOFILE=95)\nprint(r.getrlimit(r.RLIMIT_NOFILE))\n"
    "contained.limit(NOFILE=50)\nprint(r.getrlimit(r.RLIMIT_NOFILE))\n"
    "contained.limit(NOFILE=r.RLIM_INFINITY)\n"
    "print(r.getrlimit(r.RLIMIT_NOFILE))"
  )
  shown, _ = programs.finish("-c", code)
  assert shown.split("\n")[:3] == ["(90, 90)", "(50, 50)", "(50, 50)"]


def test_helpers_import_nothing_from_the_current_folder(tmp_path):
  hit = tmp_path / "imported"
  hostile = f"open({str(hit)!r}, 'a').write(__name__)\nraise SystemExit(1)\n"
  names = "json pickle resource sitecustomize jinja2 numpy/__init__"
  names += " encodings/__init__ jaxrl_llm/__init__"
  main = tmp_path.parent / f"{tmp_path.name}_main.py"
  main.write_text(
    "import os, sys\n"
    "from jaxrl_llm.data import chat_template\n"
    "from jaxrl_llm.rewards import pool\n"
    "from jaxrl_llm.rollout import tools\n"
    "os.chdir(sys.argv[1])\n"
    "if sys.argv[2]: sys.path.insert(0, sys.argv[2])\n"
    "os.environ['PYTHONPATH'] = os.environ['PYTHONPATH'] + os.pathsep\n"
    "print(chat_template.render('{{ 1 + 1 }}', {}), tools.python('print(3)'))\n"
    "calls = pool.CallPool(os.path.basename, workers=1)\n"
    "print(calls([{'p': 'a/b'}]), os.getenv('PYTHONPATH')[-1])\n"
    "calls.close()\n"
  )
  for name in names.split():
    file = tmp_path / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(hostile)
  for entry in ("", ".", str(tmp_path)):
    shown, _ = programs.finish(main, tmp_path, entry)
    assert shown.split("\n")[:3] == ["2 3", "", "[('b', None)] :"]
  assert not hit.exists()
