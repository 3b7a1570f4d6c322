"""Parameters as two trees: a frozen base and a trained part."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import traverse_util

from jaxrl_llm.models.adapters import FACTORS

# Parameters that a critic has in addition to its backbone.
_NEW_IN_CRITIC = ("value_head/", "surprise/")


class Params(NamedTuple):
  """The parameters of a model as two nested dicts with disjoint leaves.

  Functions of models merge them. Gradients, optimizer states and the
  checkpoints of steps contain only `trained`.
  """

  base: Any  # Frozen; {} if everything is trained.
  trained: Any


def partition(params: Any, frozen: Sequence[str]) -> Params:
  """Splits the parameters of a new model state.

  With adapters, only they and the parameters that a critic adds are trained.

  Args:
    params: nested dict of arrays or of their shapes.
    frozen: substrings of the paths 'a/b/c' of frozen leaves.
  """
  leaves = traverse_util.flatten_dict(params, sep="/")
  adapted = any(path.endswith(FACTORS) for path in leaves)

  def in_base(path: str):
    if adapted and not path.endswith(FACTORS):
      return not any(part in path for part in _NEW_IN_CRITIC)
    return any(part in path for part in frozen)

  base = {k: x for k, x in leaves.items() if in_base(k)}
  trained = {k: x for k, x in leaves.items() if k not in base}
  return Params(
    *(traverse_util.unflatten_dict(x, sep="/") for x in (base, trained))
  )


def merge(params: Any) -> Any:
  """Merges `Params` into one nested dict; a nested dict stays unchanged."""
  if not isinstance(params, Params):
    return params
  base, trained = (traverse_util.flatten_dict(tree) for tree in params)
  return traverse_util.unflatten_dict(base | trained)
