"""T-PPO (Fan et al. 2025, arXiv 2506.15050): truncated PPO.

A step generates at most `schedule.window` tokens of each response. Unfinished
responses continue in the next step under the new weights. Each window trains
the policy immediately, on EGAE advantages; the critic is trained only on
finished responses, on their Monte Carlo returns. No step waits for the longest
response.

T-PPO needs an informative critic, more so with shorter windows
(docs/studies/tppo.md); value.reads_logprobs helps small models.

The rest follows VAPO, because the paper leaves it open. For the lambda of
unfinished responses, also left open, the length is the number of tokens so far.
The window is a quarter of the longest response; the paper has 8K of 24K.

    python scripts/train.py --config=configs/tppo.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config = config_lib.based_on("vapo", preset)
  config.schedule.window = max(1, config.sampler.max_response_length // 4)
  if preset == "qwen2.5-32b":
    config.sampler.max_response_length = 24576
    config.schedule.window = 8192
  return config
