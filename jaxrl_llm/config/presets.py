"""Presets: a model, its data and matching sizes.

A preset sets lengths, batch sizes, learning rates and meshes, but makes no
choice of the method. It changes a config of `jaxrl_llm.config.default_config`
in place.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.config.settings import Settings


class Scale(NamedTuple):
  """A preset."""

  apply: Callable[[Any], None]  # Changes a config.
  group_size: int  # For methods with several responses per prompt.
  pretrain_steps: int  # For methods that pretrain the critic.


def built_in(config: Settings) -> None:
  """Trains on the built-in task `chain_sum` with its base model, on a CPU."""
  config.estimator.alpha = 2.0  # lambda is 0.98 at 25 tokens.
  # Typical gradient norms are 0.3; rare norms of 3 would dominate training.
  config.optimizer.policy.max_grad_norm = 0.3
  # The policy changes within about ten steps. A high learning rate and small
  # mini-batches let the critic follow.
  config.optimizer.policy.learning_rate = 1e-4
  config.optimizer.value.update(learning_rate=1e-3, mini_batch=32)
  config.value.reads_logprobs = True  # Late in training, mistakes are slips.
  config.value.pretrain_patience = 12
  config.eval.greedy = True
  config.run.steps = 40


def smollm2(config: Settings) -> None:
  """Trains SmolLM2-135M on two-digit sums, on a CPU; needs model.path."""
  config.data.update(source="sums", template="few_shot")
  config.data.settings = {"digits": 2}
  config.data.template_settings = {
    "shots": 4,
    "shot_format": "Problem: {question} {answer}\n",
    "question_format": "Problem: {question}",
  }
  config.data.update(prompts_per_step=32, max_prompt_length=80)
  config.sampler.max_response_length = 8
  config.sampler.stop = ("\n",)
  config.reward.name = "exact_line"
  # Responses have three to five tokens; lambda is 0.95 at 4.
  config.estimator.alpha = 5.0
  config.model.head_chunk = 32  # A row has some 35 response tokens.
  _learning_rates(config, 1e-5)
  _optimizers(config, mini_batch=32, micro_batch_size=4, warmup_steps=4)
  config.eval.problems = 50
  config.run.update(steps=40, samples_every=10)


def long_tail(config: Settings) -> None:
  """Trains on divisions with a long tail of response lengths, on a CPU."""
  config.data.source = "remainder"
  config.data.update(prompts_per_step=128, max_prompt_length=8)
  config.sampler.max_response_length = 288
  config.estimator.alpha = 1.0  # lambda is 0.97 at 30 tokens.
  _optimizers(config, mini_batch=64, micro_batch_size=2)
  config.optimizer.policy.max_grad_norm = 0.3
  # The batch is small, so the critic takes many small steps.
  config.optimizer.value.update(learning_rate=1e-3, mini_batch=16)
  config.value.reads_logprobs = True  # A third of the answers are guesses.
  config.value.pretrain_patience = 12
  config.eval.update(problems=100, every=10)


def gsm8k(config: Settings) -> None:
  """Trains a chat model on GSM8K; needs model.path and data.path.

  Sizes follow common scripts of TRL and verl: 128 prompts with 8 responses of
  up to 512 tokens, four updates per step, three epochs.
  """
  _word_problems(config, prompts=1024, length=512)
  config.model.dtype = "bfloat16"
  config.sampler.slots = 256
  _optimizers(config, mini_batch=0, updates_per_step=4, b2=0.999)
  config.eval.update(greedy=True, every=10)
  config.run.update(steps=175, samples_every=10)


def gsm8k_smoke(config: Settings) -> None:
  """Trains a small `gsm8k`, to try out a model, its data and a reward."""
  _word_problems(config, prompts=16, length=256)
  _optimizers(config, mini_batch=16, micro_batch_size=2)
  config.eval.update(problems=8, samples=1, every=100)
  config.run.samples_every = 1


def one_gpu_24gb(config: Settings) -> None:
  """Trains a 0.5B model like `gsm8k`, on a 24 GB GPU (docs/scale.md)."""
  gsm8k(config)
  config.sampler.slots = 128
  # Here and below, compile.py --search predicts that this is fast and fits into
  # memory, also with a critic.
  config.model.remat_policy = "dots"
  _optimizers(config, micro_batch_size=2)


def one_gpu_80gb(config: Settings) -> None:
  """Trains a 1.5B model like `gsm8k`, on an 80 GB GPU (docs/scale.md)."""
  gsm8k(config)
  config.model.remat_policy = "dots"
  _optimizers(config, micro_batch_size=4)


def qwen7b_adapters(config: Settings) -> None:
  """Trains adapters of Qwen2.5-7B like `gsm8k`, on an 80 GB GPU."""
  gsm8k(config)
  config.model.update(lora_rank=32, base_dtype="bfloat16")
  config.value.lora_rank = 32
  _learning_rates(config, 1e-5)
  _optimizers(config, micro_batch_size=4)


def qwen1_5b(config: Settings) -> None:
  """Trains Qwen2.5-1.5B on 8 TPU v5e chips; needs model.path and data.path."""
  # The pages take 3.5 GiB of keys and values per chip.
  _mathematics(config, prompts=2048, lengths=(1024, 7168), kv_pages=8192)
  config.sampler.slots = 512
  _optimizers(config, mini_batch=256, micro_batch_size=1)
  # Rows sharded over four chips leave memory for saved matrix products.
  config.model.remat_policy = "dots"
  config.mesh.update(context=4, tensor=2)
  config.sampler.mesh.update(data=2, fsdp=2, tensor=2)


def qwen7b(config: Settings) -> None:
  """Trains Qwen2.5-7B on 32 TPU v6e chips; needs model.path and data.path."""
  # The pages take 3.5 GiB of keys and values per chip.
  _mathematics(config, prompts=4096, lengths=(1024, 15_360), kv_pages=16_384)
  config.sampler.slots = 512
  _optimizers(config, mini_batch=256, micro_batch_size=2)
  config.model.remat_policy = "dots"
  config.mesh.update(fsdp=2, context=4, tensor=4)
  config.sampler.mesh.update(data=2, fsdp=4, tensor=4)


def qwen32b(config: Settings) -> None:
  """Trains Qwen2.5-32B as in the papers; needs model.path and data.path."""
  # The pages take 32 GiB of keys and values per v5p chip.
  _mathematics(config, prompts=8192, lengths=(2048, 20_480), kv_pages=65_536)
  config.sampler.slots = 2048
  _optimizers(config, mini_batch=512, micro_batch_size=4)
  # With rows sharded over four chips, saved matrix products fit in memory.
  config.model.remat_policy = "dots"
  config.mesh.update(fsdp=4, context=4, tensor=4)
  # The same chips, with more weights on each: decoding reduces partial products
  # over fsdp, and a quarter of its size takes a quarter of the time.
  config.sampler.mesh.update(data=4, fsdp=2, tensor=8)


def qwen30b_a3b(config: Settings) -> None:
  """Trains Qwen3-30B-A3B on 64 TPU chips; needs model.path and data.path."""
  _mathematics(config, prompts=4096, lengths=(1024, 15_360), kv_pages=32_768)
  config.sampler.slots = 2048
  _optimizers(config, mini_batch=256, micro_batch_size=16)
  # Eight experts on each chip of a group of 16.
  config.mesh.update(fsdp=16, context=4, expert=16)
  config.sampler.mesh.update(data=4, fsdp=16, expert=16)
  config.model.expert_capacity = 1.25


def _word_problems(config: Settings, *, prompts: int, length: int) -> None:
  """Sets up word problems; `length` is the limit of prompts and responses."""
  form = "{question}\nReason step by step and end with #### and the number."
  _questions(config, prompts, (length, length), form)
  config.estimator.alpha = 0.2  # lambda is 0.98 at 200 tokens.


def _mathematics(
  config: Settings, *, prompts: int, lengths: tuple[int, int], kv_pages: int
) -> None:
  """Sets up long reasoning on mathematics problems, see `_questions`."""
  form = (
    "Solve the problem step by step and put the final answer in"
    " \\boxed{}.\n\n{question}"
  )
  _questions(config, prompts, lengths, form)
  config.model.dtype = "bfloat16"
  config.sampler.kv_pages = kv_pages
  config.reward.workers = 16
  _optimizers(config, weight_decay=0.1, b2=0.999)  # Common for AdamW.
  _warmup(config, rollouts=20)  # DAPO, section 4.1.
  config.value.pretrain_patience = 50
  config.eval.update(samples=32, top_p=0.7)
  config.run.steps = 312  # VAPO's 5,000 updates at 16 a rollout.
  config.checkpoint.every = 10


def _questions(
  config: Settings, prompts: int, lengths: tuple, form: str
) -> None:
  """Sets up a chat model on questions with one answer.

  `lengths` are the maximum lengths of a prompt and of a response.
  """
  config.data.update(source="jsonl", template="chat", on_long="drop")
  config.data.prompts_per_step = prompts
  config.data.max_prompt_length, config.sampler.max_response_length = lengths
  config.data.template_settings = {"question_format": form}
  config.reward.name = "numeric"
  _learning_rates(config, 1e-6)


def _optimizers(config: Settings, **settings: float) -> None:
  """Updates the settings of both optimizers."""
  config.optimizer.policy.update(settings)
  config.optimizer.value.update(settings)


def _warmup(config: Settings, rollouts: int) -> None:
  """Sets warm-ups to a number of rollouts, also if batch sizes change later."""
  refs = config.data.get_ref
  batch = refs("prompts_per_step") * refs("group_size")
  for role in (config.optimizer.policy, config.optimizer.value):
    # A mini_batch of 0 counts as the whole batch.
    size = (role.get_ref("mini_batch") - 1) % batch + 1
    passes = role.get_ref("epochs") * role.get_ref("updates_per_step")
    role.warmup_steps = rollouts * batch * passes // size


def _learning_rates(config: Settings, policy: float) -> None:
  """Sets both learning rates; the critic's is doubled (VAPO, section 5.1)."""
  config.optimizer.policy.learning_rate = policy
  config.optimizer.value.learning_rate = 2 * policy


# Name -> preset; '' is the built-in task.
SCALES: Mapping[str, Scale] = {
  "": Scale(built_in, group_size=8, pretrain_steps=12),
  "long_tail": Scale(long_tail, group_size=8, pretrain_steps=12),
  "smollm2": Scale(smollm2, group_size=8, pretrain_steps=4),
  "gsm8k": Scale(gsm8k, group_size=8, pretrain_steps=20),
  "gsm8k-smoke": Scale(gsm8k_smoke, group_size=4, pretrain_steps=1),
  "one-gpu-0.5b": Scale(one_gpu_24gb, group_size=8, pretrain_steps=20),
  "one-gpu-1.5b": Scale(one_gpu_80gb, group_size=8, pretrain_steps=20),
  "qwen2.5-1.5b": Scale(qwen1_5b, group_size=16, pretrain_steps=50),
  "qwen2.5-7b-lora": Scale(qwen7b_adapters, group_size=8, pretrain_steps=20),
  "qwen2.5-7b": Scale(qwen7b, group_size=16, pretrain_steps=50),
  "qwen2.5-32b": Scale(qwen32b, group_size=16, pretrain_steps=50),
  "qwen3-30b-a3b": Scale(qwen30b_a3b, group_size=16, pretrain_steps=50),
}
