"""AReaL (Fu et al. 2025, arXiv 2505.24298): asynchronous sampler and learner.

Batches are sampled one update before they are trained on. The clip is around
the policy at the start of the update, whose log-probs are recomputed. A
truncated importance weight corrects its distance to the policy that sampled a
token (decoupled PPO). No critic: every token gets the reward of its response,
normalised over the batch (discount and lambda 1). Four mini-batches.

Differences from the paper:
  * The lag is exact, not an upper bound (the paper's eta, up to 8), so that
    runs are reproducible (`schedule.lag`).
  * Batches contain all their responses. `schedule.stop='first_groups'` lets
    unfinished ones continue under newer weights, as in the paper.
  * The paper's importance weights are unbounded; here the bound is 5, the
    default of the authors' current code as far as we know.

    python scripts/train.py --config=configs/areal.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.schedule.lag = 1
  config.estimator.name = "group"
  config.method.use = ("reinforce_pp",)
  config.estimator.center = "none"
  config.estimator.normalize = "whiten"
  config.loss.clip_high = 0.2
  config.loss.mode = "token-mean"
  config.off_policy.proximal = "recompute"
  config.off_policy.correction = "truncate"
  config.off_policy.level = "token"
  config.off_policy.high = 5.0
  config.optimizer.policy.update(mini_batch=0, updates_per_step=4)
  return config
