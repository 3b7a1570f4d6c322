"""Parameters in two trees: what never changes, and what is trained."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import traverse_util


class Params(NamedTuple):
  """The parameters of a model; nested dicts that share no leaf.

  Functions of models merge them, so that gradients, optimizers and checkpoints
  of a step see `trained` alone.
  """

  base: Any  # Never changes; {}: everything is trained.
  trained: Any


def partition(params: Any, frozen: Sequence[str]) -> Params:
  """Splits parameters, once, when the state of a model is made.

  Args:
    params: nested dict, of arrays or of their shapes.
    frozen: parts of paths 'a/b/c' of the leaves that are not trained.
  """
  leaves = traverse_util.flatten_dict(params, sep="/")
  base = {k: x for k, x in leaves.items() if any(part in k for part in frozen)}
  trained = {k: x for k, x in leaves.items() if k not in base}
  return Params(
    *(traverse_util.unflatten_dict(x, sep="/") for x in (base, trained))
  )


def merge(params: Any) -> Any:
  """Returns the nested dict of all parameters; a nested dict is one already."""
  if not isinstance(params, Params):
    return params
  base, trained = params
  inner = {
    name: merge(Params(base[name], trained[name]))
    for name in base.keys() & trained.keys()
  }
  return {**base, **trained, **inner}
