"""Measures policy steps: packed batches of rollouts, and updates on them."""

import functools
import time

import jax
import numpy as np
from benchmarks import tail, workloads

from jaxrl_llm import estimators, metrics
from jaxrl_llm.learner import packing
from jaxrl_llm.learner import update as update_lib
from jaxrl_llm.learner.core import clip
from jaxrl_llm.learner.members import Training
from jaxrl_llm.learner.optimizer import create_train_state, make_optimizer
from jaxrl_llm.learner.scoring import score_logprobs


def make_training(fns):
  """Returns the training of a policy with the clipped token-mean loss."""
  loss = clip({"clip_low": 0.2, "clip_high": 0.28})
  return Training(
    update_lib.policy_objective(fns, loss, {}),
    jax.jit(functools.partial(score_logprobs, fns=fns)),
    reads=("proximal_logprobs", "advantages"),
    mask="mask",
    mode="token-mean",
  )


def make_batch(fns, training, rollout, **shape):
  """Makes a packed policy batch with group-relative advantages.

  Args:
    fns: model functions of the policy.
    training: result of `make_training`.
    rollout: B responses.
    **shape: rows per micro-batch, and their capacity in tokens.
  """
  size, share = len(rollout.tokens), fns.shares_prompts
  distinct = [len(np.unique(tokens)) for tokens in rollout.tokens]
  advantages = estimators.group_relative(
    np.asarray(distinct, np.float32) + 0.01 * np.arange(size),
    rollout.group,
    num_groups=int(rollout.group.max()) + 1,
  )
  spread = np.where(rollout.mask, np.asarray(advantages)[:, None], 0.0)
  # With one update per batch, the old log-probs are those of the sampler.
  inputs = {"mask": rollout.mask, "advantages": spread.astype(np.float32)}
  inputs["proximal_logprobs"] = rollout.behavior_logprobs
  (batch,) = packing.mini_batches(
    rollout, size=size, rng=None, share=share, **shape
  )
  return training.prepare(inputs, batch)


def make_update(fns, training):
  """Returns the update function with AdamW, and an initial state."""
  schedule = lambda step: 1e-5
  optimizer = make_optimizer(
    schedule, max_grad_norm=1.0, weight_decay=1e-4, b1=0.9, b2=0.999, eps=1e-8
  )
  create = lambda key: create_train_state(fns.init(key), optimizer)
  state = jax.block_until_ready(jax.jit(create)(jax.random.key(0)))
  return update_lib.make_update(training.objective, optimizer, schedule), state


def measure_train_step(options) -> workloads.Samples:
  """Measures policy steps: generate, prepare, update, sync; also scoring."""
  sampler = workloads.Sampler.of(options)
  fns, training = sampler.fns, make_training(sampler.fns)
  update, state = make_update(fns, training)
  ids = np.arange(options.batch).reshape(-1, options.group_size)
  shape = {"rows": min(options.micro_batch_size, options.batch)}
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
      batch = make_batch(fns, training, rollout, **shape)
    with timer.phase("update"):
      state, _ = jax.block_until_ready(update.whole(state, batch))
    with timer.phase("sync"):
      sampler.params = sampler.for_sampling(state.trained)
      jax.block_until_ready(sampler.params)
    row = timer.collect() | {"step_cpu_s": time.process_time() - cpu}
    # One update per batch needs no scoring, so it is not part of the step.
    with timer.phase("score"):
      params = state.trained
      scored = training.score(params, batch.packed)
      jax.block_until_ready(scored)
    row |= {"time/score_s": timer.collect()["time/score_s"]}
    rows.append(row | {"compilations": compiles.collect()})
  return train_samples(rows, options)


def train_samples(rows, options) -> workloads.Samples:
  """Returns rates and best values, without the first step, which compiles."""
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
