"""Exports the policy of a training run as a Hugging Face model directory.

  python scripts/convert.py --checkpoint=WORKDIR --out=DIR [--step=N|best]

DIR gets config.json, model.safetensors and the tokenizer's files, and is read
by `transformers`, by `--config.model.path=DIR` and by `models.load(DIR)`. Exit
code 2 for bad input.
"""

import pathlib
import sys

import jax
from parts import program

from jaxrl_llm import base_models, models, workdir
from jaxrl_llm.errors import InputError


def convert(options) -> str:
  """Writes the directory; returns a line that says what is in it.

  Raises:
    InputError: the run cannot be read or the directory not be written.
  """
  source, out = pathlib.Path(options.checkpoint), pathlib.Path(options.out)
  if not source.is_dir():
    raise InputError(
      f"--checkpoint={source}: no such directory; give the --workdir of a run"
    )
  policy = workdir.load_policy(source, step=options.step)
  base = base_models.model_path(workdir.read_config(source))
  taken = [pathlib.Path(p).resolve() for p in (base, policy.model_path)]
  if out.resolve() in taken:
    raise InputError(
      f"--out={out} is the model that the run started from; choose another"
      " directory"
    )
  params = jax.tree.map(lambda x: x.astype(options.dtype), policy.params)
  models.save(out, policy.fns, params, tokenizer_from=policy.model_path)
  count = models.num_params(policy.fns.config)
  return (
    f"wrote the policy of step {policy.step} to {out}: {count:,} parameters,"
    f" {options.dtype}"
  )


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--checkpoint", required=True, metavar="WORKDIR", help="of the run")
  add("--out", required=True, metavar="DIR", help="directory to write")
  add("--step", help="which checkpoint, or 'best'; the newest by default")
  add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of the weights in the file; float32 is exact",
  )
  print(convert(parser.parse_args(arguments)))


if __name__ == "__main__":
  sys.exit(main())
