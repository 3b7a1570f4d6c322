"""Makes and damages files of every kind that is read from outside.

    PYTHONPATH=.:tests:scripts/dev python tests/bad_inputs/mutants.py 20000

Mutants are read as in a run: they must be read or rejected with one printable
line; anything else is a bug.
"""

import collections
import contextlib
import copy
import json
import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import chat_model, configs, tiny_run

from jaxrl_llm import checkpoint, metrics, models, workdir
from jaxrl_llm.data import rows
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.files import hf

_LONGEST_S = 20  # Per reader; a longer time counts as a hang.
_VALUES = (
  *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308),
  *("", "1", "a", "..", "/etc/passwd", "\x00", "\ud800", "x" * 10_000),
  *([], {}, [[]], [None], {"a": None}),
)


class Target(NamedTuple):
  """A file and its reader."""

  file: str  # Path in the folder of intact files.
  read: Callable[[pathlib.Path], Any]  # Takes that folder.


def _read_model(folder: pathlib.Path) -> None:
  config = hf.read_config(folder / "model")
  hf.read_params(folder / "model", config, dtype=np.float32)


def _read_shards(folder: pathlib.Path) -> None:
  config = hf.read_config(folder / "shards")
  hf.read_params(folder / "shards", config, dtype=np.float32)


def _read_tokenizer(folder: pathlib.Path) -> None:
  tokenizer = Tokenizer(folder / "chat")
  tokenizer.check_model(1000)
  tokenizer.encode("12+3?")
  tokenizer.apply_chat([{"role": "user", "content": "1+2?"}])


def _read_checkpoint(folder: pathlib.Path) -> None:
  target = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = jax.tree.map(lambda s: s.update(sharding=sharding), target)
  checkpoint.load_tree(folder / "tree", target)


TARGETS = (
  *(
    Target(f"model/{name}", _read_model)
    for name in ("config.json", "model.safetensors")
  ),
  *(
    Target(f"shards/{name}", _read_shards)
    for name in ("model.safetensors.index.json", "config.json")
  ),
  *(
    Target(f"chat/{name}", _read_tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
  ),
  Target("data.jsonl", lambda f: rows.read_examples(f"{f}/data.jsonl")),
  Target("run/config.json", lambda f: workdir.read_config(f / "run")),
  Target("run/config_changes.jsonl", lambda f: workdir.read_config(f / "run")),
  Target(
    "run/metrics.jsonl", lambda f: metrics.read_rows(f / "run/metrics.jsonl")
  ),
  Target("tree/COMMIT", _read_checkpoint),
)


def write_sound(folder: pathlib.Path) -> None:
  """Writes intact files of all targets."""
  tiny_run.write_model(folder / "model")
  fns = models.make_policy(tiny_run.model_config())
  params = jax.jit(fns.init)(jax.random.key(0))
  hf.write_params(
    folder / "shards", tiny_run.model_config(), params, max_shard_bytes=9000
  )
  chat_model.write(folder / "chat")
  (folder / "data.jsonl").write_text(
    '{"question": "1+1?", "answer": "2", "id": "a"}\n'
    '{"messages": [{"role": "user", "content": "1+2?"}], "answer": 3}\n'
    '{"prompt": "2+2?", "reward_model": {"ground_truth": "4"}}\n'
  )
  run = folder / "run"
  run.mkdir()
  config = configs.load("vapo")
  (run / "config.json").write_text(json.dumps(config.to_dict(), default=str))
  change = {"step": 3, "changes": {"run.steps": [40, 80]}}
  (run / "config_changes.jsonl").write_text(json.dumps(change) + "\n")
  lines = [
    json.dumps({"step": i, "time": 1.5 * i, "x/y": i / 3}) for i in range(4)
  ]
  (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  checkpoint.save_tree(folder / "tree", {"x": jnp.arange(3, dtype=jnp.float32)})
  for target in TARGETS:
    target.read(folder)


def mutate(rng: random.Random, data: bytes) -> bytes:
  """Damages bytes or, in JSON, a value."""
  lines = data.split(b"\n")
  place = rng.randrange(len(lines))
  with contextlib.suppress(ValueError):
    if rng.random() < 0.5:
      if rng.random() < 0.5:
        return _mutate_json(rng, data)
      lines[place] = _mutate_json(rng, lines[place])
      return b"\n".join(lines)
  start = rng.randrange(len(data))
  end = min(len(data), start + rng.choice([1, 1, 2, 8, 100, 10_000]))
  kind = rng.randrange(5)
  if kind == 0:
    return data[:start]
  if kind == 1:
    return data[:start] + data[end:]
  if kind == 2:
    return data[:end] + data[start:]
  if kind == 3:
    return data[:start] + rng.randbytes(end - start) + data[end:]
  flipped = bytes([data[start] ^ 1 << rng.randrange(8)])
  return data[:start] + flipped + data[start + 1 :]


def _mutate_json(rng: random.Random, text: bytes) -> bytes:
  value = json.loads(text)
  if not (isinstance(value, dict | list) and value):
    raise ValueError("nothing in it")
  inner = [value]
  for part in inner:  # Grows: all containers.
    children = part.values() if isinstance(part, dict) else part
    inner += [x for x in children if isinstance(x, dict | list) and x]
  part = rng.choice(inner)
  keys = list(part) if isinstance(part, dict) else range(len(part))
  key = rng.choice(list(keys))
  kind = rng.randrange(4)
  if kind == 0:
    del part[key]
  elif kind == 1 and isinstance(part, dict):
    part[rng.choice(["", "a", "__class__", key + " "])] = part.pop(key)
  elif kind == 2:
    deep = copy.deepcopy(part[key])
    for _ in range(rng.choice([1, 3, 200])):
      deep = [deep]
    part[key] = deep
  else:
    part[key] = rng.choice(_VALUES)
  return json.dumps(value).encode()


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
  def late(*_):
    raise TimeoutError(f"a reader takes longer than {_LONGEST_S} s")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(_LONGEST_S)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fuzz(
  folder: pathlib.Path, count: int, seed: int = 0
) -> dict[str, collections.Counter]:
  """Reads mutants of intact files; returns counts of results by file.

  Raises:
    AssertionError: A reader raised another error, or one of several lines.
  """
  outcomes = collections.defaultdict(collections.Counter)
  for number in range(count):
    rng = random.Random(f"{seed} {number}")
    target = TARGETS[number % len(TARGETS)]
    file = folder / target.file
    sound = file.read_bytes()
    mutant = mutate(rng, sound)
    file.write_bytes(mutant)
    try:
      with _in_time():
        target.read(folder)
      outcome = "read"
    except InputError as error:
      outcome = "refused"
      said = str(error)
      fine = said.isprintable() and 10 < len(said) < 2000
      assert fine, f"mutant {number} of {target.file}: {said!r}"
    except Exception as error:
      raise AssertionError(
        f"mutant {number} (seed {seed}) of {target.file}: {error!r}"
      ) from error
    finally:
      file.write_bytes(sound)
    outcomes[target.file][outcome] += 1
  return dict(outcomes)


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as directory:
    write_sound(pathlib.Path(directory))
    for name, counts in fuzz(pathlib.Path(directory), int(sys.argv[1])).items():
      print(f"| {name} | {counts['refused']:,} | {counts['read']:,} |")
