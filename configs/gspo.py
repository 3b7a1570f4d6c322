"""GSPO (Zheng et al. 2025, arXiv 2507.18071): sequence policy optimisation.

One ratio per response, from its mean log-prob, clipped at 3e-4 below and 4e-4
above; four updates per batch. About 15 % clipped responses is normal.

    python scripts/train.py --config=configs/gspo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.method.use = ("gspo",)
  config.loss.clip_low = 3e-4
  config.loss.clip_high = 4e-4
  config.loss.mode = "seq-mean-token-mean"
  config.optimizer.policy.update(mini_batch=0, updates_per_step=4)
  return config
