"""EVPO (Pan et al. 2026, arXiv 2604.19485): a critic only while it explains.

VAPO, and in batches where the explained variance of the critic is not above 0,
the reward minus the mean of its group instead of the critic's advantages
(`methods/evpo.py`).

The paper compares PPO with GRPO; here the critic is VAPO's. A baseline needs
whole groups, so that windows (T-PPO) are excluded.

    python scripts/train.py --config=configs/evpo.py[:PRESET]

Presets (see jaxrl_llm/config/presets.py): none (embedded, CPU), long_tail,
smollm2, gsm8k, gsm8k-smoke, one-gpu-0.5b, one-gpu-1.5b, qwen2.5-1.5b,
qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  # The seven parts of VAPO, see configs/vapo.py.
  config.value.pretrain_steps = scale.pretrain_steps
  config.estimator.lambda_value = 1.0
  config.estimator.lambda_schedule = "length_adaptive"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.loss.nll_coefficient = 0.1
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  # Specific to EVPO.
  config.estimator.name = "evpo"
  return config
