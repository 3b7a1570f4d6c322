"""sGPO (Sudalairaj et al. 2026, arXiv 2606.08854): a profile of the data.

The initial policy answers the training questions once. The resulting profile
determines which questions are used, in which order, and how many responses each
gets. The rest is GRPO with clip-higher and the token-level loss. With your own
data:

    python scripts/evaluate.py --checkpoint=MODEL --dataset=train.jsonl \
      --samples=8 --problems=0 --out=profile

    python scripts/train.py --config=configs/sgpo.py[:PRESET] \
      --config.method.sgpo.profile=profile/train.jsonl

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("sgpo",)
  return config
