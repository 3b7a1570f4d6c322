"""GRPO (Shao et al. 2024, arXiv 2402.03300).

Group-relative advantages, divided by the group's standard deviation; losses
averaged over the tokens of a response, then over responses; a symmetric clip; a
KL loss to the initial policy (k3 estimate) with coefficient 0.04.

At 32B a step has 128 prompts with 64 responses each, the paper's group size. A
batch has the preset's 16 updates; the paper, as far as we know, has one
(`optimizer.policy.mini_batch=0`). Lengths and learning rates are those of the
preset too. The paper does not state its clip range.

    python scripts/train.py --config=configs/grpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.estimator.name = "group"
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  config.loss.kl_coefficient = 0.04
  config.loss.kl = "k3"
  if preset == "qwen2.5-32b":
    config.data.prompts_per_step = 128
    config.data.group_size = 64
  return config
