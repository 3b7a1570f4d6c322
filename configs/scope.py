"""SCOPE (Ren et al. 2026, arXiv 2602.24110): wrong steps are corrected.

A wrong response is sampled again from its first wrong step, which an oracle
corrects; all responses to a prompt share a baseline. The rest is GRPO with
clip-higher and the token-level loss. The oracle of the built-in tasks is exact;
for other data, a --plugin file registers one with `register.oracle`, and
method.scope.oracle selects it.

    python scripts/train.py --config=configs/scope.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("scope",)
  return config
