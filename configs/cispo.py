"""CISPO (MiniMax 2025, arXiv 2506.13585): clips weights instead of tokens.

The importance weight is at most 1 + clip_high and carries no gradient; every
token keeps its gradient. The paper does not state its upper bound; 0.28 is used
here. There is no lower bound, which corresponds to a clip_low of 1.

    python scripts/train.py --config=configs/cispo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.method.use = ("cispo",)
  config.loss.clip_low = 1.0
  config.loss.clip_high = 0.28
  config.loss.mode = "token-mean"
  return config
