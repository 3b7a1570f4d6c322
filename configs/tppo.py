"""T-PPO (Fan et al. 2025, arXiv 2506.15050): truncated PPO.

A step generates at most `schedule.window` tokens of each response. Unfinished
responses continue in the next step under the new weights. Each window trains
the policy immediately, on EGAE advantages; the critic is trained only on
finished responses, on their Monte Carlo returns. No step waits for the longest
response.

T-PPO needs an informative critic, more so with shorter windows
(docs/studies.md, section 5); value.reads_logprobs helps small models.

The rest follows VAPO, because the paper leaves it open. For the lambda of
unfinished responses, also left open, the length is the tokens so far. The
window is a quarter of the longest response; the paper has 8K of 24K.

    python scripts/train.py --config=configs/tppo.py[:PRESET]

Presets (see jaxrl_llm/config/presets.py): none (embedded, CPU), long_tail,
smollm2, gsm8k, gsm8k-smoke, one-gpu-0.5b, one-gpu-1.5b, qwen2.5-1.5b,
qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
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
  # Specific to T-PPO.
  config.schedule.window = max(1, config.sampler.max_response_length // 4)
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576
    config.schedule.window = 8192
  return config
