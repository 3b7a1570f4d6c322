"""Majority labels (TTRL, Zuo et al. 2025, arXiv 2504.16084).

The most frequent answer of a group is right: training reads no answers, and
evaluation compares with those of the data as ever. reward/true is the accuracy
of training by the data's answers, where there are some, and reward/agrees how
often the label says the same. The rest is GRPO with clip-higher and the
token-level loss.

Where the most frequent answer is wrong, this teaches the error: on the embedded
task, whose base is right on 0.24 of the problems by majority.

    python scripts/train.py --config=configs/majority.py[:PRESET]

PRESET is a scale of jaxrl_llm/config/presets.py; without one, the run is the
embedded task on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.reward.group = "majority"
  return config
