"""AsyPPO (2025, arXiv 2510.01656): two critics on halves of the prompts.

V is the mean of the two critics. The fifth of a batch's tokens on which they
agree most has no policy loss.

Differences from the paper, of which only the abstract was read: the other
settings are VAPO's (value pretraining, Monte Carlo targets, length-adaptive
lambda, clip-higher, token mean), and the fraction of a fifth is our choice. The
critics have the policy's size unless --config.value.init_from names a smaller
model.

    python scripts/train.py --config=configs/asyppo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset, groups=True)
  config.method.use = ("asyppo",)
  config.method.asyppo.agree_share = 0.2
  config.value.pretrain_steps = scale.pretrain_steps
  config.estimator.lambda_value = 1.0
  config.estimator.lambda_schedule = "length_adaptive"
  config.loss.mode = "token-mean"
  config.loss.clip_high = 0.28
  return config
