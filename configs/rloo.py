"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): REINFORCE leave-one-out.

The baseline of a response is the mean reward of the other responses in its
group. A whole response is one action, without ratio or clip. The reward
includes the KL to the initial policy.

    python scripts/train.py --config=configs/rloo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.estimator.center = "leave_one_out"
  config.estimator.scale = "none"
  config.method.use = ("rloo",)
  config.loss.mode = "seq-mean-token-sum"
  config.loss.kl_reward_coefficient = 0.03
  # On-policy: one update per batch.
  config.optimizer.policy.update(mini_batch=0, updates_per_step=1)
  return config
