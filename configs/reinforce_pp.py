"""REINFORCE++ (Hu 2025, arXiv 2501.03262).

Rewards-to-go that include the KL to the initial policy, normalised over the
whole batch (token-weighted); PPO's clip; losses averaged over the tokens of a
response, then over responses.

    python scripts/train.py --config=configs/reinforce_pp.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.method.use = ("reinforce_pp",)
  config.estimator.center = "none"
  config.estimator.normalize = "whiten"
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  config.loss.kl_reward_coefficient = 0.001
  return config
