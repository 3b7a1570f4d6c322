"""SFT: supervised fine-tuning on the answers of the data.

The loss is the negative log-likelihood of an answer's tokens, with the token
that ends it, averaged over the tokens of a mini-batch. Nothing is sampled in
training and no reward is needed; evaluation generates and judges every
eval.every steps. An answer is

  * the assistant's messages of `messages`, every turn of them,
  * `completion` after `prompt`, as texts or as messages,
  * `completion` or `solution` after `question`; data.columns names others,
  * the clean solution of an embedded task.

    python scripts/train.py --config=configs/sft.py[:PRESET]

PRESET is a scale of jaxrl_llm/config/presets.py; without one, the run is the
embedded task on a CPU, and smollm2 trains on the sums themselves. A batch and a
learning rate are those of reinforcement learning at that scale.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, _ = config_lib.scaled(preset)
  config.data.order = "demonstrations"
  config.estimator.name = "given"
  config.loss.name = "likelihood"
  config.loss.mode = "token-mean"
  config.off_policy.proximal = "none"
  if config.data.source == "sums":
    config.data.order_settings = {"response_format": " {answer}", "stop": "\n"}
  return config
