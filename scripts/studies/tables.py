"""Definitions of the studies: compared variants and their settings."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Variant(NamedTuple):
  """One row of a study."""

  name: str
  method: str  # configs/METHOD.py.
  changes: Mapping[str, Any] = {}  # Config key -> value.


class Study(NamedTuple):
  """Variants that are compared with the first of them."""

  title: str
  question: str
  variants: tuple[Variant, ...]
  preset: str = ""  # Scale of all variants.
  target: float = 0.8  # Accuracy to which the cost is measured.
  axes: tuple[str, ...] = ("tokens",)  # Panels of the figure.
  leads: tuple[str, ...] = ("steps", "tokens")  # Axes along which leads are.
  # Variants whose curves are plotted; empty: all.
  drawn: tuple[str, ...] = ()

  @property
  def baseline(self) -> str:
    """Returns the name of the variant that the others are compared with."""
    return self.variants[0].name

  def only(self, names: Sequence[str]) -> "Study":
    """Returns the study with only the named variants."""
    kept = tuple(each for each in self.variants if each.name in names)
    return self._replace(variants=kept)


_RUN = {"run.steps": 40, "eval.every": 10}
_CONSTANT_LAMBDA = {
  "estimator.lambda_schedule": "constant",
  "estimator.lambda_policy": 0.95,
}
# Changes that remove one part of VAPO each.
_WITHOUT = {
  "value pretraining": {"value.pretrain_steps": 0},
  "decoupled GAE": _CONSTANT_LAMBDA | {"estimator.lambda_value": 0.95},
  "length-adaptive λ": _CONSTANT_LAMBDA,
  "clip-higher": {"loss.clip_high": 0.2},
  "token-level loss": {"loss.mode": "seq-mean-token-mean"},
  "positive LM loss": {"loss.nll_coefficient": 0.0},
}


def _each(
  method: str, run: Mapping[str, Any], named: Mapping, name: str = "{}"
) -> tuple[Variant, ...]:
  """Returns one variant of a run for each of the named changes."""
  return tuple(
    Variant(name.format(k), method, run | changes)
    for k, changes in named.items()
  )


def _without_parts(run: Mapping[str, Any], responses: int) -> tuple:
  """Returns VAPO, VAPO without each part, and PPO; equal responses per step."""
  alone = {"data.prompts_per_step": responses, "data.group_size": 1}
  return (
    Variant("VAPO", "vapo", run),
    *_each("vapo", run, _WITHOUT | {"group sampling": alone}, "without {}"),
    Variant("PPO", "ppo", run),
  )


# The papers' critics read only tokens.
_TOKENS_ALONE = _RUN | {"value.reads_logprobs": False}
_REWARD_MODEL = {"value.reward_model_steps": 12}
_NO_KL = _RUN | {"loss.kl_coefficient": 0.0}
_FILTER = {"loss.overlong_filter": True}
_CLIP_HIGHER = {"loss.clip_high": 0.28}
_PUNISHED = _NO_KL | _CLIP_HIGHER | {"reward.overlong_buffer": 72}
_ALL_GROUPS = {"schedule.dynamic_sampling": False}
# A full rollout costs as much as several windows: fewer steps, similar seconds.
_FULL = {"run.steps": 40, "eval.every": 5}
_WINDOWED = {"run.steps": 80, "eval.every": 10}
_WINDOWS = {str(n): {"schedule.window": n} for n in (64, 32, 128)}
_WINDOWS["64, bootstrap"] = _WINDOWS["64"] | {"estimator.boundary": "bootstrap"}
_EVALUATED_WELL = _RUN | {"eval.greedy": True, "eval.problems": 200}
# AReaL's objective and its ablations: π_prox is recomputed, and an importance
# weight corrects for the sampler; the sampler is π_prox, so that PPO's ratio
# corrects; no correction.
_OBJECTIVES = {
  "decoupled": {},
  "coupled": {"off_policy.proximal": "stored", "off_policy.correction": "none"},
  "uncorrected": {"off_policy.correction": "none"},
}
_LAGS = {str(lag): {"schedule.lag": lag} for lag in (0, 1, 2, 4)}
_LAGS |= {f"8, {k}": {"schedule.lag": 8} | v for k, v in _OBJECTIVES.items()}
_STALE = {
  "run.steps": 40,
  "eval.every": 20,
  "data.prompts_per_step": 16,
  "data.group_size": 16,
  "optimizer.policy.learning_rate": 2e-4,
}
# Variants of REINFORCE at lag 8.
_PLAIN = _STALE | {
  "schedule.lag": 8,
  "estimator.name": "group",
  "estimator.scale": "none",
  "off_policy.correction": "none",
  "off_policy.ess_scale": False,
}
_TRUNCATED = {"off_policy.correction": "truncate"}
_SCALED = _TRUNCATED | {"off_policy.ess_scale": True}
_VCPO = {"estimator.name": "optimal_baseline"}
# Four updates per batch, with large steps.
_LARGE_STEPS = _STALE | {
  "optimizer.policy.mini_batch": 0,
  "optimizer.policy.updates_per_step": 4,
  "loss.kl_coefficient": 0.0,
}
_DIS = {
  "loss.name": "dis",
  "loss.clip_low": 0.3,
  "loss.clip_high": 5.0,
  "off_policy.proximal": "stored",
}
_SINGLE = {"data.prompts_per_step": 256, "data.group_size": 1}
_HARD_MASKS = {
  "SAO": ("sao", _SINGLE),
  "GRPO + DIS": ("grpo", _DIS),
  "VAPO": ("vapo", {}),
  "GRPO": ("grpo", {}),
}
# At lag 8: bounds only on ratios that moved in the direction of the advantage.
_ONE_SIDED = {
  "SAO with PPO's clip": (
    "sao",
    _SINGLE
    | {"loss.name": "clip", "loss.clip_low": 0.2, "loss.clip_high": 0.28},
  ),
  "GRPO + DPPO": (
    "grpo",
    {"loss.name": "dppo_tv", "off_policy.proximal": "stored"},
  ),
}

_CALCULATOR = {
  "run.steps": 24,
  "eval.every": 8,
  "eval.problems": 100,
  "eval.greedy": False,
  "data.prompts_per_step": 16,
  "data.group_size": 8,
  "environment.name": "calculator",
  "sampler.stop": ("=",),
  "optimizer.policy.mini_batch": 0,
  "optimizer.value.mini_batch": 16,
  "value.pretrain_steps": 6,
}
# Four calculator turns on average, or six and at most 34.
_TURNS = {
  "sums": _CALCULATOR,
  "divisions": _CALCULATOR
  | {
    "data.source": "remainder",
    "data.max_prompt_length": 8,
    "sampler.max_response_length": 288,
    "environment.max_turns": 34,
    "estimator.alpha": 1.0,
  },
}
_UNITS = {
  "token": {},
  "segment": {"estimator.lambda_schedule": "segments"},
  "turn": {
    "estimator.name": "turn_gae",
    "estimator.lambda_schedule": "constant",
  },
}

# Prompts of a pool that is traversed twice.
_POOL = {"run.steps": 60, "eval.every": 10, "data.prompts_per_step": 32}
_POOL |= {"data.pool": 1024}
_SHUFFLED = _POOL | {"data.order": "shuffled"}
_MIXED_GROUPS = {"schedule.dynamic_sampling": True}


def _of(prompts: int, tries: int, **changes: Any) -> dict[str, Any]:
  """Returns settings with so many prompts per step and responses per prompt."""
  shape = {"data.prompts_per_step": prompts, "data.group_size": tries}
  return _RUN | shape | {"optimizer.policy.mini_batch": 0} | changes


_ALONE = {"data.order": "shuffled"}  # No further tries per prompt.
_PLAIN_GROUPS = _ALONE | {"estimator.name": "group"}
_HARD = {"data.order_settings": {"signal": "hard"}}

STUDIES: Mapping[str, Study] = {
  "vapo_ablations": Study(
    title="The token-level and the positive LM loss help, groups do not",
    question="How much held-out accuracy does each part contribute?",
    preset="long_tail",
    target=0.65,
    variants=_without_parts(_RUN, 128),
    drawn=("VAPO", "PPO", "without group sampling"),
  ),
  "credit": Study(
    title="VAPO is ahead of GRPO and PPO; DAPO needs 2.5 times the tokens",
    question="How useful is a critic that explains half of the variance?",
    leads=("steps",),  # At equal tokens, DAPO's lead would dwarf the others.
    drawn=("VAPO", "PPO", "GRPO", "DAPO"),
    variants=(
      *_without_parts(_TOKENS_ALONE, 512),
      # As in the papers, with and without pretraining, which removes the bias.
      Variant("from a reward model", "vapo", _TOKENS_ALONE | _REWARD_MODEL),
      Variant(
        "from a reward model, without value pretraining",
        "vapo",
        _TOKENS_ALONE | _REWARD_MODEL | _WITHOUT["value pretraining"],
      ),
      Variant("critic reads log-probs", "vapo", _RUN),
      Variant("GRPO", "grpo", _RUN),
      Variant("DAPO", "dapo", _RUN),
    ),
  ),
  "language_model": Study(
    title="SmolLM2-135M learns sums of two digits with all three methods",
    question="Do the methods work for SmolLM2-135M as for small base models?",
    preset="smollm2",  # Needs --config.model.path=DIR.
    target=0.6,
    variants=tuple(
      Variant(x.upper(), x, _EVALUATED_WELL) for x in ("vapo", "grpo", "dapo")
    ),
  ),
  "dapo_increments": Study(
    title="Dynamic sampling gives most of DAPO's lead for 1.6 times the tokens",
    question="How much does each part of DAPO contribute?",
    preset="long_tail",
    target=0.65,
    axes=("steps", "tokens", "seconds"),
    variants=(
      Variant("GRPO without KL", "grpo", _NO_KL),
      Variant("+ overlong filtering", "grpo", _NO_KL | _FILTER),
      Variant("+ clip-higher", "grpo", _NO_KL | _FILTER | _CLIP_HIGHER),
      Variant("+ soft overlong punishment", "grpo", _PUNISHED),
      Variant("+ token-level loss", "dapo", _RUN | _ALL_GROUPS),
      Variant("+ dynamic sampling (DAPO)", "dapo", _RUN),
    ),
  ),
  "staleness": Study(
    title="With large steps a long lag needs PPO's clip, truncation or VCPO",
    question="What does a lag cost, and which objective tolerates it?",
    axes=(),
    target=0.7,
    variants=(
      *_each("areal", _STALE, _LAGS, "lag {}"),
      Variant("REINFORCE, lag 8", "vcpo", _PLAIN),
      Variant("+ truncation", "vcpo", _PLAIN | _TRUNCATED),
      Variant("+ step scale", "vcpo", _PLAIN | _SCALED),
      Variant("+ optimal baseline (VCPO)", "vcpo", _PLAIN | _SCALED | _VCPO),
    ),
  ),
  "hard_masks": Study(
    title="What a lag costs with and without a hard token mask",
    question="Do SAO and its mask tolerate a lag with large steps?",
    axes=(),
    target=0.7,
    variants=tuple(
      Variant(
        f"{name}, lag {lag}",
        method,
        _LARGE_STEPS | changes | {"schedule.lag": lag},
      )
      for lag, chosen in (
        (0, _HARD_MASKS),
        (8, _HARD_MASKS | _ONE_SIDED),
        (4, _HARD_MASKS),
        (1, _HARD_MASKS),
      )
      for name, (method, changes) in chosen.items()
    ),
  ),
  **{
    f"units_{task}": Study(
      title="Credit by token, segment and turn is level",
      question="Which unit of credit do multi-turn responses need?",
      axes=(),
      variants=_each("vapo", run, _UNITS),
    )
    for task, run in _TURNS.items()
  },
  "budgets": Study(
    title="Shuffled prompts are ahead of all others at equal tokens",
    question="Can predicting mixed groups replace dynamic sampling?",
    variants=(
      Variant("shuffled", "dots", _SHUFFLED),
      Variant("dynamic sampling", "dots", _SHUFFLED | _MIXED_GROUPS),
      Variant("target rate (DOTS)", "dots", _POOL),
      Variant("DPS", "dps", _POOL),
      Variant("GDRO", "gdro", _POOL),
    ),
  ),
  "tries": Study(
    title="DARS's further tries of hard prompts pay, also at equal tokens",
    question="Are many tries of hard prompts worth more than many prompts?",
    drawn=("4 tries of 36", "4 tries of 60 prompts", "DARS, equal"),
    # DARS samples 36 prompts per step, and starts with 240 responses.
    variants=(
      Variant("4 tries of 36", "dars", _of(36, 4, **_PLAIN_GROUPS)),
      Variant("4 tries of 60 prompts", "dars", _of(60, 4, **_PLAIN_GROUPS)),
      Variant("10 tries of 24", "dars", _of(24, 10, **_PLAIN_GROUPS)),
      Variant("4 tries of 36, DARS's baseline", "dars", _of(36, 4, **_ALONE)),
      Variant("DARS, equal", "dars", _of(36, 4)),
      Variant("DARS, hard", "dars", _of(28, 4) | _HARD),
    ),
  ),
  "hints": Study(
    title="Hints and repairs pay at equal steps, repairs at equal tokens too",
    question="Do tokens that the policy did not sample help?",
    drawn=("8 tries", "16 tries", "ADHint", "SCOPE", "half is replayed"),
    variants=(
      Variant("8 tries", "adhint", _of(16, 8, **_PLAIN_GROUPS)),
      Variant("16 tries", "adhint", _of(16, 16, **_PLAIN_GROUPS)),
      Variant("ADHint", "adhint", _of(16, 8)),
      Variant("8 tries, SCOPE's baseline", "scope", _of(16, 8, **_ALONE)),
      Variant("SCOPE", "scope", _of(16, 8)),
      Variant("half is replayed", "replay", _of(16, 16)),
      Variant("DART", "dart", _of(16, 8)),
    ),
  ),
  "tppo_speed": Study(
    title="Windows halve the decode steps, but not the seconds on a CPU",
    question="What does accuracy cost in seconds, tokens and steps?",
    preset="long_tail",
    target=0.6,
    axes=("decode_steps", "tokens", "seconds"),
    variants=(
      Variant("VAPO, full rollouts", "vapo", _FULL),
      Variant("PPO, full rollouts", "ppo", _FULL),
      *_each("tppo", _WINDOWED, _WINDOWS, "T-PPO, window {}"),
    ),
  ),
}
