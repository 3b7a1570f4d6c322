"""What programs send, read from HLO; the account; scripts/compile.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import configs, programs
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import config as config_lib
from jaxrl_llm import models, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.metrics.chips import Chip
from jaxrl_llm.models.shapes import MODELS
from jaxrl_llm.simulate import account, hlo, mesh_search
from jaxrl_llm.trainer import validation

MESH = {"data": 1, "fsdp": 4, "tensor": 2}


def compiled(function, *arguments):
  """HLO of a function of arrays with places: (shape, spec)."""
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
  def test_a_gather_by_hand(self):
    text = compiled(whole, ((16, 8), ("fsdp",)))
    assert hlo.collectives(text, MESH, [1]) == [
      # Three quarters of 16 x 8 numbers of four bytes.
      hlo.Sent("all-gather", ("fsdp",), 3 / 4 * 16 * 8 * 4)
    ]

  def test_a_sum_over_the_other_axis(self):
    product = lambda x, y: whole(x @ y)
    text = compiled(product, ((16, 8), (None, "tensor")), ((8, 6), ("tensor",)))
    assert hlo.collectives(text, MESH, [1]) == [
      hlo.Sent("all-reduce", ("tensor",), 2 * 1 / 2 * 16 * 6 * 4)
    ]

  def test_over_both_axes(self):
    text = compiled(whole, ((16, 8), (("fsdp", "tensor"),)))
    assert hlo.collectives(text, MESH, [1]) == [
      hlo.Sent("all-gather", ("fsdp", "tensor"), 7 / 8 * 16 * 8 * 4)
    ]

  @pytest.mark.parametrize("known", [True, False])
  def test_loops_count_as_often_as_they_run(self, known):
    """One of five rounds, or one whose rounds are data."""

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


class TestEstimate:
  def sizes(self, preset="qwen2.5-7b", **mesh):
    config = configs.load("vapo", preset)
    mesh = {"data": 1, "fsdp": 16, "tensor": 1} | mesh
    return account.Sizes(config, MODELS[preset], mesh)

  def test_models_have_the_size_of_their_name(self):
    # As their model cards say.
    for name, billions in (("1.5b", 1.54), ("7b", 7.62), ("32b", 32.8)):
      found = models.num_params(MODELS[f"qwen2.5-{name}"]) / 1e9
      assert found == pytest.approx(billions, rel=0.005)

  def test_a_forward_pass_by_hand(self):
    sizes = self.sizes()
    row = 16_384  # Tokens; 28 layers of width 3584, 28 heads of 128.
    layer = 3584 * (28 * 128 * 2 + 2 * 4 * 128) + 3 * 3584 * 18_944
    products = 2 * row * (28 * layer + 3584 * 152_064)
    attention = 28 * 4 * (row**2 / 2) * 28 * 128
    assert sizes.forward(1) == pytest.approx(products + attention, rel=1e-4)

  def test_a_row_on_two_devices_is_half_of_it_on_each(self):
    whole, half = self.sizes(fsdp=2), self.sizes(fsdp=1, context=2)
    parts = [
      account.temporaries(sizes, "policy", update=True)
      for sizes in (whole, half)
    ]
    for name in ("activations of a layer", "activations between layers"):
      # The one has a row of two, the other a half of both.
      assert parts[0][name] == parts[1][name]
    assert "keys and values of whole rows" not in parts[0]
    one, two = (account.updating(x, "policy") for x in (whole, half))
    assert one.flops == two.flops and one.sent < two.sent

  def test_what_is_kept_is_not_computed_again(self):
    flops, kept = {}, {}
    for policy in ("full", "dots", "none"):
      sizes = self.sizes()
      sizes.config.model.remat_policy = policy
      flops[policy] = account.updating(sizes, "policy").flops
      kept[policy] = sum(
        account.temporaries(sizes, "policy", update=True).values()
      )
    assert flops["full"] == pytest.approx(4 / 3 * flops["none"])
    assert flops["none"] < flops["dots"] < 1.1 * flops["none"]
    assert kept["full"] < kept["dots"] < kept["none"]

  def test_work_is_split_over_devices(self):
    one = account.updating(self.sizes(fsdp=16), "policy")
    two = account.updating(self.sizes(fsdp=16, tensor=2), "policy")
    # Micro-batches are as large, and are split in two more ways.
    assert two.flops == one.flops / 2 and two.sent != one.sent

  def test_the_slowest_resource_is_the_bound(self):
    chip = Chip(memory=1.0, flops=1.0, bandwidth=1.0, links=1.0)
    work = account.Work(flops=6.0, moved=1.4, sent=70.0)
    assert work.bound(chip) == (pytest.approx(100.0), "links")
    assert work.seconds(chip)["compute"] == pytest.approx(10.0)
    assert work.seconds(chip)["memory"] == pytest.approx(2.0)

  def test_pages_bound_what_is_written_at_a_time(self):
    sizes = self.sizes()
    assert sizes.written == sizes.slots == 512
    sizes.config.sampler.kv_pages = 1024
    held = sizes.prompt + sizes.response / 2
    assert sizes.slots == 512
    assert sizes.written == pytest.approx(1024 * 128 / held)

  def test_what_fits_is_said_in_flags(self):
    slow = mesh_search.Fit(2.0, 1.0, (1, 4, 1, 2), (8, 1, 1, 1), 4, "full")
    fit = mesh_search.Fit(1.0, 2.0, (1, 2, 4, 8), (2, 4, 1, 8), 2, "dots")
    assert min(slow, fit) == fit
    config = config_lib.default_config()
    for flag in fit.flags().split():
      key, value = flag.removeprefix("--config.").split("=")
      group, _, name = key.rpartition(".")
      old = config_lib.get(config, group)[name]
      config_lib.get(config, group)[name] = type(old)(value)
    validation.validate(config)
    assert config.mesh.to_dict() == dict(zip(sharding.AXES, (1, 2, 4, 8)))
    assert config.sampler.mesh.fsdp == 4 and config.sampler.mesh.tensor == 8
    assert config.optimizer.value.micro_batch_size == 2

  def test_bytes_by_shardings(self):
    mesh = sharding.make_mesh(**MESH)
    place = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    shape = jax.ShapeDtypeStruct((8, 6), np.float32, sharding=place)
    assert sharding.bytes_per_device({"a": [shape, shape]}) == 2 * 8 * 6 * 4 / 8


_PRESET = "--config=configs/vapo.py:qwen2.5-32b"


class TestCompiled:
  class Failing:
    def __init__(self, message):
      self.message = message

    def compile(self):
      return self

    def as_text(self):
      raise jax.errors.JaxRuntimeError(self.message)

  def test_a_compiler_that_fails_is_one_line_with_the_remedy(self):
    broken = self.Failing("INTERNAL: async-update\nat some line")
    with pytest.raises(InputError, match=r"update: .*async-.*jax\[tpu\]=="):
      hlo.compiled("update", broken)

  def test_what_does_not_fit_is_no_such_failure(self):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
      hlo.compiled("update", self.Failing("RESOURCE_EXHAUSTED: memory"))


class TestScript:
  def test_search_ranks_meshes(self):
    flags = [_PRESET, "--topology=v5p:4x4x4", "--search"]
    code, shown, _ = programs.run("compile", *flags)
    rows = [row for row in shown.splitlines() if row.startswith("| ")][2:]
    seconds = [float(row.split("|")[-2]) for row in rows]
    assert code == 0 and len(rows) >= 3 and seconds == sorted(seconds)

  @pytest.mark.parametrize(
    "flags, says",
    [
      ([_PRESET, "--topology=h100:8"], "choose a chip of v5e, v5p, v6e"),
      (["--config=configs/vapo.py"], "names no model"),
      (
        [_PRESET, "--topology=v5e:2x4", "--search"],
        "no mesh of these chips holds this run",
      ),
      ([], "no --config; give"),
    ],
  )
  def test_bad_input_is_one_line(self, flags, says):
    code, _, error = programs.run("compile", *flags)
    assert code == 2 and says in error and error.count("\n") == 1
