"""A custom family with a custom kind of layer, both defined in this file."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import packed, tiny

from jaxrl_llm import models, register, sharding
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import families, layers
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.files import hf


@dataclasses.dataclass(frozen=True)
class ParallelKind:
  """Parallel attention and MLP, as in GPT-J, with other heads."""

  attention: layers.AttentionKind

  def make(self, *settings):
    return _Parallel(self, *settings)


class _Parallel(nnx.Module):
  def __init__(self, kind, config, numerics, rngs):
    self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.attention = layers.Attention(kind.attention, config, numerics, rngs)
    self.mlp = layers.MlpKind(bias=False).make(config, numerics, rngs)

  def __call__(self, x, rotary, attend, valid):
    normed = self.norm(x)
    out, cache = self.attention(normed, rotary, attend)
    added, _ = self.mlp(normed, valid)
    energy = jnp.mean(jnp.square(added.astype(jnp.float32)), axis=-1)
    return x + out + added, cache, {"energy": energy}


def _period(config):
  plain = llama.make_layer(config)
  other = dataclasses.replace(
    plain.attention, num_kv_heads=1, rope_theta=100.0, qk_norm=True
  )
  return plain, ParallelKind(other)


FAMILY = llama.FAMILY._replace(
  architecture="PairForCausalLM",
  period=_period,
  names=llama.NAMES | {"norm": "ln_1"},
)
register.family("pair", FAMILY)
CONFIG = dataclasses.replace(tiny.tiny_config(), family="pair", num_layers=4)
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 9)).astype(np.int32)
ONES = np.ones(TOKENS.shape, bool)


@functools.cache
def _model():
  fns = models.make_policy(CONFIG, head_chunk=8)
  make = lambda key: tiny.widen(fns.init(key), jax.random.fold_in(key, 1))
  return fns, jax.jit(make)(jax.random.key(0))


ROWS = packed.rows(TOKENS)


def test_names_are_known_and_taken_once():
  assert {"llama", "pair", "qwen2", "qwen3"} <= {*families.names()}
  with pytest.raises(ValueError, match="family 'llama' already exists"):
    register.family("llama", FAMILY)
  config = models.ModelConfig.from_hf(CONFIG.to_hf())
  assert config == CONFIG
  for own in (FAMILY._replace(written={"a": 1}), FAMILY):  # Rerun cell.
    register.family("pair", own)
    assert families.get("pair") is own
  with pytest.raises(InputError, match="config.json: .* the 2 layers that"):
    models.ModelConfig.from_hf(CONFIG.to_hf() | {"num_hidden_layers": 3})


def test_layers_of_a_place_are_stacked():
  _, params = _model()
  assert params["layers"]["input_norm"]["scale"].shape[0] == 2
  assert params["layers1"]["norm"]["scale"].shape[0] == 2
  kernel = params["layers1"]["attention"]["k"]["kernel"]
  assert kernel.shape == (2, CONFIG.hidden_size, CONFIG.head_dim)


def test_trainer_and_sampler_agree():
  fns, params = _model()
  full = jax.jit(fns.logits)(params, TOKENS, ONES)
  sampler = jax.jit(fns.for_sampling)(params)
  assert [
    "mlp" in layer and "norm" in layer for layer in sampler["layers"]
  ] == [
    False,
    True,
  ] * 2
  tables = models.make_block_tables(
    np.arange(6, dtype=np.int32).reshape(2, 3), shards=1, pages=6, page_size=4
  )
  prefilled = jax.jit(fns.prefill)(sampler, TOKENS[:, :6])
  kv_cache = models.write_pages(
    fns.init_kv_cache(1, 6, 4), prefilled, np.asarray(tables[0])[:, None, :2]
  )
  decode = jax.jit(fns.decode)
  for t in range(6, 9):
    at = np.full((2, 1), t, np.int32)
    logits, kv_cache = decode(
      sampler, kv_cache, tables, TOKENS[:, t : t + 1], at, at > 0
    )
    np.testing.assert_allclose(logits[:, 0], full[:, t], rtol=1e-5, atol=2e-5)


def test_states_and_auxiliary_outputs():
  fns, params = _model()
  states = jax.jit(fns.states, static_argnums=2)
  found = [states(params, ROWS, n) for n in (0, 2, 4)]
  embedding = params["embed"]["embedding"]
  np.testing.assert_array_equal(found[0], embedding[TOKENS])
  assert not np.allclose(found[1], found[2])
  # Logits are the head of the normalised last states.
  norm = params["final_norm"]["scale"]
  scale = jax.lax.rsqrt(
    jnp.mean(found[2] ** 2, -1, keepdims=True) + CONFIG.rms_norm_eps
  )
  logits = found[2] * scale * norm[None, None] @ embedding.T
  np.testing.assert_allclose(
    logits, fns.logits(params, TOKENS, ONES), rtol=1e-4, atol=2e-5
  )
  with pytest.raises(ValueError, match="layers"):
    fns.states(params, ROWS, 5)
  with pytest.raises(ValueError, match="multiple of the period 2, got 3"):
    fns.states(params, ROWS, 3)
  # A layer's energy is the output of its MLP; layers are summed.
  out, aux = jax.jit(fns.logprobs)(params, ROWS)
  assert out.logprobs.shape == aux["energy"].shape == TOKENS.shape
  without = jax.tree.map(jnp.copy, params)
  down = without["layers1"]["mlp"]["down"]
  down["kernel"] = down["kernel"].at[1].set(0.0)
  _, first = jax.jit(fns.logprobs)(without, ROWS)
  assert (np.asarray(aux["energy"]) > np.asarray(first["energy"])).all()
  down["kernel"] = jnp.zeros_like(down["kernel"])
  _, none = jax.jit(fns.logprobs)(without, ROWS)
  np.testing.assert_array_equal(none["energy"], 0.0)


def test_files_name_every_layer(tmp_path):
  fns, params = _model()
  models.save(str(tmp_path), fns, params)
  _, tensors = hf.hf_files.read_headers(tmp_path)
  assert tensors["model.layers.1.ln_1.weight"].shape == (CONFIG.hidden_size,)
  assert "model.layers.2.input_layernorm.weight" in tensors
  again, read = models.load(str(tmp_path))
  assert again.config == CONFIG
  jax.tree.map(np.testing.assert_array_equal, read, params)


def test_has_a_place_on_a_mesh():
  fns, params = _model()
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  shapes = jax.eval_shape(lambda: params)
  trained = sharding.tree_shardings(shapes, mesh)
  sampled = sharding.tree_shardings(
    jax.eval_shape(fns.for_sampling, shapes), mesh
  )
  up = lambda layer: layer["mlp"]["up"]["kernel"].spec
  assert tuple(up(sampled["layers"][3])) == tuple(up(trained["layers1"]))[1:]
