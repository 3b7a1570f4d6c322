"""VCPO (Huang et al. 2026, arXiv 2602.17616): stale responses, less variance.

REINFORCE on responses that older weights wrote. A response is weighed by its
whole ratio to the policy that wrote it, at most 8; the baseline is the one of
least variance under these ratios, not truncated; the step is scaled by the root
of the effective sample ratio, so that a batch of which little counts moves
little.

Sampler and learner work at once, a batch is written one update before it is
trained on (`schedule.lag`): that is where stale tokens come from.

What differs from the paper, and why:
  * The baseline of a response comes from the other responses to its prompt. In
    the authors' code it counts in its own baseline, which is then biased.
  * At the embedded scale it has the true norm of every response's gradient, by
    a backward pass of each alone: 8 to 12 s of steps of 12 to 19 s, which take
    6 to 10 s without (measured 2026-11-22 on 2 cores x86, beside other jobs).
    At the other scales, of larger models or longer responses, the squared norm
    is taken as the length.
  * The lag is met exactly and not bounded, so that runs repeat; theirs goes up
    to 128, and a response may go on under newer weights, which it does here
    with `schedule.stop='first_groups'`.
  * The authors' clip is as good as off. Here a batch has one update, so that
    there is nothing to clip.

    python scripts/train.py --config=configs/vcpo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.schedule.lag = 1
  config.estimator.name = "optimal_baseline"
  config.estimator.gradient_norms = "length" if preset else "exact"
  config.loss.name = "policy_gradient"
  config.loss.mode = "token-mean"
  config.off_policy.correction = "truncate"
  config.off_policy.level = "sequence"
  config.off_policy.high = 8.0
  config.off_policy.ess_scale = True
  config.optimizer.policy.mini_batch = (
    config.data.prompts_per_step * config.data.group_size
  )
  return config
