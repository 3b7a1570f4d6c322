"""PPO with GAE (Schulman et al. 2017, arXiv 1707.06347) as LLMs are trained.

One lambda of 0.95 for policy and critic, a symmetric clip, whitened
advantages, the mean over responses of their token means, an untrained critic
and one response per prompt: what VC-PPO and VAPO start from.

    python scripts/train.py --config=configs/ppo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.estimator.lambda_schedule = "constant"
  config.estimator.lambda_policy = 0.95
  config.estimator.lambda_value = 0.95
  config.estimator.normalize = "whiten"
  config.loss.clip_high = 0.2
  config.loss.clip_value = 0.2
  config.loss.mode = "seq-mean-token-mean"
  return config
