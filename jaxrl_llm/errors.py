"""Errors for users of the library, and checks of arguments."""

import contextlib
import errno
import functools
import numbers
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any


class InputError(ValueError):
  """Raised for a file, field or flag that cannot be used.

  The message is one line that says what is wrong, where, and how to fix it;
  scripts print it and exit with code 2. Line breaks (for instance from a
  wrapped library's message) become spaces, the middle of a very long message is
  left out, and unprintable characters are escaped, because parts of a message
  may come from an untrusted file.
  """

  def __init__(self, message: str):
    line = " ".join(message.split())
    if len(line) > 1000:
      line = f"{line[:600]} ... {line[-300:]}"
    super().__init__(
      "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    )


# Causes that the system names, wherever they occur.
_ADVICE = {
  errno.ENOSPC: "free disk space",
  errno.EDQUOT: "free disk space, or have the quota raised",
  errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
  errno.EMFILE: "raise the limit on open files (ulimit -n)",
  errno.ENOMEM: "free memory",
  errno.EACCES: "give yourself permission",
  errno.EPERM: "give yourself permission",
  errno.EROFS: "mount the file system so that it can be written",
  errno.EIO: "check the disk",
  errno.ESTALE: "check the file server",
  errno.ETIMEDOUT: "check the file server",
}


def advice(error: BaseException, otherwise: str) -> str:
  """Returns what to do about an error of the file system.

  Args:
    error: the error; libraries may only quote what the system says.
    otherwise: the result for any other cause.
  """
  while error is not None:
    # TensorStore quotes: [OS error 28: ENOSPC No space left on device], or in
    # later versions: No space left on device [os_error_code='28'].
    quoted = re.search(r"(?:OS error |os_error_code=')(\d+)", str(error))
    number = getattr(error, "errno", None) or int(quoted[1] if quoted else 0)
    if number in _ADVICE:
      return _ADVICE[number]
    if isinstance(error, TimeoutError):
      return "check the file server and the clock, which may have been set"
    error = error.__cause__ or error.__context__
  return otherwise


@contextlib.contextmanager
def as_input_error(
  what: str, todo: str, *kinds: type[Exception]
) -> Iterator[None]:
  """Turns errors of given kinds into an InputError, `what (error); todo`.

  An InputError passes through unchanged. Causes that the system names have
  their own advice instead of `todo`.
  """
  try:
    yield
  except InputError:
    raise
  except kinds as error:
    # File system errors repeat the path, which is already in `what`.
    why = getattr(error, "strerror", None) or str(error)[:300]
    file = getattr(error, "filename", None)
    if isinstance(file, (str, os.PathLike)):
      if not os.path.isabs(file):
        why += f", relative to {os.getcwd()}"
      elif str(file) not in what:
        why = f"{file}: {why}"
    raise InputError(
      f"{what} ({why or type(error).__name__}); {advice(error, todo)}"
    ) from error


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
  """Turns a ValueError into an InputError that begins with `where`."""
  try:
    yield
  except ValueError as error:
    raise InputError(f"{where}: {error}") from error


def refuse(config: Any, wrong: Any, keys: str, advice: str) -> None:
  """Refuses settings that cannot be used together.

  Args:
    config: settings of a run.
    wrong: whether they are refused.
    keys: dotted keys of the settings, separated by commas.
    advice: the reason, and what to do.

  Raises:
    InputError: One line with the settings and their values.
  """
  if not wrong:
    return
  named = []
  for key in keys.split(", "):
    value = functools.reduce(lambda group, x: group[x], key.split("."), config)
    # The repr of a config group has several lines.
    value = value.to_dict() if hasattr(value, "to_dict") else value
    named.append(f"config.{key}={value!r}")
  raise InputError(f"{' with '.join(named)}: {advice}")


class TrainingStopped(RuntimeError):
  """Raised if a run cannot continue; the message says why."""


def check_number(name: str, value: Any, interval: str) -> None:
  """Checks that a number is in an interval; arrays, perhaps traced, all pass.

  Args:
    name: name of the setting, for the message.
    value: a number or an array.
    interval: interval such as '[0, 1)', with inf for no bound.

  Raises:
    ValueError: the value is a text, a number outside the interval, or NaN.
  """
  if isinstance(value, str):
    raise ValueError(f"{name}={value!r}, expected a number in {interval}")
  if not isinstance(value, numbers.Real):
    return
  low, high = map(float, interval[1:-1].split(","))
  above = value > low if interval[0] == "(" else value >= low
  below = value < high if interval[-1] == ")" else value <= high
  if not (above and below):
    raise ValueError(f"{name}={value}, expected a number in {interval}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
  """Raises ValueError if a value is not one of the choices."""
  if value not in choices:
    raise ValueError(f"{name}={value!r}, expected one of {sorted(choices)}")
