"""Logits equal those of `transformers`, read or written, for every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_engine

from jaxrl_llm import models
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings

_REASON = "parity tests need the `parity` extra: pip install -e .[parity]"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

SIZES = dict(
  vocab_size=67,
  hidden_size=36,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=3,
  num_key_value_heads=1,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
  tie_word_embeddings=False,
)
# A short original context, so that 19 positions cover all kinds of frequencies.
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}
CASES = {
  "llama every bias": (
    "Llama",
    {
      "attention_bias": True,
      "mlp_bias": True,
      "tie_word_embeddings": True,
      "head_dim": 20,
      "rope_scaling": LINEAR,
    },
  ),
  "llama GQA llama3 rope": (
    "Llama",
    {
      "hidden_size": 96,
      "num_attention_heads": 6,
      "num_key_value_heads": 2,
      "rope_theta": 500.0,
      "rope_scaling": LLAMA3,
    },
  ),
  "qwen2": ("Qwen2", {"rope_theta": 1e6}),
  "qwen2 tied full heads": (
    "Qwen2",
    {
      "tie_word_embeddings": True,
      "num_key_value_heads": 3,
      "rope_scaling": YARN,
    },
  ),
  "gemma3": (
    "Gemma3Text",
    {
      "num_hidden_layers": 12,
      "sliding_window": 5,
      "head_dim": 16,
      "query_pre_attn_scalar": 20,
      "tie_word_embeddings": True,
    },
  ),
  "gemma3 cut period": (
    "Gemma3Text",
    {
      "num_hidden_layers": 8,
      "sliding_window": 3,
      "tie_word_embeddings": True,
      "head_dim": 12,
      "rope_parameters": {
        "full_attention": {"rope_theta": 500.0, **LINEAR},
        "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
      },
    },
  ),
  "olmo3": (
    "Olmo3",
    {
      "num_hidden_layers": 8,
      "sliding_window": 5,
      "rope_parameters": {
        "full_attention": {"rope_theta": 500.0, **YARN},
        "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
      },
    },
  ),
  "olmo3 cut period": (
    "Olmo3",
    {
      "num_hidden_layers": 5,
      "num_key_value_heads": 3,
      "sliding_window": 3,
      "attention_bias": True,
    },
  ),
  "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
  "mistral window": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
  "smollm3": (
    "SmolLM3",
    {"num_hidden_layers": 5, "pad_token_id": None, "tie_word_embeddings": True},
  ),
  "qwen3_moe": (
    "Qwen3Moe",
    {
      "head_dim": 16,
      "num_experts": 5,
      "num_experts_per_tok": 2,
      "moe_intermediate_size": 12,
      "norm_topk_prob": True,
    },
  ),
  "qwen3 tied bias": (
    "Qwen3",
    {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
  ),
}


def make_reference(family, changes):
  """Makes a random model with large weights, so that logits are not small."""
  torch.manual_seed(0)
  config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
  name = family.removesuffix("Text")
  model = getattr(transformers, f"{name}ForCausalLM")(config)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      centered = "norm" in name and "Gemma" not in family
      mean = 1.0 if centered else 0.0
      parameter.normal_(mean, 0.2)
  return model.eval()


def reference_logits(model, tokens, mask):
  with torch.no_grad():
    outputs = model(
      input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long()
    )
  return outputs.logits.numpy()


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, SIZES["vocab_size"], (2, 19))
  lengths = np.array([[19], [11]])
  return tokens, np.arange(19) < lengths


@pytest.mark.parametrize("name", CASES)
def test_logits_in_and_out(name, batch, tmp_path):
  tokens, mask = batch
  reference = make_reference(*CASES[name])
  reference.save_pretrained(tmp_path / "in")
  fns, params = models.load(str(tmp_path / "in"), dtype=jnp.float32)
  logits = jax.jit(fns.logits)

  wanted = reference_logits(reference, tokens, np.ones_like(mask))
  found = logits(params, jnp.asarray(tokens), jnp.ones(mask.shape, bool))
  assert np.abs(wanted).max() > 1.0
  assert np.abs(found - wanted).max() <= 1e-4

  # Right padding is invisible to real positions.
  padded = reference_logits(reference, tokens, mask)
  found = logits(params, jnp.asarray(tokens), jnp.asarray(mask))
  assert np.abs(found - padded)[mask].max() <= 1e-4

  models.save(str(tmp_path / "out"), fns, params)
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  assert type(again) is type(reference)
  assert (
    np.abs(reference_logits(again.eval(), tokens, mask) - padded).max() <= 1e-5
  )


def test_shards_and_bfloat16_of_transformers(batch, tmp_path):
  tokens, mask = batch
  reference = make_reference("Qwen3", {"head_dim": 16})
  with torch.no_grad():
    for parameter in reference.parameters():
      parameter.copy_(parameter.bfloat16())
  wanted = reference_logits(reference, tokens, mask)
  reference.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 2
  fns, params = models.load(str(tmp_path), dtype=jnp.float32)
  found = fns.logits(params, jnp.asarray(tokens), jnp.asarray(mask))
  assert np.abs(found - wanted)[mask].max() <= 1e-4


@pytest.mark.parametrize(
  "name",
  ["gemma3", "mistral window", "olmo3", "qwen2", "qwen3_moe", "smollm3"],
)
def test_the_sampler_scores_its_tokens_as_transformers_does(name, tmp_path):
  reference = make_reference(*CASES[name])
  reference.save_pretrained(tmp_path)
  fns, params = models.load(str(tmp_path), dtype=jnp.float32)
  engine = Engine(fns, EngineConfig(2, 5, 12, page_size=4, stop_tokens=()))
  rollout = tiny_engine.write(
    engine,
    jax.jit(fns.for_sampling)(params),
    [[3, 5, 7, 9, 11]],
    [[0, 1]],
    key=jax.random.key(0),
    settings=SamplingSettings(),
  )
  tokens = np.concatenate([rollout.prompt_tokens, rollout.tokens], axis=1)
  logits = reference_logits(reference, tokens, np.ones(tokens.shape, bool))
  wanted = jax.nn.log_softmax(logits[:, 4:-1].astype(np.float64))
  wanted = np.take_along_axis(wanted, rollout.tokens[..., None], axis=-1)
  np.testing.assert_allclose(
    rollout.behavior_logprobs, wanted[..., 0], atol=2e-4
  )
