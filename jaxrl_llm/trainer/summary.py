"""Describes a run in a few lines: its setup at the start, its results."""

import pathlib
from typing import Any

import jax

from jaxrl_llm import config as config_lib
from jaxrl_llm import metrics, models, sharding
from jaxrl_llm.config import Settings
from jaxrl_llm.data import sources
from jaxrl_llm.trainer.run import Run

_GIB = 2.0**30


def describe(run: Run) -> list[str]:
  """Returns lines on method, model, data, batch, devices and memory."""
  config = run.config
  method = config.run.method or f"{config.estimator.name} advantages"
  lines = {
    "method": f"{method}, seed {config.run.seed}, {config.run.steps} steps",
    "model": _model(run),
    "data": _data(run),
    "batch": _batch(config, run.learner.critic is not None),
    **_devices(run),
  }
  return [f"{name:8} {text}" for name, text in lines.items()]


def reached(rows: list[dict[str, Any]], folder: pathlib.Path) -> list[str]:
  """Returns lines on the results of a finished run and the next commands."""
  return [
    metrics.reached(rows),
    f"next: report.py {folder} (curves), evaluate.py --checkpoint={folder},"
    f" convert.py --checkpoint={folder} --out=MODEL",
  ]


def _model(run: Run) -> str:
  policy, config = run.learner.policy, run.config
  shape = policy.fns.config
  size = models.num_params(shape)
  parts = [f"{shape.family}, {size:,} parameters"]
  if policy.base:
    trained = sum(x.size for x in jax.tree.leaves(policy.shapes.trained))
    parts.append(f"{trained:,} of them trained")
  if (critic := run.learner.critic) is not None:
    own = models.num_params(critic.fns.config)
    count = critic.fns.count
    critics = f"{count} critics" if count > 1 else "a critic"
    parts.append(
      f"{critics} of {'the same size' if own == size else f'{own:,}'}"
    )
  parts.append(f"computed in {config.model.dtype}")
  return ", ".join(parts) + (f"; {config.model.path}" * bool(config.model.path))


def _data(run: Run) -> str:
  count, config = len(run.source), run.config
  known = count <= sources.MOST_READ
  sets = ", ".join(
    f"{len(one.prompts):,} problems of {one.name}" for one in run.evaluators
  )
  return (
    f"{config.data.path or config.data.source},"
    f" {f'{count:,} examples' if known else 'endless'}; evaluation on {sets}"
    f" every {config.eval.every} steps"
  )


def _batch(config: Settings, critic: bool) -> str:
  prompts, group = config.data.prompts_per_step, config.data.group_size
  size = config_lib.batch_size(config)
  parts = [
    f"{prompts:,} prompts x {group} responses of up to"
    f" {config.sampler.max_response_length:,} tokens"
  ]
  roles = {"policy": "policy"} | ({"critic": "value"} if critic else {})
  for name, key in roles.items():
    each = config_lib.mini_batch(config, key)
    updates = round(config.optimizer[key].epochs * size / each)
    several = "s" * (updates != 1)
    parts.append(f"{updates} {name} update{several} of {each:,}")
  return ", ".join(parts)


def _devices(run: Run) -> dict[str, str]:
  """Returns the meshes of trainer and sampler, and the memory per device."""
  learner, sampled = run.learner, run.transfer.shapes
  state = learner.abstract()
  frozen = [member.shapes for member in learner.frozen.values()]
  held = [state.models, state.companions, state.base, frozen]
  if "ref_logprobs" in learner.algorithm.leaves:
    held.append(state.policy.trained)
  meshes = learner.mesh, jax.tree.leaves(sampled)[0].sharding.mesh
  lines = {}
  for name, mesh, trees in zip(("trainer", "sampler"), meshes, (held, sampled)):
    ids = sorted(device.id for device in mesh.devices.flat)
    row = len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1
    at = f", devices {ids[0]} to {ids[-1]}" if row else ""
    axes = " x ".join(f"{k}={n}" for k, n in mesh.shape.items() if n > 1)
    lines[name] = (
      f"{mesh.size} {mesh.devices.flat[0].device_kind}"
      f" ({axes or 'no sharding'}){at}, each holds"
      f" {sharding.bytes_per_device(trees) / _GIB:.3f} GiB between phases"
    )
  if set(meshes[0].devices.flat) & set(meshes[1].devices.flat):
    lines["sampler"] += "; devices are shared with the trainer"
  return lines
