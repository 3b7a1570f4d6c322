"""Workloads with random weights and full lengths, without compilation time.

`options` contains the flags of scripts/benchmark.py. For policy steps see
`train_steps`.
"""

import functools
import time
from typing import Any

import jax
import numpy as np
from benchmarks import summary, tail
from benchmarks.peers import SHAPES

from jaxrl_llm import estimators, metrics, models
from jaxrl_llm.sampling import (
  Engine,
  EngineConfig,
  SamplingSettings,
  continuous_batching,
  new_requests,
)
from jaxrl_llm.tools import simulate

Samples = dict[str, list[float]]


def make_model(options) -> models.ModelFns:
  """Returns the model functions for the shape in the options."""
  return models.make_policy(
    models.ModelConfig(
      family="llama",
      head_dim=64,
      max_position_embeddings=options.prompt_length + options.new_tokens,
      rms_norm_eps=1e-5,
      rope_theta=10_000.0,
      tie_word_embeddings=True,
      **SHAPES[options.shape],
    ),
    remat_policy=options.remat_policy,
    sampler=models.Numerics.all(options.sampler_dtype, kv="float32"),
  )


def random_params(fns) -> Any:
  """Returns the initial weights of a model: normal(0, 0.02), float32."""
  return jax.block_until_ready(jax.jit(fns.init)(jax.random.key(0)))


class Sampler:
  """An engine whose responses have full length, and its weights."""

  def __init__(self, fns, params, *, slots, prompt_length, new_tokens):
    """Makes an engine with the given number of slots and lengths."""
    self.fns, self.for_sampling = fns, jax.jit(fns.for_sampling)
    self.params = self.for_sampling(params)
    room = EngineConfig(slots, prompt_length, new_tokens, stop_tokens=())
    self.engine = Engine(fns, room)

  @classmethod
  def of(cls, options) -> "Sampler":
    """Returns a sampler for the shape in the options, with random weights."""
    names, fns = ("slots", "prompt_length", "new_tokens"), make_model(options)
    sizes = {name: getattr(options, name) for name in names}
    return cls(fns, random_params(fns), **sizes)

  def __call__(self, prompts, ids, *, seed=0, limits=None, **settings):
    """Samples responses with the given ids; returns the rollout."""
    engine, groups = self.engine, range(len(prompts))
    rollout = new_requests(prompts, ids, groups, engine.config)
    engine.set_params(self.params, version=0)
    requests = engine.add(
      rollout,
      key=jax.random.key(seed),
      settings=SamplingSettings(**settings),
      group_size=ids.shape[1],
    )
    if limits is not None:
      for request, limit in zip(requests, limits.flat):
        request.max_tokens = request.pause_at = int(limit)
    engine.run(requests, continuous_batching)
    return rollout

  def write(self, prompts, limits, *, seed=0):
    """Samples responses of the given lengths; returns statistics and trace."""
    ids = np.arange(limits.size).reshape(limits.shape)
    self(prompts, ids, seed=seed, limits=limits)
    return self.engine.last_stats, self.engine.trace


def measure_rollouts(options) -> Samples:
  """Measures tokens per second of many responses with a long-tailed length."""
  sampler, compiles = Sampler.of(options), metrics.CompileCounter()
  prompts = tail.prompts(options.prompts, options)
  limits = tail.lengths(options)
  sampler.write(prompts, limits)
  compiled = compiles.collect()
  seeds = range(1, 1 + options.repeats)
  runs = [sampler.write(prompts, limits, seed=seed) for seed in seeds]
  stats = [run for run, _ in runs]
  rates = [run.tokens / run.wall_s for run in stats]
  peaks = [max(call.kv_capacity for call in trace) for _, trace in runs]
  whole = options.batch * (options.prompt_length + options.new_tokens)
  return {
    **_rates(rates, compiled),
    "wall_s": [run.wall_s for run in stats],
    "host_share": [run.host_s / run.wall_s for run in stats],
    "memory_share": [peak / whole for peak in peaks],
    "slot_use": [run.tokens / run.slot_steps for run in stats],
    "compilations_after_warmup": [compiles.collect()],
  }


def _rates(tokens_per_s: list[float], compiled: int) -> Samples:
  return {
    "tokens_per_s": tokens_per_s,
    "best_tokens_per_s": [max(tokens_per_s)],
    "compilations_of_first_call": [compiled],
    "peak_rss_gib": [metrics.peak_memory_gib()],
  }


def measure_simulator(options) -> Samples:
  """Measures the simulator: predicted / measured seconds of held-out lengths.

  Costs are fitted to rollouts with several tails, and predict others: new
  lengths from the same tails, and from one between them.
  """
  sampler, prompts = Sampler.of(options), tail.prompts(options.prompts, options)
  prompt_lengths = np.full(options.prompts, options.prompt_length)
  tails = [options.median, options.p99, options.p99 * 2]
  between = (options.median + options.p99) // 2
  fitted = [tail.lengths(options, p99=p99) for p99 in tails]
  others = [tail.lengths(options, p99=p, seed=1) for p in (*tails, between)]
  for limits in fitted + others:
    sampler.write(prompts, limits)  # Compiles.
  decode_calls, measured_s = [], []
  # Alternate, so that changes of the machine's load affect all of them.
  for _ in range(options.repeats):
    for limits in fitted:
      decode_calls += sampler.write(prompts, limits)[1]
    stats = [sampler.write(prompts, limits)[0] for limits in others]
    measured_s.append([each.wall_s for each in stats])
  # Least squares predicts the mean.
  measured_s = np.mean(measured_s, axis=0).tolist()
  cost = simulate.fit(decode_calls)
  asked = [simulate.Requests(prompt_lengths, limits) for limits in others]
  config = sampler.engine.config
  predicted_s = [simulate.predict(x, cost, config).wall_s for x in asked]
  return {
    "ratio": [p / m for p, m in zip(predicted_s, measured_s)],
    "measured_s": measured_s,
    "predicted_s": predicted_s,
  }


def measure_prefill(options) -> Samples:
  """Measures the first token of G responses, with and without sharing."""
  sampler, group = Sampler.of(options), options.batch
  prompt = tail.prompts(1, options)
  ways = {
    "shared_s": (prompt, np.arange(group)[None]),
    "unshared_s": (prompt * group, np.arange(group)[:, None]),
  }
  out = {name: [] for name in ways}
  for name, way in ways.items():
    for _ in range(1 + options.repeats):
      sampler(*way, max_new_tokens=1)
      out[name].append(sampler.engine.last_stats.wall_s)
    del out[name][0]  # Compiles.
  pairs = zip(out["unshared_s"], out["shared_s"])
  return out | {"speedup": [alone / shared for alone, shared in pairs]}


def measure_sampler(options) -> Samples:
  """Measures generated tokens per second, with prefill and log-probs."""
  sampler, compiles = Sampler.of(options), metrics.CompileCounter()
  prompts, ids = tail.prompts(options.batch, options), np.arange(options.batch)

  def call(**settings):
    wall, cpu = time.perf_counter(), time.process_time()
    rollout = sampler(prompts, ids[:, None], **settings)
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
    **_rates(rates, compiled),
    "wall_s": [wall for wall, _, _ in runs],
    "cpu_s": [cpu for _, cpu, _ in runs],
    "first_call_s": [first],
    "compilations_after_changes": [compiles.collect()],
  }


def gae_loop(token_rewards, values, mask, lambda_):
  """Computes GAE in a NumPy loop over time, for all rows; γ = 1, λ per row."""
  following = np.zeros(len(values), np.float32)
  running = np.zeros(len(values), np.float32)
  columns = []
  for t in reversed(range(values.shape[1])):
    here = mask[:, t]
    delta = token_rewards[:, t] + following - values[:, t]
    # Masked positions are skipped: both values pass through unchanged.
    running = np.where(here, delta + lambda_ * running, running)
    following = np.where(here, values[:, t], following)
    columns.append(np.where(here, running, np.float32(0.0)))
  return np.stack(columns[::-1], axis=1)


def measure_estimators(options) -> Samples:
  """Measures GAE and a NumPy loop."""
  rows, length = options.rows, options.length
  rng = np.random.default_rng(0)
  lengths = rng.integers(length // 2 + 1, length + 1, rows)
  mask = np.arange(length)[None] < lengths[:, None]
  token_rewards = np.zeros((rows, length), np.float32)
  token_rewards[np.arange(rows), lengths - 1] = rng.choice([-1.0, 1.0], rows)
  values = rng.normal(size=(rows, length)).astype(np.float32)
  lambda_ = estimators.length_adaptive_lambda(lengths, alpha=0.05)
  by_hand = (token_rewards, values, mask, np.asarray(lambda_))
  arrays = jax.device_put((token_rewards, values, mask))
  gae = jax.jit(functools.partial(estimators.gae, gamma=1.0))
  call = lambda: jax.block_until_ready(gae(*arrays, lambda_=lambda_))
  ours, timed = call(), summary.Timed()
  for _ in range(options.repeats):
    timed("gae_s", call)
    loop = timed("numpy_loop_gae_s", gae_loop, *by_hand)
  difference = float(np.abs(np.asarray(ours) - loop).max())
  return timed | {"gae_difference_max": [difference]}
