"""Value pretraining: the critic learns a fixed policy before it judges one."""

import contextlib
import pathlib

import numpy as np

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm.train import collect, experience, phases
from jaxrl_llm.train.build import Job
from jaxrl_llm.train.runstate import RunState


def pretrain(
  job: Job, state: RunState, workdir: pathlib.Path, logger, stopped
) -> None:
  """Regresses V on Monte Carlo returns of the fixed policy (VAPO, 4.1).

  Explained variance is measured on every batch before it is trained on, so it
  is held out; without improvement for `pretrain_patience` batches it stops.
  Advances `state.value` alone, and saves it for later runs.

  Args:
    job: the objects of the run.
    state: before the first iteration.
    workdir: gets `value_pretrain.jsonl` and `value_pretrained/`.
    logger: of the run.
    stopped: set by a signal; ends the pretraining, nothing is saved.
  """
  settings = job.config.value
  best, waited, position = -np.inf, 0, 0
  file = metrics.JsonlWriter(workdir / "value_pretrain.jsonl")
  with contextlib.closing(file) as rows:
    rows.truncate_after(-1)
    for number in range(settings.pretrain_steps):
      logger.phase(f"value pretraining {number + 1}/{settings.pretrain_steps}")
      position, row = _learn_batch(job, state, number, position)
      rows.log(number, row)
      explained = row["value/explained_variance"]
      improved = explained > best + settings.pretrain_min_delta
      waited = 0 if improved else waited + 1
      best = max(best, explained)
      if waited >= settings.pretrain_patience or stopped.signal:
        break
  if not stopped.signal:
    logger.event(
      f"critic pretrained on {number + 1} batches: held-out explained"
      f" variance {best:.3f}"
    )
    checkpoint.save_tree(workdir / "value_pretrained", state.value.params)


def _learn_batch(
  job: Job, state: RunState, number: int, position: int
) -> tuple[int, dict[str, float]]:
  """One batch of whole responses; returns the next position and metrics."""
  data = job.config.data
  prompts = job.train_prompts.take(position, data.prompts_per_step)
  rollout = collect.generate(
    job,
    state,
    prompts,
    version=number,
    first=number * data.prompts_per_step * data.group_size,
    stream=collect.PRETRAINING,
  )
  responses, _ = collect.judge(job, rollout, prompts, number)
  rng = np.random.default_rng(
    (job.config.run.seed, number, collect.PRETRAINING)
  )
  rows = np.arange(len(responses.rewards))
  batches = phases.mini_batches(job, job.value, rollout, rng, rows)
  scores = phases.score(job, state, rollout, [], batches)
  credit = phases.estimate(job, responses, scores)
  explained = experience.explained_variance(credit)
  state.value, row = phases.update_value(
    job, state.value, responses, credit, batches, rng
  )
  return prompts[-1].prompt_id + 1, row | {
    "value/explained_variance": explained,
    "reward/accuracy": float(responses.correct.mean()),
  }
