"""Tests of low-rank adapters: their equations and their layout."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import traverse_util
from helpers import packed, tiny

from jaxrl_llm import models, sync
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import adapters
from jaxrl_llm.models.files import hf

EVERYWHERE = ("attention", "mlp")


def make(**settings):
  """Returns `(fns, params)` of the tiny model with adapters; B is zero."""
  settings = {"rank": 3, "alpha": 6.0, "targets": EVERYWHERE} | settings
  own = adapters.Adapters(**settings)
  config = dataclasses.replace(tiny.tiny_config(), adapters=own)
  _, plain = tiny.tiny_policy()
  params = models.with_adapters(plain, jax.random.key(1), config)
  return models.make_policy(config), params


def widened(params):
  """Adds noise to the factors, as if they had been trained."""
  base, trained = models.partition(params, ())
  trained = tiny.widen(trained, jax.random.key(2))
  return models.merge(models.Params(base, trained))


def rows():
  tokens = np.random.default_rng(0).integers(0, 67, (2, 10))
  return packed.rows(tokens, np.arange(20).reshape(2, 10) % 10 < 9)


def scored(fns, params):
  return jax.jit(fns.logprobs)(params, rows())[0]


def test_the_product_and_the_merged_kernel_of_a_worked_example():
  layer = {
    "kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]]),
    "lora_a": jnp.array([[1.0], [2.0]]),
    "lora_b": jnp.array([[0.5, -1.0]]),
  }
  own = adapters.Adapters(rank=1, alpha=2.0, targets=EVERYWHERE)
  merged = own.merge(layer)
  assert merged.keys() == {"kernel"}
  np.testing.assert_allclose(merged["kernel"], [[2.0, 0.0], [5.0, 0.0]])
  x = jnp.array([1.0, -1.0])
  np.testing.assert_allclose(x @ merged["kernel"], [-3.0, 0.0])


@pytest.mark.parametrize(
  "scaling, scale", [("lora", 16 / 4), ("rslora", 16 / 2)]
)
def test_scales_follow_their_papers(scaling, scale):
  own = adapters.Adapters(rank=4, alpha=16, targets=(), scaling=scaling)
  assert own.scale == scale


def test_a_new_adapter_changes_no_bit():
  fns, params = make()
  plain_fns, plain = tiny.tiny_policy()
  ours, theirs = scored(fns, params), scored(plain_fns, plain)
  np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
  np.testing.assert_array_equal(ours.entropy, theirs.entropy)


@pytest.mark.parametrize("base_dtype", adapters.BASE_DTYPES)
def test_trainer_and_sampler_compute_the_merged_model(base_dtype):
  fns, params = make(base_dtype=base_dtype)
  params = widened(params)
  plain_fns, plain = tiny.tiny_policy()
  merged = fns.config.adapters.merge(params)
  assert jax.tree.structure(merged) == jax.tree.structure(plain)
  as_plain = jax.tree.map(lambda x: x.astype(jnp.float32), merged)
  ours, theirs = scored(fns, params), scored(plain_fns, as_plain)
  np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)
  assert np.abs(ours.logprobs - scored(*make()).logprobs).max() > 0.1
  transfer = sync.WeightTransfer(fns.for_sampling, params)
  check = sync.make_parity_check(
    fns, sync.parity_tokens(67, rows=2, length=10), tolerance=1e-5, page_size=4
  )
  assert check(params, transfer.send(params, 0)) <= 1e-5


def test_gradients_are_those_of_the_merged_model():
  fns, params = make()
  base, trained = models.partition(widened(params), ())

  def gradients(fns, prepare):
    def loss(trained):
      params = models.merge(models.Params(base, trained))
      return jnp.mean(fns.logprobs(prepare(params), rows())[0].logprobs)

    return jax.jit(jax.grad(loss))(trained)

  own, (plain_fns, _) = fns.config.adapters, tiny.tiny_policy()
  found, expected = gradients(fns, dict), gradients(plain_fns, own.merge)
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected))


def test_only_targets_have_adapters():
  _, params = make(targets=("attention/q", "mlp/up"))
  found = traverse_util.flatten_dict(models.partition(params, ()).trained)
  assert {path[1:] for path in found} == {
    (*place, name)
    for place in (("attention", "q"), ("mlp", "up"))
    for name in adapters.FACTORS
  }


@pytest.mark.parametrize("base_dtype", adapters.BASE_DTYPES)
def test_parameters_count_in_whatever_they_are_stored(base_dtype):
  config = make(base_dtype=base_dtype)[0].config
  added = models.num_params(config) - models.num_params(config.base)
  _, params = make()
  factors = jax.tree.leaves(models.partition(params, ()).trained)
  assert added == sum(x.size for x in factors)


def test_a_critic_begins_with_the_base_and_trains_its_head():
  fns, params = make()
  critic = models.make_value(fns.config, reads_logprobs=True)
  found = critic.from_policy(widened(params))
  base, trained = models.partition(found, ())
  assert trained.keys() == {"layers", "value_head", "surprise"}
  _, plain = tiny.tiny_policy()
  for name in ("embed", "final_norm"):
    jax.tree.map(np.testing.assert_array_equal, base[name], plain[name])
  shapes = jax.eval_shape(critic.init, jax.random.key(0))
  assert jax.tree.structure(shapes) == jax.tree.structure(found)


def test_files_have_the_layout_of_peft(tmp_path):
  fns, params = make(targets=("attention/q", "mlp"), scaling="rslora")
  factors = models.partition(widened(params), ()).trained
  hf.write_adapters(tmp_path, fns.config, factors, base="some/base")
  values = json.loads((tmp_path / "adapter_config.json").read_text())
  expected = ["down_proj", "gate_proj", "q_proj", "up_proj"]
  assert values["target_modules"] == expected
  assert (values["peft_type"], values["r"]) == ("LORA", 3)
  assert values["use_rslora"] and values["lora_alpha"] == 6.0
  assert values["base_model_name_or_path"] == "some/base"
  file = tmp_path / "adapter_model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  assert len(tensors) == 2 * 2 * len(expected)
  name = "base_model.model.model.layers.1.mlp.up_proj.lora_{}.weight"
  up = factors["layers"]["mlp"]["up"]
  np.testing.assert_array_equal(tensors[name.format("A")], up["lora_a"][1].T)
  np.testing.assert_array_equal(tensors[name.format("B")], up["lora_b"][1].T)


def test_files_replace_those_of_before_and_leave_others_alone(tmp_path):
  (tmp_path / "model.safetensors").write_text("of the base")
  for rank in (2, 3):
    fns, params = make(rank=rank)
    factors = models.partition(params, ()).trained
    hf.write_adapters(tmp_path, fns.config, factors, base="some/base")
  names = {file.name for file in tmp_path.iterdir()}
  adapters_of = {"adapter_config.json", "adapter_model.safetensors"}
  assert names == adapters_of | {"model.safetensors"}
  assert (tmp_path / "model.safetensors").read_text() == "of the base"
  values = json.loads((tmp_path / "adapter_config.json").read_text())
  assert values["r"] == 3
  with pytest.raises(InputError, match="cannot be written") as error:
    file = tmp_path / "adapter_config.json"
    hf.write_adapters(file, fns.config, factors, base="some/base")
  assert "\n" not in str(error.value)
