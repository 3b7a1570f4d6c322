"""Renders chat templates in a process with time and memory limits.

A template comes with a model and is untrusted code. Jinja's sandbox protects
the machine, but not against filters or methods that never return.
"""

import datetime
import functools
import json
import os
import resource
import time
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from jaxrl_llm.system import contained
from jaxrl_llm.system.workers import Worker, channels

_MAX_RENDERED_CHARS = 1 << 20
_MEMORY_BYTES = 2**30  # Address space of the process.
_CPU_S = 1  # CPU time per conversation.
_DEADLINE_S = 600.0  # In case the process is never scheduled.

# Date that templates write, the default of Llama 3.2. With the current date,
# prompts would change when a run is resumed.
_DATE = datetime.date(2024, 7, 26)


def render(template: str, variables: Mapping[str, Any]) -> str:
  """Renders a template with its variables.

  Raises:
    ValueError: The template fails or exceeds a limit on time, memory or length.
  """
  job = json.dumps([template, variables], default=dict)
  text, error = _worker(os.getpid()).ask(job, _DEADLINE_S)
  if error:
    limits = f"it needs more than {_CPU_S} s or {_MEMORY_BYTES >> 20} MiB"
    raise ValueError(limits if error == "crash" else error)
  return text


@functools.cache
def _worker(process: int) -> Worker:
  """Returns the worker of this process, not one that a fork has inherited."""
  return Worker(serve)  # Ends when this process, and so its input, ends.


def serve() -> None:
  """Runs in the worker process; serves one job per line."""
  lines, answers = channels()
  contained.limit(AS=_MEMORY_BYTES, FSIZE=0, CORE=0, NPROC=0)
  _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
  print("started", file=answers, flush=True)
  for line in lines:
    # Beyond this limit, the system kills the process. No limit is -1.
    seconds = int(time.process_time()) + _CPU_S + 1
    seconds = min(seconds, most_s, key=lambda x: x % 2**64)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most_s))
    template, variables = json.loads(line)
    try:
      text, error = _compile(template).render(variables), None
      if len(text) > _MAX_RENDERED_CHARS:
        raise ValueError(f"more than {_MAX_RENDERED_CHARS} characters")
    except Exception as failure:  # Templates are untrusted code.
      text, error = None, str(failure)[:1000] or type(failure).__name__
    print(json.dumps([text, error]), file=answers, flush=True)


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
  """Jinja's filter as in transformers: no HTML escapes, no sorted keys."""
  return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


class _Generation(ext.Extension):
  """Renders the body of `generation`, by which templates mark answers."""

  tags = {"generation"}

  def parse(self, parser: parser.Parser) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.Scope(body, lineno=line)


_ENVIRONMENT = sandbox.ImmutableSandboxedEnvironment(
  trim_blocks=True,
  lstrip_blocks=True,
  extensions=["jinja2.ext.loopcontrols", _Generation],
)
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = _DATE.strftime
_ENVIRONMENT.filters["tojson"] = _tojson
_compile = functools.lru_cache(maxsize=8)(_ENVIRONMENT.from_string)
