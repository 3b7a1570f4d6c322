"""Measures speed and memory, alone or side by side with other programs.

  python scripts/benchmark.py sampler [--shape=smollm2-135m]
  python scripts/benchmark.py train_step --peer "NAME=COMMAND" --rounds=3
  python scripts/benchmark.py prefill --prompt_length=512
  TAIL="--batch=64 --group_size=8 --new_tokens=768"
  python scripts/benchmark.py rollouts $TAIL
  python scripts/benchmark.py simulator $TAIL
  python scripts/benchmark.py estimators
  python scripts/benchmark.py checkpoint --megabytes=400

Prints rows for a person and, as the last line, one JSON object. Weights are
random, every response has full length (that of a lognormal law with a long tail
in rollouts and simulator), compilation is not counted. A --peer is
run alternately with a fresh process of ours; see docs/benchmarks.md. Exit code
1 if a peer failed (after our own numbers), 2 for bad input.
"""

import argparse
import functools
import os
import sys
from typing import Any

import benchmarks
import jax
import numpy as np
from benchmarks import checkpoints, workloads

from jaxrl_llm import estimators, masked, metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import packing
from jaxrl_llm.learner import update as update_lib
from jaxrl_llm.learner.choices import POLICY_LOSSES
from jaxrl_llm.learner.optimizer import (
  create_train_state,
  make_optimizer,
)
from jaxrl_llm.learner.scoring import score_logprobs
from jaxrl_llm.models import transformer
from jaxrl_llm.sampling import SamplingSettings

_OF_MODELS = (
  "shape",
  "sampler_dtype",
  "batch",
  "prompt_length",
  "new_tokens",
  "repeats",
)
# Options that a part depends on.
_SETTINGS = {
  "sampler": (*_OF_MODELS, "slots"),
  "rollouts": (*_OF_MODELS, "prompts", "group_size", "median", "p99"),
  "prefill": _OF_MODELS,
  "simulator": (*_OF_MODELS, "prompts", "group_size", "median", "p99"),
  "train_step": (
    *_OF_MODELS,
    "group_size",
    "micro_batch_size",
    "max_tokens_per_row",
    "remat_policy",
  ),
  "estimators": ("rows", "length", "group_size", "repeats"),
  "checkpoint": ("megabytes", "repeats"),
}
_LOOP = "numpy_loop"


def make_batch(rollout, options):
  """A policy batch of group-relative advantages, in packed rows."""
  rows = min(options.micro_batch_size, options.batch)
  packed, layout = packing.pack(
    rollout,
    capacity=options.max_tokens_per_row,
    rows=rows,
    micro_batches=-(-options.batch // rows),
  )
  distinct = [len(np.unique(tokens)) for tokens in rollout.tokens]
  advantages = estimators.group_relative(
    np.asarray(distinct, np.float32) + 0.01 * np.arange(options.batch),
    rollout.group,
    num_groups=options.batch // options.group_size,
  )
  spread = np.where(rollout.mask, np.asarray(advantages)[:, None], 0.0)
  weights = masked.token_weights(rollout.mask, mode="token-mean")
  return packing.PackedBatch(
    packed=packed,
    mask=packed.mask,
    inputs={
      # One update a batch: the sampler's log-probs are those of its start.
      "proximal_logprobs": layout.scatter(rollout.behavior_logprobs),
      "advantages": layout.scatter(spread.astype(np.float32)),
      "weights": layout.scatter(weights),
    },
  )


def make_update(fns):
  """The policy step of the clipped loss with AdamW, and its optimizer."""
  schedule = lambda step: 1e-5
  optimizer = make_optimizer(
    schedule, max_grad_norm=1.0, weight_decay=1e-4, b1=0.9, b2=0.999, eps=1e-8
  )
  loss = POLICY_LOSSES["clip"]({"clip_low": 0.2, "clip_high": 0.28})
  objective = update_lib.policy_objective(fns, loss, {})
  return update_lib.make_update(objective, optimizer, schedule), optimizer


def measure_train_step(options) -> workloads.Samples:
  """Whole policy steps: generate, prepare, update, sync; scoring apart."""
  fns, params = workloads.make_model(options)
  engine = workloads.make_engine(fns, options)
  update, optimizer = make_update(fns)
  for_sampling = jax.jit(fns.for_sampling)
  score = jax.jit(functools.partial(score_logprobs, fns=fns))
  create = functools.partial(create_train_state, optimizer=optimizer)
  train_state = jax.jit(create, donate_argnums=0)(params)
  del params
  sampler_params = for_sampling(train_state.params)
  ids = np.arange(options.batch).reshape(-1, options.group_size)
  compiles, timer = metrics.CompileCounter(), metrics.PhaseTimer()
  rows = []
  for i in range(1 + options.repeats):
    prompts = workloads.make_prompts(len(ids), options, seed=i)
    timer.collect()
    with timer.phase("generate"):
      rollout = engine.generate(
        sampler_params,
        prompts,
        sample_ids=i * options.batch + ids,
        key=jax.random.key(0),
        settings=SamplingSettings(),
      )
    with timer.phase("prepare"):
      batch = make_batch(rollout, options)
    with timer.phase("update"):
      train_state, _ = update(train_state, batch, np.float32(1.0))
      jax.block_until_ready(train_state)
    with timer.phase("sync"):
      sampler_params = jax.block_until_ready(for_sampling(train_state.params))
    row = timer.collect()
    # One update a batch needs no scoring, so that it is no part of the step.
    with timer.phase("score"):
      jax.block_until_ready(
        score(train_state.params, batch.packed, np.float32(1.0))
      )
    row |= {"time/score_s": timer.collect()["time/score_s"]}
    rows.append(row | {"compilations": compiles.collect()})
  return train_samples(rows, options)


def train_samples(rows, options) -> workloads.Samples:
  """Rates and best values of the steps after the first, which compiled."""
  first, *rest = rows
  samples = {k.removeprefix("time/"): [row[k] for row in rest] for k in first}
  compilations = samples.pop("compilations")
  total = options.batch * (options.prompt_length + options.new_tokens)
  generated = options.batch * options.new_tokens
  return samples | {
    "best_step_s": [min(samples["step_s"])],
    "best_update_s": [min(samples["update_s"])],
    "update_tokens_per_s": [total / s for s in samples["update_s"]],
    "generate_tokens_per_s": [generated / s for s in samples["generate_s"]],
    "first_step_s": [first["time/step_s"]],
    "compilations_after_first_step": [sum(compilations)],
    "peak_rss_gib": [metrics.peak_memory_gib()],
  }


MEASURE = {
  "sampler": workloads.measure_sampler,
  "rollouts": workloads.measure_rollouts,
  "prefill": workloads.measure_prefill,
  "simulator": workloads.measure_simulator,
  "train_step": measure_train_step,
  "estimators": workloads.measure_estimators,
  "checkpoint": checkpoints.measure_checkpoint,
}


def alone_command(options) -> list[str]:
  """The same measurement without peers, as a program of its own."""
  flags = []
  for name in _SETTINGS[options.part]:
    value = getattr(options, name)
    switch = f"--{'' if value else 'no-'}{name}"
    flags.append(switch if type(value) is bool else f"--{name}={value}")
  return [sys.executable, os.path.abspath(__file__), options.part, *flags]


def run(options) -> dict[str, Any]:
  """Measures, alone or with peers; returns what is printed at the end."""
  load = os.getloadavg()
  if options.peers:
    result = benchmarks.side_by_side(
      alone_command(options),
      options.peers,
      part=options.part,
      shape=options.shape,
      rounds=options.rounds,
      timeout_s=options.timeout_s,
      wait_idle_s=options.wait_idle,
    )
  else:
    benchmarks.wait_until_idle(options.wait_idle)
    result = benchmarks.summarize(MEASURE[options.part](options))
    result |= {"ratios": {}, "peers": {}, "errors": {}}
  medians = result["medians"]
  if f"{_LOOP}_gae_s" in medians:
    result["ratios"][_LOOP] = benchmarks.speed_ratios(
      medians, {"gae_s": medians[f"{_LOOP}_gae_s"]}
    )
  settings = {key: getattr(options, key) for key in _SETTINGS[options.part]}
  return (
    {"part": options.part, "settings": settings}
    | result
    | benchmarks.describe_machine()
    | {"load_before": load, "load_after": os.getloadavg()}
  )


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("part", metavar="PART", help=", ".join(MEASURE))
  add = parser.add_argument
  add("--shape", default="tiny", help=", ".join(benchmarks.SHAPES))
  add(
    "--sampler_dtype",
    default="float32",
    choices=("float32", "bfloat16"),
    help="of the sampler's weights and products; its memory is float32",
  )
  add("--batch", type=int, default=16, help="responses")
  add("--slots", type=int, help="of the sampler, --batch by default")
  add("--group_size", type=int, default=4, help="responses per prompt")
  add("--prompt_length", type=int, default=64, help="tokens")
  add("--new_tokens", type=int, default=128, help="tokens per response")
  add("--prompts", type=int, default=64, help="of rollouts")
  add("--median", type=int, default=64, help="tokens, of rollouts")
  add("--p99", type=int, default=512, help="tokens, of rollouts")
  add("--micro_batch_size", type=int, help="rows per gradient, by shape")
  add(
    "--max_tokens_per_row",
    type=int,
    help="of a packed row; one response with its prompt by default, and"
    " responses that fit a row together share their prompt",
  )
  add(
    "--remat_policy",
    choices=list(transformer.REMAT_POLICIES),
    default="full",
    help="what the backward pass computes again",
  )
  add("--rows", type=int, default=512, help="of estimators")
  add("--length", type=int, default=24576, help="of estimators, tokens")
  add("--megabytes", type=int, default=400, help="of a checkpoint")
  add("--repeats", type=int, default=3, help="timed after a warm-up")
  add(
    "--peer",
    action="append",
    default=[],
    metavar="NAME=COMMAND",
    help="a program that prints a JSON object; can be repeated",
  )
  add("--rounds", type=int, default=2, help="with peers: A B, B A, ...")
  add("--timeout_s", type=float, default=3600.0, help="of one program")
  add(
    "--wait_idle",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="wait so long for a low load average before a measurement",
  )
  return parser


def check(options) -> None:
  """Completes the options.

  Raises:
    InputError: one of them cannot be used.
  """
  for name, known in (("part", MEASURE), ("shape", benchmarks.SHAPES)):
    value = getattr(options, name)
    if value not in known:
      label = "PART" if name == "part" else f"--{name}"
      raise InputError(f"{label} {value!r} must be one of {', '.join(known)}")
  if options.micro_batch_size is None:
    shape = benchmarks.SHAPES[options.shape]
    options.micro_batch_size = shape.micro_batch_size
  if options.slots is None:
    options.slots = options.batch
  longest = options.prompt_length + options.new_tokens
  if options.max_tokens_per_row is None:
    options.max_tokens_per_row = longest
  for name, value in vars(options).items():
    if type(value) is int and value < 1:
      raise InputError(f"--{name}={value} must be at least 1")
  if options.batch % options.group_size:
    raise InputError(
      f"--batch={options.batch} must be a multiple of"
      f" --group_size={options.group_size}"
    )
  if options.max_tokens_per_row < longest:
    raise InputError(
      f"--max_tokens_per_row={options.max_tokens_per_row} must hold a response"
      f" with its prompt, {longest} tokens"
    )
  options.peers = {}
  for peer in options.peer:
    name, equals, command = peer.partition("=")
    if not (name and equals and command) or name == "ours":
      raise InputError(
        f"--peer={peer!r} must be NAME=COMMAND, with a name but 'ours'"
      )
    if name in options.peers:
      raise InputError(f"--peer: two peers are called {name!r}")
    options.peers[name] = command


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  options = make_parser().parse_args(arguments)
  try:
    check(options)
  except InputError as error:
    print(f"benchmark: {error}", file=sys.stderr)
    return 2
  record = run(options)
  benchmarks.show(record)
  for name, error in record["errors"].items():
    print(f"benchmark: peer {name}: {error}", file=sys.stderr)
  return 1 if record["errors"] else 0


if __name__ == "__main__":
  sys.exit(main())
