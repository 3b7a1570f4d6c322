"""MC-GRPO (2026, arXiv 2601.22582): the group's median as baseline.

Group sizes are odd. The median response (pivot) has zero advantage and is
excluded from the loss. Advantages are divided by the standard deviation,
because the paper's MAD is 0 for most groups of binary rewards.

The rest is GRPO, as in the authors' runs: a KL loss to the initial policy (k3
estimate) with coefficient 0.04, and two updates per batch, each on the whole
batch (num_iterations 2). The authors' groups have 2 to 8 responses plus the
pivot; here groups have the preset's size, made odd.

    python scripts/train.py --config=configs/mc_grpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.data.group_size += 1 - config.data.group_size % 2
  config.estimator.name = "group"
  config.estimator.center = "median"
  config.estimator.epsilon = 1e-4
  config.method.use = ("mc_grpo",)
  config.loss.clip_high = 0.2
  config.loss.mode = "seq-mean-token-mean"
  config.loss.kl_coefficient = 0.04
  config.loss.kl = "k3"
  config.optimizer.policy.epochs = 2
  config.model.expert_capacity = 0.0  # Later epochs would drop other tokens.
  config.optimizer.policy.update(mini_batch=0, updates_per_step=1)
  return config
