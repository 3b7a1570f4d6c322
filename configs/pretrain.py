"""Rebuilds a base model shipped in the package.

    python scripts/dev/pretrain.py --config=configs/pretrain.py[:TASK]

Tasks:
  chain_sum  (the default) running sums of up to 6 operations, step by step.
  remainder  divisions by up to 45 subtractions, with long solutions.
"""

from ml_collections import ConfigDict

_TASKS = ("chain_sum", "remainder")


def get_config(task: str = "chain_sum"):
  """Returns the settings of a shipped base.

  Raises:
    ValueError: there is no such task.
  """
  if task not in _TASKS:
    raise ValueError(f"task {task!r} is unknown; choose {' or '.join(_TASKS)}")
  c = ConfigDict()
  c.task = task
  # Task settings: max_ops, and tail for remainder.
  c.task_settings = ConfigDict({"max_ops": 6}, convert_dict=False)
  c.out = f"jaxrl_llm/assets/{task}_base"
  c.seed = 0
  c.steps = 1500
  c.batch_size = 64
  # Packed rows per micro-batch.
  c.micro_batch_size = 16
  c.learning_rate = 2e-3
  c.warmup_steps = 50
  c.weight_decay = 0.0
  c.hidden_size = 96
  c.num_layers = 3
  c.num_heads = 4
  c.intermediate_size = 256
  c.max_position_embeddings = 512
  # Tokens.
  c.max_prompt_length = 16
  c.max_response_length = 64
  if task == "remainder":  # Long solutions: more tokens, smaller batches.
    c.task_settings = ConfigDict(
      {"max_ops": 32, "tail": 1.1}, convert_dict=False
    )
    c.steps, c.batch_size, c.micro_batch_size = 1200, 48, 8
    c.max_position_embeddings = 320
    c.max_prompt_length = 8
    c.max_response_length = 288
  return c.lock()
