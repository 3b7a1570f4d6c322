"""Accelerators, with the numbers that their makers state.

Reference: Google Cloud, system architecture of TPU v4, v5e, v5p and v6e;
NVIDIA, data sheets of A100, H100 and H200.
"""

from typing import NamedTuple


class Chip(NamedTuple):
  """A chip with what a roofline needs of it."""

  memory: float  # Bytes.
  flops: float  # Dense bfloat16 floating-point operations per second.
  bandwidth: float  # Of its memory, bytes per second.
  links: float  # To other chips, all links together, bytes per second.


# Chip by the name of its topologies before the colon, as in v5p:4x4x4.
CHIPS = {
  "v5e": Chip(16 * 2.0**30, 197e12, 819e9, 200e9),
  "v5p": Chip(95 * 2.0**30, 459e12, 2765e9, 600e9),
  "v6e": Chip(32 * 2.0**30, 918e12, 1640e9, 448e9),
}
# Peak floating-point operations per second by JAX's name of the device.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": CHIPS["v5e"].flops,
  "TPU v5": CHIPS["v5p"].flops,
  "TPU v5p": CHIPS["v5p"].flops,
  "TPU v6 lite": CHIPS["v6e"].flops,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
}
