"""VAPO (Yue et al. 2025, arXiv 2504.05118): all seven parts.

    python scripts/train.py --config=configs/vapo.py[:PRESET]

Presets:
  (none)        the task `chain_sum` and the base model of the package; CPU.
  smollm2       a real language model of SmolLM2-135M's size on two-digit sums;
                needs --config.model.path=DIR, a Hugging Face directory.
  gsm8k         a chat model on GSM8K with 128 prompts x 8 responses per step;
                needs --config.model.path and --config.data.path (gsm8k in the
                Hugging Face cache, or a JSONL or Parquet file).
  gsm8k-smoke   the same with 16 responses per step, to try a model and data.
  one-gpu-0.5b, one-gpu-1.5b   gsm8k for a model of that size on one GPU of 24
                and of 80 GB.
  qwen2.5-32b   the paper's setting, on a TPU mesh; needs --config.model.path,
                --config.data.path and many devices.
  qwen2.5-1.5b, qwen2.5-7b   the same with smaller models, on 8 and 32 chips.
  qwen2.5-7b-lora   gsm8k with adapters of a 7B model, on one GPU of 80 GB.
  qwen3-30b-a3b   a model with experts, on 64 chips.
  long_tail     divisions with a long tail of response lengths; CPU.

Measured (docs/studies/): in 40 steps the default preset improves on held-out
problems from 0.09 to 0.98 greedily and from 0.28 to 0.90 sampled (seeds 0, 1,
2), and smollm2 on held-out sums from 0.19 to 0.65 (seeds 1, 2). gsm8k-smoke was
run for 2 steps; the Qwen2.5 presets were compiled (docs/scale.md) but not run.
The presets gsm8k and one-gpu were not run either.

Differences from the paper:
  * alpha of the length-adaptive lambda. The paper's 0.05 suits responses of
    thousands of tokens: lambda = 1 - 1/(alpha * length) is 0 at 20 tokens and
    reaches 0.95 at 400. Small presets have short responses, so alpha is chosen
    such that lambda is 0.95 to 0.99 at the median length (alpha * length of 20
    to 100): 2.0 for chain_sum's 25 tokens. lambda is clamped at 0.
  * The critic starts from the policy's weights with a new scalar head instead
    of a reward model (value.reward_model_steps trains it as one first). It is
    pretrained until its explained variance on new batches stops rising. The
    critics of the default preset and long_tail also read log-probs
    (value.reads_logprobs), because tokens alone reveal neither slips nor
    guesses.
  * Warm-up. The paper does not state its length: the Qwen2.5 presets use the 20
    rollout steps of DAPO, 320 updates at 32B. Small presets use 4 or 10
    updates, because they make 40 to 200 in total.
  * Adam's b2. The paper states AdamW: qwen2.5-32b uses the default 0.999, an
    average over 1,000 updates. Small presets use 0.99, because they make fewer.
"""

from jaxrl_llm import config as config_lib


def get_config(preset: str = ""):
  """Returns the settings of the method at the scale of a preset."""
  config, scale = config_lib.scaled(preset)
  # 1. Value pretraining on the initial policy's Monte Carlo returns.
  config.value.pretrain_steps = scale.pretrain_steps
  # 2. Decoupled GAE: the critic's targets use a separate lambda, 1.
  config.estimator.lambda_value = 1.0
  # 3. Length-adaptive lambda of the policy; the scale sets alpha.
  config.estimator.lambda_schedule = "length_adaptive"
  # 4. Token-level loss: all tokens of a batch have equal weight.
  config.loss.mode = "token-mean"
  # 5. Clip-higher.
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  # 6. Language-model loss on correct responses.
  config.loss.nll_coefficient = 0.1
  # 7. Group sampling: fewer prompts, several responses per prompt.
  config.data.group_size = scale.group_size
  config.data.prompts_per_step //= scale.group_size
  return config
