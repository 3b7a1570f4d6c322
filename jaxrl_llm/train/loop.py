"""The training loop of VAPO (arXiv 2504.05118), told from top to bottom.

Before the first iteration the critic is pretrained: responses are sampled from
the fixed policy and V is regressed on their Monte Carlo returns. Then every
iteration is

  1. draw prompts            N questions from the stream, by position
  2. generate                G responses each, sampled from the policy
  3. reward                  a verifier reads the text: +1 or -1
  4. score                   log π_old and V of every token, in packed rows
  5. estimate                decoupled GAE: advantages with λ = 1 − 1/(α·length)
                             of each response, critic targets with λ = 1
  6. pack                    mini-batches and their loss weights (token mean)
  7. update                  critic, then policy: clip-higher surrogate plus
                             μ times the NLL of correct responses
  8. sync                    new weights to the sampler
  9. log, evaluate, save

State is (policy, critic, step, data position); with the seed it determines
everything that follows, so a resumed run repeats the uninterrupted one.
"""

import contextlib
import dataclasses
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import chex
import jax
import numpy as np

from jaxrl_llm import checkpoint, metrics
from jaxrl_llm import config as config_lib
from jaxrl_llm import evaluate as evaluation
from jaxrl_llm.data.prompts import Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Judged
from jaxrl_llm.train import build, experience, packing
from jaxrl_llm.train import step as step_lib
from jaxrl_llm.train.build import Job, Role
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.types import Experience, Rollout, Status

# Independent streams of randomness under the run's seed.
ROLLOUTS, EVALUATION, PRETRAINING = 1, 2, 3


class TrainingStopped(RuntimeError):
  """The run cannot go on by itself; the message says why."""


@chex.dataclass
class RunState:
  """What changes from step to step."""

  policy: TrainState
  value: TrainState
  step: int  # Iterations done.
  position: int  # Prompts consumed; where the stream goes on.
  sampler_params: Any  # The policy as the sampler holds it.


def train(job: Job, workdir: pathlib.Path) -> None:
  """Runs or resumes a job until its last step or a signal.

  Args:
    job: the objects of the run.
    workdir: files of the run; a checkpoint there is resumed.

  Raises:
    TrainingStopped: several updates in a row were not finite.
    InputError: the checkpoint does not fit the job.
  """
  run = job.config.run
  saver = checkpoint.Checkpointer(
    workdir / "checkpoints", keep=job.config.checkpoint.keep
  )
  latest = saver.latest_step()
  with (
    metrics.make_logger(
      workdir,
      total_steps=run.steps,
      last_step=-1 if latest is None else latest,
    ) as logger,
    contextlib.closing(saver),
    contextlib.closing(job.pool),
    _stop_on_signal() as stopped,
  ):
    if latest is None:
      state = start(job, workdir, logger, stopped)
      if stopped.signal:
        logger.event("stopped during value pretraining; nothing to save yet")
        return
      logger.log(0, evaluate(job, state, logger))
      save(job, state, saver)
    else:
      state = resume(job, saver, latest)
      logger.event(f"resumed from step {latest}")
    compiles = metrics.CompileCounter()
    timer = metrics.PhaseTimer(on_enter=logger.phase)
    while state.step < run.steps and not stopped.signal:
      row = iterate(job, state, timer, logger)
      if state.step % job.config.eval.every == 0 or state.step == run.steps:
        with timer.phase("evaluate"):
          row |= evaluate(job, state, logger)
      row |= timer.collect()
      row |= speed(job, row) | {
        "memory/peak_gib": metrics.peak_memory_gib(),
        "compile/count": compiles.collect(),
      }
      # The row first: a checkpoint promises that its row is on disk. So the
      # time of a save is in the next row.
      logger.log(state.step, row)
      if state.step % job.config.checkpoint.every == 0:
        with timer.phase("checkpoint"):
          save(job, state, saver)
    if saver.latest_step() != state.step:
      save(job, state, saver)
    saver.wait()
    if stopped.signal:
      logger.event(
        f"stopped by {signal.Signals(stopped.signal).name} at step"
        f" {state.step}, saved; the same --workdir goes on"
      )


def iterate(job: Job, state: RunState, timer, logger) -> dict[str, float]:
  """One iteration of VAPO; advances `state` and returns the step's metrics."""
  data, seed = job.config.data, job.config.run.seed
  # 1. Draw prompts: what stands at a position never changes.
  with timer.phase("data"):
    prompts = job.train_prompts.take(state.position, data.prompts_per_step)
  # 2. Generate; the number of a response seeds it, whatever its slot.
  with timer.phase("generate"):
    rollout = generate(job, state, prompts, state.step, ROLLOUTS)
  # 3. Reward what ended.
  with timer.phase("reward"):
    judged = evaluation.judge(rollout, prompts, job.tokenizer, job.pool)
    rewards = np.where(
      judged.correct, job.config.reward.correct, job.config.reward.incorrect
    )
  # 4. Score, 5. estimate.
  rng = np.random.default_rng((seed, state.step))
  with timer.phase("score"):
    policy_batches = mini_batches(job, job.policy, rollout, rng)
    value_batches = mini_batches(job, job.value, rollout, rng)
    credit = score_and_estimate(
      job, state, rollout, rewards, judged, policy_batches, value_batches
    )
    row = experience.experience_metrics(credit, rollout, rewards)
  # 6. Pack, 7. update: critic and policy on their own mini-batches.
  with timer.phase("update_value"):
    state.value, value_row = update_value(
      job, state.value, rollout, credit, value_batches, rng
    )
  with timer.phase("update_policy"):
    state.policy, policy_row = update_policy(
      job, state.policy, rollout, credit, policy_batches, rng
    )
  # 8. Sync: the sampler gets the new weights.
  with timer.phase("sync"):
    state.sampler_params = job.for_sampling(state.policy.params)
  state.position = prompts[-1].prompt_id + 1
  state.step += 1
  # 9. Log.
  every = job.config.run.samples_every
  if every and state.step % every == 0:
    rows = np.random.default_rng(state.step).permutation(len(rewards))[:4]
    logger.samples(
      state.step,
      evaluation.samples_of(rollout, prompts, judged, rewards, rows),
    )
  row |= rollout_metrics(rollout, judged)
  return row | value_row | policy_row | staleness(rollout, state.step - 1)


def generate(
  job: Job, state: RunState, prompts: list[Prompt], number: int, stream: int
) -> Rollout:
  """G responses per prompt, numbered through the whole stream of the run."""
  shape = (len(prompts), job.config.data.group_size)
  first = number * shape[0] * shape[1]
  return job.engine.generate(
    state.sampler_params,
    [p.tokens for p in prompts],
    sample_ids=first + np.arange(shape[0] * shape[1]).reshape(shape),
    key=jax.random.fold_in(jax.random.key(job.config.run.seed), stream),
    settings=job.sampling,
    version=number,
    prompt_ids=[p.prompt_id for p in prompts],
  )


def mini_batches(
  job: Job, role: Role, rollout: Rollout, rng: np.random.Generator
) -> list[packing.MiniBatch]:
  """Shuffled mini-batches of a model's own size, packed into rows."""
  return packing.mini_batches(
    rollout,
    size=role.settings.mini_batch,
    rng=rng,
    capacity=config_lib.row_tokens(job.config),
    rows=role.settings.micro_rows,
  )


def score_and_estimate(
  job: Job,
  state: RunState,
  rollout: Rollout,
  rewards: np.ndarray,
  judged: Judged,
  policy_batches: list[packing.MiniBatch],
  value_batches: list[packing.MiniBatch],
) -> Experience:
  """log π_old and V under the weights of now; then advantages and targets."""
  old_logprobs = np.zeros(rollout.tokens.shape, np.float32)
  temperature = np.float32(job.sampling.temperature)
  for batch in policy_batches:
    packed = step_lib.place(batch.packed, job.mesh)
    scored = job.score_logprobs(state.policy.params, packed, temperature)
    old_logprobs[batch.rows] = batch.layout.gather(scored)
  values = np.zeros(rollout.tokens.shape, np.float32)
  for batch in value_batches:
    packed = step_lib.place(batch.packed, job.mesh)
    scored = job.score_values(state.value.params, packed)
    values[batch.rows] = batch.layout.gather(scored)
  return jax.device_get(
    job.estimate(
      rewards,
      judged.correct,
      judged.judged,
      rollout.lengths,
      rollout.mask,
      old_logprobs,
      values,
    )
  )


def update_value(job, state, rollout, credit, batches, rng):
  """Critic: ½ (V − return)², token mean over each mini-batch."""
  rows = []
  for batch in epochs(job, job.value, rollout, batches, rng):
    prepared = experience.value_batch(
      credit, batch.rows, batch.packed, batch.layout
    )
    state, row = job.value.update(state, step_lib.place(prepared, job.mesh))
    rows.append(row)
  return state, summarize(job, "critic", state, rows)


def update_policy(job, state, rollout, credit, batches, rng):
  """Policy: clipped surrogate plus positive NLL, token means."""
  rows = []
  temperature = np.float32(job.sampling.temperature)
  for batch in epochs(job, job.policy, rollout, batches, rng):
    prepared = experience.policy_batch(
      credit, batch.rows, batch.packed, batch.layout, recipe=job.recipe
    )
    state, row = job.policy.update(
      state, step_lib.place(prepared, job.mesh), temperature
    )
    rows.append(row)
  return state, summarize(job, "policy", state, rows)


def epochs(job, role, rollout, batches, rng) -> Iterator[packing.MiniBatch]:
  """The given mini-batches, then newly shuffled ones for further epochs."""
  yield from batches
  for _ in range(role.settings.epochs - 1):
    yield from mini_batches(job, role, rollout, rng)


def summarize(job, name, state, rows) -> dict[str, float]:
  """Mean over the updates of a step (maximum of a maximum).

  Raises:
    TrainingStopped: too many updates in a row were not finite.
  """
  rows = jax.device_get(rows)
  in_a_row = int(state.skipped_in_a_row)
  if in_a_row >= job.config.run.max_skipped:
    raise TrainingStopped(
      f"the last {in_a_row} updates of the {name} were not finite and were"
      " skipped; lower the learning rate or look at the last samples"
    )
  over = lambda key: max if key.endswith("_max") else np.mean
  out = {k: float(over(k)([row[k] for row in rows])) for k in rows[0]}
  skipped = next(k for k in out if k.endswith("/skipped"))
  return out | {skipped: float(sum(row[skipped] for row in rows))}


def rollout_metrics(rollout, judged) -> dict[str, float]:
  """Lengths and verdicts of a step's responses."""
  lengths, correct = rollout.lengths, judged.correct
  groups = [correct[rollout.group == g] for g in np.unique(rollout.group)]
  solved = np.asarray([g.mean() for g in groups])
  return {
    "reward/accuracy": float(correct.mean()),
    "reward/errors": float((~judged.judged).sum()),
    "rollout/solved_none": float((solved == 0).mean()),
    "rollout/solved_all": float((solved == 1).mean()),
    "rollout/response_length_mean": float(lengths.mean()),
    "rollout/response_length_max": float(lengths.max()),
    "rollout/response_length_correct": _mean(lengths[correct]),
    "rollout/response_length_incorrect": _mean(lengths[~correct]),
    "rollout/truncated_fraction": float(
      (rollout.status == Status.TRUNCATED).mean()
    ),
    "rollout/overlong_fraction": float(
      (rollout.status == Status.OVERLONG).mean()
    ),
    # Slot-steps in which a finished slot waited for the longest one.
    "rollout/idle_fraction": float(1 - lengths.mean() / lengths.max()),
    "rollout/tokens": float(lengths.sum()),
    "perf/tokens": float((lengths + rollout.prompt_lengths).sum()),
  }


def staleness(rollout: Rollout, version: int) -> dict[str, float]:
  """Versions between the weights that wrote a token and those it trained."""
  age = (version - rollout.version)[rollout.mask]
  return {
    "staleness/mean": float(age.mean()),
    "staleness/max": float(age.max()),
  }


def speed(job: Job, row: dict[str, float]) -> dict[str, float]:
  """Tokens per second of sampling and of the whole step, and utilisation.

  Utilisation counts 2 · parameters floating-point operations per token for
  each forward pass and 4 · for a backward pass, of policy and critic.
  """
  out = {
    "rollout/tokens_per_second": row["rollout/tokens"] / row["time/generate_s"],
    "perf/tokens_per_second": row["perf/tokens"] / row["time/step_s"],
  }
  device = job.mesh.devices.flat[0].device_kind
  peak = metrics.peak_flops(device)
  if peak:
    passes = sum(2 + 6 * r.settings.epochs for r in (job.policy, job.value))
    done = job.policy.fns.config.num_params() * passes * row["perf/tokens"]
    seconds = sum(
      row[f"time/{name}_s"]
      for name in ("score", "update_value", "update_policy")
    )
    out["perf/mfu"] = done / seconds / (peak * job.mesh.size)
  return out


def _mean(x: np.ndarray) -> float:
  return float(x.mean()) if x.size else 0.0


def start(job: Job, workdir: pathlib.Path, logger, stopped) -> RunState:
  """A new run: the policy from its files, the critic reused or pretrained."""
  policy = build.create_policy_state(job)
  if job.config.value.init_from:
    params = build.load_value_params(job, job.config.value.init_from)
    logger.event(f"critic reused from {job.config.value.init_from}")
  else:
    params = build.fresh_value_params(job, policy.params)
  state = RunState(
    policy=policy,
    value=build.create_value_state(job, params),
    step=0,
    position=0,
    sampler_params=job.for_sampling(policy.params),
  )
  if job.config.value.pretrain_steps and not job.config.value.init_from:
    pretrain_value(job, state, workdir, logger, stopped)
    # A reused critic starts with a fresh optimizer; so does this one.
    state.value = build.create_value_state(job, state.value.params)
  return state


def pretrain_value(
  job: Job, state: RunState, workdir: pathlib.Path, logger, stopped
) -> None:
  """Regresses V on Monte Carlo returns of the fixed policy (VAPO, 4.1).

  Explained variance is measured on every batch before it is trained on, so it
  is held out; without improvement for `pretrain_patience` batches it stops.
  """
  settings, data = job.config.value, job.config.data
  best, waited, position = -np.inf, 0, 0
  file = metrics.JsonlWriter(workdir / "value_pretrain.jsonl")
  with contextlib.closing(file) as rows:
    rows.truncate_after(-1)
    for number in range(settings.pretrain_steps):
      logger.phase(f"value pretraining {number + 1}/{settings.pretrain_steps}")
      prompts = job.train_prompts.take(position, data.prompts_per_step)
      position = prompts[-1].prompt_id + 1
      rollout = generate(job, state, prompts, number, PRETRAINING)
      judged = evaluation.judge(rollout, prompts, job.tokenizer, job.pool)
      rewards = np.where(
        judged.correct, job.config.reward.correct, job.config.reward.incorrect
      )
      rng = np.random.default_rng((job.config.run.seed, number, PRETRAINING))
      batches = mini_batches(job, job.value, rollout, rng)
      credit = score_and_estimate(
        job, state, rollout, rewards, judged, [], batches
      )
      explained = experience.explained_variance(credit)
      state.value, row = update_value(
        job, state.value, rollout, credit, batches, rng
      )
      row |= {
        "value/explained_variance": explained,
        "reward/accuracy": float(judged.correct.mean()),
      }
      rows.log(number, row)
      waited = (
        0 if explained > best + settings.pretrain_min_delta else waited + 1
      )
      best = max(best, explained)
      if waited >= settings.pretrain_patience or stopped.signal:
        break
  if not stopped.signal:
    logger.event(
      f"critic pretrained on {number + 1} batches: held-out explained"
      f" variance {best:.3f}"
    )
    checkpoint.save_tree(workdir / "value_pretrained", state.value.params)


def evaluate(job: Job, state: RunState, logger) -> dict[str, float]:
  """avg@k and pass@k on held-out problems; logs some of the responses."""
  results, samples = evaluation.evaluate(
    job.engine,
    state.sampler_params,
    job.eval_prompts,
    tokenizer=job.tokenizer,
    pool=job.pool,
    key=jax.random.fold_in(jax.random.key(job.config.run.seed), EVALUATION),
    samples=job.config.eval.samples,
    settings=job.eval_sampling,
    name=job.eval_name,
  )
  if job.config.run.samples_every and state.step == 0:
    logger.samples(state.step, samples)
  return results


def save(job: Job, state: RunState, saver: checkpoint.Checkpointer) -> None:
  """Starts a checkpoint of everything the next iteration depends on."""
  trees = {}
  for name, role_state in (("policy", state.policy), ("value", state.value)):
    trees[name] = role_state.params
    trees[f"{name}_optimizer"] = without_params(role_state)
  saver.save(
    state.step,
    trees,
    {
      "step": state.step,
      "version": state.step,
      "position": state.position,
      "seed": job.config.run.seed,
    },
  )


def resume(job: Job, saver: checkpoint.Checkpointer, step: int) -> RunState:
  """The state of a checkpoint, placed on this job's mesh.

  Raises:
    InputError: the checkpoint is damaged or of another model or seed.
  """
  meta = saver.restore_meta(step)
  if meta["seed"] != job.config.run.seed:
    raise InputError(
      f"config.run.seed={job.config.run.seed}, but the checkpoint was written"
      f" with seed {meta['seed']}; use that seed or another --workdir"
    )
  targets = {}
  for name, role in (("policy", job.policy), ("value", job.value)):
    targets[name] = role.shapes.params
    targets[f"{name}_optimizer"] = without_params(role.shapes)
  trees = saver.restore(step, targets)
  states = {
    name: TrainState(params=trees[name], **trees[f"{name}_optimizer"])
    for name in ("policy", "value")
  }
  return RunState(
    **states,
    step=meta["step"],
    position=meta["position"],
    sampler_params=job.for_sampling(states["policy"].params),
  )


def without_params(state: TrainState) -> dict[str, Any]:
  """Optimizer state and counters as a dict, for an item of their own."""
  fields = [f.name for f in dataclasses.fields(state) if f.name != "params"]
  return {name: state[name] for name in fields}


@dataclasses.dataclass
class _Stopped:
  """The signal that asked the run to stop, 0 while none did."""

  signal: int = 0


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stopped]:
  """SIGINT and SIGTERM end the run after the step; a second one at once."""
  stopped = _Stopped()
  names = (signal.SIGINT, signal.SIGTERM)
  before = {name: signal.getsignal(name) for name in names}

  def handle(number, frame):
    del frame
    stopped.signal = number
    for name in names:
      signal.signal(name, signal.SIG_DFL)

  for name in names:
    signal.signal(name, handle)
  try:
    yield stopped
  finally:
    for name, handler in before.items():
      signal.signal(name, handler)
