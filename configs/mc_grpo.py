"""MC-GRPO (2026, arXiv 2601.22582): the group's median as its baseline.

One response more than is trained on: an odd group, whose median response has no
advantage and takes no part in the loss. Advantages are divided by the standard
deviation; the paper's MAD is 0 for most groups of binary rewards.

The rest is GRPO's, as in the authors' runs: the k3 estimate of the KL to the
initial policy as a loss with coefficient 0.04, and two updates per batch, each
on the whole of it (num_iterations 2). Their groups have 2 to 8 responses beside
the pivot; here the preset's number, made odd.

    python scripts/train.py --config=configs/mc_grpo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.data.group_size += 1 - config.data.group_size % 2
  config.estimator.name = "group"
  config.estimator.center = "median"
  config.estimator.epsilon = 1e-4
  config.estimator.drop_pivot = True
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  config.loss.kl_coefficient = 0.04
  config.loss.kl = "k3"
  config.optimizer.policy.epochs = 2
  config.optimizer.policy.mini_batch = (
    config.data.prompts_per_step * config.data.group_size
  )
  return config
