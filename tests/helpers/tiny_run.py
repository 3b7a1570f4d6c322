"""Complete runs in seconds: a tiny model directory and a matching config."""

import copy
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pretraining
from helpers import configs, tiny

from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics, models
from jaxrl_llm.checkpoint import commit
from jaxrl_llm.data import tasks
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Rollout

EIGHT_DEVICES = {
  "mesh__data": 2,
  "mesh__fsdp": 2,
  "mesh__tensor": 2,
  "optimizer__policy__micro_batch_size": 4,
  "optimizer__value__micro_batch_size": 4,
}

# Evaluations sample groups as large as a step's, with the same programs.
EVALUATES_LIKE_A_STEP = {"eval__samples": 4, "eval__problems": 8}


def model_config() -> models.ModelConfig:
  """Returns a config of 2 layers of width 32 with chain_sum's alphabet."""
  return dataclasses.replace(
    tiny.tiny_config(),
    family="llama",
    vocab_size=len(tasks.CHARACTERS) + 2,
    hidden_size=32,
    intermediate_size=48,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    attention_bias=False,
  )


def write_model(
  directory: pathlib.Path,
  config: models.ModelConfig | None = None,
  characters: Sequence[str] = tasks.CHARACTERS,
) -> pathlib.Path:
  """Writes random weights and a character tokenizer in Hugging Face format.

  Args:
    directory: a new directory.
    config: sizes of the model; by default `model_config()`.
    characters: tokens of the model besides `<pad>` and `<eos>`.
  """
  directory.mkdir(parents=True)
  text = pretraining.character_tokenizer_json(characters)
  (directory / "tokenizer.json").write_text(text, encoding="utf-8")
  tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
  (directory / "generation_config.json").write_text(json.dumps(tokens))
  fns = models.make_policy(config or model_config())
  params = jax.jit(fns.init)(jax.random.key(0))
  models.save(str(directory), fns, params, tokenizer_from=str(directory))
  return directory


def overrides(model: pathlib.Path) -> dict:
  """Returns settings with which a step takes milliseconds."""
  settings = {
    "model.path": str(model),
    "value.pretrain_steps": 2,
    "data.prompts_per_step": 8,
    "data.group_size": 4,
    "data.max_prompt_length": 12,
    "reward.name": "numeric",  # Random digits are sometimes correct.
    "sampler.max_response_length": 12,
    "data.settings": {"max_ops": 2},
    "eval.greedy": False,
    "eval.every": 3,
    "eval.samples": 2,
    # As many responses as in a step, so that both use the same program.
    "eval.problems": 16,
    "checkpoint.every": 1,
    "mesh.data": 1,
    "optimizer.max_tokens_per_row": 0,
    "run.steps": 6,
    "run.samples_every": 2,
    "run.trackers": (),  # TensorBoard's would import torch.
  }
  for role in ("policy", "value"):
    settings[f"optimizer.{role}.mini_batch"] = 16
    settings[f"optimizer.{role}.updates_per_step"] = 1
    settings[f"optimizer.{role}.micro_batch_size"] = 2
    settings[f"optimizer.{role}.warmup_steps"] = 2
  return settings


def dotted(changes: dict) -> dict:
  """Returns settings whose keys have dots instead of `__`."""
  return {key.replace("__", "."): value for key, value in changes.items()}


def make_config(model: pathlib.Path, method: str = "vapo", **changes):
  """Makes the config of a tiny run; `changes` has `__` for dots."""
  config = configs.load(method)
  config_lib.update(config, overrides(model) | dotted(changes))
  return config


def make_run(model: pathlib.Path, **changes) -> build.Run:
  """Makes a tiny run without value pretraining and samples."""
  plain = {"value__pretrain_steps": 0, "run__samples_every": 0}
  return build.make_run(make_config(model, **plain | changes))


def comparable(workdir: pathlib.Path) -> list[dict]:
  """Returns rows of metrics.jsonl without time- or machine-dependent values."""
  text = (workdir / "metrics.jsonl").read_text(encoding="utf-8")
  measured = ("time", "host/", "perf/", "memory/", "compile/", "checkpoint/")
  measured += ("rollout/tokens_per_", "health/suspect_host")
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(measured)}
    for line in text.splitlines()
  ]


def check_resumes(run: build.Run, folder: pathlib.Path, after=2) -> list[dict]:
  """Trains with and without interruption; checks and returns the equal rows.

  The folders are `whole` and `parts`.
  """
  loop.train(run, folder / "whole")
  loop.train(with_config(run, run__steps=after), folder / "parts")
  loop.train(run, folder / "parts")
  rows, again = (comparable(folder / name) for name in ("whole", "parts"))
  assert rows == again and len(rows) == run.config.run.steps + 1
  return rows


def train_and_resume(run: build.Run, folder: pathlib.Path) -> list[dict]:
  """Trains; returns the rows of metrics.

  The run resumed after its first step must end with the same bits.
  """
  assert loop.train(run, folder) == 0
  resumed = resume(run, folder)
  assert comparable(resumed) == comparable(folder)
  assert_same_checkpoints(run, folder, resumed)
  return metrics.read_rows(folder / "metrics.jsonl")


def resume(run: build.Run, folder: pathlib.Path) -> pathlib.Path:
  """Resumes a copy of a run from its first step; returns its folder."""
  resumed = shutil.copytree(folder, folder.with_name(f"{folder.name} resumed"))
  assert loop.train(run, resumed, step=1) == 0
  return resumed


def assert_same_checkpoints(run: build.Run, *folders: pathlib.Path):
  """Compares the last checkpoints of two runs."""
  assert_same_checkpoint(run.config.run.steps, *folders)


def assert_same_end(step: int, *folders: pathlib.Path):
  """Compares the rows and the last checkpoints of two runs."""
  once, again = map(comparable, folders)
  assert once == again
  assert_same_checkpoint(step, *folders)


def assert_same_checkpoint(step: int, *folders: pathlib.Path):
  """Compares a checkpoint of two runs: arrays bit for bit, counters."""
  once, again = (commit.read(x / f"checkpoints/{step}") for x in folders)
  assert once["leaves"] == again["leaves"]
  assert once["states"] == again["states"]


def collect(run: build.Run):
  """Returns the states and weights before the first step, and its batch."""
  states, weights = loop.begin(run)
  collected = run.worker.collect(
    states.rollout,
    states.source,
    loop.sampled_with(run, states, weights),
    metrics.PhaseTimer(),
  )
  return states, weights, collected


def snapshot(folder):
  """Returns path -> bytes of everything below a folder; None for folders."""
  return {
    path.relative_to(folder): path.read_bytes() if path.is_file() else None
    for path in folder.rglob("*")
  }


def flags(model: pathlib.Path, workdir, **changes) -> list[str]:
  """Returns the config of a tiny run as arguments of scripts/train.py."""
  settings = overrides(model) | dotted(changes)
  return [
    "--config=configs/vapo.py",
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in settings.items()),
  ]


def random_rollout(rng, *, rows, prompt=7, room=9, vocab=50, group_size=1):
  """Makes ragged responses, some empty, masks with holes, groups of G."""
  group = np.arange(rows, dtype=np.int32) // group_size
  prompt_lengths = rng.integers(1, prompt + 1, rows).astype(np.int32)[group]
  lengths = rng.integers(0, room + 1, rows).astype(np.int32)
  present = np.arange(room)[None] < lengths[:, None]
  draw = lambda *shape: rng.integers(2, vocab, shape).astype(np.int32)
  ids = np.arange(rows, dtype=np.int32)
  return Rollout(
    prompt_tokens=draw(rows, prompt)[group],
    prompt_lengths=prompt_lengths,
    tokens=draw(rows, room),
    lengths=lengths,
    mask=present & (rng.random((rows, room)) < 0.8),
    behavior_logprobs=rng.normal(size=(rows, room)).astype(np.float32),
    version=np.zeros((rows, room), np.int32),
    origin=np.zeros((rows, room), np.int32),
    turn_rewards=np.zeros((rows, room), np.float32),
    status=np.zeros(rows, np.int32),
    window_start=np.zeros(rows, np.int32),
    example_id=group,
    group_id=group,
    group=group,
    sample_id=ids,
  )


def padded(rollout):
  """Joins prompts with responses, one per row.

  Returns:
    Right-padded tokens [B, L], their mask, and the positions before response
    tokens [B, T].
  """
  width = rollout.prompt_tokens.shape[1] + rollout.tokens.shape[1]
  tokens = np.zeros((len(rollout.lengths), width), np.int32)
  for i, (p, n) in enumerate(zip(rollout.prompt_lengths, rollout.lengths)):
    tokens[i, : p + n] = [*rollout.prompt_tokens[i, :p], *rollout.tokens[i, :n]]
  total = (rollout.prompt_lengths + rollout.lengths)[:, None]
  index = np.arange(rollout.tokens.shape[1])
  before = rollout.prompt_lengths[:, None] - 1 + index
  return tokens, np.arange(width) < total, np.minimum(before, width - 1)


def plain_logprobs(fns, params, rollout, temperature=1.0):
  """Computes log-probs and entropies [B, T] from logits, one sample per row."""
  tokens, present, before = padded(rollout)
  law = jax.nn.log_softmax(fns.logits(params, tokens, present) / temperature)
  law = jnp.take_along_axis(law, before[..., None], axis=1)
  written = rollout.tokens[..., None].astype(np.int32)
  logprobs = jnp.take_along_axis(law, written, axis=2)[..., 0]
  return logprobs, -jnp.sum(jnp.exp(law) * law, axis=2)


def with_config(run: build.Run, **changes) -> build.Run:
  """Returns the run with other settings that do not affect compilation.

  Its parts are rebuilt around the models, programs and engine of `run`.
  """
  config = run.config.copy_and_resolve_references()
  config_lib.update(config, dotted(changes))
  made = build.make_run(config)
  learner = copy.copy(run.learner)
  vars(learner)["settings"] = made.learner.settings
  pretraining = made.pretraining
  if pretraining is not None:
    pretraining = dataclasses.replace(
      pretraining,
      learner=run.pretraining.learner,
      reward_model=run.pretraining.reward_model,
      worker=run.pretraining.worker,
    )
  return dataclasses.replace(
    run,
    config=config,
    worker=build.make_worker(
      config,
      dataclasses.replace(
        made.worker.writer,
        engine=run.worker.writer.engine,
        judge=run.judge,
        turn_taking=run.worker.writer.turn_taking,
      ),
      run.source,
      made.learner.algorithm,
    ),
    pipeline=made.pipeline,
    learner=learner,
    pretraining=pretraining,
    critic_params=made.critic_params,
  )
