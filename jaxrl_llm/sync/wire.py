"""Patches as bytes: a header of JSON, the arrays, a checksum over all of it."""

import hashlib
import json

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.sync.errors import SyncError
from jaxrl_llm.sync.patch import LeafPatch, Patch, bits_dtype

_MAGIC = b"weightpatch1\n"
_SIZE = 8  # Bytes of the header's length.
_SUM = 16  # Bytes of the checksum.


def to_bytes(patch: Patch) -> bytes:
  """Writes a patch; little-endian, as JAX's hosts are."""
  header = {
    "base": patch.base,
    "version": patch.version,
    "base_digest": patch.base_digest,
    "digests": dict(patch.digests),
    "leaves": {
      name: {
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "gaps": None if leaf.gaps is None else str(leaf.gaps.dtype),
        "count": len(leaf.bits),
      }
      for name, leaf in patch.leaves.items()
    },
  }
  text = json.dumps(header, separators=(",", ":")).encode()
  parts = [_MAGIC, len(text).to_bytes(_SIZE, "little"), text]
  for leaf in patch.leaves.values():
    parts += [] if leaf.gaps is None else [leaf.gaps.tobytes()]
    parts.append(leaf.bits.tobytes())
  body = b"".join(parts)
  return body + _checksum(body)


def from_bytes(data: bytes) -> Patch:
  """Reads what `to_bytes` wrote.

  Raises:
    SyncError: the bytes are no patch, or were cut or changed.
  """
  body, checksum = data[:-_SUM], data[-_SUM:]
  if not body.startswith(_MAGIC):
    raise SyncError(
      f"{len(data)} bytes that begin with {data[:13]!r} are no patch of this"
      f" format, {_MAGIC!r}; see what was sent"
    )
  if _checksum(body) != checksum:
    raise SyncError(
      f"a patch of {len(data)} bytes was cut or changed on the way: its"
      " checksum does not fit; send it again"
    )
  start = len(_MAGIC) + _SIZE
  end = start + int.from_bytes(body[len(_MAGIC) : start], "little")
  header = json.loads(body[start:end])
  leaves = {}
  for name, item in header["leaves"].items():
    read = []
    for dtype in (item["gaps"], bits_dtype(jnp.dtype(item["dtype"]))):
      array = None
      if dtype is not None:
        array = np.frombuffer(body, dtype, item["count"], end)
        end += array.nbytes
      read.append(array)
    leaves[name] = LeafPatch(item["dtype"], tuple(item["shape"]), *read)
  return Patch(
    header["base"],
    header["version"],
    header["base_digest"],
    header["digests"],
    leaves,
  )


def _checksum(body: bytes) -> bytes:
  return hashlib.blake2b(body, digest_size=_SUM).digest()
