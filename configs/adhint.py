"""ADHint (Zhang et al. 2025, arXiv 2512.13095): hints for hard prompts.

Prompts that are solved in less than three quarters of their tries come again
with the beginning of a solution: of the data's column `completion`, or the
clean solution of an embedded task. The rest is GRPO with clip-higher and the
token-level loss. data.order_settings has most (0.8) and least (0.0) of a
solution, and enough (0.75).

    python scripts/train.py --config=configs/adhint.py[:PRESET]

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
  config.estimator.name = "hinted"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "hints"
  return config
