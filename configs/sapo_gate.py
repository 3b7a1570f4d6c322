"""SAPO's gate (Gao et al. 2025, arXiv 2511.20347): a soft clip.

GRPO with a sigmoid of the ratio in place of the clip (`methods/sapo_gate.py`),
which is steeper for negative advantages, and without a KL term. Not the system
for swarms of machines that is also called SAPO.

    python scripts/train.py --config=configs/sapo_gate.py[:PRESET]

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
  config.loss.name = "sapo_gate"
  config.loss.mode = "seq-mean-token-mean"
  return config
