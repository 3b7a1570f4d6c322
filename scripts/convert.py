"""Exports a policy or critic of a training run as a Hugging Face directory.

  python scripts/convert.py --checkpoint=WORKDIR --out=DIR [--step=N|best]
      [--adapters | --critic] [--plugin=FILE.py]

DIR gets config.json, model.safetensors and the tokenizer's files, and can be
loaded by `transformers`, by `--config.model.path=DIR` and by
`models.load(DIR)`. For a run with model.lora_rank, --adapters writes only the
adapters, for PEFT; otherwise they are merged. --critic writes the critic, which
`transformers` loads as AutoModelForTokenClassification (the logit at a token is
V after it); `--config.value.init_from=DIR` starts another critic from it. A
custom model family needs its --plugin. Exit code 2 for bad input.

With AdamW's moments, training can continue in another framework, or here:

  python scripts/convert.py --checkpoint=WORKDIR --out=DIR --form=FORM
      [--step=N|best] [--critic]
  python scripts/convert.py --checkpoint=WORKDIR --take=DIR [--critic]

FORM is dcp (a torch distributed checkpoint), trl (a checkpoint of TRL and
other Trainers of transformers) or tunix. --take loads the state in DIR, in any
of these forms, into a run created with `--config.run.steps=0`; the run then
continues from it. See docs/foreign.md.
"""

import fcntl
import functools
import pathlib
import re
import sys

import jax
import numpy as np
from parts import program

from jaxrl_llm import api, checkpoint, models, workdir
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.system import plugin
from jaxrl_llm.tools import foreign


def convert(options) -> str:
  """Writes the directory; returns a one-line summary of its content.

  Raises:
    InputError: the run cannot be read, or the directory cannot be written.
  """
  _check(options)
  for file in options.plugin:
    plugin.load(file)
  source = pathlib.Path(options.checkpoint)
  if not source.is_dir():
    raise InputError(
      f"--checkpoint={source}: no such directory; give the --workdir of a run"
    )
  step = workdir.find_step(source, options.step)
  name = "critic" if options.critic else "policy"
  if options.take:
    return _take(source, name, options.take)
  if options.form:
    return _export(source, step, name, options)
  policy, facts = api.Policy(source, step), ""
  if options.adapters:
    name = "adapters"
    policy.save_adapters(options.out)
  elif options.critic:
    policy.save_critic(options.out, dtype=options.dtype)
  else:
    policy.save(options.out, dtype=options.dtype)
    count = models.num_params(policy.model_config)
    facts = f": {count:,} parameters, {options.dtype}"
  return f"wrote the {name} of step {step} to {options.out}{facts}"


def _check(options) -> None:
  """Checks that the flags can be combined.

  Raises:
    InputError: two flags exclude each other, or --out is empty.
  """
  if options.out == "":
    raise InputError("--out is empty; give a directory")
  chosen = [k for k in ("take", "form", "adapters") if getattr(options, k)]
  given = {
    "--adapters": options.adapters and chosen[0] != "adapters",
    "--dtype": options.dtype != "float32",
    "--form": options.form and options.take,
    "--step": options.step and options.take,
  }
  if chosen and any(given.values()):
    raise InputError(
      f"{next(filter(given.get, given))} cannot be combined with"
      f" --{chosen[0]}; leave one of them out"
    )


class _Part:
  """A model in a checkpoint of a run, with the state that `foreign` needs."""

  def __init__(self, run: pathlib.Path, step: int, name: str, items: str):
    config = workdir.read_config(run)
    group = "value" if name == "critic" else "policy"
    adapters = config["value" if name == "critic" else "model"].lora_rank
    self.settings = config.optimizer[group]
    if adapters or self.settings.frozen or self.settings.name != "adamw":
      raise InputError(
        f"{run}: does not train all parameters of the {name} with AdamW, so"
        " other frameworks cannot represent its state"
      )
    if name == "critic":
      fns, self.params = workdir.load_critic(run, step)
      self.model = fns.config, fns.head.outputs
    else:
      model, self.params = workdir.load_params(run, step)
      self.model = (model,)
    folder = run / "checkpoints" / str(step)
    self.items = checkpoint.load_whole(folder, items)
    self.trained = f"learner.{name}.trained"
    self.optimizer = self.items[f"learner.{name}.optimizer"]
    self.adam = self.optimizer["opt_state"][1][0]  # 0 is the clipping.


def _export(run: pathlib.Path, step: int, name: str, options) -> str:
  """Writes a model of a run with its moments, in a format of `foreign`."""
  out = pathlib.Path(options.out)
  part = _Part(run, step, name, f"learner.{name}.")
  if out.exists() and any(out.iterdir()):
    raise InputError(f"{out}: has files; choose another directory")
  if options.form == "trl":
    policy = api.Policy(run, step)
    (policy.save_critic if name == "critic" else policy.save)(out)
  adam, settings = part.adam, part.settings
  mu = jax.tree.map(np.float32, adam["mu"])
  state = foreign.ModelState(part.params, mu, adam["nu"], int(adam["count"]))
  adamw = {key: settings[key] for key in ("eps", "weight_decay")}
  adamw |= {"lr": settings.learning_rate, "betas": (settings.b1, settings.b2)}
  foreign.write(out, options.form, state, *part.model, **adamw)
  return f"wrote the {name} of step {step} with its moments to {out}"


def _take(run: pathlib.Path, name: str, source: str) -> str:
  """Loads a state in a format of `foreign` into a run without steps."""
  if workdir.steps(run) != [0]:
    raise InputError(
      f"{run}: has steps; create a run with --config.run.steps=0"
    )
  part = _Part(run, 0, name, "")
  for item in part.items:
    if re.fullmatch(r"learner\.(?!processor_states)\w+", item):
      raise InputError(
        f"{run}: has {item}, which depends on the policy; use another method"
      )
  state = foreign.read(source, *part.model)
  cast = lambda new, old: np.asarray(new, old.dtype)
  put = functools.partial(jax.tree.map, cast)
  part.items[part.trained] = put(state.params, part.items[part.trained])
  part.adam["mu"] = put(state.mu, part.adam["mu"])
  part.adam["nu"] = put(state.nu, part.adam["nu"])
  part.adam["count"] = part.optimizer["step"] = np.int32(state.step)
  busy = as_input_error(f"{run}: is being trained", "stop it", BlockingIOError)
  with busy, (run / "lock").open("a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    saver = checkpoint.Checkpointer(run / "checkpoints", keep=1)
    record = saver.record(0, "states", "facts")
    saver.save(0, part.items, {k: record[k] for k in ("states", "facts")})
    saver.close()
  for line in saver.new_errors():
    raise InputError(line)
  return f"{run} has the {name} of {source}, after {state.step} updates"


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--checkpoint", required=True, metavar="WORKDIR", help="folder of a run")
  where = parser.add_mutually_exclusive_group(required=True)
  where.add_argument("--out", metavar="DIR", help="directory to write")
  where.add_argument("--take", metavar="DIR", help="state to load into the run")
  add("--step", help="checkpoint, or 'best'; default: the newest")
  what = parser.add_mutually_exclusive_group()
  help_ = "write only the adapters, for PEFT"
  what.add_argument("--adapters", action="store_true", help=help_)
  help_ = "write or load the critic instead of the policy"
  what.add_argument("--critic", action="store_true", help=help_)
  help_ = "format of the directory; the moments are written too"
  add("--form", choices=foreign.FORMS, help=help_)
  help_ = "data type of the written weights; float32 is exact"
  add("--dtype", **program.DTYPE, help=help_)
  help_ = "Python file of custom parts; repeatable"
  add("--plugin", **program.REPEATED, metavar="FILE", help=help_)
  print(convert(parser.parse_args(arguments)))


if __name__ == "__main__":
  sys.exit(main())
