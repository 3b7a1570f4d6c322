"""Analytic cost model: bytes, FLOPs and seconds of a large run.

Numbers are per device unless a name says otherwise. Compiled programs may
differ; scripts/compile.py prints both side by side.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sampling
from jaxrl_llm.learner.choices import has_critic
from jaxrl_llm.metrics.chips import Chip
from jaxrl_llm.models import heads
from jaxrl_llm.models.shapes import multiplied_params
from jaxrl_llm.sampling.allocator import default_page_size
from jaxrl_llm.simulate import lengths
from jaxrl_llm.simulate.cost import CostModel, Plane, Work, bound
from jaxrl_llm.simulate.engine import predict

# Program -> the model's role, and whether it is updated.
PROGRAMS = {
  "score log-probs": ("policy", False),
  "score values": ("value", False),
  "update policy": ("policy", True),
  "update value": ("value", True),
}
FILLED = 0.95  # Filled fraction of packed rows.
# Lengths of responses are lognormal: 99th percentile by median.
TAIL = 4.0
# Bytes that a pass of attention in plain XLA moves per score, and a pass of the
# head per logit, by programs compiled for an H100.
_SCORE_BYTES, _LOGIT_BYTES = 21.0, 24.0
_BLOCKS = 512, 64  # Keys of a block, of kernels for TPUs and for GPUs.
# Size of a simulation of decoding: its slots, and the pages of a response.
_SEEDS, _SLOTS, _PAGES = range(4), 64, 256


class Decoding(NamedTuple):
  """A simulated batch of responses."""

  steps: float  # Decode steps, one after the other.
  position: float  # Mean position of a response that is decoded.


class Sizes:
  """Sizes of a run on a mesh, the variables of the formulas below."""

  def __init__(
    self,
    config: Any,
    model: models.ModelConfig,
    mesh: Mapping[str, int],
    mean_response: float = 0.0,
    platform: str = "tpu",
  ):
    """Computes the sizes.

    Args:
      config: config of the run.
      model: shape of policy and critic.
      mesh: axis -> size.
      mean_response: mean response length in tokens; 0: a quarter of the
        maximum.
      platform: platform of the devices: 'tpu', 'gpu' or 'cpu'.
    """
    self.config, self.model, self.mesh = config, model, dict(mesh)
    self.tensor, self.context = mesh["tensor"], mesh.get("context", 1)
    self.shards = mesh["fsdp"] * self.context  # Shards of parameters.
    self.batch_ways = mesh["data"] * mesh["fsdp"]
    self.slot_ways = self.batch_ways * self.context
    self.devices = math.prod(mesh.values())
    self.parameters = models.num_params(model)
    self.table = model.vocab_size * model.hidden_size
    self.multiplied = multiplied_params(model) - self.table  # Of the layers.
    self.gpu = platform == "gpu"
    self.xla = platform == "cpu" or config.model.kernels == "xla"
    longest = config.sampler.max_response_length
    self.response = mean_response or longest / 4
    self.prompt = config.data.max_prompt_length / 4
    self.row = config_lib.max_tokens_per_row(config)
    self.responses = config_lib.batch_size(config)
    # Heads are split with those of keys and values, if these divide evenly.
    self.head_ways = 1 if model.num_kv_heads % self.tensor else self.tensor
    self.kv_ways = self.slot_ways * self.head_ways
    self.kv_token = 4 * model.num_layers * model.num_kv_heads * model.head_dim
    bits = jnp.dtype(config.model.cache_dtype or "bfloat16").itemsize * 8
    self.cached_token = self.kv_token * bits / 16
    self.page = default_page_size(config.data.max_prompt_length + longest)

  def head_chunk(self, rows: float) -> int:
    """Returns the positions per chunk of the head, with rows on a device."""
    time, part = self.row // self.context, self.model.vocab_size // self.tensor
    chosen = self.config.model.head_chunk
    return chosen or heads.default_chunk("tpu", math.ceil(rows), time, part)

  def trained(self, role: str) -> float:
    """Returns the share of parameters that are trained: all, or adapters."""
    group = "value" if role == "value" else "model"
    adapted = models.adapted(self.config, self.model, group=group)
    added = models.num_params(adapted) - self.parameters
    return added / self.parameters if added else 1.0

  @property
  def rows(self) -> float:
    """Packed rows of a batch, without shared prompts."""
    tokens = self.responses * (self.prompt + self.response)
    return tokens / (self.row * FILLED)

  def micro_rows(self, role: str) -> float:
    """Returns the rows of a micro-batch per device, possibly fractional."""
    return self.config.optimizer[role].micro_batch_size / self.batch_ways

  @property
  def forward(self) -> float:
    """FLOPs of a forward pass of the layers on a row."""
    return 2 * self.multiplied * self.row + self.attention

  @property
  def pairs(self) -> float:
    """Pairs of a query and a key that attention computes in a row.

    Kernels skip blocks of later keys and of other samples, plain XLA nothing.
    """
    if self.xla:
      return self.row**2
    mean, position = self.response, self.decoding.position
    squares = self.prompt**2 + 2 * mean * (self.prompt + position)
    # A sample begins anywhere in a block: three halves of one per query.
    keys = squares / (self.prompt + mean) / 2 + 1.5 * _BLOCKS[self.gpu]
    return self.row * min(keys, self.row / 2)

  @property
  def attention(self) -> float:
    """FLOPs of attention per row."""
    heads = self.model.num_heads * self.model.head_dim
    return 4 * self.pairs * heads * self.model.num_layers

  @property
  def slots(self) -> int:
    """Rows of the decode step."""
    return min(self.config.sampler.slots or self.responses, self.responses)

  @functools.cached_property
  def decoding(self) -> Decoding:
    """A batch by the sampler's scheduler, its last responses included."""
    config = self.config
    longest = config.data.max_prompt_length, config.sampler.max_response_length
    return _decoding(
      *(self.slots, self.responses, self.prompt, self.response, longest),
      *(config.schedule.window, config.sampler.kv_pages),
    )

  @property
  def active(self) -> float:
    """Mean number of responses that are decoded at the same time."""
    return self.responses * self.response / self.decoding.steps


@functools.cache
def _decoding(slots, responses, prompt, mean, longest, window, pages):
  """Simulates a part of the slots with as many responses a slot."""
  part, window = max(1, slots // _SLOTS), window or longest[1]
  usual = default_page_size(sum(longest))
  page = max(usual, sum(longest) // _PAGES)
  if pages:
    pages = max(pages * usual // page // part, -(-sum(longest) // page))
  config = sampling.EngineConfig(
    *(slots // part, *longest, ()), page_size=page, kv_pages=pages
  )
  cost, found = CostModel(decode=(Plane(1.0, 0.0, 0.0),)), []
  for seed in _SEEDS:
    size = {"maximum": longest[1], "between": 0.0, "seed": seed}
    drawn = lengths.lognormal(
      responses // part, 1, median=mean, p99=TAIL * mean, **size
    )[:, 0]
    for _ in range(9):  # Until the mean is right, with the cap.
      drawn = np.clip(drawn * (mean / drawn.mean()), 1, longest[1])
    total, squares = drawn.sum(), (drawn**2).sum()
    # A response longer than the window is written in several batches.
    begun = range(0, longest[1], window)
    parts = np.concatenate([(drawn - x).clip(0, window) for x in begun[::-1]])
    parts = np.ceil(parts[parts > 0]).astype(int)
    requests = lengths.Requests(
      np.full(parts.size, max(1, int(prompt))), parts[:, None]
    )
    steps = predict(requests, cost, config).decode_steps
    found.append((steps * total / parts.sum(), squares / total / 2))
  return Decoding(*np.mean(found, axis=0).tolist())


def temporaries(sizes: Sizes, role: str, *, update: bool) -> dict[str, float]:
  """Returns the bytes of temporaries of scoring or of an update, by kind."""
  model, rows, gpu = sizes.model, sizes.micro_rows(role), sizes.gpu
  tokens, split = rows * sizes.row, sizes.shards * sizes.tensor
  keys = 2 * 2 * tokens * model.num_kv_heads * model.head_dim / sizes.tensor
  tokens /= sizes.context
  width, mlp = model.hidden_size, model.intermediate_size / sizes.tensor
  heads = model.num_heads * model.head_dim / sizes.tensor
  layer = sizes.multiplied / model.num_layers / sizes.tensor
  parts = {
    "layers gathered": 2 * 2 * layer,
    "activations of a layer": 2 * tokens * (4 * width + 3 * mlp + 4 * heads),
  }
  if sizes.context > 1:
    parts["keys and values of whole rows"] = keys
  # In bfloat16 to read, in float32 what its gradient is summed up in.
  trained = sizes.trained(role)
  whole = update and trained == 1
  table = sizes.table / sizes.tensor * (6 if whole else 2)
  if role == "policy":
    parts["head"] = table
  # Where compilers differ: the one for GPUs casts parameters in the layers, and
  # its head and embedding have left memory where most of it is in use.
  if not gpu:
    parts["parameters in bfloat16"] = 2 * sizes.parameters / split
    parts["embedding"] = table
    if role == "policy":
      chunk = rows * sizes.head_chunk(rows)
      parts["logits"] = 3 * 4 * chunk * model.vocab_size / sizes.tensor
  if update:
    parts["activations between layers"] = 2 * tokens * width * model.num_layers
    summed = sizes.multiplied if gpu else sizes.parameters
    parts["gradients"] = 4 * (sizes.parameters + summed) * trained / split
    # And gradients, on TPUs all in float32.
    parts["activations of a layer"] *= 2 if gpu else 4
    kv = 2 * model.num_kv_heads * model.head_dim / sizes.tensor
    kept = {"dots": heads + kv + width + 2 * mlp}
    # Norms and activation functions keep theirs in float32: what compiling for
    # v5p at 32B asked for is 4.9 times the products.
    kept["none"] = 5 * kept["dots"]
    # The compiler for GPUs keeps them in float32 (h100:1 at 1.5B).
    each = kept.get(sizes.config.model.remat_policy, 0) * (2 if gpu else 1)
    parts["activations within layers"] = 2 * tokens * each * model.num_layers
  return parts


def temporaries_by_program(sizes: Sizes) -> dict[str, float]:
  """Returns the bytes of temporaries by program."""
  return {
    name: sum(temporaries(sizes, role, update=update).values())
    for name, (role, update) in PROGRAMS.items()
  }


def passes(sizes: Sizes, role: str, *, update: bool) -> tuple[Work, ...]:
  """Returns the work of scoring a micro-batch, or of its gradient.

  It is that of the head, if any, and then of the layers. The backward pass
  costs two forward passes, and recomputation is added.
  """
  again = {"full": 1.0, "none": 0.0}.get(
    sizes.config.model.remat_policy, sizes.attention / sizes.forward
  )
  trained = sizes.trained(role)
  # Gradients of weights cost one of the two.
  forwards = 2 + (trained == 1) + again if update else 1
  model, rows = sizes.model, sizes.micro_rows(role)
  attended = rows / sizes.context / sizes.head_ways
  products = 2 * sizes.multiplied * sizes.row * rows / sizes.context
  flops = forwards * (products / sizes.tensor + sizes.attention * attended)
  tokens, part = rows * sizes.row, sizes.parameters / sizes.tensor
  # Whole rows, gathered in every forward pass and summed back.
  keys = sizes.kv_token * tokens / sizes.tensor
  tokens /= sizes.context
  wide = 8 * model.hidden_size + 6 * model.intermediate_size / sizes.tensor
  moved = forwards * (2 * 2 * part + 2 * tokens * wide * model.num_layers)
  if sizes.xla:
    heads = model.num_heads * model.num_layers
    moved += forwards * _SCORE_BYTES * sizes.pairs * heads * attended
  gathers, others = 1 + update, (sizes.shards - 1) / sizes.shards
  # On GPUs gradients are reduced into their parts, on TPUs as a whole.
  summed = 4 if sizes.gpu else 2 * 4
  sent = gathers * others * 2 * part + update * others * summed * part * trained
  sent += (gathers + update) * (1 - 1 / sizes.context) * keys
  ring = 2 * (sizes.tensor - 1) / sizes.tensor
  each = ring * 2 * tokens * model.hidden_size * model.num_layers
  layers = Work(flops, moved, sent + 2 * (3 if update else 1) * each)
  return (_head(sizes, rows, update, trained), layers)[role == "value" :]


def _head(sizes, rows, update, trained) -> Work:
  """Returns the work of the vocabulary head, see `models.heads`."""
  table = sizes.table / sizes.tensor
  tokens = rows * sizes.row / sizes.context
  chunks = math.ceil(sizes.row / sizes.context / sizes.head_chunk(rows))
  # Every chunk reads the head in bfloat16, and its backward pass does so twice
  # and reads and writes the float32 gradient.
  whole = trained == 1
  moved = chunks * table * (2 + update * (2 * 2 + whole * 2 * 4))
  logits = tokens * sizes.model.vocab_size / sizes.tensor
  moved += (1 + update) * _LOGIT_BYTES * logits
  # The backward pass computes the logits again.
  products = 1 + update * (2 + whole)
  return Work(flops=products * 2 * table * tokens, moved=moved)


def decoding(sizes: Sizes) -> tuple[Work, ...]:
  """Returns the work of a decode step: products, and what is sent for them.

  Nothing hides what is sent: it lies between one product and the next.
  """
  slots, model, simulated = sizes.slots, sizes.model, sizes.decoding
  context = sizes.prompt + simulated.position
  cached = sizes.active * context * sizes.cached_token
  weights = 2 * sizes.parameters / (sizes.shards * sizes.tensor)
  moved = weights + cached / sizes.kv_ways
  flops = 2 * (sizes.multiplied + sizes.table) * slots / sizes.devices
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
  return Work(flops, moved), Work(sent=sent)


def work_by_program(
  sizes: Sizes, sampler: Sizes
) -> dict[str, tuple[Work, ...]]:
  """Returns the work of micro-batches, and of a decode step of the sampler.

  The last work of each has all that is sent.
  """
  return {"sampler decode": decoding(sampler)} | {
    name: passes(sizes, role, update=update)
    for name, (role, update) in PROGRAMS.items()
  }


def step_seconds(
  sizes: Sizes, chip: Chip, work: Mapping[str, tuple[Work, ...]]
) -> dict[str, float]:
  """Returns the seconds of a training step by program.

  Args:
    sizes: sizes of the run.
    chip: the chip.
    work: program -> work per micro-batch, or per decode step.
  """
  times = {"sampler decode": sizes.decoding.steps}
  for name, (role, update) in PROGRAMS.items():
    if role == "policy" or has_critic(sizes.config):
      settings = sizes.config.optimizer[role]
      epochs = settings.epochs if update else 1
      times[name] = epochs * sizes.rows / settings.micro_batch_size
  return {name: n * bound(work[name], chip)[0] for name, n in times.items()}
