"""Hints for command lines that a program rejects."""

import importlib.util
import pathlib
import re

import pytest
from parts import command_line

from jaxrl_llm.config import hints


def explain(*arguments):
  return command_line.explain(ValueError("?"), ["train.py", *arguments])


@pytest.mark.parametrize(
  ("key", "hint"),
  [
    ("num_generations", "num_generations is data.group_size here: responses"),
    ("rollout.n", "rollout.n is data.group_size here"),
    ("actor_rollout_ref.rollout.n", "rollout.n is data.group_size here"),
    ("data.train_batch_size", "is data.prompts_per_step here"),
    ("train_batch_size", "data.train_batch_size is data.prompts_per_step here"),
    ("beta", "beta is loss.kl_coefficient here"),
    ("learning_rate", "is optimizer.policy.learning_rate here"),
    ("critic.optim.lr", "is optimizer.value.learning_rate here"),
    ("sampler.top_p", "top_p has no counterpart here: training samples from"),
    ("trainer.total_epochs", "has no counterpart here: set run.steps"),
    ("group_size", "did you mean data.group_size?"),
    ("mini_batch", "optimizer.policy.mini_batch or optimizer.value.mini"),
    ("data.group_sise", "did you mean data.group_size?"),
    ("schedule.name", "see --help_config"),
    ("optimiser.policy.lr", "actor.optim.lr is optimizer.policy.learning_rate"),
    ("loss.cliphigh", "did you mean loss.clip_high?"),
  ],
)
def test_a_key_that_no_config_has(key, hint):
  line = explain(f"--config.{key}=8")
  assert line.startswith(f"--config.{key}: no such key; ")
  assert hint in line and "\n" not in line


@pytest.mark.parametrize(
  ("argument", "as_read"),
  [
    ("--config.sampler.max_response_length=1e3", "=1000"),
    ("--config.run.steps=3e0", "=3"),
    ("--config.optimizer.policy.learning_rate=1e-6", "=1e-6"),
    ("--config.loss.norm=1e-3", "=1e-3"),
    ("--config.data.path=1e3", "=1e3"),
    ("--workdir=runs/a=b:1e3", "=runs/a=b:1e3"),
  ],
)
def test_whole_numbers(argument, as_read):
  (argument,) = command_line._prepared([argument])
  assert argument.endswith(as_read)


# Keys of five scripts of verl and one of TRL, with common arguments.
_VERL = """
data.gen_batch_size data.return_raw_chat data.val_batch_size
algorithm.filter_groups.metric ref.log_prob_use_dynamic_bsz
rollout.log_prob_use_dynamic_bsz ref.log_prob_max_token_len_per_gpu
rollout.log_prob_max_token_len_per_gpu rollout.log_prob_micro_batch_size
rollout.enable_chunked_prefill rollout.val_kwargs.top_p
rollout.val_kwargs.top_k rollout.load_format rollout.layered_summon
rollout.mode rollout.free_cache_engine rollout.enforce_eager
model.override_config model.use_shm model.lora.rank model.lora.alpha
model.use_liger model.fused_kernel_options actor.use_token_level_loss
actor.checkpoint.save_contents actor.megatron.pipeline_model_parallel_size
actor.megatron.tensor_model_parallel_size ref.ulysses_sequence_parallel_size
ref.sync_ref_model ref.ref_model_sync_steps ref.ref_model_mixup_alpha
reward_model.overlong_buffer.enable reward_model.overlong_buffer.len
reward_model.overlong_buffer.penalty_factor trainer.balance_batch
"""
_TRL = """
model_name_or_path torch_dtype use_peft lora_target_modules lora_r dataset_name
dataset_config reward_model_name_or_path fp16 optim save_strategy hub_model_id
vllm_server_host repetition_penalty remove_unused_columns model_init_kwargs
attn_implementation dataloader_num_workers data_seed chat_template_path
generation_kwargs cache_implementation disable_dropout
ds3_gather_for_generation system_prompt per_device_eval_batch_size
torch_compile use_transformers_paged warmup_ratio
vllm_importance_sampling_clip_max
"""
# Names of earlier versions, or of scripts, which users still have.
_EARLIER = {
  *("system_prompt", "warmup_ratio", "torch_dtype", "sft_trainer"),
  *("use_token_level_loss", "sync_ref_model", "ref_model_sync_steps"),
  "ref_model_mixup_alpha",
}


@pytest.mark.parametrize("key", [*_VERL.split(), *_TRL.split()])
def test_a_key_of_common_scripts_has_a_row(key):
  assert key in hints._peers()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("column", "libraries"), [(0, ("trl", "transformers")), (1, ("verl",))]
)
def test_rows_name_settings_that_exist(column, libraries):
  text = ""
  for library in libraries:
    found = importlib.util.find_spec(library)
    if found is None:
      pytest.skip(f"{library} is not installed")
    (folder,) = map(pathlib.Path, found.submodule_search_locations)
    # All of transformers has too many words.
    name = "training_args.py" if library == "transformers" else "*.py"
    files = [*folder.rglob(name), *folder.rglob("*.yaml")]
    text += "\n".join(file.read_text("utf-8", "ignore") for file in files)
  words = set(re.findall(r"\w+", text)) | _EARLIER
  page = (hints.folder("docs") / "settings.md").read_text("utf-8")
  rows = [line for line in page.splitlines() if line.startswith("| ")]
  names = {
    name.partition("=")[0].rpartition(".")[2]
    for row in rows
    for name in re.findall("`([^`]+)`", row.strip("|").split("|")[column])
  }
  assert sorted(names - words) == []
