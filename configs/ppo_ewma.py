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
built-in task.

    python scripts/train.py --config=configs/ppo_ewma.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.based_on("vapo", preset)
  config.method.use = ("ppo_ewma",)
  config.method.ppo_ewma.decay = 0.889
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576  # T-PPO has the same.
  return config
