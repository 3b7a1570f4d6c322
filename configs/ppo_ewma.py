"""PPO-EWMA (Hilton et al. 2022, arXiv 2110.00641), as T-PPO's baseline.

The clip is around a moving average of the policy's weights instead of the
policy that sampled the responses, so the size of an update does not depend on
the age of the responses. An importance weight of the average over the behaviour
policy, at most 100, corrects the gradient for the sampling distribution. The
average costs a second copy of the weights and an extra forward pass.

T-PPO's paper compares with PPO-EWMA but does not describe the setup. The other
settings are therefore those of tppo.py without windows: VAPO's critic,
advantages and losses, and full rollouts. The decay is from the authors' code;
its center of mass is 8 updates, half a rollout at 32B and four rollouts on the
embedded task.

    python scripts/train.py --config=configs/ppo_ewma.py[:PRESET]

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
  # Specific to PPO-EWMA.
  config.off_policy.proximal = "ewma"
  config.off_policy.ewma_decay = 0.889
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576  # As in T-PPO.
  return config
