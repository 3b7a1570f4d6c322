"""Measures speed and memory, alone or side by side with other programs.

  python scripts/benchmark.py sampler [--shape=smollm2-135m]
  python scripts/benchmark.py train_step --peer "NAME=COMMAND" --rounds=3
  python scripts/benchmark.py estimators

Prints rows for a person and, as the last line, one JSON object. Weights are
random, every response has full length, compilation is not counted. A --peer is
run alternately with a fresh process of ours; see docs/benchmarks.md. Exit code
1 if a peer failed (after our own numbers), 2 for bad input.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm import benchmark
from jaxrl_llm.errors import InputError

Samples = dict[str, list[float]]

# name: fields of ModelConfig, rows per micro-batch.
_SHAPES = {
  "tiny": (
    {
      "num_layers": 4,
      "hidden_size": 256,
      "intermediate_size": 1024,
      "num_heads": 4,
      "num_kv_heads": 2,
      "vocab_size": 4096,
    },
    16,
  ),
  "smollm2-135m": (
    {
      "num_layers": 30,
      "hidden_size": 576,
      "intermediate_size": 1536,
      "num_heads": 9,
      "num_kv_heads": 3,
      "vocab_size": 49152,
    },
    4,
  ),
}
_WEIGHT_SCALE = 0.02
_LOOP = "numpy_loop"


def make_model(options) -> tuple[Any, Any]:
  """Model functions and float32 weights of normal(0, 0.02)."""
  import jax
  import jax.numpy as jnp

  from jaxrl_llm import models

  fields, _ = _SHAPES[options.shape]
  fns = models.make_policy(
    models.ModelConfig(
      family="llama",
      head_dim=64,
      max_position_embeddings=options.prompt_length + options.new_tokens,
      rms_norm_eps=1e-5,
      rope_theta=10_000.0,
      tie_word_embeddings=True,
      **fields,
    ),
    remat=options.remat,
  )

  def draw(key):
    leaves, tree = jax.tree.flatten(jax.eval_shape(fns.init, key))
    kernels = jax.tree.flatten_with_path(fns.init(key))[0]
    params = [
      leaf
      if path[-1].key == "scale"
      else _WEIGHT_SCALE * jax.random.normal(k, leaf.shape, jnp.float32)
      for (path, leaf), k in zip(kernels, jax.random.split(key, len(leaves)))
    ]
    return jax.tree.unflatten(tree, params)

  return fns, jax.block_until_ready(jax.jit(draw)(jax.random.key(0)))


def make_engine(fns, options):
  """A sampler with room for the batch, which nothing stops early."""
  from jaxrl_llm.sampling import Engine

  return Engine(
    fns,
    slots=options.batch,
    max_prompt_length=options.prompt_length,
    max_response_length=options.new_tokens,
    stop_tokens=(),
  )


def make_prompts(count: int, options, *, seed: int) -> list[list[int]]:
  """Different prompts of equal length."""
  import numpy as np

  vocab = _SHAPES[options.shape][0]["vocab_size"]
  size = (count, options.prompt_length)
  return np.random.default_rng(seed).integers(2, vocab, size).tolist()


def measure_sampler(options) -> Samples:
  """Generated tokens per second, prefill included; log-probs returned."""
  import jax
  import numpy as np

  from jaxrl_llm import metrics
  from jaxrl_llm.sampling import SamplingSettings

  fns, params = make_model(options)
  params = jax.jit(fns.for_sampling)(params)
  engine = make_engine(fns, options)
  prompts = make_prompts(options.batch, options, seed=0)
  compiles = metrics.CompileCounter()

  def call(seed=0, **settings):
    wall, cpu = time.perf_counter(), time.process_time()
    rollout = engine.generate(
      params,
      prompts,
      sample_ids=np.arange(options.batch)[:, None],
      key=jax.random.key(seed),
      settings=SamplingSettings(**settings),
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, int(rollout.lengths.sum())

  first, _, _ = call()
  compiled = compiles.collect()
  runs = [call() for _ in range(options.repeats)]
  rates = [tokens / wall for wall, _, tokens in runs]
  compiles.collect()
  call(temperature=0.7)
  call(top_p=0.9)
  call(seed=1)
  call(max_new_tokens=max(options.new_tokens // 2, 1))
  return {
    "tokens_per_s": rates,
    "best_tokens_per_s": [max(rates)],
    "wall_s": [wall for wall, _, _ in runs],
    "cpu_s": [cpu for _, cpu, _ in runs],
    "first_call_s": [first],
    "compilations_of_first_call": [compiled],
    "compilations_after_changes": [compiles.collect()],
    "peak_rss_gib": [metrics.peak_memory_gib()],
  }


def make_batch(rollout, options):
  """A policy batch of group-relative advantages, packed without padding."""
  import numpy as np

  from jaxrl_llm import estimators, masked
  from jaxrl_llm.train import packing, step

  rows = min(options.micro_rows, options.batch)
  packed, layout = packing.pack(
    rollout,
    capacity=options.prompt_length + options.new_tokens,
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
  return step.PolicyBatch(
    packed=packed,
    # One update a batch: the sampler's log-probs are those of its start.
    old_logprobs=layout.scatter(rollout.behavior_logprobs),
    advantages=layout.scatter(spread.astype(np.float32)),
    weights=layout.scatter(weights),
    nll_weights=np.zeros(layout.shape, np.float32),
  )


def make_update(fns):
  """The policy step of the clipped loss with AdamW, and its optimizer."""
  from jaxrl_llm import losses
  from jaxrl_llm.train import state, step

  schedule = state.make_schedule(1e-5, warmup_steps=1)
  optimizer = state.make_optimizer(
    schedule, max_grad_norm=1.0, weight_decay=1e-4, b1=0.9, b2=0.999, eps=1e-8
  )
  loss = functools.partial(
    losses.clipped_policy_loss, clip_low=0.2, clip_high=0.28
  )
  return step.make_policy_step(fns, optimizer, schedule, loss), optimizer


def measure_train_step(options) -> Samples:
  """Whole policy steps: generate, prepare, update, sync; scoring apart."""
  import jax
  import numpy as np

  from jaxrl_llm import metrics
  from jaxrl_llm.sampling import SamplingSettings
  from jaxrl_llm.train import score, state

  fns, params = make_model(options)
  engine = make_engine(fns, options)
  update, optimizer = make_update(fns)
  for_sampling = jax.jit(fns.for_sampling)
  score_logprobs = jax.jit(functools.partial(score.score_logprobs, fns=fns))
  create = functools.partial(state.create_train_state, optimizer=optimizer)
  train_state = jax.jit(create, donate_argnums=0)(params)
  del params
  sampler_params = for_sampling(train_state.params)
  ids = np.arange(options.batch).reshape(-1, options.group_size)
  compiles = metrics.CompileCounter()
  timer = metrics.PhaseTimer()
  samples, compilations = {}, []
  for i in range(1 + options.repeats):
    prompts = make_prompts(len(ids), options, seed=i)
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
        score_logprobs(train_state.params, batch.packed, np.float32(1.0))
      )
    row["time/score_s"] = timer.collect()["time/score_s"]
    compilations.append(compiles.collect())
    for key, value in row.items():
      samples.setdefault(key.removeprefix("time/"), []).append(value)
  first = samples["step_s"][0]
  samples = {key: values[1:] for key, values in samples.items()}
  total = options.batch * (options.prompt_length + options.new_tokens)
  generated = options.batch * options.new_tokens
  return samples | {
    "best_step_s": [min(samples["step_s"])],
    "best_update_s": [min(samples["update_s"])],
    "update_tokens_per_s": [total / s for s in samples["update_s"]],
    "generate_tokens_per_s": [generated / s for s in samples["generate_s"]],
    "first_step_s": [first],
    "compilations_after_first_step": [sum(compilations[1:])],
    "peak_rss_gib": [metrics.peak_memory_gib()],
  }


def gae_loop(token_rewards, values, mask, lambda_):
  """GAE as a NumPy loop over time, all rows at once; γ = 1, λ per row."""
  import numpy as np

  following = np.zeros(len(values), np.float32)
  running = np.zeros(len(values), np.float32)
  columns = []
  for t in reversed(range(values.shape[1])):
    here = mask[:, t]
    delta = token_rewards[:, t] + following - values[:, t]
    # A masked position is passed over: both go through it unchanged.
    running = np.where(here, delta + lambda_ * running, running)
    following = np.where(here, values[:, t], following)
    columns.append(np.where(here, running, np.float32(0.0)))
  return np.stack(columns[::-1], axis=1)


def measure_estimators(options) -> Samples:
  """GAE against a NumPy loop; group advantages; length-adaptive λ."""
  import jax
  import numpy as np

  from jaxrl_llm import estimators

  rows, length = options.rows, options.length
  rng = np.random.default_rng(0)
  lengths = rng.integers(length // 2 + 1, length + 1, rows)
  mask = np.arange(length)[None] < lengths[:, None]
  token_rewards = np.zeros((rows, length), np.float32)
  token_rewards[np.arange(rows), lengths - 1] = rng.choice([-1.0, 1.0], rows)
  values = rng.normal(size=(rows, length)).astype(np.float32)
  rewards = rng.normal(size=rows * options.group_size).astype(np.float32)
  groups = np.repeat(np.arange(rows), options.group_size)
  adaptive = jax.jit(
    functools.partial(estimators.length_adaptive_lambda, alpha=0.05)
  )
  relative = jax.jit(
    functools.partial(estimators.group_relative, num_groups=rows)
  )
  gae = jax.jit(functools.partial(estimators.gae, gamma=1.0))
  lambda_ = adaptive(lengths)
  arrays = jax.device_put((token_rewards, values, mask))
  rewards, groups, lengths = jax.device_put((rewards, groups, lengths))
  samples = {}

  def timed(name: str, function: Callable[..., Any], *arguments, calls=1):
    start = time.perf_counter()
    for _ in range(calls):
      result = jax.block_until_ready(function(*arguments))
    seconds = (time.perf_counter() - start) / calls
    samples.setdefault(name, []).append(seconds)
    return result

  ours = gae(*arrays, lambda_=lambda_)
  relative(rewards, groups)
  adaptive(lengths)
  loop_lambda = np.asarray(lambda_)
  for _ in range(options.repeats):
    timed("gae_s", functools.partial(gae, lambda_=lambda_), *arrays)
    loop = timed(
      f"{_LOOP}_gae_s", gae_loop, token_rewards, values, mask, loop_lambda
    )
    timed("group_relative_s", relative, rewards, groups, calls=100)
    timed("length_adaptive_lambda_s", adaptive, lengths, calls=100)
  difference = float(np.abs(np.asarray(ours) - loop).max())
  return samples | {"gae_difference_max": [difference]}


MEASURE = {
  "sampler": measure_sampler,
  "train_step": measure_train_step,
  "estimators": measure_estimators,
}


def run_alone(options) -> dict[str, Any]:
  """Measures ours in this process."""
  if options.wait_idle:
    benchmark.wait_until_idle(options.wait_idle)
  load = os.getloadavg()
  result = benchmark.summarize(MEASURE[options.part](options))
  medians = result["medians"]
  ratios = {}
  if f"{_LOOP}_gae_s" in medians:
    loop = {"gae_s": medians[f"{_LOOP}_gae_s"]}
    ratios[_LOOP] = benchmark.speed_ratios(medians, loop)
  return report(options, load, result | {"ratios": ratios})


def run_with_peers(options, arguments: Sequence[str]) -> dict[str, Any]:
  """Measures ours and the peers in turn, each in a fresh process."""
  load = os.getloadavg()
  alone = [sys.executable, os.path.abspath(__file__), *arguments]

  def run(name, command):
    if options.wait_idle:
      benchmark.wait_until_idle(options.wait_idle)
    print(f"running {name}", file=sys.stderr, flush=True)
    record = benchmark.run_program(command, timeout_s=options.timeout_s)
    if name == "ours":
      return record["medians"]
    return benchmark.read_numbers(
      record, part=options.part, shape=options.shape
    )

  programs = {"ours": alone} | options.peers
  numbers, errors = benchmark.alternate(
    {
      name: functools.partial(run, name, command)
      for name, command in programs.items()
    },
    rounds=options.rounds,
  )
  if "ours" in errors:
    raise RuntimeError(f"our own measurement failed: {errors['ours']}")
  joined = {k: benchmark.join_rounds(rounds) for k, rounds in numbers.items()}
  ours = joined.pop("ours")
  ratios = {
    name: benchmark.speed_ratios(ours["medians"], peer["medians"])
    for name, peer in joined.items()
  }
  result = ours | {"ratios": ratios, "peers": joined, "errors": errors}
  return report(options, load, result)


def report(options, load, result: dict[str, Any]) -> dict[str, Any]:
  """The JSON object: what was measured, how and where."""
  settings = {
    key: value
    for key, value in vars(options).items()
    if key not in ("part", "peer", "peers")
  }
  return (
    {"part": options.part, "settings": settings}
    | result
    | benchmark.describe_machine()
    | {"load_before": load, "load_after": os.getloadavg()}
  )


def show(record: dict[str, Any]) -> None:
  """Prints the record as rows, then as the last line."""
  for key, median in record["medians"].items():
    low, high = record["spread"][key]
    print(f"{key:30} {median:>12,.4g}   [{low:,.4g} .. {high:,.4g}]")
  for name, ratios in record["ratios"].items():
    for key, ratio in ratios.items():
      peers = record.get("peers", {})
      theirs = peers[name]["medians"][key] if name in peers else None
      value = "" if theirs is None else f"   ({name} has {theirs:,.4g})"
      print(f"{key:30} {ratio:>12,.2f}   times as good as {name}{value}")
  print(json.dumps(record), flush=True)


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("part", metavar="PART", help=", ".join(MEASURE))
  add = parser.add_argument
  add("--shape", default="tiny", help=", ".join(_SHAPES))
  add("--batch", type=int, default=16, help="responses")
  add("--group_size", type=int, default=4, help="responses per prompt")
  add("--prompt_length", type=int, default=64, help="tokens")
  add("--new_tokens", type=int, default=128, help="tokens per response")
  add("--micro_rows", type=int, help="rows per gradient, by shape")
  add(
    "--remat",
    action=argparse.BooleanOptionalAction,
    default=True,
    help="recompute layers in the backward pass",
  )
  add("--rows", type=int, default=512, help="of estimators")
  add("--length", type=int, default=24576, help="of estimators, tokens")
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
  for name, known in (("part", MEASURE), ("shape", _SHAPES)):
    value = getattr(options, name)
    if value not in known:
      label = "PART" if name == "part" else f"--{name}"
      raise InputError(f"{label} {value!r} must be one of {', '.join(known)}")
  if options.micro_rows is None:
    options.micro_rows = _SHAPES[options.shape][1]
  for name, value in vars(options).items():
    if type(value) is int and value < 1:
      raise InputError(f"--{name}={value} must be at least 1")
  if options.batch % options.group_size:
    raise InputError(
      f"--batch={options.batch} must be a multiple of"
      f" --group_size={options.group_size}"
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
  if not options.peers:
    show(run_alone(options))
    return 0
  record = run_with_peers(options, alone_arguments(options))
  show(record)
  for name, error in record["errors"].items():
    print(f"benchmark: peer {name}: {error}", file=sys.stderr)
  return 1 if record["errors"] else 0


def alone_arguments(options) -> list[str]:
  """Arguments of the same measurement without peers."""
  left_out = ("part", "peer", "peers", "rounds", "timeout_s", "wait_idle")
  flags = [
    f"--{name}={value}"
    for name, value in vars(options).items()
    if name not in (*left_out, "remat")
  ]
  return [options.part, *flags, "--remat" if options.remat else "--no-remat"]


if __name__ == "__main__":
  sys.exit(main())
