"""SAPO (Amico et al. 2025, arXiv 2509.08721): runs share their responses.

Half of the groups of a step come from other runs, with importance weights and
F-TIS's mask; clip-higher and the token-level loss are DAPO's. Each of two runs
names its own folder and that of the other run:

    python scripts/train.py --config=configs/sapo.py[:PRESET] --workdir=runs/a \
        --config.method.sapo.share_in=runs/a-shared \
        --config.method.sapo.replay_from="('runs/b-shared',)"

Responses that `generate.py` wrote for the training questions can be used in the
same way: replay_from names the file.

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.grouped(preset)
  config.schedule.replay = 0.5
  config.schedule.replay_keep = "foreign"
  config.method.use = ("f_tis", "sapo")
  config.method.f_tis.max_distance = 5.0
  return config
