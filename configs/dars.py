"""DARS (Yang et al. 2025, arXiv 2508.13755): more responses to hard prompts.

A step samples every prompt as usual and the hard prompts again, with the same
weights; all responses to a prompt share a baseline. The rest is GRPO with
clip-higher and the token-level loss. method.dars.signal is 'equal'
(DARS-ET) or 'hard' (DARS-HW). For the authors' larger batches with several
epochs (DARS-B), set optimizer.policy.mini_batch=0 and
optimizer.policy.epochs=2.

    python scripts/train.py --config=configs/dars.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.method.use = ("dars",)
  return config
