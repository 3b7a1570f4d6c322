"""GRPO with rollout replay (Sun et al. 2025, arXiv 2506.05316).

Half of the groups of a step are drawn from those of earlier steps that had
correct and incorrect responses; the step generates the other half. The clip is
around the policy that sampled a response, as in the authors' runs. Clip-higher
and the token-level loss are DAPO's.

    python scripts/train.py --config=configs/replay.py[:PRESET]

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
  config.schedule.replay = 0.5
  config.off_policy.proximal = "stored"
  return config
