"""Warnings about a failing run, each with settings to change.

Every rule is a pure function of the rows of metrics, so replaying the rows of a
run reproduces its warnings.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Thresholds, here and in the table of rules, are set to avoid false alarms:
# runs that learn, with batches of 32 to 512 responses, stay below them except
# for real spikes.

# Nats per token: a response of a hundred tokens is then nearly the same each
# time it is sampled. This is bad only while answers are still wrong.
ENTROPY_LOW = 0.05
# Above this accuracy, low entropy is normal for a learned task.
ACCURACY_HIGH = 0.7
# A fall of entropy by this factor within ENTROPY_STEPS, without a gain in
# accuracy, is a collapse; runs that learn well lose a factor of 4 but improve.
ENTROPY_FELL = 5.0
ENTROPY_STEPS = 10
# Gain in accuracy that makes a fall of entropy or length normal learning.
ACCURACY_GAIN = 0.05
# Consecutive rows with equal rewards that rule out chance in small batches. In
# the first row of a run a single one suffices: the setup is then at fault.
SAME_REWARDS_STEPS = 3
# Maximum standard deviation of equal rewards, relative to their mean: it is not
# 0 due to rounding.
SAME_REWARDS_SPREAD = 1e-5
# A useful critic on hard data fluctuates around 0: it may be below for a row or
# two.
EXPLAINED_VARIANCE_STEPS = 5
# Nats per token: a jump is a multiple of the usual KL and not tiny; above
# KL_HIGH, it needs no comparison.
KL_TIMES_USUAL = 10.0
KL_NOT_TINY = 0.02
KL_HIGH = 0.1
KL_USUAL_STEPS = 20
# Minimum number of rows that define the usual KL.
FEWEST_USUAL_STEPS = 5
# Lengths are compared with the first of the window: a fall may take few steps.
LENGTH_FELL = 2.0
# Number of rows that a rule sees, including the newest.
WINDOW = 60
# Number of rows in a median: a single outlier batch is not a collapse.
NOW_STEPS = 3

# Steps after which a warning that still holds is repeated.
COOLDOWN_STEPS = 50
# Steps after which a warning that no longer holds is cleared.
CLEARED_STEPS = 10

# Function of the values of each metric that a rule needs, over the latest rows
# that have all of them, oldest first. Returns a description of the problem with
# its numbers, or None.
Find = Callable[..., str | None]


class Rule(NamedTuple):
  """A warning: the metrics it needs, its condition and its advice."""

  needs: tuple[str, ...]
  find: Find
  advice: str  # Why it matters, and which settings to change.


def above(limit: float, text: str, *, rows: int = 1) -> Find:
  """Warns if the median of the latest rows is above a limit."""

  def find(values: Sequence[float]) -> str | None:
    value = statistics.median(values[-rows:])
    return text.format(value) if value > limit else None

  return find


def same_rewards(accuracy: float, text: str) -> Find:
  """Warns if all rewards are equal, in the first row or in several in a row.

  The rewards are checked too: numeric rewards may differ even if all responses
  are correct, or all incorrect.
  """

  def find(*metrics: Sequence[float]) -> str | None:
    latest = list(zip(*metrics))[-SAME_REWARDS_STEPS:]
    if any(
      now != accuracy or std > SAME_REWARDS_SPREAD * abs(mean)
      for now, std, mean in latest
    ):
      return None
    when = f"for {len(latest)} steps" if latest[1:] else "in the first step"
    return f"{text} {when}"

  return find


def entropy_collapse(
  entropies: Sequence[float], accuracies: Sequence[float]
) -> str | None:
  """Warns of low or quickly falling entropy while accuracy is still low."""
  now, accuracy = _now(entropies), _now(accuracies)
  if accuracy >= ACCURACY_HIGH or len(entropies) < NOW_STEPS:
    return None
  if now < ENTROPY_LOW:
    return f"entropy {now:.3g} nats per token at accuracy {accuracy:.2f}"
  before = entropies[:-ENTROPY_STEPS]
  if len(before) < NOW_STEPS or now * ENTROPY_FELL > _now(before):
    return None
  gain = accuracy - _now(accuracies[: len(before)])
  if gain >= ACCURACY_GAIN:
    return None
  return (
    f"entropy fell from {_now(before):.3g} to {now:.3g} nats per token in"
    f" {ENTROPY_STEPS} steps, accuracy changed by {gain:+.2f}"
  )


def explained_variance(variances: Sequence[float]) -> str | None:
  """Warns if the critic is worse than a constant in several rows in a row."""
  latest = variances[-EXPLAINED_VARIANCE_STEPS:]
  if len(latest) < EXPLAINED_VARIANCE_STEPS or max(latest) >= 0:
    return None
  return f"explained variance {latest[-1]:.3g}, below 0 for {len(latest)} steps"


def kl_jump(divergences: Sequence[float]) -> str | None:
  """Warns if the policy changed much more in this step than usual."""
  now, past = divergences[-1], divergences[-1 - KL_USUAL_STEPS : -1]
  usual = statistics.median(past) if len(past) >= FEWEST_USUAL_STEPS else None
  jumped = usual is not None and now > max(KL_NOT_TINY, KL_TIMES_USUAL * usual)
  if not jumped and now <= KL_HIGH:
    return None
  compared = "" if usual is None else f", usually {usual:.2g}"
  return f"the step's KL is {now:.3g} nats per token{compared}"


def length_collapse(
  lengths: Sequence[float], accuracies: Sequence[float]
) -> str | None:
  """Warns if responses became much shorter without becoming more accurate."""
  if len(lengths) < 2 * NOW_STEPS:
    return None
  now, before = _now(lengths), _now(lengths[:NOW_STEPS])
  gain = _now(accuracies) - _now(accuracies[:NOW_STEPS])
  if now * LENGTH_FELL > before or gain >= ACCURACY_GAIN:
    return None
  return (
    f"mean response length fell from {before:.1f} to {now:.1f} tokens within"
    f" {len(lengths)} steps, accuracy changed by {gain:+.2f}"
  )


def _now(values: Sequence[float]) -> float:
  return statistics.median(values[-NOW_STEPS:])


# Each rule: its metrics and its condition, then the advice.
# fmt: off
RULES = {
  "entropy_collapse": Rule(("policy/entropy", "reward/accuracy"),
    entropy_collapse,
    "the responses to a prompt become identical, so nothing new is explored;"
    " raise loss.clip_high, loss.entropy_coefficient or sampler.temperature, or"
    " lower optimizer.policy.learning_rate"),
  "all_wrong": Rule(("reward/accuracy", "reward/std", "reward/mean"),
    same_rewards(0.0, "no response was correct"),
    "there is nothing to learn from; see samples.jsonl, check reward.name and"
    " data.template, choose easier problems with data.settings, or raise"
    " data.group_size"),
  "all_right": Rule(("reward/accuracy", "reward/std", "reward/mean"),
    same_rewards(1.0, "every response was correct"),
    "there is nothing left to learn; choose harder problems with data.settings"
    " or data.path, or end the run with run.steps; check samples.jsonl for a"
    " reward that is too lenient"),
  "reward_errors": Rule(("reward/errors",),
    above(0, "the reward failed on {:.0f} responses"),
    "they count as neither correct nor incorrect, and nothing is learned from"
    " them; see `error` in samples.jsonl, fix the reward or environment that"
    " reward.name or environment.name selects, or raise reward.deadline_s or"
    " environment.deadline_s"),
  # With a third of the responses cut off, the policy learns to be short, not to
  # be correct.
  "overlong": Rule(("rollout/overlong_fraction",),
    above(0.3, "{:.0%} of the responses hit the maximum length", rows=3),
    "they are cut off, mostly before an answer that could be judged; raise"
    " sampler.max_response_length, set sampler.stop if they ramble on after the"
    " answer, or exclude them with loss.overlong_filter"),
  "explained_variance": Rule(("value/explained_variance",), explained_variance,
    "the critic is worse than a constant and adds noise to the advantages;"
    " raise value.pretrain_steps or optimizer.value.epochs, or lower"
    " optimizer.value.learning_rate"),
  # bfloat16 alone gives about 0.01; weights or temperatures that differ give
  # more than 0.1.
  "sampler_mismatch": Rule(("sampler_trainer/logprob_diff_mean",),
    above(0.05, "log-probabilities of sampler and trainer differ by {:.3g} nats"
      " per token"),
    "the policy is trained on responses of a different policy; correct for it"
    " with off_policy.correction, or set model.sampler_matmul to '',"
    " model.sampler_dtype, model.cache_dtype or model.dtype to float32,"
    " model.expert_capacity to 0, or leave out a method with logits"
    " processors"),
  "kl_jump": Rule(("policy/approx_kl",), kl_jump,
    "a single large step may undo many steps of progress; lower"
    " optimizer.policy.learning_rate or optimizer.policy.max_grad_norm"),
  # Single rare tokens reach 30 in healthy runs.
  "ratio_explosion": Rule(("policy/ratio_max",),
    above(100, "a token's probability ratio reached {:.3g}"),
    "clipping bounds the gain from such tokens, not their loss; lower"
    " optimizer.policy.learning_rate or optimizer.policy.epochs, or set"
    " loss.dual_clip"),
  "length_collapse": Rule(("rollout/response_length_mean", "reward/accuracy"),
    length_collapse,
    "the policy learns to stop early, not to solve; raise value.pretrain_steps,"
    " set estimator.lambda_value to 1, or lower"
    " optimizer.policy.learning_rate"),
  "suspect_host": Rule(("host/suspect",),
    above(-1, "process {:.0f} is slow, silent or uses far more memory"),
    "the other processes wait for it; a separate line says how it differs and"
    " since when; replace it, or let a scheduler do so with"
    " run.on_suspect='stop'"),
}
# fmt: on


class Health:
  """Checks the row of each step against the rules; one per run.

  A rule warns when it starts to hold, and again every `COOLDOWN_STEPS` while it
  holds. It is reset after not holding for `CLEARED_STEPS`. A rule is skipped in
  rows that lack one of its metrics; NaN counts as missing.
  """

  def __init__(
    self,
    rows: Iterable[Mapping[str, Any]] = (),
    rules: Mapping[str, Rule] = RULES,
  ):
    """Continues from earlier rows, as returned by `read_rows`.

    Args:
      rows: earlier rows.
      rules: rules by name.
    """
    self._rules = rules
    self._seen = {name: collections.deque(maxlen=WINDOW) for name in rules}
    self._held = {}  # Rule -> step at which it last held.
    self._said = {}  # Rule -> step of its last reported warning.
    for row in rows:
      self.check(row["step"], row)

  def check(
    self, step: int, row: Mapping[str, Any]
  ) -> tuple[dict[str, float], list[str]]:
    """Checks the metrics of the next step.

    Args:
      step: step of the row; must increase.
      row: metrics, as logged or as read back from `metrics.jsonl`.

    Returns:
      (metrics `health/RULE` = 1.0 for every rule that holds; new warnings: the
      observation, why it matters, and the settings to change).
    """
    holds, warnings = {}, []
    for name, rule in self._rules.items():
      values = tuple(_value(row, metric) for metric in rule.needs)
      if None in values:
        continue
      self._seen[name].append(values)
      found = rule.find(*map(list, zip(*self._seen[name], strict=True)))
      if found is not None:
        holds[f"health/{name}"] = 1.0
        if not self._is_quiet(name, step):
          text = f"{name.replace('_', ' ')}: {found}; {rule.advice}"
          warnings.append(f"warning at step {step}, {text}")
    return holds, warnings

  def _is_quiet(self, rule: str, step: int) -> bool:
    """Records that a rule holds; returns whether it was reported recently."""
    known = rule in self._held and step - self._held[rule] <= CLEARED_STEPS
    quiet = known and step - self._said[rule] < COOLDOWN_STEPS
    self._held[rule] = step
    if not quiet:
      self._said[rule] = step
    return quiet


def _value(row: Mapping[str, Any], name: str) -> float | None:
  """Returns a metric; None if it is absent or NaN. Infinity is kept."""
  value = row.get(name)
  if value is None:
    # Rows of the file keep values that JSON lacks in a separate field.
    value = row.get("nonfinite", {}).get(name, math.nan)
  value = float(value)
  return None if math.isnan(value) else value
