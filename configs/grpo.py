"""GRPO (Shao et al. 2024, arXiv 2402.03300).

Advantages relative to the group, divided by its standard deviation; the mean
over responses of their token means; a symmetric clip; the k3 estimate of the KL
to the initial policy as a loss with coefficient 0.04.

At 32B a group has 64 responses, the paper's number, to 128 prompts. A batch has
the preset's 16 updates where the paper, as far as we know, has one
(`optimizer.policy.mini_batch=8192`).
Lengths and rates are the preset's too. The paper does not state its clip range.

    python scripts/train.py --config=configs/grpo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.estimator.name = "group"
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  config.loss.kl_coefficient = 0.04
  config.loss.kl = "k3"
  if preset == "qwen2.5-32b":
    config.data.prompts_per_step = 128
    config.data.group_size = 64
  return config
