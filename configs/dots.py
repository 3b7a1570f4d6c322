"""DOTS (Sun et al. 2025, arXiv 2506.05316): prompts solved half of the time.

The rest is GRPO with clip-higher and the token-level loss. The embedded tasks
have no end and get a pool of 1,024 prompts. data.order_settings has target
(0.5), tau (0.1) and explore, the fraction that is drawn uniformly (0.1).

    python scripts/train.py --config=configs/dots.py[:PRESET]

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
  config.estimator.name = "group"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "target_rate"
  if not config.data.path:  # A task has no end.
    config.data.pool = 1024
  return config
