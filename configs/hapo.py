"""HAPO (2025, arXiv 2509.16591): tokens are treated by their entropy.

Group statistics weigh responses by their tokens; clip range and advantage of a
token follow its entropy within the batch; dual clip at 10; DAPO's dynamic
sampling and overlong punishment. The sign of low-entropy tokens is the intended
one; `loss.hapo_sign=released` is the published code's. The sampling
temperature follows a token's entropy by 5 %; the trainer scores at the plain
temperature, as the published code does; `off_policy.correction=truncate`
corrects for it.

At 32B responses have at most 12,288 tokens, of which the last 4,096 are
punished (the authors' runs have 10K to 12K and DAPO's buffer). They evaluate 8
samples at a temperature of 0.5; here it is the preset's 32 at 1.0 and top-p
0.7, as for every method.

    python scripts/train.py --config=configs/hapo.py[:PRESET]

Presets are scales, see jaxrl_llm/presets.py: none (embedded, CPU), long_tail,
smollm2, gsm8k, qwen2.5-1.5b, qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.estimator.name = "token_group"
  config.loss.name = "hapo"
  config.sampler.entropy_tau = 0.05
  config.loss.clip_high = 0.2
  config.loss.dual_clip = 10.0
  config.loss.mode = "token-mean"
  config.schedule.dynamic_sampling = True
  config.reward.overlong_buffer = config.sampler.max_response_length // 4
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 12288
    config.reward.overlong_buffer = 4096
    config.schedule.over_provision = 3.0
  return config
