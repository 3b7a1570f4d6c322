"""DARS (Yang et al. 2025, arXiv 2508.13755): more tries for hard prompts.

A step asks every prompt as usual and the hard ones again, with the same
weights; all responses to a prompt share a baseline. The rest is GRPO with
clip-higher and the token-level loss. data.order_settings has signal: 'equal'
(DARS-ET) or 'hard' (DARS-HW). The authors' larger batches with several epochs
(DARS-B) are optimizer.policy.mini_batch=0 and optimizer.policy.epochs=2.

    python scripts/train.py --config=configs/dars.py[:PRESET]

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
  config.estimator.name = "example"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "dars"
  return config
