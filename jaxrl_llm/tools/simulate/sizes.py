"""Sizes of a run on a mesh: the inputs of the analytic cost model."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sampling
from jaxrl_llm.config import Settings
from jaxrl_llm.learner import core
from jaxrl_llm.models import experts, heads, transformer
from jaxrl_llm.sampling.allocator import default_page_size
from jaxrl_llm.tools.simulate import lengths
from jaxrl_llm.tools.simulate.cost import CostModel, Plane
from jaxrl_llm.tools.simulate.engine import predict

FILLED = 0.95  # Filled fraction of packed rows.
# Response lengths are lognormal: 99th percentile divided by the median.
TAIL = 4.0
_BLOCKS = 512, 64  # Keys per block in the kernels for TPUs and for GPUs.
# Size of the simulation of decoding: seeds, slots, and pages per response.
_SEEDS, _SLOTS, _PAGES = range(4), 64, 256


class Decoding(NamedTuple):
  """Statistics of a simulated batch of responses."""

  steps: float  # Decode steps, one after the other.
  position: float  # Mean position of the decoded tokens in their responses.


class Sizes:
  """Sizes of a run on a mesh."""

  def __init__(
    self,
    config: Settings,
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
    model = model.base  # Adapters come from the config.
    self.config, self.model, self.mesh = config, model, dict(mesh)
    self.tensor, self.context = mesh["tensor"], mesh.get("context", 1)
    fsdp = mesh["fsdp"] * mesh.get("expert", 1)
    self.shards = fsdp * self.context  # Shards of parameters.
    self.batch_ways = mesh["data"] * fsdp
    self.slot_ways = self.batch_ways * self.context
    self.devices = math.prod(mesh.values())
    self.parameters = models.num_params(model)
    self.table = model.vocab_size * model.hidden_size
    self.multiplied = (
      transformer.multiplied_params(model) - self.table
    )  # In layers.
    self._set_experts(config.model.expert_capacity)
    # Parameters that a device gathers for its products, and the part of them
    # that it receives from other devices.
    self.gathered = (self.parameters - self.experts) / self.tensor
    self.gathered += self.experts / self.group
    own = self.parameters / (self.shards * self.tensor)
    self.received = self.gathered - own
    self.platform, self.gpu = platform, platform == "gpu"
    self.xla = platform == "cpu" or config.model.kernels == "xla"
    longest = config.sampler.max_response_length
    self.response = mean_response or max(longest / 4, 1)
    self.prompt = config.data.max_prompt_length / 4
    self.critic = core.compose(config).critic
    view = self.critic and self.critic.view
    self.row = config_lib.max_tokens_per_row(config, view.tokens if view else 0)
    self.responses = config_lib.batch_size(config)
    # Packed rows of a batch if prompts are not shared.
    tokens = self.responses * (self.prompt + self.response)
    self.rows = tokens / (self.row * FILLED)
    # Rows of a decode step.
    self.slots = min(config.sampler.slots or self.responses, self.responses)
    # Heads are sharded if the tensor axis divides the number of KV heads.
    self.head_ways = 1 if model.num_kv_heads % self.tensor else self.tensor
    self.kv_ways = self.slot_ways * self.head_ways
    self.kv_token = 4 * model.num_layers * model.num_kv_heads * model.head_dim
    bits = jnp.dtype(config.model.cache_dtype or "bfloat16").itemsize * 8
    self.cached_token = self.kv_token * bits / 16
    self.page = default_page_size(config.data.max_prompt_length + longest)

  def _set_experts(self, capacity: float) -> None:
    """Sets the sizes of experts; `copies` is 0 without experts.

    experts: parameters of all experts.
    dense: parameters in the products of layers, without experts.
    padded: parameters in the products of a token, including free capacity.
    group: devices with different experts; 1 if each device gathers all experts.
    copies: rows of experts on a device per token of the device. Dropless
      buffers of a group are sized for the worst case.
    inner: hidden units of a layer's MLP on a device per token.
    exchanged: bytes that a device receives per token and layer when tokens are
      sent to their experts and back.
    """
    model, mesh, tensor = self.model, self.mesh, self.tensor
    self.experts, self.dense, self.padded = 0, self.multiplied, self.multiplied
    self.group, self.copies, self.exchanged = 1, 0.0, 0.0
    self.inner = model.intermediate_size / tensor
    if not (kinds := experts.kinds(model)):
      return
    kind = kinds[0]
    k, count = kind.per_token, kind.num_experts
    self.experts = len(kinds) * transformer.expert_params(model, kind)
    active = self.experts * k / count
    self.dense -= active
    self.group = mesh["expert"] * tensor if "expert" in mesh else 1
    self.copies = self.group * min(k, count // self.group)
    others = self.group - 1
    if 0 < capacity * k < count:
      self.padded += active * (capacity - 1)
      self.copies = capacity * k
      others = self.copies * (1 - 1 / self.group)
    self.inner = self.copies * kind.intermediate_size / tensor
    self.exchanged = 2 * 2 * others * model.hidden_size

  def head_chunk(self, rows: float) -> int:
    """Returns the positions per chunk of the head for the rows of a device."""
    time, part = self.row // self.context, self.model.vocab_size // self.tensor
    chosen = self.config.model.head_chunk
    rows = math.ceil(rows)
    return chosen or heads.default_chunk(self.platform, rows, time, part)

  def trained(self, role: str) -> float:
    """Returns the fraction of trained parameters: all (1.0), or adapters."""
    added = models.num_params(self._adapted(role)) - self.parameters
    return added / self.parameters if added else 1.0

  def base_bytes(self, roles: Sequence[str]) -> float:
    """Returns the total bytes of the adapters' base; 0 without adapters.

    Models with adapters share their base.
    """
    adapted = [x for x in map(self._adapted, roles) if x.adapters]
    if not adapted:
      return 0.0
    params = models.partition(transformer.param_shapes(adapted[0]), ())
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params.base))

  def _adapted(self, role: str) -> models.ModelConfig:
    group = "value" if role == "value" else "model"
    return models.adapted(self.config, self.model, group=group)

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

    Kernels skip blocks of later keys and other samples; plain XLA skips none.
    """
    if self.xla:
      return self.row**2
    mean, position = self.response, self.decoding.position
    squares = self.prompt**2 + 2 * mean * (self.prompt + position)
    # A sample starts anywhere in a block, which adds 1.5 blocks per query.
    keys = squares / (self.prompt + mean) / 2 + 1.5 * _BLOCKS[self.gpu]
    return self.row * min(keys, self.row / 2)

  @property
  def attention(self) -> float:
    """FLOPs of attention per row."""
    heads = self.model.num_heads * self.model.head_dim
    return 4 * self.pairs * heads * self.model.num_layers

  @functools.cached_property
  def decoding(self) -> Decoding:
    """Simulated decoding of a batch until its last response ends."""
    config = self.config
    longest = config.data.max_prompt_length, config.sampler.max_response_length
    return _decoding(
      *(self.slots, self.responses, self.prompt, self.response, longest),
      *(config.schedule.window, config.sampler.kv_pages),
    )

  @property
  def active(self) -> float:
    """Mean number of responses decoded concurrently."""
    return self.responses * self.response / self.decoding.steps


@functools.cache
def _decoding(
  slots: int,
  responses: int,
  prompt: float,
  mean: float,
  longest: tuple[int, int],
  window: int,
  pages: int,
):
  """Simulates a fraction of the slots with a proportional number of responses.

  Returns means over seeds.
  """
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
    for _ in range(9):  # Rescale until the mean is right despite the cap.
      drawn = np.clip(drawn * (mean / drawn.mean()), 1, longest[1])
    total, squares = drawn.sum(), (drawn**2).sum()
    # A response longer than the window is decoded in several batches.
    begun = range(0, longest[1], window)
    parts = np.concatenate([(drawn - x).clip(0, window) for x in begun[::-1]])
    parts = np.ceil(parts[parts > 0]).astype(int)
    requests = lengths.Requests(
      np.full(parts.size, max(1, int(prompt))), parts[:, None]
    )
    steps = predict(requests, cost, config).decode_steps
    found.append((steps * total / parts.sum(), squares / total / 2))
  return Decoding(*np.mean(found, axis=0).tolist())
