"""Benchmarks checkpoints: saving, checksums, restoring, concurrent steps."""

import concurrent.futures
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm import checkpoint, digest

Samples = dict[str, list[float]]
_LEAVES = 24  # A model and two moments of eight stacked kernels each.


def measure_checkpoint(options) -> Samples:
  """Ours against plain Orbax, which saves synchronously and checks nothing."""
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
  samples: Samples = {}

  def timed(name: str, function: Callable[..., Any], *arguments) -> Any:
    start = time.perf_counter()
    result = function(*arguments)
    samples.setdefault(name, []).append(time.perf_counter() - start)
    return result

  def steps(until: Callable[[int], bool]) -> list[float]:
    seconds: list[float] = []
    while not until(len(seconds)):
      start = time.perf_counter()
      jax.block_until_ready(step(busy))
      seconds.append(time.perf_counter() - start)
    return seconds

  with tempfile.TemporaryDirectory() as folder:
    place = pathlib.Path(folder)
    saver = checkpoint.Checkpointer(place / "ours", keep=2)
    for i in range(1 + options.repeats):
      plain = place / "orbax" / str(i)
      with ocp.StandardCheckpointer() as orbax:
        timed("orbax_save_s", _save_and_wait, orbax, plain, trees)
        timed("orbax_restore_s", orbax.restore, plain, shapes)
      timed("save_blocking_s", saver.save, 2 * i, trees, {})
      timed("save_waiting_s", saver.wait)
      timed("checksums_s", digest.checksums, trees)
      timed("restore_s", saver.restore, 2 * i, shapes)
      samples.setdefault("step_s", []).extend(steps(lambda n: n == 100))
      saver.save(2 * i + 1, trees, {})
      with concurrent.futures.ThreadPoolExecutor() as thread:
        waiting = thread.submit(saver.wait)
        beside = steps(lambda n, waiting=waiting: waiting.done())
      samples.setdefault("step_while_saving_s", []).extend(beside)
    assert not saver.failures, saver.new_errors()
    saver.close()
  for name in samples:  # The first of each compiles or warms up.
    samples[name] = samples[name][len(samples[name]) // (1 + options.repeats) :]
  return samples | _shares(samples)


def _save_and_wait(orbax, path: pathlib.Path, trees: Any) -> None:
  orbax.save(path, trees)
  orbax.wait_until_finished()


def _shares(samples: Samples) -> Samples:
  median = {name: float(np.median(x)) for name, x in samples.items()}
  total = median["save_blocking_s"] + median["save_waiting_s"]
  slow, usual = (
    float(np.percentile(samples[name], 99))
    for name in ("step_while_saving_s", "step_s")
  )
  return {
    "blocking_share": [median["save_blocking_s"] / median["orbax_save_s"]],
    "checksums_share_of_save": [median["checksums_s"] / total],
    "checksums_share_of_restore": [median["checksums_s"] / median["restore_s"]],
    "p99_step_ratio": [slow / usual],
  }
