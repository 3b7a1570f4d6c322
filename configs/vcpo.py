"""VCPO (Huang et al. 2026, arXiv 2602.17616): stale responses, less variance.

REINFORCE on responses sampled from older weights. A response is weighted by its
sequence-level ratio to the policy that sampled it, at most 8. The baseline
minimises the variance under these ratios, untruncated. The step is scaled by
the square root of the effective sample ratio, so that batches with few
effective samples cause small updates.

Sampler and learner run concurrently and a batch is sampled one update before it
is trained on (`schedule.lag`), which makes its tokens stale.

Differences from the paper:
  * The baseline of a response comes from the other responses to its prompt. The
    authors' code includes the response itself, which biases the baseline.
  * With the built-in task the baseline uses the true gradient norm of every
    response, from one backward pass per response: 8 to 12 s of steps of 12 to
    19 s, which take 6 to 10 s without (measured 2026-11-22 on 2 cores x86,
    under other load). The other scales have larger models or longer responses
    and approximate the squared norm by the length.
  * The lag is exact, not an upper bound, so that runs are reproducible. The
    authors use lags up to 128 and let responses continue under newer weights,
    which `schedule.stop='first_groups'` does here.
  * The authors' clip is practically off. Here a batch has one update, so there
    is nothing to clip.

    python scripts/train.py --config=configs/vcpo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset, groups=True)
  config.schedule.lag = 1
  config.estimator.name = "group"
  config.method.use = ("vcpo",)
  config.method.vcpo.gradient_norms = "length" if preset else "exact"
  config.loss.mode = "token-mean"
  config.off_policy.correction = "truncate"
  config.off_policy.level = "sequence"
  config.off_policy.high = 8.0
  config.optimizer.policy.update(mini_batch=0, updates_per_step=1)
  return config
