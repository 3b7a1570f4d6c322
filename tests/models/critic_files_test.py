"""Critics are read and written as token classifiers of `transformers`."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import packed, tiny_run

from jaxrl_llm import models
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods.hl_gauss import CategoricalHead
from jaxrl_llm.models import heads
from jaxrl_llm.models.files import hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
CATEGORICAL = CategoricalHead(7, (-1.5, 2.0))
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def place(shapes):
  return jax.tree.map(lambda _: HERE, shapes)


def make(family="llama", head=heads.SCALAR, **changes):
  fields = vars(tiny_run.model_config()) | {"family": family} | changes
  fields["attention_bias"] = family == "qwen2"
  if family == "smollm3":
    fields |= {"num_layers": 4}
  return models.make_value(models.ModelConfig(**fields), head=head)


def random_params(fns):
  rng = np.random.default_rng(0)

  def draw(path, x):
    mean = float(path[-1].key == "scale")  # Norms.
    return jnp.asarray(rng.normal(mean, 0.3, x.shape), x.dtype)

  shapes = jax.eval_shape(fns.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize("head", [heads.SCALAR, CATEGORICAL])
@pytest.mark.parametrize("tied", [True, False])
def test_bit_equal_after_a_round_trip(tmp_path, head, tied):
  fns = make(head=head, tie_word_embeddings=tied)
  params = random_params(fns)
  models.save(str(tmp_path), fns, params)
  assert hf.is_model(tmp_path) and hf.is_critic(tmp_path)
  config = hf.read_config(tmp_path)
  assert config == fns.config
  found = hf.read_critic(tmp_path, config, head, place)
  chex.assert_trees_all_equal(found, params)
  chex.assert_trees_all_equal(
    fns.from_policy(found), params
  )  # Nothing is re-initialised.


@pytest.mark.parametrize(
  "head, problem",
  [
    (heads.SCALAR, "is \\[-1.5, 2.0\\], but that of config.value is None"),
    (CategoricalHead(7, (-1.0, 2.0)), "config.value is \\[-1.0, 2.0\\]"),
    (CategoricalHead(9, (-1.5, 2.0)), "score"),
  ],
)
def test_another_head_is_one_line(tmp_path, head, problem):
  fns = make(head=CATEGORICAL)
  models.save(str(tmp_path), fns, random_params(fns))
  with pytest.raises(InputError, match=problem):
    hf.read_critic(tmp_path, fns.config, head, place)
  with pytest.raises(InputError, match="is unexpected"):
    models.load(str(tmp_path))  # As a policy.


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path, family):
  reason = "parity tests need the `parity` extra: pip install -e .[parity]"
  torch = pytest.importorskip("torch", reason=reason)
  transformers = pytest.importorskip("transformers", reason=reason)
  head = CATEGORICAL if family == "qwen3" else heads.SCALAR
  fns = make(family, head)
  params = random_params(fns)
  models.save(str(tmp_path), fns, params)
  theirs = transformers.AutoModelForTokenClassification.from_pretrained(
    tmp_path
  ).eval()
  assert theirs.config.num_labels == head.outputs
  tokens = np.random.default_rng(1).integers(0, 19, (2, 11))
  with torch.no_grad():
    logits = theirs(input_ids=torch.tensor(tokens)).logits.numpy()
  assert np.abs(logits).max() > 1.0
  ours, _ = jax.jit(fns.outputs)(params, packed.rows(tokens))
  found = ours.get("value_logits", ours["values"][..., None])
  np.testing.assert_allclose(found, logits, atol=1e-4)
  saved = json.loads((tmp_path / "config.json").read_text())
  support = head.support and [*head.support]
  assert saved["value_support"] == support
  # Directories written by transformers can be read, too.
  theirs.save_pretrained(tmp_path / "theirs")
  if head.outputs == 1:
    chex.assert_trees_all_equal(
      hf.read_critic(tmp_path / "theirs", fns.config, head, place), params
    )
