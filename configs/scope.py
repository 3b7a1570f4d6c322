"""SCOPE (Ren et al. 2026, arXiv 2602.24110): wrong steps are put right.

A wrong response is sampled again from its first wrong step, which an oracle
corrects; all responses to a prompt share a baseline. The rest is GRPO with
clip-higher and the token-level loss. The oracle of the embedded tasks is exact;
for other data a file of --plugin brings one by `register.oracle`, and
data.order_settings={'oracle': NAME} chooses it.

    python scripts/train.py --config=configs/scope.py[:PRESET]

Presets (see jaxrl_llm/config/presets.py): none (embedded, CPU), long_tail,
smollm2, gsm8k, gsm8k-smoke, one-gpu-0.5b, one-gpu-1.5b, qwen2.5-1.5b,
qwen2.5-7b, qwen2.5-32b.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  config.estimator.name = "example"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "repairs"
  return config
