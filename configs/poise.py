"""POISE (Choi et al. 2026, arXiv 2605.07579): the policy is its own critic.

Groups of two; the baseline of a response is what a linear probe on the policy's
hidden states says of the other one. The rest is GRPO with clip-higher and the
token-level loss.

    python scripts/train.py --config=configs/poise.py[:PRESET]

Presets (see jaxrl_llm/config/presets.py): none (embedded, CPU), long_tail,
smollm2, gsm8k, gsm8k-smoke, one-gpu-0.5b, one-gpu-1.5b, qwen2.5-1.5b,
qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.data.group_size = 2
  config.data.prompts_per_step //= 2
  config.estimator.name = "cross_probe"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  return config
