"""SAO (2026, arXiv 2607.07508): single responses, asynchronous, with a critic.

One response per prompt, sampled one update before it is trained on. The ratio
of a token is that of the current policy to the policy that sampled it; tokens
with a ratio outside (0.7, 6) have no gradient (DIS, `methods/sao.py`), and no
policy is recomputed at the start of an update. The critic is VAPO's, with two
passes over every batch and frozen attention.

The ablations of the paper are settings:
  one critic update      optimizer.value.epochs=1
  attention trained      optimizer.value.frozen=()
  without DIS            method.use=(), loss.clip_low=0.2, loss.clip_high=0.28
                         (the paper's row is VAPO, whose file also has groups
                         and a language-model loss)
  GRPO with DIS          configs/grpo.py with method.use=sao, loss.clip_low=0.3,
                         loss.clip_high=5 and off_policy.proximal=stored

Differences from the paper, which we know from notes:
  * The critic is pretrained for at most 10 iterations, as in the paper, but
    from the policy's weights with a new head; pretraining may end earlier (see
    value.pretrain_patience).
  * The lag is exact, not an upper bound (`schedule.lag`). With the large
    steps of small models DIS tolerates none: with a lag of 1, both seeds
    collapsed temporarily. PPO's clip with bounds of 0.2 and 0.28
    tolerates 8 (docs/studies/hard_masks.md).
  * Batches and learning rates are those of the preset, except at 32B: 128
    prompts and learning rates of 1e-6 and 5e-6.
  * A critic with adapters (value.lora_rank) also trains those of its
    attention, because the base weights are frozen already.

    python scripts/train.py --config=configs/sao.py[:PRESET]

PRESET selects a scale from jaxrl_llm/config/presets.py; without one, the run
trains on the built-in running sums on a CPU.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  config.schedule.lag = 1
  config.data.group_size = 1
  # The ratio of the current policy to the sampler, and its bounds.
  config.off_policy.proximal = "stored"
  config.method.use = ("sao",)
  config.loss.clip_low = 0.3
  config.loss.clip_high = 5.0
  config.loss.mode = "token-mean"
  # VAPO's critic and advantages.
  config.value.pretrain_steps = min(10, scale.pretrain_steps)
  config.estimator.lambda_value = 1.0
  config.estimator.lambda_schedule = "length_adaptive"
  config.estimator.alpha = 1.5
  # Specific to SAO.
  config.optimizer.value.epochs = 2
  if not config.value.lora_rank:
    config.optimizer.value.frozen = ("attention",)
  if preset == "qwen2.5-32b":
    config.data.prompts_per_step = 128
    config.optimizer.policy.mini_batch = 128
    config.optimizer.value.update(mini_batch=128, learning_rate=5e-6)
  return config
