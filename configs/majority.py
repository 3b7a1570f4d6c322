"""Majority labels (TTRL, Zuo et al. 2025, arXiv 2504.16084).

The most frequent answer of a group counts as correct: training does not read
the data's answers, and evaluation uses them as usual. If the data has answers,
reward/true is the training accuracy by them, and reward/agrees how often the
label leads to the same verdict. The rest is GRPO with clip-higher and the
token-level loss.

Where the most frequent answer is wrong, the policy learns the error, as on the
built-in task, where the base's majority is right on 0.24 of the problems.

    python scripts/train.py --config=configs/majority.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("majority",)
  return config
