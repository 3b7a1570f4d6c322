"""Responses of a step for the log, with the learner's numbers per token."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm import metrics
from jaxrl_llm.learner.state import TrainingBatch
from jaxrl_llm.rewards import Verdict
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.rollout.records import Batch, Collected
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.types import Origin, Responses, is_demonstrated, take_rows

_DECIMALS = 5


def samples_of_step(
  run: Run,
  batch: Batch,
  collected: Sequence[Collected],
  scored: Sequence[TrainingBatch],
) -> list[metrics.Sample]:
  """Returns new failures of the reward, and responses that a step trained on.

  There are `run.samples` of the latter, ended ones first.

  Args:
    run: the components.
    batch: the batch of the step.
    collected: batches collected in the step. With a lag these are later
      batches, and the extracted answers and errors of `batch` are unknown.
    scored: the batch as scored by the learner; if empty, only failures are
      returned.
  """
  failures = [sample for new in collected for sample in new.new_failures]
  if not scored:
    return failures
  (scored,) = scored
  responses, count = batch.responses, run.config.run.samples
  rows = np.arange(len(responses.rewards))
  if count:
    rows = np.random.default_rng(scored.step + 1).permutation(rows)
    rows = rows[np.argsort(~responses.ended[rows], kind="stable")][:count]
  responses = take_rows(responses, rows)
  # Demonstrated responses have not been judged by a reward.
  given = is_demonstrated(responses.rollout)
  responses = dataclasses.replace(responses, judged=responses.judged & ~given)
  judged = _judged(run, responses, collected)
  samples = metrics.make_samples(judged, range(rows.size))
  # The learner may have the rows in another order.
  place = {number: i for i, number in enumerate(scored.rollout.sample_id)}
  shown = {sample.sample for sample in samples}
  places = [place[sample.sample] for sample in samples]
  advantages, mask = (
    scored.experience[name][places] for name in ("advantages", "policy_mask")
  )
  return [sample for sample in failures if sample.sample not in shown] + [
    sample._replace(per_token=_per_token(run, scored, *seen))
    for sample, *seen in zip(samples, places, advantages, mask)
  ]


def _judged(
  run: Run, responses: Responses, collected: Sequence[Collected]
) -> Judged:
  """Returns responses with their prompts and texts, and known verdicts."""
  known = {
    number: (prompt, verdict)
    for new in collected
    for judged in new.judged
    for number, prompt, verdict in zip(
      judged.responses.rollout.sample_id.tolist(),
      judged.prompts,
      judged.verdicts,
    )
  }
  rollout, found = responses.rollout, []
  for row, number in enumerate(rollout.sample_id.tolist()):
    if number not in known:
      ids = int(rollout.example_id[row]), int(rollout.group_id[row])
      verdict = Verdict(bool(responses.correct[row]))
      known[number] = run.source.prompt(*ids), verdict
    found.append(known[number])
  texts = [
    run.tokenizer.decode(tokens[:length])
    for tokens, length in zip(rollout.tokens, rollout.lengths)
  ]
  prompts, verdicts = zip(*found) if found else ((), ())
  return Judged(responses, prompts, texts, list(verdicts))


def _per_token(
  run: Run,
  scored: TrainingBatch,
  row: int,
  advantages: np.ndarray,
  policy_mask: np.ndarray,
) -> dict[str, list]:
  """Returns the tokens of a row, with their authors and per-token numbers.

  Entries without a number are None: advantages outside of the policy loss,
  log-probs of other authors. Lists without any number are left out.
  """
  rollout, scores = scored.rollout, scored.scores
  length = int(rollout.lengths[row])
  own = rollout.origin[row, :length] == Origin.POLICY
  others = np.where(np.cumsum(own) > 0, "environment", "given")
  authors = np.where(own, "policy", others).tolist()
  out = {
    "tokens": run.tokenizer.pieces(rollout.tokens[row, :length].tolist()),
    "origin": [[k, len(list(g))] for k, g in itertools.groupby(authors)],
  }

  def add(name, numbers, has_one):
    pairs = zip(numbers[:length].tolist(), has_one[:length].tolist())
    found = [
      round(x, _DECIMALS) + 0.0 if has and math.isfinite(x) else None
      for x, has in pairs
    ]
    if any(x is not None for x in found):
      out[name] = found

  mask = rollout.mask[row]
  add("advantage", advantages, policy_mask)
  if "values" in scores:
    valued = np.broadcast_to(scores["valued"][row], mask.shape)
    add("value", scores["values"][row], valued)
  difference = rollout.behavior_logprobs[row] - scores["old_logprobs"][row]
  add("logprob_diff", difference, mask & scores["scored"][row])
  return out
