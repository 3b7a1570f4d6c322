"""Compiles a run for TPUs or GPUs without having them, to see if it fits.

    python scripts/compile.py --config=configs/vapo.py:qwen2.5-32b \
        --topology=v5p:4x4x4 [--config.KEY=VALUE ...] [--search]
    python scripts/compile.py --config=configs/grpo.py:one-gpu-1.5b \
        --topology=h100:1

Needs `pip install -e '.[tpu]'` or `'.[gpu]'`, but no device. Every program of
the run is compiled by the TPU or GPU compiler at its largest shapes, with the
meshes of the config on the devices of the topology. Prints, per device: bytes
of arguments and temporaries, as compiled and as estimated; the kernels that are
called; the bytes that each phase sends to other devices, by mesh axis; and
roofline seconds with the limiting resource. Times are predicted, never
measured. --search compiles nothing: it ranks meshes, micro-batches and
rematerialization policies by those times.

The model's shape is taken from config.model.path or, without one, from the
preset. Exit code 0 if everything fits, 1 if not, 2 for bad input.
"""

import os

# Before jax: this process needs no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import collections  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import types  # noqa: E402
from typing import Any  # noqa: E402

from absl import flags  # noqa: E402
from parts import command_line, program  # noqa: E402

_CONFIG = command_line.define_config(
  None, "METHOD:PRESET or FILE.py:PRESET; the preset names the model."
)
_TOPOLOGY = flags.DEFINE_string(
  "topology", "v5p:4x4x4", "TPUs as CHIP:AxB[xC], or GPUs as CHIP:COUNT."
)
_SEARCH = flags.DEFINE_bool("search", False, "Rank meshes; compile nothing.")
_MEAN = flags.DEFINE_float(
  "mean_response", 0.0, "Mean tokens; default: a quarter of the maximum."
)
_CACHE = flags.DEFINE_string(
  "cache", ".jax_cache/compiled", "Folder of cached compilation results."
)
if __name__ == "__main__":  # Before JAX, which takes seconds.
  command_line.answer_help(sys.argv)

import jax  # noqa: E402
from parts import dry_run, topology  # noqa: E402

from jaxrl_llm import models, sharding  # noqa: E402
from jaxrl_llm.errors import InputError  # noqa: E402
from jaxrl_llm.learner import core  # noqa: E402
from jaxrl_llm.metrics.chips import Chip  # noqa: E402
from jaxrl_llm.models.files import hf  # noqa: E402
from jaxrl_llm.system import files  # noqa: E402
from jaxrl_llm.tools.simulate import account, cost, hlo, mesh_search  # noqa: E402
from jaxrl_llm.tools.simulate.cost import Work  # noqa: E402
from jaxrl_llm.tools.simulate.models import MODELS  # noqa: E402
from jaxrl_llm.trainer import (  # noqa: E402
  build,
  meshes,
  model_fns,
  sampler,
  validation,
)

_NOTHING_FITS = (
  "by the estimate, the run fits on no mesh of these chips: use more or larger"
  " chips, or lower sampler.kv_pages or the maximum response length"
)
_GIB = 2.0**30


def model_of(config: Any, preset: str) -> models.ModelConfig:
  """Returns the shape of the model."""
  if config.model.path:
    return hf.read_config(config.model.path)
  if preset in MODELS:
    return MODELS[preset]
  raise InputError(
    f"preset {preset!r} has no model; give --config.model.path, or one of"
    f" {', '.join(MODELS)}"
  )


class Programs:
  """The lowered programs of a run, and the bytes that stay in memory."""

  def __init__(self, config, model, devices):
    # With its version, in the key of cached results.
    self.compiler = f"{jax.__version__} {devices[0].client.platform_version}"
    both = meshes.make_meshes(config, devices)
    algorithm = core.make_algorithm(config)
    fns, critic = model_fns.make_policy_fns(config, model, both), None
    if of := algorithm.critic:
      critic = model_fns.make_critic_fns(config, of, model, both)
    self.learner = build.make_learner(
      config, algorithm, fns, "", both.trainer, critic=critic
    )
    words = types.SimpleNamespace(stop_tokens=[0], decode=None)
    words.single_tokens = lambda *_: []
    engine = sampler.make_engine(
      config, fns, words, both.sampler, algorithm.processors
    )
    policy, critic = self.learner.policy, self.learner.critic
    whole = models.merge(policy.params)
    transfer = sampler.make_transfer(fns, whole, both)
    self.mesh = dict(both.trainer.shape)
    self.sampler_mesh = dict(both.sampler.shape)
    self.lowered = dry_run.lower_all(
      config, self.learner, engine, transfer.shapes
    )
    size = sharding.bytes_per_device
    shared = critic.base if critic and critic.shares_base else ()
    own = critic.base if critic and not critic.shares_base else ()
    self.kept = {
      "policy": size([policy.shapes, policy.base]),
      "value": size([critic.shapes, own]) if critic else 0,
      "sampler": size(transfer.shapes),
    }
    # Bytes of a base that policy and critic share; it is in memory once.
    self.shared = size(shared)
    # Bytes of the parameters that scoring receives.
    self.parameters = {"policy": size(whole)}
    self.parameters["value"] = size(critic.params) if critic else 0
    if "ref_logprobs" in self.learner.algorithm.leaves:
      self.kept["reference"] = size(policy.shapes.trained)


def compiled(
  name: str, lowered: Any, compiler: str, mesh: dict, loops: list[int]
) -> dict:
  """Compiles a program, or returns the cached result."""
  reader = pathlib.Path(hlo.__file__).read_text()
  settings = f"{compiler} {_TOPOLOGY.value} {mesh} {loops}"
  text = f"{settings} {reader} {lowered.as_text()}"
  key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
  file = pathlib.Path(_CACHE.value) / f"{key}.json"
  if file.exists():
    return json.loads(file.read_text())
  begun = time.perf_counter()
  try:
    done, text = topology.compiled(name, lowered, _TOPOLOGY.value)
  except jax.errors.JaxRuntimeError as error:
    return {"refused": str(error).splitlines()[0]}
  memory = done.memory_analysis()
  found = {
    "seconds": time.perf_counter() - begun,
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "sent": hlo.collectives(text, mesh, loops),
    "kernels": hlo.kernels(text),
  }
  file.parent.mkdir(parents=True, exist_ok=True)
  files.write_whole(file, json.dumps(found))
  return found


def report(config, model, programs: Programs, chip: Chip) -> bool:
  """Compiles the programs and prints a table; returns whether all fit."""
  sizes, written = (
    account.Sizes(config, model, mesh, _MEAN.value, chip.platform)
    for mesh in (programs.mesh, programs.sampler_mesh)
  )
  kept, fits = programs.kept, True
  held = ", ".join(f"{k} {v / _GIB:.2f}" for k, v in kept.items())
  print(f"resident GiB per device: {held}")
  table = program.Table(
    "program | compile s | arguments | temporaries | estimated | fits | kernels"
  )
  sent, kv_bytes, known = {}, 0.0, account.temporaries_by_program(sizes)
  # Decoding first: its KV cache stays in memory during all other programs.
  first = lambda item: item[0] != "sampler decode"
  for name, lowered in sorted(programs.lowered.items(), key=first):
    # One micro-batch; the head processes a row in chunks. A decode call has as
    # many steps as a page has tokens.
    chunk = sizes.head_chunk(sizes.micro_rows("policy"))
    loops = [1, -(-sizes.row // sizes.context // chunk)]
    loops = [sizes.page] if name == "sampler decode" else loops
    mesh = programs.sampler_mesh if "sampler" in name else programs.mesh
    found = compiled(name, lowered, programs.compiler, mesh, loops)
    if "refused" in found:
      table.row(name, *[""] * 4, f"no: {found['refused']}", "")
      fits = False
      continue
    role = "value" if name.endswith(("value", "values")) else "policy"
    if name == "sampler decode":
      kv_bytes = found["arguments"] - kept["sampler"]
    # Memory of other programs, in addition to this one's arguments.
    own = "sampler" if "sampler" in name else role
    total = sum(v for k, v in kept.items() if k != own)
    total += 0.0 if name == "sampler decode" else kv_bytes
    if "score" in name:
      total += kept[role] - programs.parameters[role]
    if name == "update value":
      total -= programs.shared
    total += sum(found[k] for k in ("arguments", "results", "temporaries"))
    fits &= total < chip.usable
    gib = [found["arguments"], found["temporaries"], known.get(name)]
    gib = ["" if x is None else f"{x / _GIB:.2f}" for x in gib]
    most = f"{total / _GIB:.1f} of {chip.usable / _GIB:.0f}"
    kernels = ", ".join(f"{k} x {n}" for k, n in found["kernels"].items())
    table.row(name, f"{found['seconds']:.0f}", *gib, most, kernels)
    sent[name] = [hlo.Sent(*each) for each in found["sent"]]
  print()
  work = _print_times(sizes, written, chip, sent)
  if len(sent) == len(programs.lowered):
    _print_step(sizes, chip, work)
  return fits


def _print_times(sizes, written, chip, sent) -> dict[str, tuple[Work, ...]]:
  """Prints and returns the work of the compiled programs."""
  work = account.work_by_program(sizes, written)
  table = program.Table(
    "program | TFLOP | GB moved | sent GB, by axis | estimated | s | bound"
  )
  for name in sorted(sent.keys() & work, key=list(work).index):
    calls = sizes.page if name == "sampler decode" else 1
    by_axis = collections.Counter()
    for each in sent[name]:
      by_axis["+".join(each.axes) or "-"] += each.bytes / calls
    *others, last = work[name]
    work[name] = (*others, last._replace(sent=by_axis.total()))
    seconds, bound = cost.bound(work[name], chip)
    flops, moved, _ = map(sum, zip(*work[name]))
    most = 1e-3 * max(by_axis.values(), default=0.0)
    named = {k: v for k, v in by_axis.items() if v >= most}
    axes = ", ".join(f"{k} {v / 1e9:.3g}" for k, v in named.items())
    numbers = flops / 1e12, moved / 1e9, last.sent / 1e9, seconds
    tflop, moved, sent_gb, seconds = (f"{x:.3g}" for x in numbers)
    table.row(name, tflop, moved, axes, sent_gb, seconds, bound)
  print("per micro-batch; decoding: per decode step\n")
  return work


def _print_step(sizes, chip, work) -> None:
  total = account.step_seconds(sizes, chip, work)
  parts = ", ".join(f"{k} {v:.4g}" for k, v in total.items())
  print(
    f"predicted: a step of {sizes.responses} responses of {sizes.response:.0f}"
    f" tokens takes {sum(total.values()):.4g} s ({parts}), decoding in"
    f" {sizes.decoding.steps:.0f} steps, including the longest responses"
  )
  shares = ", ".join(f"{k} {v:.0%}" for k, v in cost.SHARES._asdict().items())
  print(f"assumed shares of the manufacturer's figures: {shares}")


def _print_found(found: list[mesh_search.Fit]) -> None:
  table = program.Table(
    "mesh | sampler.mesh | micro-batch | remat | mu_dtype | GiB per device"
    " | s per step"
  )
  for fit in found[:10]:
    meshes = (" x ".join(map(str, x)) for x in (fit.mesh, fit.sampler_mesh))
    costs = f"{fit.memory / _GIB:.1f}", f"{fit.seconds:.4g}"
    settings = fit.micro_batch, fit.remat_policy, fit.mu_dtype
    table.row(*meshes, *settings, *costs)
  axes = " x ".join(sharding.AXES)
  print(f"{axes}, as estimated; nothing was compiled")


def check_flags() -> None:
  """Checks that --config is given."""
  if not _CONFIG.present:
    raise InputError("no --config; give --config=METHOD:PRESET, see --help")


@program.one_line
def main(_: list[str]) -> int:
  """Runs the command; returns its exit code."""
  config = _CONFIG.value
  preset = flags.FLAGS["config"].config_filename.partition(":")[2]
  validation.validate(config)
  longest = config.sampler.max_response_length
  if _MEAN.value and not 1 <= _MEAN.value <= longest:
    raise InputError(
      f"--mean_response={_MEAN.value:g}: must be in [1, {longest}], at most"
      " config.sampler.max_response_length"
    )
  chip, count = topology.parse(_TOPOLOGY.value)
  model = model_of(config, preset)
  if not _SEARCH.value:
    programs = Programs(config, model, topology.devices_of(_TOPOLOGY.value))
    if report(config, model, programs, chip):
      return 0
  found = mesh_search.search(config, model, count, chip, _MEAN.value)
  if _SEARCH.value:
    if not found:
      raise InputError(f"the run does not fit; {_NOTHING_FITS}")
    _print_found(found)
    return 0
  advice = f"by the estimate it fits with {found[0].flags()}" if found else ""
  print(
    f"compile: the run does not fit; {advice or _NOTHING_FITS}", file=sys.stderr
  )
  return 1


if __name__ == "__main__":
  command_line.run(lambda argv: sys.exit(main(argv)), check_flags)
