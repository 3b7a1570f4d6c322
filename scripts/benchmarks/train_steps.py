"""Policy steps: packed batches of rollouts, and the update on them."""

import functools
import time

import jax
import numpy as np
from benchmarks import tail, workloads

from jaxrl_llm import estimators, masked, metrics
from jaxrl_llm.learner import packing
from jaxrl_llm.learner import update as update_lib
from jaxrl_llm.learner.choices import POLICY_LOSSES
from jaxrl_llm.learner.optimizer import create_train_state, make_optimizer
from jaxrl_llm.learner.scoring import score_logprobs


def make_batch(fns, rollout, *, rows, capacity):
  """A policy batch of group-relative advantages, in packed rows.

  Args:
    fns: of the policy.
    rollout: B responses.
    rows: of a micro-batch, at most.
    capacity: tokens of a row.
  """
  batch, rows = len(rollout.tokens), min(rows, len(rollout.tokens))
  packed, layout = packing.pack(
    rollout,
    capacity=capacity,
    rows=rows,
    micro_batches=-(-batch // rows),
    share=fns.shares_prompts,
  )
  distinct = [len(np.unique(tokens)) for tokens in rollout.tokens]
  advantages = estimators.group_relative(
    np.asarray(distinct, np.float32) + 0.01 * np.arange(batch),
    rollout.group,
    num_groups=int(rollout.group.max()) + 1,
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
  """Returns the policy step of the clipped loss with AdamW, and a new state."""
  schedule = lambda step: 1e-5
  optimizer = make_optimizer(
    schedule, max_grad_norm=1.0, weight_decay=1e-4, b1=0.9, b2=0.999, eps=1e-8
  )
  loss = POLICY_LOSSES["clip"]({"clip_low": 0.2, "clip_high": 0.28})
  objective = update_lib.policy_objective(fns, loss, {})
  create = lambda key: create_train_state(fns.init(key), optimizer)
  state = jax.block_until_ready(jax.jit(create)(jax.random.key(0)))
  return update_lib.make_update(objective, optimizer, schedule), state


def measure_train_step(options) -> workloads.Samples:
  """Whole policy steps: generate, prepare, update, sync; scoring apart."""
  sampler = workloads.Sampler.of(options)
  fns = sampler.fns
  update, state = make_update(fns)
  score = jax.jit(functools.partial(score_logprobs, fns=fns))
  ids = np.arange(options.batch).reshape(-1, options.group_size)
  shape = {"rows": options.micro_batch_size}
  shape["capacity"] = options.max_tokens_per_row
  compiles, timer = metrics.CompileCounter(), metrics.PhaseTimer()
  rows = []
  for i in range(1 + options.repeats):
    prompts = tail.prompts(len(ids), options, seed=i)
    timer.collect()
    cpu = time.process_time()
    with timer.phase("generate"):
      rollout = sampler(prompts, i * options.batch + ids)
    with timer.phase("prepare"):
      batch = make_batch(fns, rollout, **shape)
    with timer.phase("update"):
      state, _ = jax.block_until_ready(update(state, batch, np.float32(1.0)))
    with timer.phase("sync"):
      sampler.params = sampler.for_sampling(state.trained)
      jax.block_until_ready(sampler.params)
    row = timer.collect() | {"step_cpu_s": time.process_time() - cpu}
    # One update a batch needs no scoring, so that it is no part of the step.
    with timer.phase("score"):
      params = state.trained
      jax.block_until_ready(score(params, batch.packed, np.float32(1.0)))
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
