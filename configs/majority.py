"""Majority labels (TTRL, Zuo et al. 2025, arXiv 2504.16084).

The most frequent answer of a group is right: training reads no answers, and
evaluation compares with those of the data as ever. reward/true is the accuracy
of training by the data's answers, where there are some, and reward/agrees how
often the label says the same. The rest is GRPO with clip-higher and the
token-level loss.

Where the most frequent answer is wrong, this teaches the error: on the embedded
task, whose base is right on 0.24 of the problems by majority.

    python scripts/train.py --config=configs/majority.py[:PRESET]

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
  config.reward.group = "majority"
  return config
