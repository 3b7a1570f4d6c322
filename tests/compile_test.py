"""scripts/compile.py compiles small programs for TPUs and for GPUs."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from jaxrl_llm.tools.simulate import account

pytestmark = pytest.mark.slow


def _needs(installed, topology, extra):
  """Returns a test's topology, skipped if its compiler is not installed."""
  reason = f"no compiler for {topology}: pip install -e '.[{extra}]'"
  mark = pytest.mark.skipif(not installed, reason=reason)
  return pytest.param(topology, marks=mark, id=topology)


_PLUGINS = importlib.util.find_spec("jax_plugins")
_CUDA = [f"jax_plugins.xla_cuda{version}" for version in (12, 13)]
_TPU = _needs(importlib.util.find_spec("libtpu"), "v5e:2x2", "tpu")
_GPU = _needs(
  _PLUGINS and any(map(importlib.util.find_spec, _CUDA)), "h100:4", "gpu"
)


class TestScript:
  """T-PPO on four devices, with a model of two layers with 4 heads of 128."""

  CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
  }

  SMALL = (
    "--config.data.max_prompt_length=128",
    "--config.sampler.max_response_length=256",
    "--config.schedule.window=128",
    "--config.reward.overlong_buffer=64",
    "--config.mesh.fsdp=2",
    "--config.mesh.context=1",
    "--config.mesh.tensor=2",
    "--config.sampler.mesh.data=1",
    "--config.optimizer.policy.micro_batch_size=4",
    "--config.optimizer.value.micro_batch_size=4",
  )

  @pytest.fixture(scope="class", params=[_TPU, _GPU])
  def topology(self, request):
    return request.param

  @pytest.fixture(scope="class")
  def folder(self, tmp_path_factory, topology):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(self.CONFIG))
    return folder

  def compile(self, folder, topology, *flags):
    return subprocess.run(
      [
        *(sys.executable, "scripts/compile.py", f"--topology={topology}"),
        *("--config=configs/tppo.py:qwen2.5-1.5b", f"--cache={folder}/cache"),
        *(f"--config.model.path={folder}", *self.SMALL, *flags),
      ],
      env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
      capture_output=True,
      text=True,
    )

  def test_says_what_fits_and_where_the_time_goes(self, folder, topology):
    done = self.compile(folder, topology, "--config.sampler.kv_pages=40000")
    assert done.returncode == 0, done.stderr
    programs, phases = done.stdout.split("| program | TFLOP |")
    held = dict(re.findall(r"\| (sampler [\w ]+) \|.* ([\d.]+) of ", programs))
    assert list(held) == [
      *("sampler decode", "sampler prefill", "sampler prefill cut responses")
    ]
    # Each is resident together with the KV cache.
    assert all(float(gib) >= 0.6 for gib in held.values())
    for name in ("sampler decode", *account.PROGRAMS):
      (row,) = [s for s in phases.splitlines() if s.startswith(f"| {name} |")]
      assert "fsdp" in row and "tensor" in row
    assert "predicted: a step of 2048 responses" in phases
    # A second run finds the compiled programs in the cache.
    assert len(list((folder / "cache").iterdir())) == 7

  def test_says_what_does_not_fit(self, folder, topology):
    # GPU kernels reject such a KV cache before compilation.
    kernels = "xla" if topology.startswith("h100") else "auto"
    done = self.compile(
      *(folder, topology, "--config.sampler.kv_pages=8000000"),
      f"--config.model.kernels={kernels}",
    )
    assert done.returncode == 1 and "the run does not fit" in done.stderr
    assert "the run fits on no mesh of these chips" in done.stderr
