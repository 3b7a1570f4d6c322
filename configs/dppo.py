"""DPPO (2026, arXiv 2602.04879): a trust region on divergences, not ratios.

Group-relative advantages without the standard deviation, the token-level loss,
and no KL term. A token has no gradient if its probability differs by more than
0.2 from that at sampling and the update would move it further away
(`methods/dppo.py`). method.dppo.divergence=kl bounds a KL instead.

The paper's batch sizes and learning rates are not known to us; those of the
preset are used.

    python scripts/train.py --config=configs/dppo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.estimator.scale = "none"
  config.method.use = ("dppo",)
  config.loss.mode = "token-mean"
  config.off_policy.proximal = "stored"
  return config
