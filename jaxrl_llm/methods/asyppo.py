"""AsyPPO: two critics, each trained on half of the prompts.

    V = (V_1 + V_2) / 2,  disagreement = |V_1 - V_2| / 2

Differs from PPO in that each prompt always trains the same one of the two
critics, so that their disagreement estimates the critic's error. A mini-batch
without a prompt of its half leaves a critic as it is. Tokens where
they agree most (the fraction `agree_share` of a batch) carry no
policy loss: their advantages are small or certain, so they are uninformative.
The critics may be smaller than the policy (`value.init_from`).

Reference: AsyPPO 2025, arXiv:2510.01656. Not implemented: excluding tokens of
high disagreement from the entropy bonus. Both critics compute all rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.learner import Algorithm, Part, Settings, part
from jaxrl_llm.learner.algorithm import OF_THE_UPDATE
from jaxrl_llm.models import PackedRows, Params, ValueFns

NAMES = ("first", "second")


def make(fns: ValueFns) -> ValueFns:
  """Makes an ensemble of two critics; parameters are nested by `NAMES`."""

  def init(key: Array):
    return dict(zip(NAMES, map(fns.init, jax.random.split(key))))

  def from_policy(params: Any):
    return {name: fns.from_policy(params) for name in NAMES}

  def outputs(params: Any, packed: PackedRows, load: Any = None):
    loads = [None] * len(NAMES) if load is None else load
    each = [
      fns.outputs(_one(params, name), packed, of)
      for name, of in zip(NAMES, loads)
    ]
    each, aux = jax.tree.map(lambda *x: jnp.stack(x), *each)
    spread = {
      "values": jnp.mean(each["values"], axis=0),
      "disagreement": jnp.std(each["values"], axis=0),
    }
    # Each critic has its own losses in full; metrics are means.
    for key in aux:
      reduce = jnp.mean if key.startswith("metrics/") else jnp.sum
      aux[key] = reduce(aux[key], axis=0)
    return spread | {"of_critics": each}, aux

  def load(params: Any, packed: PackedRows):
    return [fns.load(_one(params, name), packed) for name in NAMES]

  return fns._replace(
    init=init,
    from_policy=from_policy,
    outputs=outputs,
    count=len(NAMES),
    owner="second_half",
    load=fns.load and load,
  )


def _one(params: Any, name: str) -> Any:
  """Returns the parameters of one critic, which may share the policy's base."""
  if not isinstance(params, Params):
    return params[name]
  return Params(params.base.get(name, params.base), params.trained[name])


def second_half(example_id: Array) -> Array:
  """float32 [B]: 1 if the prompt trains the second critic, else 0."""
  return (example_id % 2).astype(jnp.float32)


def on_own_half(loss: Part) -> Part:
  """Makes the loss of two critics from the loss of one."""
  given = [name for name in loss.reads if name not in OF_THE_UPDATE]

  def fn(of_critics: dict[str, Array], second_half: Array, *arrays):
    def own(x: Array):
      axes = tuple(range(second_half.ndim, x.ndim - 1))
      return jnp.where(jnp.expand_dims(second_half, axes) > 0.5, x[1], x[0])

    return loss(jax.tree.map(own, of_critics) | dict(zip(given, arrays)))

  return Part(fn, ("of_critics", "second_half", *given))


def without_agreement(
  mask: Array, disagreement: Array, *, agree_share: float
) -> Array:
  """Masks the tokens with the least disagreement; keeps ties."""
  known = jnp.where(mask, disagreement, jnp.nan)
  return mask & (disagreement >= jnp.nanquantile(known, agree_share))


def asyppo(
  algorithm: Algorithm, s: Settings, *, agree_share: float = 0.0
) -> Algorithm:
  """Makes two critics of one, each trained on half of the prompts.

  Args:
    algorithm: an algorithm with a critic.
    s: settings of the run.
    agree_share: Fraction of a batch's tokens to leave out of the policy loss:
      those where the critics agree most.
  """
  check_number("agree_share", agree_share, "[0, 1)")
  critic = algorithm.critic
  if critic is None:
    raise InputError("'asyppo' needs a critic; use estimator.name='gae'")
  if s.loss.clip_value:
    raise InputError(
      "the mean of the critics is not the old value of any of them; use"
      " loss.clip_value=None"
    )
  mask = part(without_agreement, {"agree_share": agree_share})
  return algorithm.change(
    critic=dataclasses.replace(critic, wrap_fns=make, wrap_loss=on_own_half),
    inputs={"second_half": part(second_half)},
    providers={"disagreement": algorithm.providers["values"]},
    masks=(mask,) if agree_share else (),
    whole_batch=algorithm.whole_batch or agree_share > 0,
  )
