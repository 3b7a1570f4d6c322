"""NudgeRL (Lee et al. 2026, arXiv 2605.15726): several contexts per prompt.

Every prompt is sampled once in each context of method.nudge.contexts, a
text before the question; '' is the bare question. The rest is GRPO with
clip-higher and the token-level loss.

    python scripts/train.py --config=configs/nudge.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("nudge",)
  contexts = ("", "0+")  # For a model that reads only sums.
  if config.model.path:
    contexts = (
      "",
      "Work backwards from what is asked.\n",
      "Write down what is known first.\n",
      "Check the answer by another way.\n",
    )
  config.method.nudge.contexts = contexts
  return config
