"""Communication read from HLO, the cost account, and scripts/compile.py."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases, configs, programs
from jax.sharding import NamedSharding, PartitionSpec
from parts import topology

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.chips import CHIPS, Chip
from jaxrl_llm.tools import simulate
from jaxrl_llm.tools.simulate import account, cost, hlo, mesh_search
from jaxrl_llm.tools.simulate.models import MODELS
from jaxrl_llm.trainer import validation

_PROGRAMS = cases.load("code")
MESH = {"data": 1, "fsdp": 4, "tensor": 2}


def compiled(function, *arguments):
  """Returns HLO of a function of sharded arrays: (shape, spec)."""
  mesh = sharding.make_mesh(**MESH)
  given = [
    jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    for shape, spec in arguments
  ]
  return jax.jit(function).lower(*given).compile().as_text()


def whole(x):
  mesh = sharding.make_mesh(**MESH)
  return jax.lax.with_sharding_constraint(x, sharding.replicated(mesh))


class TestCollectives:
  @pytest.mark.parametrize(
    ("axes", "share"), [(("fsdp",), 3 / 4), (("fsdp", "tensor"), 7 / 8)]
  )
  def test_a_gather_by_hand(self, axes, share):
    text = compiled(whole, ((16, 8), (axes,)))
    # A fraction of 16 x 8 numbers of four bytes.
    sent = hlo.Sent("all-gather", axes, share * 16 * 8 * 4)
    assert hlo.collectives(text, MESH, [1]) == [sent]

  def test_a_sum_over_the_other_axis(self):
    product = lambda x, y: whole(x @ y)
    text = compiled(product, ((16, 8), (None, "tensor")), ((8, 6), ("tensor",)))
    assert hlo.collectives(text, MESH, [1]) == [
      hlo.Sent("all-reduce", ("tensor",), 2 * 1 / 2 * 16 * 6 * 4)
    ]

  @pytest.mark.parametrize("known", [True, False])
  def test_loops_count_as_often_as_they_run(self, known):
    """A loop of five iterations, and one whose count depends on data."""

    def run(x, weights, rounds):
      body = lambda i, x: jnp.sin(x @ whole(weights[i % 5]))
      count = 5 if known else rounds.astype(jnp.int32)
      return jax.lax.fori_loop(0, count, body, x)

    text = compiled(run, ((16, 8), ()), ((5, 8, 8), (None, "fsdp")), ((), ()))
    sent = sum(each.bytes for each in hlo.collectives(text, MESH, [7]))
    assert sent == (5 if known else 7) * 3 / 4 * 8 * 8 * 4

  def test_loops_in_loops(self):
    def run(x, weights):
      def layer(x, weight):
        turn = lambda i, x: jnp.sin(x @ whole(weight * i))
        return jax.lax.fori_loop(0, 3, turn, x), None

      return jax.lax.scan(layer, x, weights)[0]

    text = compiled(run, ((16, 8), ()), ((4, 8, 8), (None, "fsdp")))
    sent = sum(each.bytes for each in hlo.collectives(text, MESH, [1]))
    assert sent in (12 * 3 / 4 * 8 * 8 * 4, 4 * 3 / 4 * 8 * 8 * 4)

  def test_what_a_gpu_starts_and_waits_for(self):
    """Results are half of a start's arrays; for an all-reduce, all of them."""
    text = _PROGRAMS["hlo_gpu"]
    found = hlo.collectives(text, {"fsdp": 8}, [1])
    assert {each.kind: each.bytes for each in found} == {
      "all-gather": 7 / 8 * (32 + 16) * 2,
      "reduce-scatter": 7 * 8 * 4,
      "all-reduce": 2 * 7 / 8 * (8 + 2) * 4,
      "collective-permute": 8 * 4,
    }

  def test_a_tpu_sums_scattered_numbers_once(self):
    text = _PROGRAMS["hlo_tpu"]
    sent = hlo.Sent("reduce-scatter", ("fsdp",), 7 / 8 * 64 * 128 * 4)
    assert hlo.collectives(text, {"fsdp": 8}, [1]) == [sent]

  def test_rounds_that_the_compiler_knows(self):
    text = _PROGRAMS["hlo_rounds"]
    (found,) = hlo.collectives(text, {"fsdp": 8}, [1])
    assert found.bytes == 28 * 7 / 8 * 32 * 2

  def test_kernels_by_name(self):
    call = '%x = f32[8]{0} custom-call(%p), custom_call_target="{}", {}'
    name = 'op_name="jit(f)/while/body/attend/pallas_call"'
    pallas = 'kernel_metadata={\n"a":1}\n, metadata={' + name + "}"
    text = "\n".join(
      call.replace("{}", target, 1).replace("{}", rest)
      for target, rest in [
        ("__cudnn$fmhaSoftmax", ""),
        ("tpu_custom_call", pallas),
        ("ConcatBitcast", ""),  # Internal to XLA.
        ("__cudnn$fmhaSoftmax", ""),
        ("__gpu$xla.gpu.triton", pallas),
        ("tpu_custom_call", 'metadata={op_name="jit(f)/ragged-dot-none"}'),
      ]
    )
    found = {"__cudnn$fmhaSoftmax": 2, "attend": 2, "ragged-dot-none": 1}
    assert hlo.kernels(text) == found


def test_gpus_of_a_host_and_chips_of_a_slice():
  assert topology.parse("h100:8") == (CHIPS["h100"], 8)
  assert topology.parse("v5p:4x4x8") == (CHIPS["v5p"], 128)
  for name in ("z9:8", "h100", "h100:eight", "h100:0", "v5p:4x"):
    with pytest.raises(InputError, match="choose one of v5e.*h100"):
      topology.parse(name)


@pytest.mark.parametrize(
  "name, extra, version", [("h100:8", "gpu", "cuda12"), ("v5e:1", "tpu", "tpu")]
)
def test_a_compiler_that_is_missing_or_fails_is_one_line(
  name, extra, version, monkeypatch
):
  done = mock.Mock()
  lowered = mock.Mock(**{"compile.return_value": done})
  failure = jax.errors.JaxRuntimeError
  done.as_text.side_effect = failure("INTERNAL: async-update\nat some line")
  said = rf"update: .*async-[^\n]*jax\[{version}\]==[^\n]*$"
  with pytest.raises(InputError, match=said):
    topology.compiled("update", lowered, name)
  # What does not fit is no such failure.
  done.as_text.side_effect = failure("RESOURCE_EXHAUSTED: memory")
  with pytest.raises(failure, match="RESOURCE"):
    topology.compiled("update", lowered, name)

  def fail(*_, **__):
    raise NotImplementedError("topology not implemented\nat some line")

  monkeypatch.setattr(topology.topologies, "get_topology_desc", fail)
  said = rf"^[^\n]*install -e '.\[{extra}\]'[^\n]*$"
  with pytest.raises(InputError, match=said):
    topology.devices_of(name)


def layers_of(sizes, *, update=False):
  """Returns the work of the layers, without a head."""
  (work,) = account.passes(sizes, "value", update=update)
  return work


class TestEstimate:
  def sizes(self, preset="qwen2.5-7b", platform="tpu", kernels="auto", **mesh):
    config = configs.load("vapo", preset)
    config.data.prompts_per_step = (
      128  # Half of the preset's take half as long.
    )
    config.model.update(kernels=kernels, remat_policy="full")
    for role in config.optimizer.values():
      if not isinstance(role, int):
        role.micro_batch_size = 8
    mesh = {"data": 1, "fsdp": 16, "tensor": 1} | mesh
    return account.Sizes(config, MODELS[preset], mesh, platform=platform)

  def test_models_have_the_size_of_their_name(self):
    # As stated by their model cards.
    sizes = {"qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.8}
    for name, billions in (sizes | {"qwen3-30b-a3b": 30.5}).items():
      found = models.num_params(MODELS[name]) / 1e9
      assert found == pytest.approx(billions, rel=0.005)
    plain = self.sizes("qwen2.5-7b-lora")
    model = models.adapted(plain.config, plain.model)
    sizes = account.Sizes(plain.config, model, plain.mesh)
    assert sizes.parameters == plain.parameters
    for role in ("policy", "value"):
      assert sizes.trained(role) == plain.trained(role) < 0.02
    # Chunks of the head are those of the platform.
    assert self.sizes(platform="cpu").head_chunk(1) == 128
    assert self.sizes(platform="gpu").head_chunk(1) > 128

  def test_a_forward_pass_by_hand(self):
    sizes = self.sizes(kernels="xla")  # XLA attention skips nothing.
    row = 16_384  # Tokens; 28 layers of width 3584, 28 heads of 128.
    layer = 3584 * (28 * 128 * 2 + 2 * 4 * 128) + 3 * 3584 * 18_944
    attention = 28 * 4 * row**2 * 28 * 128
    by_hand = 2 * row * 28 * layer + attention
    assert sizes.forward == pytest.approx(by_hand, rel=1e-4)
    # Half a row per device.
    head, layers = account.passes(sizes, "policy", update=False)
    assert layers.flops == pytest.approx(by_hand / 2, rel=1e-4)
    assert head.flops == 2 * row * 3584 * 152_064 / 2
    assert layers_of(sizes) == layers

  def test_plain_attention_skips_nothing_and_moves_its_scores(self):
    kernel, plain = (self.sizes(kernels=name) for name in ("auto", "xla"))
    heads, rows = 28 * 28, 1 / 2
    skipped = plain.pairs - kernel.pairs
    assert plain.pairs == 16_384**2 and skipped > plain.pairs / 2
    kernel, plain = layers_of(kernel), layers_of(plain)
    expected = pytest.approx(4 * skipped * heads * 128 * rows)
    assert plain.flops - kernel.flops == expected
    assert plain.moved - kernel.moved > 20 * heads * 16_384**2 * rows

  @pytest.mark.parametrize("platform, block", [("tpu", 512), ("gpu", 64)])
  def test_kernels_compute_blocks_within_samples(self, platform, block):
    sizes = self.sizes(platform=platform)
    law = {"median": 3840 / 1.19, "p99": 4 * 3840 / 1.19, "maximum": 15_360}
    lengths = simulate.lognormal(4000, 1, **law, between=0, seed=1).ravel()
    # Consecutive samples, and the pairs of blocks that they touch.
    ends = np.cumsum(lengths + 256)
    begins = ends - lengths - 256
    blocks = (ends - 1) // block - begins // block + 1
    visited = (blocks * (blocks + 1) / 2).sum() - len(blocks)
    by_hand = visited * block**2 / ends[-1] * 16_384
    assert sizes.pairs == pytest.approx(by_hand, rel=0.05)

  def test_heads_that_do_not_divide_are_on_every_device(self):
    whole, four = self.sizes(fsdp=4), self.sizes(fsdp=4, tensor=4)
    eight = self.sizes(fsdp=4, tensor=8)  # 4 key heads.
    products, attention = whole.forward - whole.attention, whole.attention
    flops = [layers_of(x).flops for x in (whole, four, eight)]
    rows = 8 / 4
    assert flops == pytest.approx(
      [rows * whole.forward, rows * whole.forward / 4]
      + [rows * (products / 8 + attention)]
    )

  def test_the_head_reads_and_writes_its_gradient_in_every_chunk(self):
    sizes, table = self.sizes(), 3584 * 152_064
    moved = []
    for chunk in (128, 1024):
      sizes.config.model.head_chunk = chunk
      moved.append(account.passes(sizes, "policy", update=True)[0].moved)
    # Three times in bfloat16, and in float32.
    chunks = 16_384 / 128 - 16_384 / 1024
    assert moved[0] - moved[1] == pytest.approx(chunks * table * (6 + 8))

  def test_a_row_on_two_devices_is_half_of_it_on_each(self):
    whole, half = self.sizes(fsdp=2), self.sizes(fsdp=1, context=2)
    held = lambda sizes: account.temporaries(sizes, "policy", update=True)
    parts = held(whole), held(half)
    for name in ("activations of a layer", "activations between layers"):
      # One has one of two rows, the other has half of both rows.
      assert parts[0][name] == parts[1][name]
    assert "keys and values of whole rows" not in parts[0]
    one, two = (layers_of(x, update=True) for x in (whole, half))
    assert one.flops == two.flops and one.sent < two.sent

  def test_gradients_are_also_summed_over_data(self):
    one, two = (self.sizes(data=data, fsdp=4) for data in (1, 2))
    more = layers_of(two, update=True).sent - layers_of(one, update=True).sent
    assert more == pytest.approx(4 * one.parameters / 4)

  @pytest.mark.parametrize("platform, size", [("tpu", 2), ("gpu", 4)])
  @pytest.mark.parametrize("policy, sums", [("full", 8), ("dots", 7)])
  def test_tensor_groups_sum_products(self, platform, size, policy, sums):
    # As compiled for h100:4 and, for scores, for v5e:2x2.
    sizes = self.sizes(platform=platform, kernels="xla", fsdp=1, tensor=2)
    sizes.config.model.remat_policy = policy
    each = 8 * 16_384 * 28 * 3584 * size
    for update, count in ((False, 2), (True, sums)):
      sent = layers_of(sizes, update=update).sent
      assert sent == pytest.approx(count * each)

  def test_what_is_kept_is_not_computed_again(self):
    flops, kept = {}, {}
    for policy in ("full", "dots", "none"):
      sizes = self.sizes()
      sizes.config.model.remat_policy = policy
      flops[policy] = layers_of(sizes, update=True).flops
      kept[policy] = sum(
        account.temporaries(sizes, "policy", update=True).values()
      )
    assert flops["full"] == pytest.approx(4 / 3 * flops["none"])
    assert flops["none"] < flops["dots"] < 1.1 * flops["none"]
    assert kept["full"] < kept["dots"] < kept["none"]

  def test_the_slowest_resource_is_the_bound(self):
    chip = Chip(memory=1.0, flops=10.0, bandwidth=1.0, links=1.0)
    work = cost.Work(flops=8.0, moved=1.2, sent=70.0)
    assert work.seconds(chip) == pytest.approx((2.0, 2.0, 100.0))
    assert cost.bound([work], chip) == (pytest.approx(100.0), "links")
    # Works one after the other add.
    parts = cost.Work(flops=4.0, moved=1.8), cost.Work(sent=1.4)
    found = cost.bound(parts, chip)
    assert found == (pytest.approx(3.0 + 2.0), "memory + links")

  def test_decoding_waits_for_its_links_and_for_the_longest(self):
    sizes = self.sizes(fsdp=16)
    products, links = account.decoding(sizes)
    assert products.sent == 0 and links.flops == links.moved == 0
    assert links.sent > 0
    tokens = sizes.responses * sizes.response
    fewest = tokens / sizes.slots
    # At worst, the longest response begins when all others have ended.
    assert 1.2 * fewest < sizes.decoding.steps < fewest + 15_360
    assert sizes.active == pytest.approx(tokens / sizes.decoding.steps)
    # Long responses are decoded for longer.
    assert sizes.decoding.position > 1.2 * sizes.response / 2

  def test_windows_bound_the_tail(self):
    sizes = self.sizes()
    whole = sizes.decoding.steps
    sizes = self.sizes()
    sizes.config.schedule.window = 1024
    fewest = sizes.responses * sizes.response / sizes.slots
    assert fewest < sizes.decoding.steps < min(whole, 1.2 * fewest)

  def test_pages_bound_what_is_decoded_at_a_time(self):
    free, few = self.sizes(), self.sizes()
    few.config.sampler.kv_pages = 4096
    assert few.slots == free.slots == 512
    assert few.active * (few.prompt + few.decoding.position) < 4096 * 128
    assert few.decoding.steps > free.decoding.steps

  def test_what_fits_is_said_in_flags(self):
    meshes, settings = ((1, 2, 4, 8), (2, 4, 1, 8)), (2, "dots", "float32")
    fit = mesh_search.Fit(1.0, 2.0, *meshes, *settings)
    slow, inexact = fit._replace(seconds=2.0), fit._replace(mu_dtype="bfloat16")
    inexact = inexact._replace(memory=1.0)
    assert min(slow, inexact, fit, key=lambda x: x.rank) == fit
    config = config_lib.default_config()
    for flag in fit.flags().split():
      key, value = flag.removeprefix("--config.").split("=")
      group, _, name = key.rpartition(".")
      old = config_lib.get(config, group)[name]
      config_lib.get(config, group)[name] = type(old)(value)
    validation.validate(config)
    sizes = dict(zip(sharding.AXES, (1, 2, 4, 8)))
    assert config.mesh.to_dict() == sizes | {"expert": 1}
    assert config.sampler.mesh.fsdp == 4 and config.sampler.mesh.tensor == 8
    assert config.optimizer.value.micro_batch_size == 2


_PRESET = "--config=configs/vapo.py:qwen2.5-32b"


class TestScript:
  def test_search_ranks_meshes(self):
    flags = [_PRESET, "--topology=v5p:4x4x4", "--search"]
    code, shown, _ = programs.run("compile", *flags)
    rows = [row for row in shown.splitlines() if row.startswith("| ")][2:]
    seconds = [float(row.split("|")[-2]) for row in rows]
    assert code == 0 and len(rows) >= 3
    # Sorted up to 1 %; within that, exact and small ones come first.
    assert all(a < 1.011 * b for a, b in itertools.pairwise(seconds))

  def test_search_counts_the_shared_base_of_adapters_once(self):
    preset = "--config=configs/vapo.py:qwen2.5-7b-lora"
    flags = [preset, "--topology=h100:1", "--search"]
    bits = {"bfloat16": 16, "nf4": 4.5}
    held = {}
    for name in bits:
      given = [*flags, f"--config.model.base_dtype={name}"]
      code, shown, _ = programs.run("compile", *given)
      rows = [row for row in shown.splitlines() if row.startswith("| 1 x ")]
      assert code == 0 and len(rows) == 1
      held[name] = float(rows[0].split("|")[-3])
    # Learner and sampler have one copy each; embedding and head are bfloat16.
    layers = 7.62e9 - 2 * 3584 * 152_064
    saved = 2 * layers * (bits["bfloat16"] - bits["nf4"]) / 8 / 2**30
    assert held["bfloat16"] - held["nf4"] == pytest.approx(saved, rel=0.01)
