"""Settings that are fine alone and do not go together."""

from collections.abc import Container, Iterator
from typing import Any

from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Over, Range
from jaxrl_llm.learner.choices import correction_of, has_critic
from jaxrl_llm.masked import NORM_MODES

# (it is broken, its keys, what to do).
Constraint = tuple[bool, tuple[str, ...], str]


class _Not(tuple):
  """All values but these."""

  def __contains__(self, value: Any) -> bool:
    return not super().__contains__(value)


_ON, _OFF, _ONE = Over(0), (False,), Range(0, 1)
# What goes without a scoring pass of the trainer.
_UNSCORED = ("stored", "interpolate")

# Keys with the values that they do not have together, and what to do.
_TABLE: tuple[tuple[dict[str, Container], str], ...] = (
  # Responses that are written in windows, and other schedules.
  (
    {"schedule.window": _ON, "schedule.dynamic_sampling": _ON},
    "unfinished groups have no verdicts to filter on; switch one off",
  ),
  (
    {
      "schedule.over_provision": Over(1),
      "schedule.stop": ("all",),
      "schedule.dynamic_sampling": _OFF,
    },
    "more groups would be written than are trained on; use"
    " stop='first_groups' or dynamic_sampling=True",
  ),
  # What a cut response, unlike an ended one, rules out.
  (
    {"schedule.window": _ON, "estimator.normalize": ("whiten",)},
    "centering moves the zero advantage at a cut; use 'scale' or 'none'",
  ),
  (
    {"schedule.window": _ON, "estimator.boundary": ("zero",)},
    "what follows a cut is not worth nothing; use 'repeat' or 'bootstrap'",
  ),
  (
    {
      "schedule.window": _ON,
      "estimator.boundary": ("repeat",),
      "estimator.gamma": _Not((1,)),
    },
    "a discount makes every cut a penalty; use gamma=1 or 'bootstrap'",
  ),
  (
    {"schedule.window": _ON, "loss.overlong_filter": _ON},
    "earlier windows of an overlong response are trained before it is known"
    " to be one; switch one off",
  ),
  # Responses that are compared with others to the same prompt.
  (
    {
      "data.group_size": _ONE,
      "estimator.name": ("group", "token_group", "optimal_baseline"),
    },
    "a group baseline needs at least two responses to a prompt",
  ),
  (
    {
      "data.group_size": _ONE,
      "estimator.name": ("reward_to_go",),
      "estimator.center": _Not(("none",)),
    },
    "a group baseline needs at least two responses to a prompt",
  ),
  (
    {"data.group_size": _ONE, "schedule.dynamic_sampling": _ON},
    "one response never has mixed verdicts; raise data.group_size",
  ),
  (
    {"estimator.name": ("group",), "estimator.center": ("none",)},
    "choose 'mean', 'median' or 'leave_one_out'",
  ),
  # Whose log-probs the loss is taken against, and what corrects it.
  (
    {"off_policy.proximal": ("ewma",), "off_policy.correction": ("none",)},
    "without the weight proximal/behaviour the loss is no policy gradient;"
    " use 'auto'",
  ),
  (
    {"off_policy.proximal": ("ewma",), "loss.name": _Not(("clip", "cispo"))},
    "the average needs a ratio per token; use loss.name='clip' or 'cispo'",
  ),
  (
    {
      "loss.name": ("policy_gradient",),
      "off_policy.proximal": _Not(("recompute",)),
    },
    "this loss has no ratio, so it reads no proximal policy; use 'recompute'",
  ),
  (
    {"loss.name": ("hapo",), "off_policy.proximal": _Not(("recompute",))},
    "HAPO reads the entropies of the scoring pass; use 'recompute'",
  ),
  (
    {"off_policy.ess_scale": _ON, "off_policy.proximal": _UNSCORED},
    "the sample ratio needs old log-probs of the trainer; use 'recompute'",
  ),
  (
    {
      "estimator.name": ("optimal_baseline",),
      "off_policy.proximal": _UNSCORED,
    },
    "the baseline weighs by old log-probs of the trainer; use 'recompute'",
  ),
  (
    {"sampler.entropy_tau": _ON, "off_policy.proximal": _UNSCORED},
    "entropies come from the scoring pass; use 'recompute'",
  ),
  (
    {
      "off_policy.correction": ("truncate", "mask"),
      "off_policy.proximal": ("stored",),
    },
    "with the sampler's log-probs as old ones the ratio corrects already;"
    " use correction='none' or proximal='recompute'",
  ),
  # Terms of the loss.
  (
    {"loss.kl_coefficient": _ON, "loss.kl_reward_coefficient": _ON},
    "the KL counts once; set one of them to 0",
  ),
  (
    {"loss.norm": _ON, "loss.mode": _Not(NORM_MODES)},
    f"only {' and '.join(map(repr, NORM_MODES))} have a constant length",
  ),
)


def constraints(config: Any) -> Iterator[Constraint]:
  """Every constraint; the first that is broken is the one to report."""
  for settings, why in _TABLE:
    is_broken = all(
      config_lib.get(config, key) in values for key, values in settings.items()
    )
    yield is_broken, tuple(settings), why
  yield from _of_several(config)


def _of_several(config: Any) -> list[Constraint]:
  """Constraints on what settings amount to together."""
  estimator, off_policy = config.estimator, config.off_policy
  window, mesh = config.schedule.window, config.sampler.mesh
  limit = config.sampler.max_response_length
  critic, (correction, _) = has_critic(config), correction_of(config)
  return [
    (
      window > 0 and not critic,
      ("schedule.window", "estimator.name"),
      "responses of a group end in different steps, so there is no group to"
      " compare with; use estimator.name='gae' or schedule.window=0",
    ),
    (
      window > limit,
      ("schedule.window", "sampler.max_response_length"),
      f"the window must be at most {limit} tokens",
    ),
    (
      window > 0 and 0 < config.sampler.slots < config_lib.batch_size(config),
      ("schedule.window", "sampler.slots"),
      "every response of a batch needs a slot; use 0 or"
      " data.prompts_per_step * data.group_size",
    ),
    (
      estimator.drop_pivot
      and (
        (estimator.name, estimator.center) != ("group", "median")
        or config.data.group_size % 2 == 0
      ),
      (
        *("estimator.drop_pivot", "estimator.name"),
        *("estimator.center", "data.group_size"),
      ),
      "the pivot is the median of an odd 'group'",
    ),
    (
      not critic and config.value.pretrain_steps > 0,
      ("value.pretrain_steps", "estimator.name"),
      "this estimator has no critic to pretrain; set value.pretrain_steps=0",
    ),
    (
      off_policy.proximal == "interpolate"
      and (
        config.loss.name != "clip"
        or correction == "mask"
        or (correction != "none" and off_policy.level != "token")
      ),
      (
        *("off_policy.proximal", "loss.name"),
        *("off_policy.correction", "off_policy.level"),
      ),
      "interpolation is defined for the clipped loss with a token-level"
      " 'truncate' or none",
    ),
    (
      mesh.data == 0 and max(mesh.fsdp, mesh.tensor) > 1,
      ("sampler.mesh.data", "sampler.mesh.fsdp", "sampler.mesh.tensor"),
      "data=0 shares the trainer's mesh; set data to 1 or more, or -1",
    ),
    (
      config.reward.overlong_buffer > limit,
      ("reward.overlong_buffer", "sampler.max_response_length"),
      "the buffer is a part of the response",
    ),
  ]
