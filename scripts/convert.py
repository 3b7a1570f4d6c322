"""Exports a policy or critic of a training run as a Hugging Face directory.

  python scripts/convert.py --checkpoint=WORKDIR --out=DIR [--step=N|best]
      [--adapters | --critic]

DIR gets config.json, model.safetensors and the tokenizer's files, and is read
by `transformers`, by `--config.model.path=DIR` and by `models.load(DIR)`. Of a
run with model.lora_rank, --adapters writes the adapters alone, for PEFT;
otherwise they are merged. --critic writes the critic, which `transformers`
reads as AutoModelForTokenClassification (a logit is V after its token), and
`--config.value.init_from=DIR` starts another from it. Exit code 2 for bad
input.
"""

import pathlib
import sys

from parts import program

from jaxrl_llm import api, models, workdir
from jaxrl_llm.errors import InputError


def convert(options) -> str:
  """Writes the directory; returns a line that says what is in it.

  Raises:
    InputError: the run cannot be read or the directory not be written.
  """
  source = pathlib.Path(options.checkpoint)
  if not source.is_dir():
    raise InputError(
      f"--checkpoint={source}: no such directory; give the --workdir of a run"
    )
  policy = api.Policy(source, workdir.find_step(source, options.step))
  if options.adapters:
    policy.save_adapters(options.out)
    return f"wrote the adapters of step {policy.step} to {options.out}"
  if options.critic:
    policy.save_critic(options.out, dtype=options.dtype)
    return f"wrote the critic of step {policy.step} to {options.out}"
  policy.save(options.out, dtype=options.dtype)
  count = models.num_params(policy.model_config)
  return (
    f"wrote the policy of step {policy.step} to {options.out}: {count:,}"
    f" parameters, {options.dtype}"
  )


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  add = parser.add_argument
  add("--checkpoint", required=True, metavar="WORKDIR", help="of the run")
  add("--out", required=True, metavar="DIR", help="directory to write")
  add("--step", help="which checkpoint, or 'best'; the newest by default")
  what = parser.add_mutually_exclusive_group()
  help_ = "write them alone, for PEFT"
  what.add_argument("--adapters", action="store_true", help=help_)
  help_ = "write the critic instead of the policy"
  what.add_argument("--critic", action="store_true", help=help_)
  add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of the weights in the file; float32 is exact",
  )
  print(convert(parser.parse_args(arguments)))


if __name__ == "__main__":
  sys.exit(main())
