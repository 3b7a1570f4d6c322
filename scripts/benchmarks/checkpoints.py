"""Benchmarks checkpoints: saving, checksums, restoring, concurrent steps."""

import concurrent.futures
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from benchmarks import summary

from jaxrl_llm import checkpoint, digest

Samples = dict[str, list[float]]
_LEAVES = 24  # Eight stacked kernels each for the model and its two moments.


def measure_checkpoint(options) -> Samples:
  """Compares our checkpoints with Orbax's own asynchronous ones.

  Orbax's have neither checksums nor a check of the free space of the disk, and
  are not flushed to it.
  """
  side = int((options.megabytes * 1e6 / 4 / _LEAVES) ** 0.5)
  keys = jax.random.split(jax.random.key(0), _LEAVES)
  draw = jax.jit(lambda key: jax.random.normal(key, (side, side)))
  trees = {"state": {str(i): draw(key) for i, key in enumerate(keys)}}
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees
  )
  step = jax.jit(lambda x: jnp.sin(x @ x))
  busy = draw(keys[0])[:1024, :1024]
  jax.block_until_ready((step(busy), digest.checksums(trees)))
  work = lambda: jax.block_until_ready(step(busy))
  timed = summary.Timed()
  with tempfile.TemporaryDirectory() as folder:
    place = pathlib.Path(folder)
    saver = checkpoint.Checkpointer(place / "ours", keep=2)
    orbax = ocp.StandardCheckpointer()
    for i in range(1 + options.repeats):
      plain = place / "orbax" / str(i)
      timed("orbax_blocking_s", orbax.save, plain, trees)
      timed("orbax_waiting_s", orbax.wait_until_finished)
      timed("orbax_restore_s", orbax.restore, plain, shapes)
      timed("save_blocking_s", saver.save, 2 * i, trees, {})
      timed("save_waiting_s", saver.wait)
      timed("checksums_s", digest.checksums, trees)
      timed("restore_s", checkpoint.load, saver.directory / str(2 * i), shapes)
      for _ in range(100):
        timed("step_s", work)
      saver.save(2 * i + 1, trees, {})
      with concurrent.futures.ThreadPoolExecutor() as thread:
        waiting = thread.submit(saver.wait)
        while not waiting.done():
          timed("step_while_saving_s", work)
    assert not saver.failures, saver.new_errors()
    saver.close()
    orbax.close()
  for name, own in timed.items():  # The first of each compiles or warms up.
    timed[name] = own[len(own) // (1 + options.repeats) :]
  return timed | _shares(timed)


def _shares(samples: Samples) -> Samples:
  median = {name: float(np.median(x)) for name, x in samples.items()}
  total = median["save_blocking_s"] + median["save_waiting_s"]
  orbax_total = median["orbax_blocking_s"] + median["orbax_waiting_s"]
  p99 = {name: float(np.percentile(x, 99)) for name, x in samples.items()}
  return {
    "blocking_ratio": [median["save_blocking_s"] / median["orbax_blocking_s"]],
    "save_ratio": [total / orbax_total],
    "checksums_share_of_save": [median["checksums_s"] / total],
    "checksums_share_of_restore": [median["checksums_s"] / median["restore_s"]],
    "p99_step_ratio": [p99["step_while_saving_s"] / p99["step_s"]],
  }
