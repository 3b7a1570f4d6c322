"""HAPO (2025, arXiv 2509.16591): entropy-dependent token losses.

Group statistics weight responses by their tokens. The clip range and advantage
of a token depend on its entropy within the batch. Dual clip at 10; DAPO's
dynamic sampling and overlong punishment. Low-entropy tokens have the intended
sign; `method.hapo.sign=released` selects that of the published code. The
sampling temperature varies by 5 % with a token's entropy. The trainer scores at
the base temperature, as the published code does;
`off_policy.correction=truncate` corrects for the difference.

At 32B responses have at most 12,288 tokens, of which the last 4,096 are
punished (the authors' runs have 10K to 12K and DAPO's buffer). The authors
evaluate 8 samples at a temperature of 0.5; here evaluation uses the preset's 32
at 1.0 and top-p 0.7, as for every method.

    python scripts/train.py --config=configs/hapo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.method.use = ("hapo",)
  config.method.hapo.tau = 0.05
  config.loss.clip_high = 0.2
  config.loss.dual_clip = 10.0
  config.loss.mode = "token-mean"
  config.schedule.dynamic_sampling = True
  config.reward.overlong_buffer = config.sampler.max_response_length // 4
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 12288
    config.reward.overlong_buffer = 4096
    config.schedule.over_provision = 3.0
  return config
