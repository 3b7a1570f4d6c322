"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases.

Advantages are not divided by the group's standard deviation. Token losses are
divided by a constant length (the response limit) instead of the length of the
response.

At 32B the constant is 3,000 and a prompt has 8 responses, as in the authors'
runs. Their response limit is 3,000 too and a step has 128 prompts; here the
limit is that of the preset, and 1,024 prompts make its batch.

    python scripts/train.py --config=configs/dr_grpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.estimator.scale = "none"
  config.loss.clip_high = 0.2
  config.loss.mode = "dr-grpo"
  if preset == "qwen2.5-32b":
    config.loss.norm = 3000
    config.data.prompts_per_step = 1024
    config.data.group_size = 8
  return config
