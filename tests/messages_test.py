"""Messages between processes carry values, and cannot run code."""

import json
import pathlib
import pickle

import numpy as np
import pytest

from jaxrl_llm.checkpoint import commit
from jaxrl_llm.data.rows import Row
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.rewards import Verdict
from jaxrl_llm.system import messages


@pytest.mark.parametrize(
  "value",
  [
    None,
    [True, 3, -0.5, "ü\n\udc80", [], {}],
    {1: ("a", None), ("b", 2): {"array": [1]}, "": {"x", "y"}},
    b"\0\xff",
    pathlib.Path("/a/b"),
    Verdict(True, 0.5, None, parts={"form": 1.0}),
    Row("here", {"a": 1}),
  ],
)
def test_values_arrive_unchanged(value):
  found = messages.loads(messages.dumps([value]))
  assert found == [value] and type(found[0]) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_arrays_arrive_bit_for_bit(dtype):
  sent = np.arange(6).reshape(2, 3).astype(np.dtype(dtype))
  found = messages.loads(messages.dumps({"x": (sent, sent[0, 1])}))["x"]
  assert found[0].dtype == sent.dtype and found[0].shape == (2, 3)
  assert found[0].tobytes() == sent.tobytes() and found[1] == sent[0, 1]
  found[0][:] = 0  # Writable, as after a pickle.


def test_errors_arrive_as_what_they_are():
  sent = commit.DamagedError(pathlib.Path("run/3"), "a bit"), InputError("no")
  sent = *sent, TrainingStopped("full"), OSError("disk")
  found = messages.loads(messages.dumps(sent))
  assert [type(x) for x in found] == [type(x) for x in sent]
  assert [str(x) for x in found] == [str(x) for x in sent]
  assert found[0].folder == pathlib.Path("run/3")


@pytest.mark.parametrize(
  "made",
  [
    ["os", "system", ["touch ran"]],
    ["builtins", "eval", ["1"]],
    ["jaxrl_llm.system.plugin", "load", ["x.py"]],
    ["jaxrl_llm.system.plugin", "importlib", []],
    ["jaxrl_llm.system.workers", "Worker", ["x"]],
  ],
)
def test_a_message_calls_nothing(made):
  with pytest.raises((ValueError, AttributeError)):
    messages.loads(json.dumps({"made": made}).encode())


def test_a_pickle_is_no_message():
  with pytest.raises(ValueError):
    messages.loads(pickle.dumps([1]))


def test_what_cannot_be_sent_is_named():
  with pytest.raises(TypeError, match="cannot send a function to"):
    messages.dumps(lambda: 0)
