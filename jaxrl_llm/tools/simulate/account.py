"""Analytic cost model: bytes, FLOPs and seconds of a large run.

Numbers are per device unless stated otherwise. Compiled programs may differ;
scripts/compile.py prints both side by side.
"""

import math
from collections.abc import Mapping

from jaxrl_llm.metrics.chips import Chip
from jaxrl_llm.tools.simulate.cost import Work, bound
from jaxrl_llm.tools.simulate.sizes import Sizes as Sizes

# Program -> role of the model, and whether it is updated.
PROGRAMS = {
  "score log-probs": ("policy", False),
  "score values": ("value", False),
  "update policy": ("policy", True),
  "update value": ("value", True),
}
# Bytes that one pass moves: of attention in plain XLA, per score, and of the
# head, per logit; from programs compiled for an H100.
_SCORE_BYTES, _LOGIT_BYTES = 21.0, 24.0


def temporaries(sizes: Sizes, role: str, *, update: bool) -> dict[str, float]:
  """Returns the bytes of temporaries in scoring or in an update, by kind."""
  model, rows, gpu = sizes.model, sizes.micro_rows(role), sizes.gpu
  tokens, split = rows * sizes.row, sizes.shards * sizes.tensor
  keys = 2 * 2 * tokens * model.num_kv_heads * model.head_dim / sizes.tensor
  tokens /= sizes.context
  width, copies = model.hidden_size, sizes.copies / sizes.tensor
  heads = model.num_heads * model.head_dim / sizes.tensor
  layers = sizes.dense / sizes.tensor + sizes.experts / sizes.group
  wide = (4 + 3 * copies) * width + 3 * sizes.inner + 4 * heads
  parts = {
    "layers gathered": 2 * 2 * layers / model.num_layers,
    "activations of a layer": 2 * tokens * wide,
  }
  if sizes.context > 1:
    parts["keys and values of whole rows"] = keys
  # A bfloat16 copy to read, and a float32 sum of its gradient.
  trained = sizes.trained(role)
  whole = update and trained == 1
  table = sizes.table / sizes.tensor * (6 if whole else 2)
  if role == "policy":
    parts["head"] = table
  # Compilers differ: the GPU compiler casts parameters within the layers, and
  # has freed head and embedding by the time of peak memory.
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
    # In addition their gradients, on TPUs all in float32.
    parts["activations of a layer"] *= 2 if gpu else 4
    kv = 2 * model.num_kv_heads * model.head_dim / sizes.tensor
    # Products of experts are not kept.
    mlp = 0 if sizes.experts else 2 * sizes.inner
    # Norms and activation functions keep float32 intermediates: the compiler
    # for v5p needed 4.9 times the products at 32B. Without a policy the GPU
    # compiler also keeps products in float32.
    every = 10 if gpu else 5
    kept = {"dots": 1, "none": every}.get(sizes.config.model.remat_policy, 0)
    each = kept * (heads + kv + width + mlp)
    parts["activations within layers"] = 2 * tokens * each * model.num_layers
  return parts


def temporaries_by_program(sizes: Sizes) -> dict[str, float]:
  """Returns the bytes of temporaries by program."""
  return {
    name: sum(temporaries(sizes, role, update=update).values())
    for name, (role, update) in PROGRAMS.items()
  }


def passes(sizes: Sizes, role: str, *, update: bool) -> tuple[Work, ...]:
  """Returns the work of scoring a micro-batch, or of computing its gradient.

  First comes the work of the head, if any, then of the layers. The backward
  pass costs two forward passes plus recomputation.
  """
  again = {"full": 1.0, "none": 0.0}.get(
    sizes.config.model.remat_policy, sizes.attention / sizes.forward
  )
  trained = sizes.trained(role)
  # Weight gradients account for one of the two.
  forwards = 2 + (trained == 1) + again if update else 1
  model, rows = sizes.model, sizes.micro_rows(role)
  attended = rows / sizes.context / sizes.head_ways
  products = 2 * sizes.padded * sizes.row * rows / sizes.context
  flops = forwards * (products / sizes.tensor + sizes.attention * attended)
  tokens = rows * sizes.row
  # Full rows: gathered in every forward pass, gradients reduce-scattered.
  keys = sizes.kv_token * tokens / sizes.tensor
  tokens /= sizes.context
  copies = sizes.copies / sizes.tensor
  wide = (8 + 4 * copies) * model.hidden_size + 6 * sizes.inner
  read = 2 * 2 * sizes.gathered
  moved = forwards * (read + 2 * tokens * wide * model.num_layers)
  if sizes.xla:
    heads = model.num_heads * model.num_layers
    moved += forwards * _SCORE_BYTES * sizes.pairs * heads * attended
  gathers = 1 + update
  # Gradients are reduce-scattered. TPUs send about twice as much where they do
  # so within products, in rings (7B on v6e:4x8).
  summed = 4 if sizes.gpu else 2 * 4
  sent = (gathers * 2 + update * summed * trained) * sizes.received
  # Afterwards their parts are all-reduced over data.
  own = sizes.gathered - sizes.received
  sent += update * 2 * 4 * trained * (1 - 1 / sizes.mesh["data"]) * own
  sent += (gathers + update) * (1 - 1 / sizes.context) * keys
  # Attention and MLP sum partial products over tensor, as do the gradients of
  # the inputs of q, k, v, gate and up. GPUs sum float32, TPUs bfloat16.
  sums = 2 + update * (5 + (again == 1))
  ring = 2 * (sizes.tensor - 1) / sizes.tensor
  each = (4 if sizes.gpu else 2) * tokens * model.hidden_size
  sent += ring * sums * each * model.num_layers
  # The backward pass sends gradients in the same exchanges.
  exchanges = model.num_layers * (2 + again if update else 1)
  sent += exchanges * sizes.exchanged * tokens / sizes.tensor
  layers = Work(flops, moved, sent)
  return (_head(sizes, rows, update, trained), layers)[role == "value" :]


def _head(sizes: Sizes, rows: float, update: bool, trained: float) -> Work:
  """Returns the work of the language model head, see `models.heads`."""
  table = sizes.table / sizes.tensor
  tokens = rows * sizes.row / sizes.context
  chunks = math.ceil(sizes.row / sizes.context / sizes.head_chunk(rows))
  # Every chunk reads the head in bfloat16; its backward pass reads it twice,
  # and reads and writes the float32 gradient.
  whole = trained == 1
  moved = chunks * table * (2 + update * (2 * 2 + whole * 2 * 4))
  logits = tokens * sizes.model.vocab_size / sizes.tensor
  moved += (1 + update) * _LOGIT_BYTES * logits
  # The backward pass recomputes the logits.
  products = 1 + update * (2 + whole)
  return Work(flops=products * 2 * table * tokens, moved=moved)


def decoding(sizes: Sizes) -> tuple[Work, ...]:
  """Returns the work of a decode step: products, and their communication.

  Communication is not overlapped: it takes place between products.
  """
  slots, model, simulated = sizes.slots, sizes.model, sizes.decoding
  context = sizes.prompt + simulated.position
  cached = sizes.active * context * sizes.cached_token
  weights = 2 * sizes.parameters / (sizes.shards * sizes.tensor)
  # Expert matrices are gathered, instead of summing partial products.
  ways = sizes.shards * sizes.tensor / sizes.group
  gathered = 2 * sizes.experts / sizes.group * (1 - 1 / ways)
  moved = weights + 2 * gathered + cached / sizes.kv_ways
  flops = 2 * (sizes.multiplied + sizes.table) * slots / sizes.devices
  # If an axis shards the width of weights, the rows of its devices are gathered
  # before attention and MLP, and float32 partial products are summed.
  group = slots * sizes.shards / sizes.slot_ways * model.num_layers
  heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  inner = 0 if sizes.experts else model.intermediate_size
  summed = (heads + 2 * inner) / sizes.tensor
  others = (sizes.shards - 1) / sizes.shards
  sent = others * group * (4 * summed + 2 * 2 * model.hidden_size)
  # GPUs sum float32 products over tensor, TPUs bfloat16. Then logits are
  # exchanged, so that each device has all logits of some slots.
  own, part = slots / sizes.slot_ways, (sizes.tensor - 1) / sizes.tensor
  sums = 2 * (4 if sizes.gpu else 2) * model.hidden_size * model.num_layers
  logits = 4 * model.vocab_size / sizes.tensor
  sent += part * own * (2 * sums + logits) + gathered
  # Tokens of an expert group are gathered, and their results are summed.
  tokens = slots / sizes.devices * model.num_layers
  sent += 2 * 2 * (sizes.group - 1) * tokens * model.hidden_size
  return Work(flops, moved), Work(sent=sent)


def work_by_program(
  sizes: Sizes, sampler: Sizes
) -> dict[str, tuple[Work, ...]]:
  """Returns the work of micro-batches, and of a decode step of the sampler.

  The last work of each program contains all of its communication.
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
    chip: chip of the devices.
    work: program -> work per micro-batch, or per decode step.
  """
  times = {"sampler decode": sizes.decoding.steps}
  for name, (role, update) in PROGRAMS.items():
    if role == "policy" or sizes.critic:
      settings = sizes.config.optimizer[role]
      epochs = settings.epochs if update else 1
      times[name] = epochs * sizes.rows / settings.micro_batch_size
  return {name: n * bound(work[name], chip)[0] for name, n in times.items()}
