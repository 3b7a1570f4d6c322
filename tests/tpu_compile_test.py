"""Sampler and update compile for TPUs, the sampler with its kernels."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PROGRAM = _ROOT / "tests" / "lower_for_tpu.py"
_LAYERS, _DEVICES = 2, 8

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[tpu]'",
  ),
]


@pytest.fixture(scope="module", name="report")
def _report():
  """What the compiler makes of every program, in one process of its own."""
  own = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "scripts")]),
  }
  # The compiler for TPUs does not bear the flags of the one for CPUs.
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [sys.executable, _PROGRAM],
    env=kept | own,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


class TestSampler:
  def test_every_layer_of_a_step_attends_by_the_kernel(self, report):
    assert report["sampler decode"]["kernels"] == _LAYERS

  def test_a_prefill_attends_by_the_kernel(self, report):
    # Of its last layer nothing but keys and values is needed.
    assert report["sampler prefill"]["kernels"] == _LAYERS - 1

  def test_pages_stay_on_their_devices(self, report):
    assert report["sampler decode"]["gathered_caches"] == 0


class TestScale:
  """2,048 slots of Qwen2.5-32B on 64 chips of v5p, of 95 GiB each."""

  # 65,536 pages of 128 tokens: 2 x 8 heads x 128 x 2 bytes in 64 layers.
  KV_CACHE = 65_536 * 128 * 2 * 8 * 128 * 2 * 64

  def test_every_chip_holds_its_part_of_the_kv_cache(self, report):
    assert report["decode at scale"]["in_place_bytes"] == self.KV_CACHE / 64

  def test_a_decode_step_needs_little_beside_it(self, report):
    sizes, cache = report["decode at scale"], self.KV_CACHE / 64
    # The policy, split over 32 of the 64.
    assert sizes["argument_bytes"] < cache + 2**31
    assert sizes["temporary_bytes"] < 2**29


class TestUpdate:
  def test_attends_by_the_kernel(self, report):
    # Forward, again for the backward pass, and twice in it.
    assert report["update"]["kernels"] == 4

  def test_only_keys_and_values_are_gathered_of_other_parts_of_a_row(
    self, report
  ):
    gathered = {
      tuple(axes): size
      for kind, axes, size in report["update"]["sent"]
      if kind == "all-gather" and "context" in axes
    }
    # Forward, again for the backward pass: of 4 rows of 512 tokens, half of
    # what 2 of 4 heads have on a device, twice in bfloat16.
    keys = 2 * _LAYERS * 4 * (512 / 2) * 2 * 2 * 128 * 2
    assert keys <= gathered["context",] <= 1.1 * keys

  def test_every_device_holds_its_part_of_the_state(self, report):
    part = report["state_bytes"] / _DEVICES
    assert part < report["update"]["argument_bytes"] < 1.1 * part


class TestScript:
  """scripts/compile.py on a model of two layers with 4 heads of 128."""

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

  SHORT = (
    "--config.data.max_prompt_length=128",
    "--config.sampler.max_response_length=1024",
    "--config.schedule.window=256",
    "--config.reward.overlong_buffer=64",
  )

  @pytest.fixture(scope="class")
  def folder(self, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(self.CONFIG))
    return folder

  def compile(self, folder, *flags):
    return subprocess.run(
      [
        *(sys.executable, "scripts/compile.py", "--topology=v5e:2x2"),
        *("--config=configs/tppo.py:qwen2.5-1.5b", f"--cache={folder}/cache"),
        *(f"--config.model.path={folder}", *self.SHORT, *flags),
      ],
      env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
      capture_output=True,
      text=True,
    )

  def test_says_what_fits_and_where_the_time_goes(self, folder):
    done = self.compile(
      folder, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"
    )
    assert done.returncode == 0, done.stderr
    programs, phases = done.stdout.split("| phase |")
    for name in ("sampler decode", "sampler prefill cut responses"):
      assert f"| {name} |" in programs
    for name in ("decode", "score policy", "update policy", "update value"):
      (row,) = [s for s in phases.splitlines() if s.startswith(f"| {name} |")]
      assert "fsdp" in row and "tensor" in row
    assert "predicted: a step of 2048 responses" in phases
    # Found again, at once.
    assert len(list((folder / "cache").iterdir())) == 7

  def test_says_what_does_not_fit(self, folder):
    done = self.compile(
      *(folder, "--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
      "--config.sampler.kv_pages=4000000",
    )
    assert done.returncode == 1 and "it does not fit" in done.stderr
    assert "no mesh of these chips holds this run" in done.stderr
