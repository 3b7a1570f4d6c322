"""Errors say what to do, for the cause that the system names."""

import errno

import pytest

from jaxrl_llm.errors import advice, as_input_error, check_number

_QUOTED = "Failed to write 9 bytes to file 25: File too large "


@pytest.mark.parametrize(
  ("error", "todo"),
  [
    (OSError(errno.ENOSPC, "No space left on device"), "free disk space"),
    (OSError(errno.EACCES, "Permission denied"), "give yourself permission"),
    (ValueError(_QUOTED + "[os_error_code='27']"), "(ulimit -f)"),
    (ValueError("[OS error 28: ENOSPC No space left"), "free disk space"),
    (TimeoutError("waited"), "check the file server and the clock"),
    (ValueError("a shape is wrong"), "ask"),
    (OSError("without a number"), "ask"),
  ],
)
def test_advice_fits_the_cause(error, todo):
  assert todo in advice(error, "ask")
  outer = RuntimeError("a library's own")
  outer.__cause__ = error
  assert todo in advice(outer, "ask")


def test_a_message_has_the_path_and_the_advice_once(tmp_path):
  path = tmp_path / "missing"
  with pytest.raises(ValueError) as raised:
    with as_input_error(f"{path}: cannot be read", "give it", OSError):
      path.read_text()
  text = f"{path}: cannot be read (No such file or directory); give it"
  assert str(raised.value) == text


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "1"])
def test_a_number_outside_its_interval_is_named(value):
  with pytest.raises(
    ValueError, match=r"gamma=.*, expected a number in \[0, 1"
  ):
    check_number("gamma", value, "[0, 1]")
  check_number("gamma", 1, "[0, 1]")
