"""Communication of a compiled program, read from its HLO text.

XLA's own cost analysis counts the body of a loop once. Here it counts as often
as it runs: as the compiler says (`known_trip_count`) or, for loops whose length
is data, as the caller says.
"""

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
_KINDS += ("collective-permute",)
_BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16}
_BITS |= {"u16": 16, "f32": 32, "s32": 32, "u32": 32, "s64": 64, "u64": 64}
_BITS |= {"f64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "s4": 4, "u4": 4}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(|\{).*\{$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OP = re.compile(
  rf"= (?P<shape>\(.*?\)|\S+) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\("
)
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|branch_computations)="
  r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_OF_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\]"
  r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}"
)
_CONSTANT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# The function of a Pallas kernel, or the operation of another one.
_NAME = re.compile(r'op_name="[^"]*?([\w-]+)(?:/pallas_call[^"]*)?"')
_CHAIN = re.compile(r'chain_id="(\d+)"')


class Sent(NamedTuple):
  """Bytes that a device receives of others, by kind and axes of the mesh."""

  kind: str
  axes: tuple[str, ...]
  bytes: float


def collectives(
  text: str, mesh: Mapping[str, int], loops: Sequence[int]
) -> list[Sent]:
  """Returns the bytes that each device receives, largest first.

  Args:
    text: of `compiled.as_text()`.
    mesh: axis -> size, in the order of the mesh's devices.
    loops: rounds of loops whose length is data, by how deep they are nested in
      one another; the last one counts for all deeper ones.
  """
  bodies, entry = _computations(text)
  # One that goes on while others work is written once for each of its parts,
  # which are a chain.
  found: dict[tuple[str, str], Sent] = {}

  def walk(name, times, depth):
    for number, line in enumerate(bodies.get(name, ())):
      if match := _OP.search(line):
        axes, size = _axes(line, mesh)
        whole = _bytes(match["shape"], match["kind"], match["start"])
        sent = times * _received(match["kind"], whole, size)
        chain = _CHAIN.search(line)
        key = ("", chain[1]) if chain else (name, str(number))
        if key not in found or found[key].bytes < sent:
          found[key] = Sent(match["kind"], axes, sent)
      rounds, deeper = 1, depth
      if " while(" in line:
        rounds = _rounds(bodies, line)
        if rounds is None:
          rounds, deeper = loops[min(depth, len(loops) - 1)], depth + 1
      for one, many in _CALLED.findall(line):
        for called in [one] if one else re.findall(r"[\w.\-]+", many):
          walk(called, times * rounds, deeper)

  walk(entry, 1, 0)
  total = collections.Counter()
  for sent in found.values():
    total[sent.kind, sent.axes] += sent.bytes
  sent = [Sent(kind, axes, n) for (kind, axes), n in total.items() if n]
  return sorted(sent, key=lambda x: -x.bytes)


def kernels(text: str) -> dict[str, int]:
  """Returns how often a program's text calls each kernel that is not XLA's.

  Pallas kernels have the name of their function, others that of the operation
  or, in NVIDIA's libraries, of the call's target.
  """
  found = collections.Counter()
  for call in _TARGET.finditer(text):
    if call[1] in ("tpu_custom_call", "__gpu$xla.gpu.triton"):
      # Its name follows, some lines later if the kernel has metadata.
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
  bodies, entry, name = {}, "", ""
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      name = match[1]
      bodies[name] = []
      entry = name if line.startswith("ENTRY") else entry
    elif name:
      bodies[name].append(line)
  return bodies, entry


def _bytes(shape: str, kind: str, started: str | None) -> float:
  """Returns the size of a result, also of an asynchronous start."""
  arrays = [x for x in _SHAPE.findall(shape) if x[0] in _BITS]
  if started and kind != "all-reduce":
    # Operands, as many results and, of some kinds, numbers of a context.
    arrays = [x for x in arrays if x[1]]
    arrays = arrays[len(arrays) // 2 :]
  return sum(
    math.prod(map(int, filter(None, dims.split(",")))) * _BITS[each] / 8
    for each, dims in arrays
  )


def _received(kind: str, result: float, group: int) -> float:
  """Bytes a device receives when a ring does it (Thakur et al. 2005)."""
  share = (group - 1) / group
  return {
    "all-gather": share * result,
    "all-reduce": 2 * share * result,
    "reduce-scatter": (group - 1) * result,
    "all-to-all": share * result,
    "collective-permute": result,
  }[kind]


def _axes(line: str, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
  """The axes of the mesh that a collective's groups run along, their size."""
  groups = _groups(line, math.prod(mesh.values()))
  group = sorted(groups[0])
  places = np.stack(np.unravel_index(group, tuple(mesh.values())), axis=1)
  moves = [len(set(column)) > 1 for column in places.T]
  return tuple(itertools.compress(mesh, moves)), len(group)


def _groups(line: str, devices: int) -> np.ndarray:
  """Devices of each group."""
  if match := re.search(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
  ):
    count, size, dims, order = match.groups()
    ids = np.arange(devices).reshape(_numbers(dims))
    if order:
      ids = ids.transpose(_numbers(order))
    return ids.reshape(int(count), int(size))
  if match := _OF_MESH.search(line):
    named, ordered, order, along = match.groups()
    sizes = {k: int(n) for k, n in re.findall(r"'(\w+)'=(\d+)", named)}
    along = re.findall(r"'(\w+)'", along)
    ids = np.arange(devices)
    if ordered:
      ids = ids.reshape(_numbers(ordered)).transpose(_numbers(order))
    ids = ids.reshape(list(sizes.values()))
    last = range(-len(along), 0)
    ids = np.moveaxis(ids, [list(sizes).index(a) for a in along], last)
    return ids.reshape(-1, math.prod(sizes[a] for a in along))
  if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return np.array([_numbers(match[1])])
  if match := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
    return np.array([[int(match[1]), int(match[2])]])
  return np.arange(devices)[None]


def _numbers(text: str) -> list[int]:
  return [int(x) for x in text.split(",")]
