"""Accelerators, with their vendors' specifications.

Reference: Google Cloud, system architecture of TPU v4, v5e, v5p and v6e;
NVIDIA, data sheets of A100, H100, H200, GH200 and DGX B200, and white papers of
the architectures Ada and RTX PRO Blackwell. Properties for GPU compilers were
checked against XLA's target descriptions
(xla/backends/gpu/target_config/specs).
"""

from typing import NamedTuple


class Gpu(NamedTuple):
  """Properties of a GPU that its compiler needs in addition to `Chip`."""

  name: str  # JAX's name for the device.
  capability: tuple[int, int]  # CUDA compute capability.
  cores: int  # Streaming multiprocessors.
  fpus: int  # Float32 units per core.
  threads: int  # Maximum threads per core.
  shared_kib: int  # Shared memory per core.
  l2_mib: int
  clock_ghz: float


class Chip(NamedTuple):
  """A chip, with its numbers for a roofline."""

  memory: float  # Bytes; for a GPU as reported by CUDA.
  flops: float  # Dense bfloat16 floating-point operations per second.
  bandwidth: float  # Memory bandwidth in bytes per second.
  links: float  # Bytes per second from other chips, all links together.
  gpu: Gpu | None = None

  @property
  def platform(self) -> str:
    """JAX's platform, 'gpu' or 'tpu'."""
    return "gpu" if self.gpu else "tpu"

  @property
  def usable(self) -> float:
    """Bytes for programs; on a GPU, JAX leaves the rest to CUDA.

    Assumes XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 on GPUs; JAX's default is 0.75.
    """
    return self.memory * (0.95 if self.gpu else 1.0)


_A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 40, 1.41)
_H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 50, 1.98)
_H200 = _H100._replace(name="NVIDIA H200")
_PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
_PRO = Gpu(_PRO, (12, 0), 188, 128, 1536, 100, 128, 2.6)
_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100, 72, 2.52)
# Chip by the prefix of its topologies, as in v5p:4x4x4 or h100:8. Links of GPUs
# are NVLink, except PCIe for the last two.
CHIPS = {
  "v5e": Chip(16 * 2.0**30, 197e12, 819e9, 200e9),
  "v5p": Chip(95 * 2.0**30, 459e12, 2765e9, 600e9),
  "v6e": Chip(32 * 2.0**30, 918e12, 1640e9, 448e9),
  "a100": Chip(85.1e9, 312e12, 2039e9, 300e9, _A100),
  "h100": Chip(84.9e9, 989e12, 3352e9, 450e9, _H100),
  "h200": Chip(151.4e9, 989e12, 4800e9, 450e9, _H200),
  "rtx6000pro": Chip(102.0e9, 503.8e12, 1792e9, 64e9, _PRO),
  "rtx4090": Chip(25.39e9, 165.2e12, 1008e9, 32e9, _4090),
}
# Peak floating-point operations per second by JAX's name for the device.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": CHIPS["v5e"].flops,
  "TPU v5": CHIPS["v5p"].flops,
  "TPU v5p": CHIPS["v5p"].flops,
  "TPU v6 lite": CHIPS["v6e"].flops,
  "NVIDIA A100-SXM4-40GB": CHIPS["a100"].flops,
  "NVIDIA A100-PCIE-40GB": CHIPS["a100"].flops,
  "NVIDIA A100 80GB PCIe": CHIPS["a100"].flops,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA GH200 480GB": CHIPS["h100"].flops,
  "NVIDIA B200": 2250e12,
} | {chip.gpu.name: chip.flops for chip in CHIPS.values() if chip.gpu}
