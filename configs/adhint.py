"""ADHint (Zhang et al. 2025, arXiv 2512.13095): hints for hard prompts.

Prompts with a solve rate below three quarters are sampled again with the
beginning of a solution, which is the data's column `completion` or the clean
solution of a built-in task. The rest is GRPO with clip-higher and the
token-level loss. method.adhint has the largest and the smallest fraction of a
solution, `most` (0.8) and `least` (0.0), and the solve rate from which no hint
is given, `enough` (0.75).

    python scripts/train.py --config=configs/adhint.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("adhint",)
  return config
