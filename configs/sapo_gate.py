"""SAPO's gate (Gao et al. 2025, arXiv 2511.20347): a soft clip.

GRPO with a sigmoid of the ratio in place of the clip (`methods/sapo_gate.py`),
which is steeper for negative advantages, and without a KL term. Unrelated to
the system for swarms of machines that is also called SAPO (configs/sapo.py).

    python scripts/train.py --config=configs/sapo_gate.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.method.use = ("sapo_gate",)
  config.loss.mode = "seq-mean-token-mean"
  return config
