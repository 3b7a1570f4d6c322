"""An algorithm: the mathematical choices of a method, as parts.

Methods differ in which functions they use, never by a flag inside a function. A
part that is switched off is absent: it costs nothing and the result is bitwise
the same. `build_algorithm` makes algorithms from settings.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm import losses
from jaxrl_llm.learner.parts import Auxiliary, Part, leaves_of


class ProcessorSpec(NamedTuple):
  """A logits processor, and how its state is updated during training."""

  # (distribution, context, state) -> distribution; see `sampling.processors`.
  fn: Callable[[Any, Any, Any], Any]
  # Inputs and scores of a batch -> state for the next batch, a tree of arrays;
  # None: stateless.
  state: Part | None = None
  initial: Any = None  # State before the first batch.


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The parts of an update.

  Attributes:
    parts: name of an input -> the part that computes it, see `estimates`.
    policy_loss: returns a `losses.ClippedPolicyLoss` of per-token arrays. It
      reads `logprobs` and `entropy` of the current policy, `mask` and
      `segments` of the packed rows, and any input of the batch.
    auxiliary: name -> additional loss of the policy.
    value_loss: returns a `losses.ClippedValueLoss`. It reads the outputs of the
      current critic's head, such as `values`. None: there is no critic.
    corrections: name -> part that returns a `losses.Correction`. Each one
      multiplies the weights of a mini-batch.
    step_scale: returns a scalar factor of a mini-batch's update; None is 1.
    processors: stateful logits processors of the sampler by name.
    loss_mode: mode of `masked.token_weights` for the policy loss.
    loss_norm: constant length of the mode; None for modes without one.
    members: name of a model other than policy and critic -> inputs that it is
      trained on.
    rollout_reads: inputs, provided by models, that are read during generation.
    metrics: name of a user's metric -> scalar of a batch.
  """

  parts: Mapping[str, Part]
  policy_loss: Part
  auxiliary: Mapping[str, Auxiliary]
  value_loss: Part | None
  corrections: Mapping[str, Part]
  step_scale: Part | None
  processors: Mapping[str, ProcessorSpec]
  loss_mode: str
  loss_norm: float | None
  members: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  rollout_reads: frozenset[str] = frozenset()
  metrics: Mapping[str, Part] = dataclasses.field(default_factory=dict)

  @property
  def correction(self) -> Part | None:
    """The product of all corrections; None if there are none."""
    chosen = tuple(self.corrections.values())
    return functools.reduce(_both, chosen) if chosen else None

  @property
  def policy_inputs(self) -> frozenset[str]:
    """Inputs [B, T] or [B] of the policy's update, packed like its tokens."""
    # `proximal_logprobs` are logged even if the loss does not read them.
    read = self.parts.keys() & {"proximal_logprobs"} | {*self.policy_loss.reads}
    for term in self.auxiliary.values():
      read |= set(term.loss.reads)
    return frozenset(read - _OF_THE_POLICY)

  @property
  def value_inputs(self) -> frozenset[str]:
    """Inputs [B, T] or [B] of the critic's update, if there is a critic."""
    return frozenset(set(self.value_loss.reads) - _OF_THE_CRITIC)

  @property
  def experience(self) -> frozenset[str]:
    """All inputs that updates and metrics read from a batch."""
    names = self.policy_inputs | {"policy_mask", "advantages"}
    names |= {term.mask for term in self.auxiliary.values()}
    for chosen in (self.correction, self.step_scale):
      names |= set(chosen.reads if chosen else ())
    for processor in self.processors.values():
      names |= set(processor.state.reads)
    if self.value_loss is not None:
      names |= self.value_inputs | {"value_mask", "returns", "old_values"}
    names = names.union(
      *self.members.values(), *(x.reads for x in self.metrics.values())
    )
    return frozenset(names)

  @property
  def leaves(self) -> frozenset[str]:
    """Inputs that the batch and the models must provide."""
    return frozenset(leaves_of(self.experience, self.parts))


# Inputs computed within an update, from the current model and packed rows.
_OF_THE_POLICY = {"logprobs", "entropy", "mask", "segments"}
_OF_THE_CRITIC = {"values", "value_logits", "of_critics"}
OF_THE_UPDATE = _OF_THE_POLICY | _OF_THE_CRITIC | {"weights"}


def _both(first: Part, second: Part) -> Part:
  """Multiplies two corrections; a token is kept only if both keep it."""

  def product(*arrays):
    count = len(first.reads)
    one, other = first.fn(*arrays[:count]), second.fn(*arrays[count:])
    return losses.Correction(one.weights * other.weights, one.keep & other.keep)

  return Part(product, first.reads + second.reads)
