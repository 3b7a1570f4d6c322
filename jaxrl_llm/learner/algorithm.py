"""An algorithm as a value: everything that a method decides about a run.

`core` makes the algorithms of the settings; a method of `methods/` is a
function that changes one. Nothing is decided by a flag inside a function: a
part that is off is absent, costs nothing, and the result is bitwise the same.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm import losses
from jaxrl_llm.config import Settings as Settings
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import estimates
from jaxrl_llm.learner.parts import Auxiliary, Part, leaves_of, part, then
from jaxrl_llm.models import ValueFns, ValueHead
from jaxrl_llm.types import Pruning


class ProcessorSpec(NamedTuple):
  """A logits processor, and how its state is updated during training."""

  # (distribution, context, state) -> distribution; see `sampling.processors`.
  fn: Callable[[Any, Any, Any], Any]
  # Inputs and scores of a batch -> state for the next batch, a tree of arrays;
  # None: stateless, for everything that the engine samples.
  state: Part | None = None
  initial: Any = None  # State before the first batch.


class Provider(NamedTuple):
  """A function that computes inputs by scoring with models."""

  # Names of members, companions and inputs, or 'reference' (of a KL).
  needs: tuple[str, ...]
  # (`providers.Scoring` of a batch) -> inputs by name, each [B, ...].
  give: Callable[[Any], dict[str, Any]]


class MemberSpec(NamedTuple):
  """A trained model other than policy and critic, such as a probe."""

  make: Callable[..., Any]  # (policy, algorithm, mesh) -> `members.Member`.
  reads: tuple[str, ...]  # Inputs that it is trained on.


class View(NamedTuple):
  """Different samples for the critic than for the policy."""

  # (row of the data -> its answer, tokenizer, samples) -> samples.
  fn: Callable[..., Any]
  tokens: int  # Maximum number of tokens that it adds to a prompt.


@dataclasses.dataclass(frozen=True)
class Critic:
  """Targets and loss of a value model.

  Attributes:
    returns: targets [B, T].
    loss: returns a `losses.ClippedValueLoss`. It reads the outputs of the
      current critic's head, such as `values`.
    mask: bool [B, T], tokens that the critic is trained on.
    head: output head of the model.
    wrap_fns: makes several critics of one.
    wrap_loss: makes their loss of that of one.
    view: samples as the critic reads them.
  """

  returns: Part
  loss: Part
  mask: Part = part(estimates.value_mask)
  head: ValueHead = ValueHead()
  wrap_fns: Callable[[ValueFns], ValueFns] | None = None
  wrap_loss: Callable[[Part], Part] = lambda loss: loss
  view: View | None = None


_no = functools.partial(dataclasses.field, default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """The parts of an update, and the models and prompts that a run needs.

  A part is a function of arrays that reads the inputs which its arguments name.

  Attributes:
    advantages: part -> advantages [B, T].
    policy_loss: returns a `losses.ClippedPolicyLoss` of per-token arrays. It
      reads `logprobs` and `entropy` of the current policy, `mask` and
      `segments` of the packed rows, and any input of the batch.
    providers: name of an input -> how models compute it.
    critic: targets and loss of a value model; None: there is no critic.
    proximal: input that the ratio is taken against; '' takes no ratio.
    inputs: name -> part, further inputs.
    masks: parts (mask, inputs) -> mask, which leave tokens out of the policy
      loss, in order.
    after: parts (advantages, inputs) -> advantages, such as whitening.
    auxiliary: name -> additional loss of the policy.
    corrections: name -> part that returns a `losses.Correction`. Each one
      multiplies the weights of a mini-batch.
    step_scale: returns a scalar factor of a mini-batch's update; None is 1.
    mode: reduction of the policy loss, see `masked.token_weights`.
    norm: constant length of the mode; None for modes without one.
    metrics: name of a metric -> scalar of a batch, logged as `own/NAME`.
    lowest_reward: smallest reward of which advantages are meaningful.
    whole_batch: whether a part compares tokens of different groups, which
      gradients accumulated group by group cannot do.
    processors: logits processors of the sampler by name.
    members: further trained models by name.
    companions: name of weights that follow the policy's -> (policy, mesh) ->
      `members.Companion`.
    frozen: name of a model that only scores -> its directory.
    prompts: makes the `PromptSource`; None is that of `data.order`.
    prompt_settings: its keyword arguments.
    group_reward: reward of whole groups; None is that of `reward.group`.
    replay: makes the replay store; None is `data.replay.Replay`.
    feed: makes the exchange of responses with other policies.
    pruning: drops unfinished responses.
    stages: functions of a batch of complete groups, see `RolloutWorker`.
    checks: functions that refuse a complete algorithm by an InputError.
    shaped_by: keys of the settings that shape the state of its models, which
      cannot change on resume.
  """

  advantages: Part
  policy_loss: Part
  providers: Mapping[str, Provider]
  critic: Critic | None = None
  proximal: str = "old_logprobs"
  inputs: Mapping[str, Part] = _no()
  masks: tuple[Part, ...] = ()
  after: tuple[Part, ...] = ()
  auxiliary: Mapping[str, Auxiliary] = _no()
  corrections: Mapping[str, Part] = _no()
  step_scale: Part | None = None
  mode: str = "token-mean"
  norm: float | None = None
  metrics: Mapping[str, Part] = _no()
  lowest_reward: float = -math.inf
  whole_batch: bool = False
  processors: Mapping[str, ProcessorSpec] = _no()
  members: Mapping[str, MemberSpec] = _no()
  companions: Mapping[str, Callable[..., Any]] = _no()
  frozen: Mapping[str, str] = _no()
  prompts: Callable[..., Any] | None = None
  prompt_settings: Mapping[str, Any] = _no()
  group_reward: Callable[..., Any] | None = None
  replay: Callable[..., Any] | None = None
  feed: Callable[[], Any] | None = None
  pruning: Pruning | None = None
  stages: tuple[Callable[..., Any], ...] = ()
  checks: tuple[Callable[["Algorithm"], None], ...] = ()
  shaped_by: tuple[str, ...] = ()

  def change(self, **fields: Any) -> "Algorithm":
    """Returns the algorithm with other fields.

    Masks, stages, checks and entries of mappings are added; an entry replaces
    that of its name. All other fields are replaced.

    Raises:
      InputError: there is a model or a logits processor of the name already.
    """
    for field in _ADDED & fields.keys():
      old, new = getattr(self, field), fields[field]
      if isinstance(old, tuple):
        fields[field] = (*old, *new)
        continue
      taken = {*_MODELS, *old} if field in _UNIQUE else _OF_MODELS
      if taken := taken & new.keys():
        raise InputError(
          f"{field}: there is a {min(taken)!r} already; use another name"
        )
      fields[field] = {**old, **new}
    return dataclasses.replace(self, **fields)

  def changed(self, before: "Algorithm") -> dict[str, bool]:
    """Maps the fields in `_SINGLE` that differ from those before a method.

    Returns:
      Name of a field -> whether its earlier value is lost. It is not if a part
      was chained to it, or a critic was changed.
    """
    found = {}
    for field in _SINGLE:
      old, new = getattr(before, field), getattr(self, field)
      if new is not old:
        chained = isinstance(new, Part) and new.of is None
        found[field] = not (chained or isinstance(new, Critic))
    return found

  @functools.cached_property
  def parts(self) -> dict[str, Part]:
    """Every input that is computed from others, by name."""
    mask = part(estimates.same, x="trainable")
    for without in self.masks:
      mask = then(mask, without)
    if self.masks:
      mask = then(mask, part(estimates.still_trainable))
    advantages = then(self.advantages, part(estimates.checked_advantages))
    for modify in self.after:
      advantages = then(advantages, modify)
    parts = {
      **ALWAYS,
      "advantages": advantages,
      "unwindowed_policy_mask": mask,
      **self.inputs,
    }
    if self.proximal:
      parts["proximal_logprobs"] = part(estimates.same, x=self.proximal)
    if self.critic is not None:
      parts |= {"returns": self.critic.returns, "value_mask": self.critic.mask}
    return parts

  @property
  def value_loss(self) -> Part | None:
    """The loss of the critic, or of several; None without a critic."""
    critic = self.critic
    return None if critic is None else critic.wrap_loss(critic.loss)

  @property
  def correction(self) -> Part | None:
    """The product of all corrections; None if there are none."""
    chosen = tuple(self.corrections.values())
    return functools.reduce(_both, chosen) if chosen else None

  @property
  def stateful_processors(self) -> dict[str, ProcessorSpec]:
    """The logits processors whose state follows training."""
    return {k: x for k, x in self.processors.items() if x.state is not None}

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
    for processor in self.stateful_processors.values():
      names |= set(processor.state.reads)
    if self.critic is not None:
      names |= self.value_inputs | {"value_mask", "returns", "old_values"}
    for reader in (*self.members.values(), *self.metrics.values()):
      names |= set(reader.reads)
    return frozenset(names)

  @property
  def leaves(self) -> frozenset[str]:
    """Inputs that the batch and the models must provide."""
    return frozenset(leaves_of(self.experience, self.parts))

  def needs(self, leaves: Any) -> frozenset[str]:
    """Returns the names that the inputs' providers need, also indirectly."""
    known = self.providers.keys() & leaves
    found = {name for x in known for name in self.providers[x].needs}
    return frozenset(found | self.needs(found) if found else found)


# Inputs that every method computes in the same way.
ALWAYS = {
  "own_lengths": part(estimates.own_lengths),
  "truncated": part(estimates.truncated),
  "groups": part(estimates.groups),
  "trainable": part(estimates.trainable),
  "policy_mask": part(estimates.in_window),
  "value_mask": part(estimates.value_mask),
  "positive_mask": part(estimates.positive_mask),
  "old_values": part(estimates.same, x="values"),
}
# Fields that `Algorithm.change` adds to; those whose names are unique, and the
# names of other models and losses, which they cannot have.
_UNIQUE = {"members", "companions", "frozen", "processors"}
_ADDED = _UNIQUE | {
  *("inputs", "providers", "masks", "auxiliary", "metrics"),
  *("stages", "checks", "shaped_by"),
}
# Fields with one value, which a method replaces or builds on.
_SINGLE = (
  *("advantages", "policy_loss", "critic", "prompts"),
  *("group_reward", "replay", "feed", "pruning"),
)
_MODELS, _OF_MODELS = ("policy", "critic"), {"balance"}
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
