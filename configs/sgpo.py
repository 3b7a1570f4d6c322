"""sGPO (Sudalairaj et al. 2026, arXiv 2606.08854): a profile of the data.

The initial policy answers the training questions once; the profile decides
which are asked, in which order, and how many tries each gets. The rest is GRPO
with clip-higher and the token-level loss. With data of your own:

    python scripts/evaluate.py --checkpoint=MODEL --dataset=train.jsonl \
      --samples=8 --problems=0 --out=profile

    python scripts/train.py --config=configs/sgpo.py[:PRESET] \
      --config.data.order_settings="{'profile': 'profile/train.jsonl'}"

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
  config.estimator.name = "group"
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.data.order = "sgpo"
  return config
