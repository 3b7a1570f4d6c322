"""MaxRL (Tajwar et al. 2026, arXiv 2602.02710): maximum likelihood by RL.

GRPO whose advantages are divided by the group's mean reward instead of its
standard deviation (`methods/maxrl.py`), so that rare successes count most.
Wrong responses have a reward of 0; the token-level loss has no KL term.

The paper's clip range is not known to us; PPO's is used.

    python scripts/train.py --config=configs/maxrl.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.reward.incorrect = 0.0
  config.estimator.name = "group"
  config.method.use = ("maxrl",)
  config.loss.mode = "token-mean"
  return config
