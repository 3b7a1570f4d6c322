"""SFT: supervised fine-tuning on the answers of the data.

The loss is the negative log-likelihood of an answer's tokens, including its
stop token, averaged over the tokens of a mini-batch. Training samples nothing
and needs no reward; evaluation generates and judges responses every eval.every
steps. For data without `answer`, which the shipped rewards compare with, choose
a reward of your own, such as register.reward("none", lambda: 0.0). An answer is

  * the assistant's messages in `messages`, in every turn,
  * `completion` after `prompt`, as texts or as messages,
  * `completion` or `solution` after `question`; data.columns sets other names,
  * the clean solution of a built-in task.

    python scripts/train.py --config=configs/sft.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU. smollm2 trains on the answers to
two-digit sums. Batch size and learning rate are those of RL at that scale.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.method.use = ("sft",)
  config.loss.mode = "token-mean"
  if config.data.source == "sums":
    config.method.sft.update(response_format=" {answer}", stop="\n")
  return config
