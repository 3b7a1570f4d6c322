"""The training loop, described for VAPO (arXiv 2504.05118).

Before the first iteration the critic is pretrained: responses are sampled from
the fixed policy and V is regressed on their Monte Carlo returns. An iteration
is

  1. draw prompts            N questions, in the order of `data.order`
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

Three components do the work: a prompt source (1), a rollout worker (2 and 3)
and a learner (4 to 7). The loop passes records between them; the state of each
is an immutable value. With `schedule.lag` the worker is some batches ahead of
the learner, and both run concurrently.

Other methods make other choices for the same steps. In the worker, T-PPO
samples a window of every response, DAPO samples until enough groups are mixed,
and APRIL takes the groups that end first. In the learner, an algorithm defines
the mathematics; a method without a critic leaves it out. States and seed
determine everything that follows, so that a resumed run repeats the
uninterrupted one.
"""

import os
from typing import Any

from jaxrl_llm import sync
from jaxrl_llm.errors import InputError, TrainingStopped
from jaxrl_llm.trainer.iteration import check_sampler, iterate, sampled_with
from jaxrl_llm.trainer.run import Run, States
from jaxrl_llm.trainer.run import restore as restore
from jaxrl_llm.trainer.run import save as save
from jaxrl_llm.trainer.session import Session


def train(
  run: Run,
  workdir: str | os.PathLike,
  *,
  step: int | None = None,
  begun: float | None = None,
) -> int:
  """Trains or resumes until the last step or a signal.

  Args:
    run: the components.
    workdir: directory of the run, created if necessary. A checkpoint in it is
      resumed, and changes of the config are recorded in config_changes.jsonl.
    step: checkpoint to resume; None is the newest. Later ones are set aside.
    begun: `time.perf_counter()` at the start of the program; now if None.

  Returns:
    0 if the run is complete; otherwise the signal that stopped it before its
    last step, or `signals.SUSPECT`.

  Raises:
    TrainingStopped: The run cannot continue, for example after several
      consecutive non-finite updates, if the reward always fails, or if the disk
      is full.
    InputError: The checkpoint does not fit the run, or the directory cannot be
      used; its files are unchanged.
  """
  with Session(run, workdir, step, begun) as session:
    if session.is_complete:
      return 0
    session.open()
    restored = session.restored or start(run, session)
    if restored is None:
      return session.stopped.signal
    session.begin(restored[0])
    states, weights = restored
    del restored  # The first step donates its arrays.
    while session.goes_on(states):
      states, weights, row = iterate(
        run, states, weights, session.timer, session.logger
      )
      if session.evaluates(states.step):
        with session.timer.phase("evaluate"):
          row |= evaluate(run, states, weights, session.logger)
      session.log(states, row)
      session.save_if_due(states, row)
    return session.finish(states)


def begin(run: Run) -> tuple[States, sync.VersionedWeights]:
  """Returns the states before the first iteration, with an untrained critic."""
  learner = run.learner.init(critic=run.critic_params)
  states = States(run.source.init(), run.worker.init(), learner)
  return states, run.transfer.send(learner.params("policy"), 0)


def start(
  run: Run, session: Session
) -> tuple[States, sync.VersionedWeights] | None:
  """Starts a run: pretrains the critic, and logs the first row.

  Returns None if a signal ended the pretraining.
  """
  logger = session.logger
  states, weights = begin(run)
  if run.config.value.init_from and run.learner.critic is not None:
    logger.event(f"the critic starts from {run.config.value.init_from}")
  if run.pretraining is not None:
    # Otherwise the critic would be fitted to samples from stale weights.
    check_sampler(run, states, weights)
    given = sampled_with(run, states, weights)
    learner = run.pretraining.run(
      states.learner, given, session.folder.path, logger, session.stopped
    )
    if learner is None:
      return None
    states = states._replace(learner=learner)
  timer = session.timer_of_the_start()
  row = check_sampler(run, states, weights)
  with timer.phase("evaluate"):
    row |= evaluate(run, states, weights, logger)
  logger.log(0, row | timer.collect())
  return states, weights


def evaluate(
  run: Run, states: States, weights: sync.VersionedWeights, logger: Any
) -> dict[str, float]:
  """Returns avg@k and pass@k on each evaluation set; logs some responses."""
  sync.check_version(weights, states.step)
  row, config = {}, run.config
  for evaluator in run.evaluators:
    evaluated = evaluator(weights.params)
    first = config.run.samples_every and states.step == 0
    if first or evaluated.judged.new_failures:
      logger.samples(states.step, evaluated.shown())
    judged = evaluated.responses.judged
    if states.step == 0 and not judged.any():  # Later, this may be temporary.
      raise TrainingStopped(
        f"the reward failed on all {judged.size} responses of step 0:"
        f" {run.judge.failure}"
      )
    tries = *config.eval.pass_k, config.eval.samples
    results = evaluated.results(tries)
    if config.eval.greedy:
      greedy = evaluator.greedy()(weights.params)
      results["greedy"] = greedy.results([])["avg@1"]
    row |= {f"eval/{evaluator.name}/{k}": float(x) for k, x in results.items()}
  best = config.checkpoint.best
  # Later, answers or verdicts may be missing only temporarily.
  if best and best not in row and states.step == 0:
    raise InputError(
      f"config.checkpoint.best={best!r} must be one of {', '.join(row)}"
    )
  return row
