"""XRPO (Bamba et al. 2025, arXiv 2510.06672): novelty sharpens advantages.

Correct responses that are less likely than the others of their group get a
bonus. The rest is GRPO with clip-higher and the token-level loss.

    python scripts/train.py --config=configs/xrpo.py[:PRESET]

Presets (see jaxrl_llm/config/presets.py): none (embedded, CPU), long_tail,
smollm2, gsm8k, gsm8k-smoke, one-gpu-0.5b, one-gpu-1.5b, qwen2.5-1.5b,
qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.estimator.name = "sharpened"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  return config
