"""Command lines of programs that take --config."""

import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import hints, presets
from jaxrl_llm.errors import InputError
from jaxrl_llm.system import streams

_LEAVE_S = 10.0  # Time to end threads and child processes.


class _MethodFile(flags.ArgumentParser):
  """Reads METHOD[:PRESET] or FILE.py[:PRESET]; errors name file and line."""

  def parse(self, argument: str) -> ConfigDict:
    name, _, preset = argument.partition(":")
    return config_lib.based_on(name, preset).lock()


def define_config(default: str | None, help_text: str) -> flags.FlagHolder:
  """Defines --config; every given --config.KEY is applied to its default."""
  try:
    holder = config_flags.DEFINE_config_file("config", default, help_text)
    flags.FLAGS["config"].parser = _MethodFile()
    return holder
  except AttributeError as error:  # There is no such key.
    print(f"error: {explain(error, sys.argv)}", file=sys.stderr)
    sys.exit(2)


def define_plugin() -> flags.FlagHolder:
  """Defines --plugin."""
  help_text = "Python file of custom parts, see jaxrl_llm/register.py."
  return flags.DEFINE_multi_string("plugin", [], help_text)


def run(
  main: Callable[[list[str]], int | None],
  check: Callable[[], None] = lambda: None,
) -> None:
  """Runs a program; an invalid command line prints one line and exits with 2.

  Readers of its output, and threads and processes that user code has started,
  do not keep it from ending.

  Args:
    main: takes the arguments that are not flags.
    check: raises InputError for flags that cannot be combined.
  """
  streams.protect()
  parse = functools.partial(_parse, check=check)
  app.run(
    functools.partial(_leave_after, main),
    _prepared(sys.argv),
    flags_parser=parse,
  )


def _leave_after(main: Callable[[list[str]], Any], argv: list[str]) -> Any:
  code: Any = 1
  try:
    code = main(argv)
    return code
  except SystemExit as error:
    code = error.code
    raise
  finally:
    code = code if isinstance(code, int) else int(code is not None)
    leave = threading.Timer(_LEAVE_S, os._exit, [code])
    leave.daemon = True
    leave.start()


def answer_help(argv: list[str]) -> None:
  """Prints the help of the program and exits with 0 if argv contains --help."""
  if not {"-h", "-help", "--help", "--helpshort", "--helpfull"} & {*argv}:
    return
  scales = ", ".join(name for name in presets.SCALES if name)
  print(
    sys.modules["__main__"].__doc__,
    f"METHOD: {', '.join(config_lib.methods())}; or a file, FILE.py.",
    f"PRESET: {scales}; or none, to train on the built-in task.\n",
    flags.FLAGS.main_module_help(),
    sep="\n",
  )
  sys.exit(0)


def _parse(argv: list[str], check: Callable[[], None]) -> list[str]:
  """Parses flags; prints help or an error and exits if there is no run."""
  answer_help(argv)
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise InputError(f"{rest[1]!r} is not a flag; flags start with --")
    check()
  except Exception as error:
    print(f"error: {explain(error, argv)}", file=sys.stderr)
    sys.exit(2)
  return rest


def _prepared(argv: list[str]) -> list[str]:
  """Returns the arguments in the form that absl parses.

  1e3 becomes 1000 for integer keys. All other arguments are unchanged.
  """
  found = []
  for argument in argv:
    flag, equals, value = argument.partition("=")
    key = config_lib.KEYS.get(flag.removeprefix("--config."))
    if key and type(key.default) is int and re.fullmatch(r"\d+e\d+", value):
      value = f"{float(value):.0f}"
    found.append(f"{flag}{equals}{value}")
  return found


def explain(error: Exception, argv: list[str]) -> str:
  """Returns a one-line message for an error of parsing the command line."""
  return _unknown_key(argv) or _reason(error)


def _unknown_key(argv: list[str]) -> str | None:
  """Returns a message for the first unknown --config.KEY, or None."""
  keys = list(config_lib.KEYS)
  for argument in argv[1:]:
    name, dot, key = argument.partition("=")[0].lstrip("-").partition(".")
    groups = [key, *(k for k in keys if k.startswith(key + "."))]
    if name == "config" and dot and len(groups) == 1 and key not in keys:
      return f"--config.{key}: no such key; {hints.hint(key)}"
  return None


def _reason(error: Exception) -> str:
  """Returns one line for an error that may wrap others or a traceback."""
  causes = [error]
  while causes[-1].__context__:
    causes.append(causes[-1].__context__)
  for cause in causes:
    if isinstance(cause, InputError):
      return str(cause)
  lines = str(error).strip().splitlines() or [type(error).__name__]
  line = re.sub("invalid .* int.*", "give a whole number", lines[-1].strip())
  return re.sub("could not convert .* float.*", "give a number", line)
