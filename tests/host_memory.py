"""Program of tests/host_memory_test.py: measures a batch's host memory.

    python tests/host_memory.py

Runs a step of VAPO with responses of random tokens and models that compute
nothing. Host and devices share no arrays, as with an accelerator. Prints bytes
per token slot (responses times maximum length): the peak of host arrays, and
the inputs of the losses on the devices of this process.
"""

import dataclasses
import mmap
import pathlib
import sys
import tempfile
import tracemalloc
import types

import jax
import numpy as np
from absl import app, flags

_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT / "scripts"), str(_ROOT / "scripts" / "dev")]

from helpers import tiny_run  # noqa: E402

from jaxrl_llm import metrics, register  # noqa: E402
from jaxrl_llm.learner import packing, scorer  # noqa: E402
from jaxrl_llm.models import TokenLogprobs  # noqa: E402
from jaxrl_llm.sampling import EngineStats  # noqa: E402
from jaxrl_llm.system import processes  # noqa: E402
from jaxrl_llm.trainer import loop  # noqa: E402
from jaxrl_llm.types import Status, join_rows  # noqa: E402

_COORDINATOR = flags.DEFINE_string("coordinator", "", "")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "")
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "")
_PATIENCE_S = flags.DEFINE_integer("patience_s", 60, "")
_ROWS = flags.DEFINE_integer("rows", 128, "Responses of the batch.")
_LENGTH = flags.DEFINE_integer("length", 2048, "Most tokens of a response.")


class Writer:
  """An engine that writes random tokens into a quarter of the token slots."""

  def __init__(self, fns, config, tokenizer):
    self.config, self.stats = config, EngineStats()

  def generate_window(self, params, requests, *, version, **_):
    rows = join_rows([requests])
    for i, number in enumerate(rows.sample_id.tolist()):
      rng = np.random.default_rng(number)
      length = int(rng.integers(8, rows.tokens.shape[1] // 2))
      rows.tokens[i, :length] = rng.integers(2, 12, length)
      rows.behavior_logprobs[i, :length] = -2.5
      rows.version[i, :length], rows.mask[i, :length] = version, True
      rows.lengths[i], rows.status[i] = length, int(Status.FINISHED)
    return rows


def make_run(folder):
  """Makes a run whose models return zeros."""
  register.engine("writer", Writer)
  sizes = dataclasses.replace(
    tiny_run.model_config(), max_position_embeddings=1 << 20
  )
  tiny_run.model_config = lambda: sizes
  changes = {
    "sampler.engine": "writer",
    "sampler.max_response_length": _LENGTH.value,
    "sampler.parity_check_every": 0,
    "data.prompts_per_step": _ROWS.value // 8,
    "data.group_size": 8,
    "mesh.data": 8,
  }
  for role in ("policy", "value"):
    changes[f"optimizer.{role}.mini_batch"] = _ROWS.value // 8
    changes[f"optimizer.{role}.micro_batch_size"] = 8
  changes = {key.replace(".", "__"): x for key, x in changes.items()}
  run = tiny_run.make_run(tiny_run.write_model(folder / "model"), **changes)
  update = lambda state, *_, base: (state, {"policy/skipped": 0.0})
  members = {
    name: dataclasses.replace(
      member, update=member.update._replace(whole=update)
    )
    for name, member in run.learner.members.items()
  }
  learner = dataclasses.replace(run.learner, members=members)

  def score(state, name, batch, trained=None):
    zeros = lambda: np.zeros(batch.packed.tokens.shape, np.float32)
    if name == "critic":
      return {"values": zeros()}
    return TokenLogprobs(zeros(), zeros())

  vars(learner)["score"] = score
  return dataclasses.replace(run, learner=learner)


def put(tree, places):
  """Like `processes.put`, but into memory that is not traced."""

  def apart(x):
    memory = mmap.mmap(-1, max(x.nbytes, 1))
    copy = np.frombuffer(memory, x.dtype, x.size).reshape(x.shape)
    np.copyto(copy, x)
    return copy

  def put_one(x, place):
    x = np.asarray(x)
    part = lambda index: apart(x[index])
    return jax.make_array_from_callback(x.shape, place, part, dtype=x.dtype)

  if isinstance(places, jax.sharding.Sharding):
    return jax.tree.map(lambda x: put_one(x, places), tree)
  return jax.tree.map(put_one, tree, places)


def main(_):
  if _COORDINATOR.value:
    given = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    processes.connect(*given, patience_s=_PATIENCE_S.value)
  to_host = processes.to_host
  own = lambda x: np.require(x, requirements="O")
  processes.to_host = lambda tree: jax.tree.map(own, to_host(tree))
  packing.processes = scorer.processes = types.SimpleNamespace(
    **vars(processes) | {"put": put}
  )
  on_devices = []

  def scored(batch):
    arrays = jax.tree.leaves([arrays for arrays, _ in batch.experience.parts])
    shards = [s.data.nbytes for x in arrays for s in x.addressable_shards]
    on_devices.append(sum(shards))

  with tempfile.TemporaryDirectory() as folder:
    run = make_run(pathlib.Path(folder))
    (states, weights), timer = loop.begin(run), metrics.PhaseTimer()
    given = loop.sampled_with(run, states, weights)
    for _ in range(2):  # The first step compiles.
      tracemalloc.stop()
      tracemalloc.start()
      collected = run.worker.collect(
        states.rollout, states.source, given, timer
      )
      peaks = [tracemalloc.get_traced_memory()[1]]
      responses = collected.batch.responses
      run.learner.update(states.learner, responses, timer, scored)
      peaks.append(tracemalloc.get_traced_memory()[1])
  slots = _ROWS.value * _LENGTH.value
  found = [x / slots for x in (*peaks, on_devices[-1])]
  print("rollout {:.1f}, step {:.1f}, devices {:.1f}".format(*found))


if __name__ == "__main__":
  app.run(main)
