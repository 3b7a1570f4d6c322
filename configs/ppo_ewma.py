"""PPO-EWMA (Hilton et al. 2022, arXiv 2110.00641), as T-PPO's baseline.

The clip is around a moving average of the policy's weights, not around the
policy that wrote the responses: how far an update may go no longer depends on
how old they are. A weight of the average over the behaviour policy, at most
100, keeps the gradient that of the responses' own distribution. The average
costs a second copy of the weights and a forward pass with it.

T-PPO's paper compares with it and does not describe it further. So the rest is
what tppo.py has without windows: VAPO's critic, advantages and losses, rollouts
to their end. The decay is that of the authors' code; its center of mass is 8
updates, half a rollout at 32B and four rollouts on the embedded task.

    python scripts/train.py --config=configs/ppo_ewma.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
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
  # PPO-EWMA's own.
  config.off_policy.proximal = "ewma"
  config.off_policy.ewma_decay = 0.889
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576  # T-PPO's.
  return config
