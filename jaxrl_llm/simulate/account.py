"""Analytic cost model: bytes, FLOPs and seconds of a large run.

Numbers are per device unless a name says otherwise. Compiled programs may
differ; scripts/compile.py prints both side by side.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import config as config_lib
from jaxrl_llm import models
from jaxrl_llm.learner.choices import has_critic
from jaxrl_llm.metrics.chips import Chip
from jaxrl_llm.models import heads
from jaxrl_llm.models.shapes import multiplied_params
from jaxrl_llm.sampling.allocator import default_page_size

# Assumed fractions of a chip's peak numbers.
REACHED = {"compute": 0.6, "memory": 0.7, "links": 0.7}
FILLED = 0.95  # Filled fraction of packed rows.


@dataclasses.dataclass(frozen=True)
class Work:
  """The work of a program on one device."""

  flops: float
  moved: float  # Bytes to and from memory.
  sent: float  # Bytes received from other devices.

  def seconds(self, chip: Chip) -> dict[str, float]:
    """Returns the seconds of each resource if it were the only limit."""
    return {
      "compute": self.flops / (REACHED["compute"] * chip.flops),
      "memory": self.moved / (REACHED["memory"] * chip.bandwidth),
      "links": self.sent / (REACHED["links"] * chip.links),
    }

  def bound(self, chip: Chip) -> tuple[float, str]:
    """Returns the seconds of the slowest resource, and its name."""
    seconds = self.seconds(chip)
    slowest = max(seconds, key=seconds.get)
    return seconds[slowest], slowest


class Sizes:
  """Sizes of a run on a mesh, the variables of the formulas below."""

  def __init__(
    self,
    config: Any,
    model: models.ModelConfig,
    mesh: Mapping[str, int],
    mean_response: float = 0.0,
  ):
    """Computes the sizes.

    Args:
      config: config of the run.
      model: shape of policy and critic.
      mesh: axis -> size.
      mean_response: mean response length in tokens; 0: a quarter of the
        maximum.
    """
    self.config, self.model, self.mesh = config, model, dict(mesh)
    self.tensor, self.context = mesh["tensor"], mesh.get("context", 1)
    self.shards = mesh["fsdp"] * self.context  # Shards of parameters.
    self.batch_ways = mesh["data"] * mesh["fsdp"]
    self.slot_ways = self.batch_ways * self.context
    self.devices = math.prod(mesh.values())
    self.parameters = models.num_params(model)
    self.multiplied = multiplied_params(model)
    longest = config.sampler.max_response_length
    self.response = mean_response or longest / 4
    self.prompt = config.data.max_prompt_length / 4
    self.row = config_lib.max_tokens_per_row(config)
    self.responses = config_lib.batch_size(config)
    heads_split = model.num_kv_heads % self.tensor == 0
    self.kv_ways = self.slot_ways * (self.tensor if heads_split else 1)
    self.kv_token = 4 * model.num_layers * model.num_kv_heads * model.head_dim
    self.page = default_page_size(config.data.max_prompt_length + longest)

  def head_chunk(self, rows: float) -> int:
    """Returns the positions per chunk of the head on an accelerator."""
    time, part = self.row // self.context, self.model.vocab_size // self.tensor
    chosen = self.config.model.head_chunk
    return chosen or heads.default_chunk("tpu", math.ceil(rows), time, part)

  @property
  def rows(self) -> float:
    """Packed rows of a batch, without shared prompts."""
    tokens = self.responses * (self.prompt + self.response)
    return tokens / (self.row * FILLED)

  def micro_rows(self, role: str) -> float:
    """Returns the rows of a micro-batch per device, possibly fractional."""
    return self.config.optimizer[role].micro_batch_size / self.batch_ways

  def forward(self, rows: float) -> float:
    """Returns the FLOPs of a causal forward pass on rows, on all devices."""
    return rows * (2 * self.multiplied * self.row + self.attention)

  @property
  def attention(self) -> float:
    """FLOPs of attention per row."""
    heads = self.model.num_heads * self.model.head_dim
    return 4 * self.row**2 / 2 * heads * self.model.num_layers

  @property
  def slots(self) -> int:
    """Rows of the decode step."""
    return min(self.config.sampler.slots or self.responses, self.responses)

  @property
  def written(self) -> float:
    """Responses decoded concurrently, limited by slots and by pages."""
    if not self.config.sampler.kv_pages:
      return self.slots
    held = self.prompt + self.response / 2
    return min(self.slots, self.config.sampler.kv_pages * self.page / held)


def temporaries(sizes: Sizes, role: str, *, update: bool) -> dict[str, float]:
  """Returns the bytes of temporaries of scoring or of an update, by kind."""
  model, rows = sizes.model, sizes.micro_rows(role)
  tokens, split = rows * sizes.row, sizes.shards * sizes.tensor
  keys = 2 * 2 * tokens * model.num_kv_heads * model.head_dim / sizes.tensor
  tokens /= sizes.context
  width, mlp = model.hidden_size, model.intermediate_size / sizes.tensor
  heads = model.num_heads * model.head_dim / sizes.tensor
  layer = sizes.parameters / model.num_layers / sizes.tensor
  parts = {
    "parameters in bfloat16": 2 * sizes.parameters / split,
    "layers gathered": 2 * 2 * layer,
    "activations of a layer": 2 * tokens * (4 * width + 3 * mlp + 4 * heads),
  }
  if sizes.context > 1:
    parts["keys and values of whole rows"] = keys
  # In bfloat16 to read, in float32 what its gradient is summed up in.
  table = model.vocab_size * width / sizes.tensor * (6 if update else 2)
  parts["embedding"] = table
  if role == "policy":
    chunk = rows * sizes.head_chunk(rows)
    parts["logits"] = 3 * 4 * chunk * model.vocab_size / sizes.tensor
    parts["head"] = table
  if update:
    parts["activations between layers"] = 2 * tokens * width * model.num_layers
    parts["gradients"] = 2 * 4 * sizes.parameters / split
    parts["activations of a layer"] *= 4  # And gradients, all in float32.
    kv = 2 * model.num_kv_heads * model.head_dim / sizes.tensor
    kept = {"dots": heads + kv + width + 2 * mlp}
    # Norms and activation functions keep theirs in float32: what compiling for
    # v5p at 32B asked for is 4.9 times the products.
    kept["none"] = 5 * kept["dots"]
    each = kept.get(sizes.config.model.remat_policy, 0)
    parts["activations within layers"] = 2 * tokens * each * model.num_layers
  return parts


def temporaries_by_program(sizes: Sizes) -> dict[str, float]:
  """Returns the bytes of temporaries by program."""
  programs = {
    "score log-probs": ("policy", False),
    "score values": ("value", False),
    "update policy": ("policy", True),
    "update value": ("value", True),
  }
  return {
    name: sum(temporaries(sizes, role, update=update).values())
    for name, (role, update) in programs.items()
  }


def scoring(sizes: Sizes, role: str) -> Work:
  """Returns the work of scoring a micro-batch."""
  return _passes(sizes, role, forwards=1, gathers=1, reduced=False)


def updating(sizes: Sizes, role: str) -> Work:
  """Returns the work of the gradient of a micro-batch.

  The backward pass costs two forward passes, and recomputation is added.
  """
  again = {"full": 1.0, "none": 0.0}.get(
    sizes.config.model.remat_policy, sizes.attention / sizes.forward(1)
  )
  return _passes(sizes, role, forwards=3 + again, gathers=2, reduced=True)


def _passes(sizes, role, *, forwards, gathers, reduced) -> Work:
  model, rows = sizes.model, sizes.micro_rows(role)
  flops = forwards * sizes.forward(rows * sizes.batch_ways) / sizes.devices
  tokens, part = rows * sizes.row, sizes.parameters / sizes.tensor
  # Whole rows, gathered in every forward pass and summed back.
  keys = sizes.kv_token * tokens / sizes.tensor
  tokens /= sizes.context
  wide = 8 * model.hidden_size + 6 * model.intermediate_size / sizes.tensor
  moved = forwards * (2 * 2 * part + 2 * tokens * wide * model.num_layers)
  others = (sizes.shards - 1) / sizes.shards
  sent = gathers * others * 2 * part + reduced * others * 2 * 4 * part
  sent += (gathers + reduced) * (1 - 1 / sizes.context) * keys
  ring = 2 * (sizes.tensor - 1) / sizes.tensor
  each = ring * 2 * tokens * model.hidden_size * model.num_layers
  return Work(flops, moved, sent + 2 * (3 if reduced else 1) * each)


def decoding(sizes: Sizes) -> Work:
  """Returns the work of a decode step."""
  slots, model = sizes.slots, sizes.model
  cached = sizes.written * (sizes.prompt + sizes.response / 2) * sizes.kv_token
  weights = 2 * sizes.parameters / (sizes.shards * sizes.tensor)
  moved = weights + cached / sizes.kv_ways
  flops = 2 * sizes.multiplied * slots / sizes.devices
  # If an axis splits the width of weights, its devices' rows are gathered
  # before attention and MLP, and their products are sums of parts in float32.
  group = slots * sizes.shards / sizes.slot_ways * model.num_layers
  heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  summed = (heads + 2 * model.intermediate_size) / sizes.tensor
  others = (sizes.shards - 1) / sizes.shards
  sent = others * group * (4 * summed + 2 * 2 * model.hidden_size)
  ring = 2 * (sizes.tensor - 1) / sizes.tensor
  own = slots / sizes.slot_ways * model.num_layers
  sent += ring * 2 * 2 * own * model.hidden_size
  return Work(flops, moved, sent)


def work_by_phase(sizes: Sizes, written: Sizes) -> dict[str, Work]:
  """Returns the work of micro-batches, and of a decode step of the sampler."""
  work = {"decode": decoding(written)}
  for role in ("policy", "value"):
    work[f"score {role}"] = scoring(sizes, role)
    work[f"update {role}"] = updating(sizes, role)
  return work


def step_seconds(
  sizes: Sizes, chip: Chip, work: Mapping[str, Work]
) -> dict[str, float]:
  """Returns the seconds of a training step by phase.

  Args:
    sizes: sizes of the run.
    chip: the chip.
    work: phase -> work per micro-batch, or per decode step.
  """
  config, seconds = sizes.config, {}
  steps = sizes.responses * sizes.response / sizes.written
  seconds["decode"] = steps * work["decode"].bound(chip)[0]
  for role in ("policy", "value") if has_critic(config) else ("policy",):
    settings = config.optimizer[role]
    times = sizes.rows / settings.micro_batch_size
    seconds[f"score {role}"] = times * work[f"score {role}"].bound(chip)[0]
    seconds[f"update {role}"] = (
      settings.epochs * times * work[f"update {role}"].bound(chip)[0]
    )
  return seconds


def mfu(sizes: Sizes, chip: Chip, seconds: Mapping[str, float]) -> float:
  """Returns the model FLOPs utilization of updates."""
  done = spent = 0.0
  for role in ("policy", "value"):
    if f"update {role}" in seconds:
      epochs = sizes.config.optimizer[role].epochs
      done += 3 * epochs * sizes.forward(sizes.rows)
      spent += seconds[f"update {role}"]
  return done / (spent * sizes.devices * chip.flops)
