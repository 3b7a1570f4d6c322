"""Times another library on the work of `benchmark.py rollouts`.

  PYTHON scripts/dev/peer_rollouts.py hf [--shape=tiny] [--batches=8]
  PYTHON scripts/dev/peer_rollouts.py tunix

PYTHON has the library (transformers with torch, or google-tunix); this project
need not be installed there. Weights are random, prompts and lengths those of
`benchmark.py rollouts`. Static batches of 64 responses are decoded, each to its
longest; only the tokens of the responses count, not those written past their
ends. A batch runs once to compile and once timed. --batches times the first few
batches only. The last line is a JSON object.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "scripts")]

from benchmarks import peers, static_batches, tail  # noqa: E402


def measure(decode: static_batches.Decode, options) -> dict[str, float]:
  """Tokens per second over the batches, each compiled before."""
  fields = peers.SHAPES[options.shape].fields
  limits = tail.long_tail(
    options.prompts,
    options.group_size,
    median=options.median,
    p99=options.p99,
    longest=options.new_tokens,
  ).reshape(-1)
  size = (options.prompts, options.prompt_length)
  rng = np.random.default_rng(0)
  prompts = rng.integers(2, fields["vocab_size"], size)
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
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("peer", choices=static_batches.DECODERS)
  add("--shape", default="tiny", choices=peers.SHAPES)
  add("--prompts", type=int, default=64)
  add("--group_size", type=int, default=8)
  add("--batch", type=int, default=64, help="responses decoded at a time")
  add("--batches", type=int, help="the first so many; all by default")
  add("--prompt_length", type=int, default=64)
  add("--new_tokens", type=int, default=768, help="most of a response")
  add("--median", type=int, default=64)
  add("--p99", type=int, default=512)
  options = parser.parse_args()
  fields = peers.SHAPES[options.shape].fields
  longest = options.prompt_length + options.new_tokens
  decode = static_batches.DECODERS[options.peer](fields, longest)
  print(json.dumps({"shape": options.shape} | measure(decode, options)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
