"""How the sampler's attention is computed: one choice, two ways.

A way has functions of its own for all that reads or writes a layer's keys and
values, so that how they lie in memory is its own business. Pages and slots are
the caller's (`PageMap`).
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import attention
from jaxrl_llm.models.config import ModelConfig

NAMES = ("auto", "xla", "pallas")


class Kernels(NamedTuple):
  """Attention over a layer's memory, in pages of slots and in rows.

  H query heads of size d share K heads of keys and values. Zeros are a memory
  that nobody has written to.
  """

  # (shards, pages, length, dtype) -> zeros of a layer in pages.
  init_pages: Callable[..., Any]
  # (rows, length, dtype) -> zeros of a layer in rows.
  init_rows: Callable[..., Any]
  # (layer in pages, k [S,Q,K,d], v, PageMap, positions [S,Q], writing [S,Q])
  #  -> the layer with them; what is not written leaves no trace.
  write_tokens: Callable[..., Any]
  # (q [S,Q,H,d], layer in pages, PageMap, positions [S,Q]) -> [S,Q,H,d]: a
  #  query sees its own position and those before; 0 for a slot without pages.
  #  Positions of a slot are consecutive.
  paged_attention: Callable[..., jax.Array]
  # (layer in rows, k [N,Q,K,d], v, start) -> the layer with them from position
  #  start on; start is a multiple of Q, and so is the length of a row.
  write_rows: Callable[..., Any]
  # (q [N,Q,H,d], layer in rows, start) -> [N,Q,H,d], likewise.
  row_attention: Callable[..., jax.Array]


def make_kernels(
  name: str,
  config: ModelConfig,
  *,
  sharding: jax.sharding.NamedSharding | None = None,
) -> Kernels:
  """The way of a name.

  Args:
    name: 'xla', which runs everywhere; 'pallas', the kernel for TPUs; 'auto',
      'pallas' where it can serve the model and 'xla' elsewhere. On a GPU this
      is XLA.
    config: the architecture.
    sharding: of slots; None: all lie on one device.

  Raises:
    InputError: 'pallas' cannot serve this model on these devices.
    ValueError: there is no such name.
  """
  if name not in NAMES:
    raise ValueError(f"kernels must be one of {NAMES}, got {name!r}")
  platform = "" if name == "xla" else platform_of(sharding)
  if name == "xla" or (name == "auto" and platform != "tpu"):
    return make_xla(config)
  # Pallas takes long to import, and no other way needs it.
  from jaxrl_llm.models import kernels_tpu

  reason = kernels_tpu.refusal(config, platform)
  if not reason:
    return kernels_tpu.make_pallas(config, sharding=sharding)
  if name == "pallas":
    raise InputError(f"kernels='pallas' {reason}; use 'auto' or 'xla'")
  warnings.warn(
    f"the sampler runs kernels='xla': 'pallas' {reason}", stacklevel=3
  )
  return make_xla(config)


def platform_of(sharding: jax.sharding.NamedSharding | None) -> str:
  """'cpu', 'gpu' or 'tpu': of the devices that programs are compiled for."""
  if sharding is None:
    return jax.default_backend()
  return next(iter(sharding.device_set)).platform


def make_xla(config: ModelConfig) -> Kernels:
  """Plain XLA: keys [..., K, d, T] and values [..., K, T, d] of a layer.

  With positions last, the product of keys with a query runs along memory: on a
  CPU attention of a decode step took half the time of [..., T, d] keys.
  """
  heads, size = config.num_kv_heads, config.head_dim

  def zeros(*shape, dtype):
    *outer, length = shape
    return (
      jnp.zeros((*outer, heads, size, length), dtype),
      jnp.zeros((*outer, heads, length, size), dtype),
    )

  def init_pages(shards, pages, length, dtype):
    return zeros(shards, pages, length, dtype=dtype)

  def init_rows(rows, length, dtype):
    return zeros(rows, length, dtype=dtype)

  return Kernels(
    init_pages=init_pages,
    init_rows=init_rows,
    write_tokens=attention.write_tokens,
    paged_attention=attention.paged_attention,
    write_rows=attention.write_rows,
    row_attention=attention.row_attention,
  )
