"""Parts of an algorithm: plain functions with the inputs that they read.

A part is a function of arrays and the names of what it is called with. The
names are looked up in one table: what the batch says of itself (`mask`,
`rewards`, `behavior_logprobs`, ...), what the models say of it (`values`,
`old_logprobs`, ...) and what other parts make of these (`advantages`, ...). So
exactly the inputs are computed that somebody reads, and a part of one's own
may read a new one.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax


class Part(NamedTuple):
  """A function of arrays, called with the inputs of these names in order."""

  fn: Callable[..., Any]
  reads: tuple[str, ...]

  def __call__(self, inputs: Mapping[str, jax.Array]) -> Any:
    return self.fn(*(inputs[name] for name in self.reads))


class Auxiliary(NamedTuple):
  """A loss beside the surrogate, and the tokens that it is averaged over."""

  loss: Part  # Of inputs of the update -> per-token loss.
  coefficient: float
  mask: str  # Name of a bool input [B, T].
  mode: str  # Of `masked.token_weights`.
  norm: float | None = None  # Its constant length, for a mode that has one.


def part(
  fn: Callable[..., Any],
  settings: Mapping[str, Any] | None = None,
  /,
  **inputs: str,
) -> Part:
  """A function as a part.

  Args:
    fn: of arrays, its positional arguments, each of which reads the input of
      its own name.
    settings: values for its keyword-only arguments, by their names; others are
      passed over. What is not given keeps its default.
    **inputs: argument -> input that it reads instead of one of its own name,
      or instead of being a setting.
  """
  parameters = inspect.signature(fn).parameters.values()
  positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
  keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  chosen = {k: settings[k] for k in keywords if k in (settings or {})}
  arguments = {name: name for name in positional} | inputs
  call = lambda *arrays: fn(**chosen | dict(zip(arguments, arrays)))
  return Part(call, tuple(arguments.values()))


def then(first: Part, fn: Callable[..., Any], *reads: str) -> Part:
  """A part followed by a function of its result and of further inputs."""

  def both(*arrays):
    count = len(first.reads)
    return fn(first.fn(*arrays[:count]), *arrays[count:])

  return Part(both, first.reads + reads)


def leaves_of(names: Iterable[str], parts: Mapping[str, Part]) -> set[str]:
  """The inputs that no part makes and that the named ones rest on."""
  found = set()
  for name in names:
    made = parts.get(name)
    found |= leaves_of(made.reads, parts) if made else {name}
  return found


def evaluate(
  names: Iterable[str],
  parts: Mapping[str, Part],
  leaves: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
  """The named inputs, each part they rest on computed once.

  They are constants of a loss: no gradient flows into them.

  Args:
    names: of inputs.
    parts: what makes an input, by its name.
    leaves: the inputs that no part makes.

  Raises:
    KeyError: an input is neither made nor given.
  """
  known = dict(leaves)

  def get(name):
    if name not in known:
      made = parts[name]
      known[name] = made({read: get(read) for read in made.reads})
    return known[name]

  return jax.lax.stop_gradient({name: get(name) for name in names})
