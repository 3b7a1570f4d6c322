"""On-policy distillation (Thinking Machines Lab 2025; GKD, arXiv 2306.13649).

The policy samples, and a frozen teacher scores its tokens: the advantage of a
token is log π_teacher - log π_old, an estimate of the reverse KL with the sign
changed. Rewards are only logged. The loss is PPO's clipped surrogate, averaged
over the tokens of a mini-batch; every prompt has one response.

    python scripts/train.py --config=configs/distill.py[:PRESET]
      --config.method.distill.teachers=DIR

DIR is a Hugging Face directory with the tokenizer of the policy;
scripts/convert.py makes one from a run. With 'DIR,DIR', the data's column
`teacher`, 0 or 1, selects the teacher of a row.

Measured on the built-in task (docs/studies/distillation.md): nine tenths of the
teacher's accuracy are reached with 0.69 to 0.87 of GRPO's generated tokens. The
other presets were not run.

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.estimator.name = "group"
  config.method.use = ("distill",)
  config.loss.mode = "token-mean"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  return config
