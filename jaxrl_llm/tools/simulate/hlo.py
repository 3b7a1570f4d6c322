"""Communication of a compiled program, parsed from its HLO text.

XLA's cost analysis counts the body of a loop once. Here it is multiplied by the
number of iterations, from the compiler (`known_trip_count`) or, for loops whose
length depends on data, from the caller.
"""

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Kind -> bytes that a device receives per byte of the result, in a ring of n
# devices (Thakur et al. 2005).
_RECEIVED = {
  "all-gather": lambda n: (n - 1) / n,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "reduce-scatter": lambda n: n - 1,
  "all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1,
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(|\{).*\{$")
# The name of a dtype contains its bits, except for pred, which has eight.
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_KIND = "|".join(_RECEIVED)
_OP = re.compile(
  rf"= (?P<shape>\(.*?\)|\S+) (?P<kind>{_KIND})(?P<start>-start)?\("
)
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|[^\s,]+)"
)
# Notations for the devices of groups: an array of all devices that is
# transposed and split, the axes of a mesh, or a list.
_IOTA = re.compile(
  r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_OF_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\]"
  r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_CONSTANT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# The function of a Pallas kernel, or the operation of another kernel.
_NAME = re.compile(r'op_name="[^"]*?([\w-]+)(?:/pallas_call[^"]*)?"')
# TPUs write a reduce-scatter as an all-reduce and a slice, in a computation of
# this name.
_REDUCE_SCATTER = "all-reduce-scatter"
_CHAIN = re.compile(r'chain_id="(\d+)"')


class Sent(NamedTuple):
  """Bytes that a device receives from others, by kind and axes of the mesh."""

  kind: str
  axes: tuple[str, ...]
  bytes: float


def collectives(
  text: str, mesh: Mapping[str, int], loops: Sequence[int]
) -> list[Sent]:
  """Returns the bytes that each device receives, largest first.

  Args:
    text: text from `compiled.as_text()`.
    mesh: axis -> size, in the order of the mesh's devices.
    loops: iterations of loops whose length depends on data, by nesting depth;
      the last number also holds for deeper loops.
  """
  bodies, entry = _computations(text)
  # An asynchronous collective is written once for each of its parts, which
  # have the same chain id.
  found: dict[tuple[str, str], Sent] = {}

  def walk(name: str, times: int, depth: int):
    for number, line in enumerate(bodies.get(name, ())):
      if match := _OP.search(line):
        kind, (axes, size) = match["kind"], _axes(line, mesh)
        result = _bytes(match["shape"], kind, match["start"])
        if name.startswith(_REDUCE_SCATTER):
          kind, result = "reduce-scatter", result / size
        sent = times * (_RECEIVED[kind](size) * result)
        chain = _CHAIN.search(line)
        key = ("", chain[1]) if chain else (name, str(number))
        if key not in found or found[key].bytes < sent:
          found[key] = Sent(kind, axes, sent)
      rounds, deeper = 1, depth
      if " while(" in line and (rounds := _rounds(bodies, line)) is None:
        rounds, deeper = loops[min(depth, len(loops) - 1)], depth + 1
      for called in re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line))):
        walk(called, times * rounds, deeper)

  walk(entry, 1, 0)
  total = collections.Counter()
  for sent in found.values():
    total[sent.kind, sent.axes] += sent.bytes
  return [Sent(*key, count) for key, count in total.most_common() if count]


def kernels(text: str) -> dict[str, int]:
  """Counts the calls of each kernel in a program's text, except XLA's own.

  Pallas kernels are named by their function, others by the operation or, for
  NVIDIA's libraries, by the target of the call.
  """
  found = collections.Counter()
  for call in _TARGET.finditer(text):
    if call[1] in ("tpu_custom_call", "__gpu$xla.gpu.triton"):
      # The name follows, some lines later if the kernel has metadata.
      name = _NAME.search(text, call.end())
      found[name[1] if name else call[1]] += 1
    elif call[1].startswith("__cu"):
      found[call[1]] += 1
  return dict(found)


def _rounds(bodies: Mapping[str, list[str]], line: str) -> int | None:
  """Returns the iterations of a loop with a constant bound."""
  if match := _TRIPS.search(line):
    return int(match[1])
  condition = re.search(r"condition=%?([\w.\-]+)", line)[1]
  found = [m[1] for x in bodies[condition] if (m := _CONSTANT.search(x))]
  return int(found[0]) if len(found) == 1 else None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  bodies, entry, body = {}, "", []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      body = bodies[match[1]] = []
      entry = match[1] if line.startswith("ENTRY") else entry
    else:
      body.append(line)
  return bodies, entry


def _bytes(shape: str, kind: str, started: str | None) -> float:
  """Returns the bytes of a result, also for an asynchronous start."""
  arrays = _ARRAY.findall(shape)
  if started and kind != "all-reduce":
    # Operands, as many results and, for some kinds, scalars of a context.
    arrays = [x for x in arrays if x[1]]
    arrays = arrays[len(arrays) // 2 :]
  return sum(
    math.prod(_numbers(dims)) * int(bits or 8) / 8 for bits, dims in arrays
  )


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
  """Returns the mesh axes that a collective's groups span, and their size."""
  group = sorted(_group(line, math.prod(mesh.values())))
  places = np.stack(np.unravel_index(group, tuple(mesh.values())), axis=1)
  moves = [len(set(column)) > 1 for column in places.T]
  return tuple(itertools.compress(mesh, moves)), len(group)


def _group(line: str, devices: int) -> Sequence[int]:
  """Returns the devices of the first group."""
  if match := _IOTA.search(line):
    size, *order = match.groups()
    return _in_order(*order).flat[: int(size)]
  if match := _OF_MESH.search(line):
    named, *order, along = match.groups()
    sizes = {k: int(n) for k, n in re.findall(r"'(\w+)'=(\d+)", named)}
    along = re.findall(r"'(\w+)'", along)
    ids = _in_order(*order) if order[0] else np.arange(devices)
    first = [slice(None) if name in along else 0 for name in sizes]
    return ids.reshape(*sizes.values())[*first].reshape(-1)
  match = _LISTED.search(line)
  return _numbers(match[1]) if match else range(devices)


def _in_order(dims: str, order: str | None) -> np.ndarray:
  """Returns all devices as an array with its axes transposed to an order."""
  ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
  return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
  return [int(x) for x in re.findall(r"\d+", text)]
