"""EVPO (Pan et al. 2026, arXiv 2604.19485): a critic only while it explains.

VAPO, and in batches where the explained variance of the critic is not above 0,
the reward minus the mean of its group instead of the critic's advantages
(`methods/evpo.py`).

The paper compares PPO with GRPO; here the critic is VAPO's. A baseline needs
whole groups, so that windows (T-PPO) are excluded.

    python scripts/train.py --config=configs/evpo.py[:PRESET]

PRESET is a scale of jaxrl_llm/config/presets.py; without one, the run is the
embedded task on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.based_on("vapo", preset)
  config.estimator.name = "evpo"
  return config
