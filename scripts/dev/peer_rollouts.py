"""Times `generate` of transformers on the workload of `benchmark.py rollouts`.

  PYTHON scripts/dev/peer_rollouts.py [--shape=tiny] [--batches=8]

PYTHON is an interpreter with transformers and torch; this project need not be
installed there. Weights are random; prompts and lengths are those of
`benchmark.py rollouts`. Responses are decoded in static batches of 64, up to
the longest response of each batch; tokens after the end of a response do not
count. Each batch runs once as a warm-up and once timed. --batches limits the
number of batches. The last line is a JSON object.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "scripts")]

from benchmarks import peers, tail  # noqa: E402
from parts import program  # noqa: E402

# (prompts int [B, P], n) -> None; generates n tokens for every row.
Decode = Callable[[np.ndarray, int], None]


def make_decode(fields: dict[str, int], longest: int) -> Decode:
  """Returns `generate` of transformers, with its default cache."""
  import torch
  import transformers

  config = transformers.Qwen2Config(
    num_hidden_layers=fields["num_layers"],
    hidden_size=fields["hidden_size"],
    intermediate_size=fields["intermediate_size"],
    num_attention_heads=fields["num_heads"],
    num_key_value_heads=fields["num_kv_heads"],
    vocab_size=fields["vocab_size"],
    max_position_embeddings=longest,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
  )
  torch.manual_seed(0)
  device = "cuda" if torch.cuda.is_available() else "cpu"
  make = transformers.AutoModelForCausalLM.from_config
  model = make(config, dtype=torch.float32).eval().to(device)

  def decode(prompts, count):
    tokens = torch.as_tensor(prompts, device=device)
    with torch.no_grad():
      model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
      )

  return decode


def measure(decode: Decode, options) -> dict[str, float]:
  """Measures tokens per second over the batches, without compilation."""
  limits = tail.lengths(options).reshape(-1)
  prompts = np.asarray(tail.prompts(options.prompts, options))
  prompts = np.repeat(prompts, options.group_size, axis=0)
  starts = range(0, len(limits), options.batch)[: options.batches]
  tokens, seconds = 0, 0.0
  for start in starts:
    rows = slice(start, start + options.batch)
    count = int(limits[rows].max())
    decode(prompts[rows], count)
    begun = time.perf_counter()
    decode(prompts[rows], count)
    seconds += time.perf_counter() - begun
    tokens += int(limits[rows].sum())
    print(f"{tokens} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)
  return {
    "tokens_per_s": tokens / seconds,
    "tokens": tokens,
    "wall_s": seconds,
    "batches": len(starts),
  }


def main() -> int:
  """Runs the command; returns its exit code."""
  parser = program.make_parser(__doc__)
  tail.add_flags(parser)
  help_ = "number of batches to time; default: all"
  parser.add_argument("--batches", type=int, help=help_)
  parser.set_defaults(batch=64, group_size=8, new_tokens=768)
  options = parser.parse_args()
  fields = peers.SHAPES[options.shape]
  longest = options.prompt_length + options.new_tokens
  decode = make_decode(fields, longest)
  print(json.dumps({"shape": options.shape} | measure(decode, options)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
