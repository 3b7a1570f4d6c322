"""PPO with GAE (Schulman et al. 2017, arXiv 1707.06347) for LLMs.

The starting point of VC-PPO and VAPO: a lambda of 0.95 for policy and critic, a
symmetric clip, whitened advantages, losses averaged over the tokens of a
response, then over responses, an untrained critic and one response per prompt.

    python scripts/train.py --config=configs/ppo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.estimator.lambda_schedule = "constant"
  config.estimator.lambda_policy = 0.95
  config.estimator.lambda_value = 0.95
  config.estimator.normalize = "whiten"
  config.loss.clip_high = 0.2
  config.loss.clip_value = 0.2
  config.loss.mode = "seq-mean-token-mean"
  return config
