"""GRPO with DART's store of successes (Li et al. 2025, arXiv 2509.23866).

If all responses to a prompt are wrong, the last correct response that an
earlier step sampled for it is added to its group. The clip is around the policy
that sampled a response; clip-higher and the token-level loss are DAPO's. To put
responses that were collected beforehand into the store, use
method.sapo.replay_from, as in configs/sapo.py.

    python scripts/train.py --config=configs/dart.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.schedule.replay = 0.5
  config.method.use = ("dart",)
  config.off_policy.proximal = "stored"
  return config
