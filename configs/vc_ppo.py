"""VC-PPO (Yuan et al. 2025, arXiv 2503.01491): value-calibrated PPO.

The critic is pretrained on a fixed policy, and its lambda of 1 is decoupled
from the policy's 0.95.

    python scripts/train.py --config=configs/vc_ppo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  # Value pretraining, and decoupled GAE: Monte Carlo targets of the critic.
  config.value.pretrain_steps = scale.pretrain_steps
  config.estimator.lambda_value = 1.0
  config.estimator.lambda_schedule = "constant"
  config.estimator.lambda_policy = 0.95
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  return config
