"""Implements train.py --dry_run: compiles phases; checks data and rewards."""

import time
from typing import Any

import jax
from parts import program

from jaxrl_llm import rewards
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.lower import lower
from jaxrl_llm.rewards import judge
from jaxrl_llm.rollout.engine import RolloutEngine
from jaxrl_llm.tools.simulate import account
from jaxrl_llm.trainer import summary, validation
from jaxrl_llm.trainer.run import Run

_GIB = 2.0**30
_CHECKED = 200  # Maximum number of gold answers given to the verifier, per set.


def dry_run(run: Run) -> None:
  """Prints data, rewards, and memory per phase; trains nothing.

  Raises:
    InputError: the verifier rejects most gold answers.
  """
  validation.check_effect(run.config)
  print("\n".join(summary.describe(run)))
  _show_data(run)
  _check_rewards(run)
  model, mesh = run.learner.policy.fns.config, dict(run.learner.mesh.shape)
  platform = run.learner.mesh.devices.flat[0].platform
  sizes = account.Sizes(run.config, model, mesh, platform=platform)
  known = account.temporaries_by_program(sizes)
  table = program.Table(
    "phase | compile s | arguments GiB | temporary GiB | estimated"
  )
  shapes = run.transfer.shapes
  programs = lower_all(
    run.config, run.learner, run.worker.writer.engine, shapes
  )
  for name, lowered in programs.items():
    begin = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    seconds = time.perf_counter() - begin
    held = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    gib = (f"{x / _GIB:.3f}" if x else "" for x in (*held, known.get(name)))
    table.row(name, f"{seconds:.1f}", *gib)
  print(
    "GiB are per device; the estimate is that of the cost model for temporary"
    " memory in bfloat16; nothing was trained",
    flush=True,
  )


def _show_data(run: Run) -> None:
  source = run.source
  count = min(len(source), run.config.data.prompts_per_step)
  prompts, _ = source.draw(source.init(), count)
  lengths = [len(p.tokens) for p in prompts]
  print(f"first {count} prompts: {min(lengths)} to {max(lengths)} tokens")
  answers = [prompts[0].answer, *prompts[0].alternatives]
  said = (
    "answer " + " or ".join(map(repr, answers)) if answers[0] else "no answer"
  )
  shown = run.tokenizer.show(prompts[0].tokens)
  print(f"first prompt: {shown!r}, {said}")
  origins = (one.origin for one in run.evaluators)
  for line in filter(None, (*run.notes, *origins)):
    print(line)


def _check_rewards(run: Run) -> None:
  """Checks that the reward accepts the reference answers.

  If no correct response is known for the reward, checks only that it returns
  verdicts.
  """
  name = run.config.reward.name
  problems = [x for one in run.evaluators for x in one.prompts[:_CHECKED]]
  golds = [
    rewards.gold_response(name, p.answer) if p.answer else None
    for p in problems
  ]
  responses = [
    gold or p.answer or p.question for p, gold in zip(problems, golds)
  ]
  verdicts = run.judge.pool.judge(
    [
      judge.known(problem, text, tokens=(), finished=True)
      for problem, text in zip(problems, responses)
    ]
  )
  count, said = len(verdicts), "reference answers accepted"
  accepted = [v.correct for v in verdicts]
  if None in golds:
    accepted = [v.error is None for v in verdicts]
    texts = "answers" if all(p.answer for p in problems) else "questions"
    said = f"{texts} got a verdict (correct responses to {name!r} are unknown)"
  print(f"rewards: {sum(accepted)} of {count} {said}")
  if sum(accepted) < (count + 1) // 2:
    row = accepted.index(False)
    why = verdicts[row].error or f"such as {problems[row].answer!r}"
    raise InputError(
      f"config.reward.name={name!r} rejects {count - sum(accepted)} of {count}"
      f" reference answers, {why} of {problems[row].id}; choose another reward"
      " or clean the data"
    )


def lower_all(
  config: Any, learner: Learner, engine: RolloutEngine, shapes: Any
) -> dict[str, jax.stages.Lowered]:
  """Lowers the programs of a run at their largest shapes.

  Args:
    config: settings of the run.
    learner: the learner of the run.
    engine: the engine of the run; the programs of a custom engine are not
      lowered.
    shapes: shapes of the sampler's weights, with shardings.
  """
  if config.sampler.engine:
    return lower(learner)
  processors = learner.algorithm.stateful_processors.items()
  _, prompts = engine.config.prompts_per_prefill(config.data.group_size)
  return engine.lower(
    shapes,
    prompts=prompts,
    window=config.schedule.window > 0,
    processor_states={k: x.initial for k, x in processors},
  ) | lower(learner)
