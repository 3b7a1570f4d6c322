"""VAPO (Yue et al. 2025, arXiv 2504.05118): all seven parts.

    python scripts/train.py --config=configs/vapo.py[:PRESET]

Presets:
  (none)        the task `chain_sum` and the base model of the package; CPU.
  smollm2       a real language model of SmolLM2-135M's size on two-digit sums;
                needs --config.model.path=DIR, a Hugging Face directory.
  gsm8k         the same model on GSM8K questions with a chat prompt; needs
                --config.model.path and --config.data.path (JSONL).
  qwen2.5-32b   the paper's setting, on a TPU mesh; needs --config.model.path,
                --config.data.path and, for its size, many devices.
  qwen2.5-1.5b, qwen2.5-7b   smaller ones, likewise, on 8 and 32 chips.

Measured (docs/studies.md): the embedded preset goes from 0.09 greedy accuracy
on held-out problems to 0.98, and from 0.28 sampled to 0.90, in 40 steps (seeds
0, 1, 2); smollm2 from 0.19 to 0.65 on held-out sums in 40 steps (seeds 1, 2).
gsm8k was run for 2 steps, those of Qwen2.5 were compiled (docs/scale.md) and
not run.

What differs from the paper, and why:
  * alpha of the length-adaptive lambda. The paper's 0.05 is for responses of
    thousands of tokens: lambda = 1 - 1/(alpha * length) is 0 at 20 tokens and
    reaches 0.95 at 400. Small presets have short responses, so alpha is chosen
    such that lambda is 0.95 to 0.99 at the median length (alpha * length of 20
    to 100): 2.0 for chain_sum's 25 tokens. lambda is clamped at 0.
  * The critic starts from the policy's weights with a fresh scalar head, not
    from a reward model (value.reward_model_steps makes it one first), and is
    pretrained until its explained variance on fresh batches stops rising. Those
    of the embedded preset and long_tail also read log-probs
    (value.reads_logprobs): tokens alone tell neither a slip nor a guess.
  * Warm-up. The paper warms up without saying for how long: the presets of
    Qwen2.5 take the 20 rollout steps of DAPO, at 32B 320 updates. Small presets
    have 4 or 10 updates, as they make 40 to 200 in all.
  * Adam's b2. The paper says AdamW: qwen2.5-32b has its usual 0.999, an average
    over 1,000 updates. Small presets have 0.99, as they make fewer.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """The settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  # 1. Value pretraining on the initial policy's Monte Carlo returns.
  config.value.pretrain_steps = scale.pretrain_steps
  # 2. Decoupled GAE: the critic's targets have a lambda of their own, 1.
  config.estimator.lambda_value = 1.0
  # 3. Length-adaptive lambda of the policy; the scale sets alpha.
  config.estimator.lambda_schedule = "length_adaptive"
  # 4. Token-level loss: every token of a batch weighs the same.
  config.loss.mode = "token-mean"
  # 5. Clip-higher.
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  # 6. Language-model loss of right responses.
  config.loss.nll_coefficient = 0.1
  # 7. Group sampling: fewer prompts, several responses to each.
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  return config
