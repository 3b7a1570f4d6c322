"""Test session: 8 CPU devices, strict JAX settings, parsed absl flags."""

import collections
import gc
import importlib.metadata
import os

# Set before jax is imported anywhere: tests use real meshes on one host, and
# spend much more time compiling than computing.
_FLAGS = [
  os.environ.get("XLA_FLAGS", ""),
  "--xla_force_host_platform_device_count=8",
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
if importlib.metadata.version("jax").startswith("0.10."):
  # Halves compilation time; JAX 0.12 crashes with it.
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
  # Do not split programs for 32 threads: the cores have other tests to run.
  _FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# By default, XLA has as many threads as cores. Eight devices that wait for each
# other in collectives need more, or XLA aborts after 40 seconds.
os.environ.setdefault("NPROC", "32")

import jax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from absl import flags  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Each key may be sampled from once; fold_in and split do not consume it.
jax.config.update("jax_debug_key_reuse", True)
# Traced programs are graphs of many small objects that stay in caches: scanning
# all of them in each collection would take a tenth of the time.
gc.set_threshold(50_000, 20, 20)
# Write replicated arrays from one device. By default, each device writes a
# slice, which compiles a program for every shape.
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
  """A tiny random model with a tokenizer; tests must not change it."""
  from helpers import tiny_run

  return tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
  """Clears caches: compiled programs of all files would not fit in memory."""
  yield
  if psutil.Process().memory_info().rss > 4 * 2**30:
    jax.clear_caches()
    gc.collect()


def pytest_collection_finish():
  gc.freeze()  # Modules stay.


def pytest_collection_modifyitems(items):
  """Starts the longest files first, so that none runs alone at the end."""
  minutes = collections.Counter()
  for item in items:
    for slow in item.iter_markers("slow"):
      minutes[item.path] += slow.kwargs.get("minutes", 0.3)
  items.sort(key=lambda item: -minutes[item.path])
