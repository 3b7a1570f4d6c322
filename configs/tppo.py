"""T-PPO (Fan et al. 2025, arXiv 2506.15050): truncated PPO.

A step writes at most `schedule.window` tokens of every response. What has not
ended goes on in the next step under the new weights; its window trains the
policy at once, on EGAE advantages, and the critic learns from ended responses
alone, on their Monte Carlo returns. No step waits for the longest response.

It needs a critic that sees more than chance, the more the shorter its windows
(docs/studies.md, section 5): value.reads_logprobs helps a small one.

The rest is VAPO's (which the paper leaves open, like the lambda of unfinished
responses: here their tokens so far count as the length). The window is a
quarter of the longest response; the paper has 8K of 24K.

    python scripts/train.py --config=configs/tppo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  # The seven parts of VAPO, see configs/vapo.py.
  config.value.pretrain_steps = scale.pretrain_steps
  config.estimator.lambda_value = 1.0
  config.estimator.lambda_schedule = "length_adaptive"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.loss.nll_coefficient = 0.1
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  # T-PPO's own.
  config.schedule.window = max(1, config.sampler.max_response_length // 4)
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576
    config.schedule.window = 8192
  return config
