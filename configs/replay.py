"""GRPO with rollout replay (Sun et al. 2025, arXiv 2506.05316).

Half of the groups of a step are drawn from the mixed groups (with correct and
incorrect responses) of earlier steps; the step generates the other half. The
clip is around the policy that sampled a response, as in the authors' runs.
Clip-higher and the token-level loss are DAPO's.

    python scripts/train.py --config=configs/replay.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.schedule.replay = 0.5
  config.off_policy.proximal = "stored"
  return config
