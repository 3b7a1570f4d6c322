"""States in checkpoints: all fields are saved, missing parts are reported."""

import json
import re
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import checkpoint, types
from jaxrl_llm.checkpoint import state as state_lib
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Responses, Rollout


class Moments(NamedTuple):
  mean: Any
  scale: Any


@chex.dataclass(frozen=True)
class Inner:
  count: int
  params: Any


@chex.dataclass(frozen=True)
class State:
  """A state with a field of every kind."""

  number: int
  share: float
  name: str
  nothing: Any
  params: Any  # A tree of arrays.
  moments: Moments  # Host arrays.
  inner: Inner
  store: Rollout | None
  waiting: Responses | None
  absent: Rollout | None


def make_state():
  rng = np.random.default_rng(0)
  tree = lambda *shape: {
    "a": jax.numpy.asarray(rng.normal(size=shape).astype(np.float32)),
    "b": [jax.numpy.arange(3)],
  }
  rollout = tiny_run.random_rollout(rng, rows=5)
  return State(
    number=7,
    share=0.1,
    name="text",
    nothing=None,
    params=tree(2, 3),
    moments=Moments(np.float32(1.5), rng.normal(size=4).astype(np.float32)),
    inner=Inner(count=2, params=tree(4)),
    store=rollout,
    waiting=types.unjudged(tiny_run.random_rollout(rng, rows=2)).replace(
      parts={"right": np.float32([1, np.nan])}
    ),
    absent=None,
  )


def shapes(tree):
  """Returns ShapeDtypeStructs of arrays on a device."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


def abstract_of(state):
  """Returns the abstract state for a restore; its numbers do not matter."""
  inner = state.inner
  return state.replace(
    number=0,
    share=0.0,
    name="",
    params=shapes(state.params),
    moments=Moments(*(np.zeros_like(x) for x in state.moments)),
    inner=inner.replace(count=0, params=shapes(inner.params)),
    store=Rollout,
    waiting=Responses,
    absent=Rollout,
  )


def read(abstract, trees, values):
  """Returns the state from parts that were written to disk and read again."""
  values = json.loads(json.dumps(values))
  wanted = state_lib.targets({"x": abstract}, values)
  # A checkpoint restores the requested arrays on the given devices.
  found = jax.tree.map(
    lambda x, target: jax.device_put(x, target.sharding),
    {path: trees[path] for path in wanted},
    wanted,
  )
  return state_lib.from_items({"x": abstract}, found, values)["x"]


class TestRoundTrip:
  def test_on_disk(self, tmp_path):
    state = make_state()
    saver = checkpoint.Checkpointer(tmp_path, keep=1)
    saver.save_states(3, {"x": state})
    saver.wait()
    again = saver.restore_states(3, {"x": abstract_of(state)})["x"]
    saver.close()
    chex.assert_trees_all_equal(again, state)
    chex.assert_trees_all_equal_dtypes(again.store, state.store)
    assert (again.number, again.share, again.name) == (7, 0.1, "text")
    assert again.nothing is None and again.absent is None
    assert isinstance(again.moments, Moments)
    # Host arrays stay host arrays: a run indexes and joins them.
    for tree in (again.store, again.waiting, again.moments):
      for leaf in jax.tree.leaves(tree):
        assert isinstance(leaf, (np.ndarray, np.generic))
    assert isinstance(again.params["a"], jax.Array)


class TestOtherParts:
  def refusal(self, saved, abstract):
    trees, values = state_lib.to_items({"x": saved})
    with pytest.raises(InputError) as error:
      read(abstract, trees, values)
    assert "\n" not in str(error.value)
    assert "use the checkpoint's settings" in str(error.value)
    (path,) = re.findall(r"this run has (\S+);", str(error.value))
    return path

  @pytest.mark.parametrize("part", ["params", "inner"])
  def test_a_part_that_the_checkpoint_or_the_run_lacks(self, part):
    state, lacking = make_state(), {part: None}
    abstract = abstract_of(state)
    assert self.refusal(state.replace(**lacking), abstract) == f"x.{part}"
    assert self.refusal(state, abstract.replace(**lacking)) == f"x.{part}"

  def test_a_number_that_the_checkpoint_does_not_know(self):
    state = make_state()
    trees, values = state_lib.to_items({"x": state})
    del values["x.number"]
    with pytest.raises(InputError, match="this run has x.number;"):
      read(abstract_of(state), trees, values)
