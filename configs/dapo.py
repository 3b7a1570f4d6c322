"""DAPO (Yu et al. 2025, arXiv 2503.14476).

GRPO's advantages with clip-higher, dynamic sampling, the token-level loss and
the soft overlong punishment, without a KL term. The last quarter of the
response limit is punished (paper: 4,096 of 20,480). Overlong filtering
(`loss.overlong_filter`) is off, as in the authors' best runs.

At 32B the run has 520 steps instead of VAPO's 312, because VAPO's paper reports
that it reaches DAPO's level after 60 % of the updates.

    python scripts/train.py --config=configs/dapo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.loss.mode = "token-mean"
  config.schedule.dynamic_sampling = True
  config.reward.overlong_buffer = config.sampler.max_response_length // 4
  if preset == "qwen2.5-32b":
    config.reward.overlong_buffer = 4096
    config.schedule.over_provision = 3.0
    config.run.steps = 520
  return config
