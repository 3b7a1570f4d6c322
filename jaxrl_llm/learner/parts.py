"""Parts of an algorithm: plain functions, wired by the names of their inputs.

A part is a function of arrays with the names of its inputs. Inputs are fields
of the batch (`mask`, `rewards`, `behavior_logprobs`, ...), scores of the models
(`values`, `old_logprobs`, ...) or results of other parts (`advantages`, ...).
Only inputs that some part reads are computed. User-defined parts may read
user-defined inputs.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm.errors import InputError


class Part(NamedTuple):
  """A function of arrays, and the names of its inputs in order."""

  fn: Callable[..., Any]
  reads: tuple[str, ...]
  settings: frozenset[str] = frozenset()  # Names of the settings that it uses.
  of: Callable[..., Any] | None = None  # The function without its settings.

  def __call__(self, inputs: Mapping[str, jax.Array]) -> Any:
    return self.fn(*(inputs[name] for name in self.reads))


class Auxiliary(NamedTuple):
  """An additional loss, and the tokens that it is averaged over."""

  loss: Part  # Inputs of the update -> per-token loss.
  coefficient: float
  mask: str  # Name of a bool input [B, T].
  mode: str  # A mode of `masked.token_weights`.
  norm: float | None = None  # Constant length, for modes with one.


def part(
  fn: Callable[..., Any],
  settings: Mapping[str, Any] | None = None,
  /,
  **inputs: str,
) -> Part:
  """Makes a part from a function.

  Args:
    fn: function of arrays; each positional argument reads the input of the same
      name.
    settings: values of keyword-only arguments by name. Other settings are
      ignored, and arguments without a value keep their default.
    **inputs: argument -> name of the input that it reads instead.

  Raises:
    InputError: An argument has neither a value nor a default.
  """
  parameters = list(inspect.signature(fn).parameters.values())
  positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
  keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  chosen = {k: settings[k] for k in keywords if k in (settings or {})}
  for p in parameters:
    needed = p.kind is p.KEYWORD_ONLY and p.default is p.empty
    if needed and p.name not in {*chosen, *inputs}:
      raise InputError(
        f"{getattr(fn, '__name__', fn)} needs a value for {p.name!r}; set it in"
        " config.estimator.settings or config.loss.settings"
      )
  used = frozenset({*chosen, *getattr(fn, "keywords", ())})
  arguments, of = {name: name for name in positional} | inputs, fn
  if chosen:
    fn = functools.partial(fn, **chosen)

  def by_keyword(*arrays):
    return fn(**dict(zip(arguments, arrays)))

  # A wrapper may take keywords only.
  own = [*inspect.signature(fn, follow_wrapped=False).parameters]
  direct = [*arguments] == positional == own[: len(positional)]
  call = fn if direct else by_keyword
  return Part(call, tuple(arguments.values()), used, of)


def then(first: Part, second: Part) -> Part:
  """Chains two parts: the first input of `second` is the result of `first`."""

  def both(*arrays):
    count = len(first.reads)
    return second.fn(first.fn(*arrays[:count]), *arrays[count:])

  used = first.settings | second.settings
  return Part(both, first.reads + second.reads[1:], used)


def leaves_of(
  names: Iterable[str], parts: Mapping[str, Part], by: tuple[str, ...] = ()
) -> set[str]:
  """Returns the inputs that `names` depend on and that no part computes.

  Args:
    names: names of inputs.
    parts: parts by the name of the input that they compute.
    by: chain of inputs that depend on `names`.

  Raises:
    InputError: An input depends on itself.
  """
  found = set()
  for name in names:
    if name in by:
      circle = " needs ".join((*by[by.index(name) :], name))
      raise InputError(
        f"{circle}: no part may need its own result; leave one out, such as"
        " estimator.normalize or a mask that reads advantages"
      )
    made = parts.get(name)
    found |= leaves_of(made.reads, parts, (*by, name)) if made else {name}
  return found


def evaluate(
  names: Iterable[str],
  parts: Mapping[str, Part],
  leaves: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
  """Computes the named inputs, each part once.

  They are constants in a loss: no gradient flows into them.

  Args:
    names: names of inputs.
    parts: parts by the name of the input that they compute.
    leaves: inputs that no part computes.

  Raises:
    KeyError: An input is neither computed by a part nor in `leaves`.
  """
  known = dict(leaves)

  def get(name):
    if name not in known:
      made = parts[name]
      known[name] = made({read: get(read) for read in made.reads})
    return known[name]

  return jax.lax.stop_gradient({name: get(name) for name in names})
