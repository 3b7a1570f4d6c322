"""REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262).

Like reinforce_pp.py, but subtracts the group's mean before the batch is
normalised.

    python scripts/train.py --config=configs/reinforce_pp_baseline.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.based_on("reinforce_pp", preset)
  config.estimator.center = "mean"
  return config
