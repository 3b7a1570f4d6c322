"""Moves arrays to devices of other processes, over the devices' interconnect.

`jax.device_put` moves arrays between processes only where both sides have the
same devices. Otherwise the bits of an array are split into pieces on its own
mesh, sent piece by piece in a program that all devices of both sides run, and
joined on the other mesh.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_AXIS = "devices"


def make_move(
  shapes: Sequence[jax.ShapeDtypeStruct], places: Sequence[NamedSharding]
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
  """Makes a function that moves arrays to the mesh of `places`.

  All processes must call it. In addition to both copies, a device needs memory
  for its pieces, and the compiler may materialize a full array to split or join
  it (on CPUs it warns of a full rematerialization). Small groups bound both.

  Args:
    shapes: shapes and dtypes of the arrays.
    places: sharding of each array after the move.

  Returns:
    A function of the arrays, all on one mesh. It is `jax.device_put` within a
    process, or if both sides have the same devices.
  """
  target = places[0].mesh.devices.flatten()

  def move(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    source = arrays[0].sharding.mesh.devices.flatten()
    if jax.process_count() == 1 or {*source} == {*target}:
      return jax.device_put(list(arrays), list(places))
    pack, send, unpack = programs(tuple(source))
    return unpack(send(pack(list(arrays))))

  @functools.cache
  def programs(source: tuple[jax.Device, ...]) -> tuple[Callable, ...]:
    union = [*source, *(d for d in target if d not in source)]
    everywhere, here, there = map(_along, (union, source, target))
    pieces = math.lcm(len(source), len(target))
    pack = functools.partial(_pack, rows=len(source), pieces=pieces)
    pack = jax.jit(pack, out_shardings=here)
    send = jax.jit(
      jax.shard_map(
        functools.partial(_send, rounds=_rounds(union, source, target)),
        mesh=everywhere.mesh,
        in_specs=P(_AXIS),
        out_specs=P(_AXIS),
      )
    )
    move = lambda packed: [_on(there, send(_on(everywhere, x))) for x in packed]
    unpack = functools.partial(_unpack, shapes=shapes)
    return pack, move, jax.jit(unpack, out_shardings=list(places))

  return move


def _along(devices: Sequence[jax.Device]) -> NamedSharding:
  """Returns a sharding of [len(devices), ...] with one row on each device."""
  return NamedSharding(Mesh(np.asarray(devices), (_AXIS,)), P(_AXIS))


def _pack(
  arrays: Sequence[jax.Array], *, rows: int, pieces: int
) -> list[jax.Array]:
  """Returns the bits of each array, padded, uint [rows, pieces / rows, n]."""
  packed = []
  for x in arrays:
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    bits = jnp.pad(bits.reshape(-1), (0, -bits.size % pieces))
    packed.append(bits.reshape(rows, pieces // rows, -1))
  return packed


def _unpack(
  packed: Sequence[jax.Array], *, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
  return [
    jax.lax.bitcast_convert_type(
      bits.reshape(-1)[: math.prod(x.shape)].reshape(x.shape), x.dtype
    )
    for bits, x in zip(packed, shapes)
  ]


def _rounds(
  union: Sequence[jax.Device],
  source: Sequence[jax.Device],
  target: Sequence[jax.Device],
) -> dict[tuple[int, int], list[tuple[int, int]]]:
  """Plans the pieces: (source slot, target slot) -> pairs of devices.

  In a round, each device sends at most one piece and receives at most one.
  """
  pieces, rounds = math.lcm(len(source), len(target)), {}
  for piece in range(pieces):
    sender, here = divmod(piece, pieces // len(source))
    receiver, there = divmod(piece, pieces // len(target))
    pair = union.index(source[sender]), union.index(target[receiver])
    rounds.setdefault((here, there), []).append(pair)
  return rounds


def _send(
  bits: jax.Array, *, rounds: dict[tuple[int, int], list[tuple[int, int]]]
) -> jax.Array:
  """Sends the pieces [1, pieces, n] of this device; returns those received."""
  slots = max(there for _, there in rounds) + 1
  received = jnp.zeros((1, slots, bits.shape[-1]), bits.dtype)
  for (here, there), pairs in rounds.items():
    # A device that receives nothing gets zeros, which change no bits.
    piece = jax.lax.ppermute(bits[:, here], _AXIS, pairs)
    received = received.at[:, there].set(received[:, there] | piece)
  return received


def _on(place: NamedSharding, x: jax.Array) -> jax.Array:
  """Returns an array with its rows on another set of devices.

  Rows on devices that `x` does not use are zero.
  """
  rows = {shard.device: shard.data for shard in x.addressable_shards}
  zeros = functools.partial(jnp.zeros, (1, *x.shape[1:]), x.dtype)
  index = jax.process_index()
  return jax.make_array_from_single_device_arrays(
    (place.num_devices, *x.shape[1:]),
    place,
    [
      rows[device] if device in rows else zeros(device=device)
      for device in place.mesh.devices.flat
      if device.process_index == index
    ],
    dtype=x.dtype,
  )
