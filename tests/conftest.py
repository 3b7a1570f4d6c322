"""Test session: 8 CPU devices, strict JAX settings, parsed absl flags."""

import collections
import gc
import importlib.metadata
import os

# Before jax is imported anywhere: tests exercise real meshes on one host, and
# compile much longer than they compute.
_FLAGS = [
  os.environ.get("XLA_FLAGS", ""),
  "--xla_force_host_platform_device_count=8",
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
if importlib.metadata.version("jax").startswith("0.10."):
  # Halves the time to compile; JAX 0.12 crashes with it.
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
  # A program is not split for 32 threads: the cores have other tests to run.
  _FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA has as many threads as cores by default. Eight devices that wait for each
# other in collectives need more, or it gives up after 40 seconds.
os.environ.setdefault("NPROC", "32")

import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# A key is drawn from once. fold_in and split leave theirs for more of them.
jax.config.update("jax_debug_key_reuse", True)
# Traced programs are graphs of many small objects, which live on in caches: to
# look through all of them again and again would take a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# Of an array with copies on several devices a checkpoint has one. To have each
# device write a share, as by default, compiles programs for every shape.
ocp.type_handlers.register_type_handler(
  jax.Array,
  ocp.type_handlers.ArrayHandler(use_replica_parallel=False),
  override=True,
)


@pytest.fixture(autouse=True, scope="session")
def _parsed_flags():
  # grain reads absl flags when it starts workers.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  """A tiny random model with a tokenizer, which no test may change."""
  from helpers import tiny_run

  return tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
  """Compiled programs of all files together would take too much of it."""
  yield
  if psutil.Process().memory_info().rss > 4 * 2**30:
    jax.clear_caches()
    gc.collect()


def pytest_collection_finish():
  gc.freeze()  # Modules stay.


def pytest_collection_modifyitems(items):
  """The longest files first: started last, they would run on alone."""
  minutes = collections.Counter()
  for item in items:
    for slow in item.iter_markers("slow"):
      minutes[item.path] += slow.kwargs.get("minutes", 0.3)
  items.sort(key=lambda item: -minutes[item.path])
