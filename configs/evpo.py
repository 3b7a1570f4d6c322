"""EVPO (Pan et al. 2026, arXiv 2604.19485): a gate on the critic.

VAPO, but in batches where the explained variance of the critic is not above 0,
advantages are the reward minus the mean of its group (`methods/evpo.py`).

The paper compares PPO with GRPO; here the critic is VAPO's. The group baseline
needs complete groups, which excludes windows (T-PPO).

    python scripts/train.py --config=configs/evpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.based_on("vapo", preset)
  config.method.use = ("evpo",)
  return config
