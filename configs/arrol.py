"""ARRoL (2026): responses are pruned during generation.

After a quarter of the response limit, a probe on the policy's hidden states
estimates the values of unfinished responses. The half of a group with the
highest and lowest values continues. The rest is GRPO with clip-higher and the
token-level loss.

    python scripts/train.py --config=configs/arrol.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("arrol",)
  config.method.arrol.at = config.sampler.max_response_length // 4
  return config
