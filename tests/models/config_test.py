"""ModelConfig: real files, rejected files, rope frequencies."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import rope
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.rope import RopeScaling
from jaxrl_llm.models.transformer import multiplied_params

# Contents of config.json of published models, one paragraph each.
FILES = [
  json.loads(f"{{{text}}}")
  for text in """
"architectures": ["LlamaForCausalLM"], "attention_bias": false,
"hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
"max_position_embeddings": 8192, "model_type": "llama",
"num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
"rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 100000,
"tie_word_embeddings": true, "vocab_size": 49152

"architectures": ["LlamaForCausalLM"], "attention_bias": false,
"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
"max_position_embeddings": 131072, "model_type": "llama",
"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05,
"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor":
1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
"rope_theta": 500000.0, "tie_word_embeddings": true, "vocab_size": 128256,
"head_dim": 64, "mlp_bias": false

"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
"hidden_size": 896, "intermediate_size": 4864,
"max_position_embeddings": 32768, "max_window_layers": 21,
"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
"num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
"sliding_window": 32768, "tie_word_embeddings": true,
"use_sliding_window": false, "vocab_size": 151936

"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
"head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
"intermediate_size": 3072, "max_position_embeddings": 40960,
"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
"rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
"use_sliding_window": false, "vocab_size": 151936

"architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
"attn_logit_softcapping": null, "final_logit_softcapping": null,
"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
"hidden_size": 1152, "intermediate_size": 6912,
"max_position_embeddings": 32768, "model_type": "gemma3_text",
"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
"rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144

"architectures": ["MistralForCausalLM"], "hidden_act": "silu",
"hidden_size": 4096, "intermediate_size": 14336,
"max_position_embeddings": 32768, "model_type": "mistral",
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
"tie_word_embeddings": false, "vocab_size": 32768

"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false,
"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
"max_position_embeddings": 65536, "mlp_bias": false, "model_type": "smollm3",
"no_rope_layer_interval": 4, "num_attention_heads": 16,
"num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
"rope_theta": 5000000.0, "use_sliding_window": false, "vocab_size": 128256

"architectures": ["Olmo3ForCausalLM"], "attention_bias": false,
"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
"max_position_embeddings": 65536, "model_type": "olmo3",
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
"rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836,
"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
"original_max_position_embeddings": 8192, "rope_type": "yarn"},
"rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": false,
"vocab_size": 100278

"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
"decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 2048, "intermediate_size": 6144,
"max_position_embeddings": 40960, "mlp_only_layers": [],
"model_type": "qwen3_moe", "moe_intermediate_size": 768,
"norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
"router_aux_loss_coef": 0.001, "sliding_window": null,
"tie_word_embeddings": false, "use_sliding_window": false,
"vocab_size": 151936
""".split("\n\n")
]
SMOLLM2, LLAMA_1B, QWEN2, QWEN3, GEMMA3, MISTRAL, SMOLLM3, OLMO3, QWEN3_MOE = (
  FILES
)
SMOLLM3["no_rope_layers"] = [1, 1, 1, 0] * 9
LLAMA3 = LLAMA_1B["rope_scaling"]
YARN = {"type": "yarn", "factor": 4.0}
YARN["original_max_position_embeddings"] = 32768
NAMES = "smollm2 llama qwen2 qwen3 gemma3 mistral smollm3 olmo3 qwen3_moe"
FAMILIES = dict(zip(NAMES.split(), FILES))


def without(values, *keys):
  return {key: value for key, value in values.items() if key not in keys}


class TestFromHf:
  @pytest.mark.parametrize(
    ("name", "count"),
    # Published parameter counts of these models; OLMo 3's from its shapes.
    [
      ("qwen3_moe", 30_532_122_624),
      ("gemma3", 999_885_952),
      ("mistral", 7_248_023_552),
      ("olmo3", 7_298_011_136),
      ("smollm3", 3_075_098_624),
      ("smollm2", 134_515_008),
      ("llama", 1_235_814_400),
      ("qwen2", 494_032_768),
      ("qwen3", 596_049_920),
    ],
  )
  def test_num_params_of_published_models(self, name, count):
    assert models.num_params(ModelConfig.from_hf(FAMILIES[name])) == count

  def test_what_the_number_of_parameters_does_not_show(self):
    config = ModelConfig.from_hf(LLAMA_1B | {"attention_bias": True})
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 500000.0)
    assert config.max_position_embeddings == 131072
    (kind,) = config.period
    assert kind.attention.output_bias and not kind.attention.qk_norm
    hash(config)  # Usable as a static argument of jit.

  @pytest.mark.parametrize(
    "written",
    [
      {"beta_fast": 32, "beta_slow": 1.0, "truncate": True, "mscale": None},
      {"original_max_position_embeddings": 32768.0},
      {"attention_factor": 0.1 * math.log(4) + 1},
      {"original_max_position_embeddings": None},  # The context of the model.
    ],
  )
  def test_keys_of_yarn_that_say_what_holds_anyway(self, written):
    assert QWEN2["max_position_embeddings"] == 32768
    config = ModelConfig.from_hf(QWEN2 | {"rope_scaling": YARN | written})
    assert config.rope_scaling == RopeScaling(
      "yarn", 4.0, original_max_position_embeddings=32768
    )

  def test_every_fourth_layer_of_smollm3_has_no_rope(self):
    config = ModelConfig.from_hf(SMOLLM3)
    rotary = [kind.attention.rotary for kind in config.layers]
    assert rotary == [True, True, True, False] * 9
    cut = {"num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 0, 1, 1]}
    layers = ModelConfig.from_hf(SMOLLM3 | cut).layers
    rotary = [kind.attention.rotary for kind in layers]
    assert rotary == [True, True, True, False, True, True]

  def test_absent_keys_have_the_defaults_of_their_family(self):
    assert ModelConfig.from_hf(SMOLLM3).tie_word_embeddings
    other = ModelConfig.from_hf(SMOLLM3 | {"tie_word_embeddings": False})
    assert not other.tie_word_embeddings
    assert not other.to_hf()["tie_word_embeddings"]
    old = ModelConfig.from_hf(without(MISTRAL, "sliding_window"))
    assert old.period[0].attention.window == 4096

  def test_a_token_is_multiplied_with_its_own_experts(self):
    config = ModelConfig.from_hf(QWEN3_MOE)
    idle, table = 48 * 120 * 3 * 2048 * 768, 151_936 * 2048
    assert multiplied_params(config) == 30_532_122_624 - idle - table
    tied = ModelConfig.from_hf(SMOLLM2)  # The embedding is the head, too.
    assert multiplied_params(tied) == 134_515_008

  def test_experts_are_read_by_either_name_of_their_number(self):
    config = ModelConfig.from_hf(QWEN3_MOE)
    (kind,) = config.period
    assert (kind.mlp.num_experts, kind.mlp.per_token) == (128, 8)
    other = without(QWEN3_MOE, "num_experts") | {"num_local_experts": 128}
    assert ModelConfig.from_hf(other) == config

  def test_windows_and_ropes_of_gemma3_alternate(self):
    config = ModelConfig.from_hf(GEMMA3)
    layers = [kind.attention for kind in config.layers]
    assert [kind.window for kind in layers[:7]] == [512] * 5 + [None, 512]
    assert [kind.rope_theta for kind in layers[4:6]] == [1e4, 1e6]
    assert len(layers) == 26 and layers[-1].window == 512
    newer = without(GEMMA3, "rope_theta", "rope_local_base_freq") | {
      "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
      }
    }
    assert ModelConfig.from_hf(newer) == config

  def test_a_window_of_mistral_is_in_every_layer_and_always_written(self):
    config = ModelConfig.from_hf(MISTRAL | {"sliding_window": 77})
    assert {kind.attention.window for kind in config.layers} == {77}
    assert config.to_hf()["sliding_window"] == 77
    full = MISTRAL | {"layer_types": ["full_attention"] * 32}
    assert ModelConfig.from_hf(full) == ModelConfig.from_hf(MISTRAL)
    # Readers would assume 4096 if the key were absent.
    for extra in (("sliding_window", None),), ():
      config = dataclasses.replace(ModelConfig.from_hf(MISTRAL), extra=extra)
      assert config.period[0].attention.window is None
      assert config.to_hf()["sliding_window"] is None

  def test_what_old_llama_files_leave_out(self):
    config = ModelConfig.from_hf(
      without(SMOLLM2, "rope_theta", "num_key_value_heads", "attention_bias")
    )
    assert config.rope_theta == 10000.0
    assert config.num_kv_heads == config.num_heads
    assert not config.attention_bias

  @pytest.mark.parametrize(
    "scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}]
  )
  def test_both_spellings_of_rope_agree(self, scaling):
    old = LLAMA_1B | {"rope_scaling": scaling}
    block = (scaling or {"rope_type": "default"}) | {"rope_theta": 500000.0}
    new = without(old, "rope_theta", "rope_scaling") | {
      "rope_parameters": block
    }
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(old | new) == ModelConfig.from_hf(old)

  def test_older_name_of_the_rope_kind(self):
    scaling = {"type": "linear", "factor": 2.0}
    config = ModelConfig.from_hf(SMOLLM2 | {"rope_scaling": scaling})
    assert config.rope_scaling == RopeScaling("linear", 2.0)

  def test_keys_that_choose_code_are_ignored(self):
    hostile = {
      "auto_map": {"AutoModelForCausalLM": "evil.Model"},
      "_attn_implementation_internal": "evil/kernel",
      "trust_remote_code": True,
    }
    assert ModelConfig.from_hf(QWEN3 | hostile) == ModelConfig.from_hf(QWEN3)

  @pytest.mark.parametrize("name", FAMILIES)
  def test_round_trip(self, name):
    config = ModelConfig.from_hf(FAMILIES[name])
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config


# The family of a published file; its changes, `-` for a key that is removed; a
# part of the message.
BAD = """
smollm2 | "vocab_size": 0 | vocab_size
smollm2 | "num_attention_heads": -9 | num_attention
smollm2 | "hidden_size": 1000000000000 | hidden_size
smollm2 | "num_hidden_layers": true | num_hidden_layers
smollm2 | "vocab_size": "49152" | vocab_size
smollm2 | "hidden_size": 576.0 | hidden_size
smollm2 | "intermediate_size": [1, 2] | intermediate_size
smollm2 | "num_key_value_heads": 2 | num_key_value_heads
smollm2 | "num_key_value_heads": 0 | num_key_value_heads
smollm2 | "hidden_size": 577 | head_dim
qwen3 | "head_dim": 63 | head_dim
smollm2 | "rms_norm_eps": 0 | rms_norm_eps
smollm2 | "rms_norm_eps": NaN | rms_norm_eps
smollm2 | "rope_theta": Infinity | rope_theta
smollm2 | "rope_theta": "1e4" | rope_theta
smollm2 | "attention_bias": "no" | attention_bias
smollm2 | "tie_word_embeddings": 1 | tie_word_embeddings
smollm2 | "model_type": "-" | model_type
smollm2 | "model_type": "gpt2" | gpt2
smollm2 | "model_type": ["llama"] | model_type
smollm2 | "architectures": ["LlamaForSequenceClassification"] | architectures
smollm2 | "architectures": ["Llama\\nEvil"] | architectures
smollm2 | "hidden_act": "gelu" | hidden_act
smollm2 | "hidden_act": "-" | hidden_act
qwen2 | "use_sliding_window": true | use_sliding_window
gemma3 | "is_causal": false | is_causal
mistral | "sliding_window": 0 | sliding_window
mistral | "layer_types": ["sliding_attention"] | layer_types
smollm3 | "no_rope_layers": [1, 0] | no_rope_layers
gemma3 | "sliding_window": 0 | sliding_window
gemma3 | "final_logit_softcapping": 30.0 | final_logit_softcapping
gemma3 | "query_pre_attn_scalar": "-" | query_pre_attn_scalar
gemma3 | "tie_word_embeddings": false | tie_word_embeddings
gemma3 | "rope_parameters": {"full_attention": {}, "sliding_attention": 3} | \
sliding_attention
gemma3 | "rope_parameters": {"full_attention": {}, "sliding_attention": \
{"rope_type": "linear", "factor": 8.0}} | sliding_attention
olmo3 | "layer_types": ["full_attention"] | layer_types
olmo3 | "sliding_window": null | sliding_window
olmo3 | "rope_theta": "-", "rope_scaling": "-", "rope_parameters": \
{"full_attention": {"rope_theta": 5e5}, "sliding_attention": \
{"rope_theta": 1e4}} | sliding_attention
qwen3_moe | "norm_topk_prob": false | norm_topk_prob
qwen3_moe | "mlp_only_layers": [0] | mlp_only_layers
qwen3_moe | "num_experts_per_tok": 129 | num_experts_per_tok
qwen3 | "layer_types": ["full_attention", "sliding_attention"] | layer_types
qwen2 | "quantization_config": {"quant_method": "gptq"} | quantization_config
qwen2 | "rope_theta": "-" | rope_theta
qwen3 | "head_dim": "-" | head_dim
qwen3 | "num_hidden_layers": "-" | num_hidden_layers
qwen2 | "num_key_value_heads": "-" | num_key_value
qwen2 | "rope_scaling": {"type": "dynamic", "factor": 2} | rope_type
qwen2 | "rope_scaling": {"factor": 2.0} | rope_type
qwen2 | "rope_scaling": "linear" | rope_scaling
qwen2 | "rope_scaling": {"type": "linear", "factor": 0} | rope_scaling': factor
qwen2 | "rope_scaling": {"rope_type": "linear"} | rope_scaling': factor
llama | "rope_scaling": {LLAMA3, "low_freq_factor": 4.0} | low_freq_factor
llama | "rope_scaling": {"rope_type": "llama3", "factor": 8.0, \
"low_freq_factor": 1, "high_freq_factor": 4} | original_max_position_embeddings
llama | "rope_scaling": {LLAMA3, "mscale": 1.5} | mscale
qwen2 | "rope_scaling": {YARN, "beta_fast": 16} | beta_fast
qwen2 | "rope_scaling": {YARN, "truncate": false} | truncate
qwen2 | "rope_scaling": {YARN, "attention_factor": 1.0} | attention_factor
qwen2 | "rope_scaling": {"type": "yarn", "factor": "4", "attention_factor": 1} \
| attention_factor
qwen2 | "rope_scaling": {YARN, "original_max_position_embeddings": 9.5} | \
original_max_position_embeddings
llama | "rope_parameters": {LLAMA3, "partial_rotary_factor": 0.5} | partial_rot
llama | "rope_parameters": {LLAMA3, "rope_theta": 10000.0} | rope_parameters
""".strip().splitlines()


class TestRefusals:
  @pytest.mark.parametrize("row", BAD)
  def test_one_line_names_file_and_key(self, row):
    name, changes, part = row.split(" | ")
    changes = changes.replace("LLAMA3", json.dumps(LLAMA3)[1:-1])
    changes = changes.replace("YARN", json.dumps(YARN)[1:-1])
    values = FAMILIES[name] | json.loads(f"{{{changes}}}")
    values = {key: value for key, value in values.items() if value != "-"}
    with pytest.raises(InputError) as info:
      ModelConfig.from_hf(values, "dir/config.json")
    message = str(info.value)
    assert "\n" not in message and len(message) < 300
    assert message.startswith("dir/config.json: ") and part in message
    assert ";" in message  # The remedy follows.

  @pytest.mark.parametrize(
    "change, named",
    [
      ({"num_layers": 0}, "num_hidden_layers"),
      ({"family": "gpt2"}, "model_type"),
      ({"family": "qwen2"}, "attention_bias must be True in family qwen2"),
      ({"attention_bias": "yes"}, "attention_bias"),
      ({"num_kv_heads": 2}, "num_key_value_heads"),
    ],
  )
  def test_settings_are_checked_without_a_file(self, change, named):
    config = ModelConfig.from_hf(SMOLLM2)
    with pytest.raises(ValueError, match=named):
      dataclasses.replace(config, **change)

  def test_scaling_is_checked_without_a_file(self):
    with pytest.raises(ValueError, match="low_freq_factor does not apply"):
      RopeScaling("linear", 2.0, low_freq_factor=1.0)


def _frequencies(scaling, **changes):
  config = ModelConfig.from_hf(LLAMA_1B | {"rope_scaling": scaling} | changes)
  return rope.frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )


class TestRopeFrequencies:
  @pytest.mark.parametrize("factor", [None, 4.0])
  def test_plain_and_linear(self, factor):
    scaling = factor and {"rope_type": "linear", "factor": factor}
    found, scale = _frequencies(scaling, head_dim=4, rope_theta=10000.0)
    expected = np.float32([1.0, 0.01]) / np.float32(factor or 1)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32 and scale == 1.0

  # Parity tests compare all frequencies with those of transformers.
  @pytest.mark.parametrize("scaling", [LLAMA3, YARN])
  def test_fast_pairs_stay_and_slow_ones_stretch(self, scaling):
    plain, _ = _frequencies(None)
    found, scale = _frequencies(scaling)
    context = scaling["original_max_position_embeddings"]
    turns, ratio = context * plain / (2 * math.pi), plain / found
    np.testing.assert_allclose(ratio[turns > 64], 1.0, rtol=1e-6)
    slow = ratio[turns < 0.5]
    np.testing.assert_allclose(slow, scaling["factor"], rtol=1e-6)
    assert (np.diff(ratio) >= -1e-6).all()
    assert scale == pytest.approx(1.1386294 if scaling is YARN else 1.0)
