"""NudgeRL (Lee et al. 2026, arXiv 2605.15726): several contexts a prompt.

Every prompt is asked once in each context of data.order_settings, a text before
the question; '' is the bare question. The rest is GRPO with clip-higher and the
token-level loss.

    python scripts/train.py --config=configs/nudge.py[:PRESET]

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
  config.estimator.name = "inter_intra"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "contexts"
  contexts = ["", "0+"]  # For a model that reads sums alone.
  if config.model.path:
    contexts = [
      "",
      "Work backwards from what is asked.\n",
      "Write down what is known first.\n",
      "Check the answer by another way.\n",
    ]
  config.data.order_settings = {"contexts": contexts}
  return config
