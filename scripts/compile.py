"""Compiles a run for TPUs that are not there, and says whether it fits.

    python scripts/compile.py --config=configs/vapo.py:qwen2.5-32b \
        --topology=v5p:4x4x4 [--config.KEY=VALUE ...] [--search]

Needs `pip install -e '.[tpu]'` and no TPU. Every program of the run is compiled
by the compiler for TPUs at its largest shapes, with the meshes of the config on
the devices of the topology. Prints, a device: bytes of arguments and
temporaries, as compiled and by the model's account; what each phase sends to
other devices, by axis of the mesh; and seconds by the roofline, with the bound
named. Times are predicted, never measured. --search compiles nothing: it ranks
meshes by those times.

The shape of the model is that of config.model.path or, without one, of the
preset. Exit code 0 if all fits, 1 if not, 2 for bad input.
"""

import os

# Before jax: this process needs no TPU, and there is none; nor need it be the
# only one that has loaded the library.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hashlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import types  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

from absl import flags  # noqa: E402
from parts import command_line  # noqa: E402

_CONFIG = command_line.define_config(
  None, "METHOD:PRESET or FILE.py:PRESET, whose model it is."
)
_TOPOLOGY = flags.DEFINE_string("topology", "v5p:4x4x4", "CHIP:AxB[xC].")
_SEARCH = flags.DEFINE_bool("search", False, "Rank meshes; compile nothing.")
_MEAN = flags.DEFINE_float(
  "mean_response", 0.0, "Tokens; a quarter of the longest by default."
)
_CACHE = flags.DEFINE_string(
  "cache", ".jax_cache/compiled", "Folder of what was found of programs."
)
if __name__ == "__main__":  # Before JAX, which takes seconds.
  command_line.answer_help(sys.argv)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from scaling import estimate, hlo  # noqa: E402

from jaxrl_llm import models, sharding  # noqa: E402
from jaxrl_llm.errors import InputError  # noqa: E402
from jaxrl_llm.learner.choices import has_critic  # noqa: E402
from jaxrl_llm.learner.lower import lower  # noqa: E402
from jaxrl_llm.metrics.chips import CHIPS, Chip  # noqa: E402
from jaxrl_llm.models import hf  # noqa: E402
from jaxrl_llm.models.shapes import MODELS  # noqa: E402
from jaxrl_llm.models.transformer import REMAT_POLICIES  # noqa: E402
from jaxrl_llm.train import build, meshes, sampler, validation  # noqa: E402

_NOTHING_FITS = (
  "no mesh of these chips holds this run by the account: take more or larger"
  " ones, or lower sampler.kv_pages or the longest response"
)
_GIB = 2.0**30
_TENSOR = (1, 2, 4, 8, 16)  # Sizes that a search tries.
_PHASES = {
  "sampler decode": "decode",
  "score log-probs": "score policy",
  "score values": "score value",
  "update policy": "update policy",
  "update value": "update value",
}


def model_of(config: Any, preset: str) -> models.ModelConfig:
  """The shape of the model."""
  if config.model.path:
    return hf.read_config(config.model.path)
  if preset in MODELS:
    return MODELS[preset]
  raise InputError(
    f"preset {preset!r} names no model; give --config.model.path, or one of"
    f" {', '.join(MODELS)}"
  )


def chip_of(topology: str) -> Chip:
  """The chip of a topology."""
  name = topology.partition(":")[0]
  if name not in CHIPS:
    raise InputError(
      f"--topology={topology}: choose a chip of {', '.join(CHIPS)}, such"
      " as v5p:4x4x4"
    )
  return CHIPS[name]


def devices_of(topology: str) -> list[Any]:
  """Descriptions of its devices."""
  try:
    described = topologies.get_topology_desc(
      platform="tpu", topology_name=topology
    )
  except Exception as error:  # libtpu fails or is missing.
    reason = str(error).strip().splitlines()[0][:200]
    raise InputError(
      f"--topology={topology}: {reason}; is it one that exists, and is libtpu"
      " installed (pip install -e '.[tpu]')?"
    ) from error
  return list(described.devices)


class Programs:
  """The programs of a run, lowered, and what stays in memory beside them."""

  def __init__(self, config, model, devices):
    both = meshes.make_meshes(config, devices)
    fns = build.make_fns(config, model, both)
    self.learner = build.make_learner(config, fns, "", both.trainer)
    words = types.SimpleNamespace(
      single_tokens=lambda *_: [], stop_tokens=[0], decode=None
    )
    engine = sampler.make_engine(config, fns[0], words, both.sampler)
    policy, critic = self.learner.policy, self.learner.critic
    whole = models.merge(policy.params)
    transfer = sampler.make_transfer(fns[0], whole, both)
    self.mesh = dict(both.trainer.shape)
    self.sampler_mesh = dict(both.sampler.shape)
    self.lowered = engine.lower(
      transfer.shapes,
      prompts=engine.prompts_at_a_time(config.data.group_size),
      window=config.schedule.window > 0,
    ) | lower(self.learner)
    self.kept = {
      "policy": estimate.held([policy.shapes, policy.base]),
      "value": estimate.held(critic and [critic.shapes, critic.base]),
      "sampler": estimate.held(transfer.shapes),
    }
    # The part of it that scoring receives.
    self.parameters = {
      "policy": estimate.held(whole),
      "value": estimate.held(critic.params) if critic else 0.0,
    }
    if "ref_logprobs" in self.learner.algorithm.leaves:
      self.kept["reference"] = estimate.held(policy.shapes.trained)


def compiled(name: str, lowered: Any, mesh: dict, loops: list[int]) -> dict:
  """Compiles a program, or returns the cached result."""
  reader = pathlib.Path(hlo.__file__).read_text()
  key = hashlib.blake2b(
    f"{jax.__version__} {mesh} {loops} {reader} {lowered.as_text()}".encode(),
    digest_size=12,
  ).hexdigest()
  file = pathlib.Path(_CACHE.value) / f"{key}.json"
  if file.exists():
    return json.loads(file.read_text())
  begun = time.perf_counter()
  try:
    done, text = hlo.compiled(name, lowered)
  except jax.errors.JaxRuntimeError as error:
    return {"refused": str(error).splitlines()[0]}
  memory = done.memory_analysis()
  found = {
    "seconds": time.perf_counter() - begun,
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "sent": hlo.collectives(text, mesh, loops),
  }
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(found))
  return found


def report(config, model, programs: Programs, chip: Chip) -> bool:
  """Compiles and prints; returns whether everything fits."""
  sizes, written = (
    estimate.Sizes(config, model, mesh, _MEAN.value)
    for mesh in (programs.mesh, programs.sampler_mesh)
  )
  kept, fits = programs.kept, True
  held = ", ".join(f"{k} {v / _GIB:.2f}" for k, v in kept.items())
  print(f"GiB a device that stays: {held}")
  print("| program | compile s | arguments | temporaries | by account | fits |")
  print("|---|---|---|---|---|---|")
  sent, kv_bytes, account = {}, 0.0, estimate.account(sizes)
  for name, lowered in programs.lowered.items():
    # A micro-batch; the head goes over a row in chunks.
    loops = [1, -(-sizes.row // config.model.head_chunk)]
    mesh = programs.sampler_mesh if "sampler" in name else programs.mesh
    found = compiled(name, lowered, mesh, loops)
    if "refused" in found:
      print(f"| {name} | | | | | no: {found['refused']} |", flush=True)
      fits = False
      continue
    role = "value" if name.endswith(("value", "values")) else "policy"
    if name == "sampler decode":
      kv_bytes = found["arguments"] - kept["sampler"]
    # Memory of other programs, in addition to this one's arguments.
    own = {"policy", "value"} & {role} if "sampler" not in name else {"sampler"}
    own |= {"decode"} if name == "sampler decode" else set()
    others = sum(v for k, v in kept.items() if k not in own)
    others += 0.0 if name == "sampler decode" else kv_bytes
    if "score" in name:
      others += kept[role] - programs.parameters[role]
    total = sum(found[k] for k in ("arguments", "results", "temporaries"))
    total += others
    fits &= total < chip.memory
    known = f"{account[name] / _GIB:.2f}" if name in account else ""
    print(
      f"| {name} | {found['seconds']:.0f} | {found['arguments'] / _GIB:.2f} |"
      f" {found['temporaries'] / _GIB:.2f} | {known} |"
      f" {total / _GIB:.1f} of {chip.memory / _GIB:.0f} |",
      flush=True,
    )
    sent[name] = [hlo.Sent(*each) for each in found["sent"]]
  print()
  work = _print_times(sizes, written, chip, sent)
  if len(sent) == len(programs.lowered):
    _print_step(sizes, chip, work)
  return fits


def _print_times(sizes, written, chip, sent) -> dict[str, estimate.Work]:
  """Prints what the phases do that were compiled, and returns it."""
  known = {
    "decode": estimate.decoding(written),
    "score policy": estimate.scoring(sizes, "policy"),
    "score value": estimate.scoring(sizes, "value"),
    "update policy": estimate.updating(sizes, "policy"),
    "update value": estimate.updating(sizes, "value"),
  }
  work = {}
  print("| phase | TFLOP | sent GB, by axis | by account | s | bound |")
  print("|---|---|---|---|---|---|")
  for name, phase in _PHASES.items():
    if name not in sent:
      continue
    # A call of decoding is as many steps as a page has tokens.
    calls = sizes.page if phase == "decode" else 1
    own, by_axis = known[phase], {}
    for each in sent[name]:
      axes = "+".join(each.axes) or "-"
      by_axis[axes] = by_axis.get(axes, 0.0) + each.bytes / calls
    work[phase] = estimate.Work(own.flops, own.moved, sum(by_axis.values()))
    seconds, bound = work[phase].bound(chip)
    axes = ", ".join(f"{k} {v / 1e9:.3g}" for k, v in by_axis.items())
    print(
      f"| {phase} | {own.flops / 1e12:.3g} | {axes} | {own.sent / 1e9:.3g} |"
      f" {seconds:.3g} | {bound} |"
    )
  print("of a micro-batch, of decoding of a step\n")
  return work


def _print_step(sizes, chip, work) -> None:
  total = estimate.step_seconds(sizes, chip, work)
  parts = ", ".join(f"{k} {v:.0f}" for k, v in total.items())
  print(
    f"predicted: a step of {sizes.responses} responses of {sizes.response:.0f}"
    f" tokens takes {sum(total.values()):.0f} s ({parts}); MFU of the updates"
    f" {estimate.mfu(sizes, chip, total):.0%}"
  )
  shares = ", ".join(f"{k} {v:.0%}" for k, v in estimate.REACHED.items())
  print(f"assumed shares of what the maker states: {shares}")


def search(config, model, topology: str, chip: Chip) -> list[estimate.Fit]:
  """Meshes of learner and sampler that fit, and what goes with them."""
  count = 1
  for side in topology.partition(":")[2].split("x"):
    count *= int(side)
  found = []
  for own in {count, count // 4, count // 2, count - count // 4} - {0}:
    # The sampler has the same devices, or those that the learner leaves.
    free = count if own == count else count - own
    samplers = [_sampler(config, model, mesh) for mesh in _meshes(model, free)]
    for mesh in _meshes(model, own, contexts=(1, 2, 4, 8)):
      found += _best(config, model, mesh, samplers, chip, apart=own < count)
  return sorted(found)


def _print_found(found: list[estimate.Fit]) -> None:
  print(
    "| mesh | sampler.mesh | micro-batch | remat | GiB a device | s a step |"
  )
  print("|---|---|---|---|---|---|")
  name = lambda mesh: " x ".join(map(str, mesh))
  for fit in found[:10]:
    print(
      f"| {name(fit.mesh)} | {name(fit.sampler_mesh)} | {fit.micro_batch} |"
      f" {fit.remat_policy} | {fit.memory / _GIB:.1f} | {fit.seconds:.0f} |"
    )
  axes = " x ".join(sharding.AXES)
  print(f"{axes}, by the model's account; nothing was compiled")


def _meshes(
  model: models.ModelConfig, count: int, contexts: Sequence[int] = (1,)
) -> list[dict[str, int]]:
  """Meshes of so many devices."""
  factors = itertools.product((1, 2, 4, 8, 16, 32, 64), contexts, _TENSOR)
  return [
    dict(zip(sharding.AXES, (data, count // rest, context, tensor)))
    for data, context, tensor in factors
    if count % (rest := data * context * tensor) == 0
    and model.num_heads % tensor == 0
  ]


def _sampler(config, model, mesh) -> tuple[float, estimate.Sizes, Any]:
  """(bytes, sizes, work) of a sampler."""
  sizes = estimate.Sizes(config, model, mesh, _MEAN.value)
  pages = config.sampler.kv_pages * sizes.page or (
    sizes.slots * 4 * (sizes.prompt + sizes.response)
  )
  memory = 2 * sizes.parameters / (sizes.shards * sizes.tensor)
  memory += pages * sizes.kv_token / sizes.kv_ways
  return memory, sizes, estimate.decoding(sizes)


def _best(config, model, mesh, samplers, chip, *, apart) -> list[estimate.Fit]:
  """The fastest with a mesh of the learner, if any fits."""
  config = config.copy_and_resolve_references()
  ways = mesh["data"] * mesh["fsdp"]
  roles = ["policy", "value"] if has_critic(config) else ["policy"]
  for role in roles:
    config.optimizer[role].micro_batch_size = ways
  sizes, found = estimate.Sizes(config, model, mesh, _MEAN.value), []
  each = sizes.parameters / (sizes.shards * sizes.tensor)
  kept = sum(
    (8 + jnp.dtype(config.optimizer[role].mu_dtype).itemsize) * each
    for role in roles
  )
  for policy in REMAT_POLICIES:
    config.model.remat_policy = policy
    parts = estimate.temporaries(sizes, "policy", update=True)
    own, work = kept + sum(parts.values()), {}
    for role in roles:
      work[f"score {role}"] = estimate.scoring(sizes, role)
      work[f"update {role}"] = estimate.updating(sizes, role)
    for held, written, decoding in samplers:
      memory = max(held, own) if apart else held + own
      if memory >= chip.memory:
        continue
      seconds = estimate.step_seconds(sizes, chip, work | {"decode": decoding})
      decode = seconds.pop("decode")
      train = sum(seconds.values())
      # Apart and a batch behind, they work at the same time.
      at_once = apart and config.schedule.lag
      total = max(decode, train) if at_once else decode + train
      of = lambda mesh: tuple(mesh[axis] for axis in sharding.AXES)
      fit = estimate.Fit(
        total, memory, of(mesh), of(written.mesh), ways, policy
      )
      found.append(fit)
  return [min(found)] if found else []


def check_flags() -> None:
  """Refuses flags that lack others."""
  if not _CONFIG.present:
    raise InputError("no --config; give --config=METHOD:PRESET, see --help")


def main(_: list[str]) -> int:
  """Runs the command; returns its exit code."""
  try:
    config = _CONFIG.value
    preset = flags.FLAGS["config"].config_filename.partition(":")[2]
    validation.validate(config)
    chip = chip_of(_TOPOLOGY.value)
    model = model_of(config, preset)
    if _SEARCH.value:
      found = search(config, model, _TOPOLOGY.value, chip)
      if not found:
        raise InputError(f"it does not fit; {_NOTHING_FITS}")
      _print_found(found)
      return 0
    programs = Programs(config, model, devices_of(_TOPOLOGY.value))
    if report(config, model, programs, chip):
      return 0
    found = search(config, model, _TOPOLOGY.value, chip)
  except InputError as error:
    print(f"compile: {error}", file=sys.stderr)
    return 2
  advice = f"by the account it does with {found[0].flags()}" if found else ""
  print(f"compile: it does not fit; {advice or _NOTHING_FITS}", file=sys.stderr)
  return 1


if __name__ == "__main__":
  command_line.run(lambda argv: sys.exit(main(argv)), check_flags)
