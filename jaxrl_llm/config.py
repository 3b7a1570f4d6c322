"""Every setting of a training run, with its default and meaning.

A method file `configs/METHOD.py` starts from `default_config()` and overrides;
`--config.group.key=value` overrides once more. Unknown keys are errors.
`validate` checks what can be checked before anything is loaded and says in one
line which key is wrong and what it may be.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from jaxrl_llm.errors import InputError


def default_config() -> ConfigDict:
  """All keys with their defaults; VAPO's mathematics at the embedded scale."""
  c = ConfigDict()

  c.model = ConfigDict()
  # Hugging Face directory of the policy; '' is the base model in the package.
  c.model.path = ""
  # Of activations and matrix products: 'float32' or 'bfloat16'.
  c.model.dtype = "float32"
  # Of the sampler's keys and values; '' follows model.dtype.
  c.model.cache_dtype = ""
  # Recompute layers in the backward pass.
  c.model.remat = True
  # Positions of time per application of the vocabulary head.
  c.model.head_chunk = 128

  c.value = ConfigDict()
  # Most iterations of value pretraining on a fixed policy (VAPO: 50); 0 is off.
  c.value.pretrain_steps = 10
  # Stop when held-out explained variance did not improve this often in a row.
  c.value.pretrain_patience = 6
  # An improvement counts from here on.
  c.value.pretrain_min_delta = 0.01
  # Workdir of an earlier run whose pretrained critic is reused; '' is none.
  c.value.init_from = ""

  c.data = ConfigDict()
  # 'chain_sum' or 'sums' (built in), 'jsonl' or 'tfds'.
  c.data.source = "chain_sum"
  # File of 'jsonl', name[:version] of 'tfds'.
  c.data.path = ""
  # Settings of the source: max_ops, digits, question_key, ... by source.
  c.data.settings = ConfigDict({"max_ops": 6}, convert_dict=False)
  # 'completion', 'few_shot' or 'chat'.
  c.data.template = "completion"
  # Keywords of the template: shots, shot_format, question_format, system.
  c.data.template_settings = ConfigDict({}, convert_dict=False)
  c.data.prompts_per_step = 32
  # Responses per prompt (VAPO: 16).
  c.data.group_size = 16
  # Tokens.
  c.data.max_prompt_length = 16
  # What a longer prompt does: 'error' or 'drop'.
  c.data.on_long = "error"

  c.reward = ConfigDict()
  # 'chain_sum', 'exact_line', 'numeric' or 'math_verify'.
  c.reward.name = "chain_sum"
  c.reward.correct = 1.0
  c.reward.incorrect = -1.0
  # Processes that judge; 0 judges inline (only for rewards that cannot hang).
  c.reward.workers = 0
  # Seconds a single verdict may take in a worker.
  c.reward.deadline_s = 10.0

  c.sampler = ConfigDict()
  # Responses written at a time; 0 is prompts_per_step * group_size.
  c.sampler.slots = 0
  # Tokens.
  c.sampler.max_response_length = 64
  c.sampler.temperature = 1.0
  c.sampler.top_k = 0
  c.sampler.top_p = 1.0
  c.sampler.min_p = 0.0
  # Further stop tokens as text, each one token, e.g. ('\n',).
  c.sampler.stop = ()

  c.estimator = ConfigDict()
  c.estimator.gamma = 1.0
  # 'length_adaptive' (lambda = max(0, 1 - 1/(alpha * length))) or 'constant'.
  c.estimator.lambda_schedule = "length_adaptive"
  # Of 'length_adaptive'. VAPO's 0.05 is for responses of thousands of tokens.
  c.estimator.alpha = 2.0
  # Of 'constant'.
  c.estimator.lambda_policy = 0.95
  # Of the critic's targets; 1 is Monte Carlo (decoupled GAE).
  c.estimator.lambda_value = 1.0

  c.loss = ConfigDict()
  c.loss.clip_low = 0.2
  c.loss.clip_high = 0.28
  # Bound c > 1 of the loss of negative advantages; None is off.
  c.loss.dual_clip = config_dict.placeholder(float)
  # Clip range of the value loss around the old values; None is off.
  c.loss.clip_value = config_dict.placeholder(float)
  # Reduction: 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum'.
  c.loss.mode = "token-mean"
  # mu of the positive-example language-model loss.
  c.loss.nll_coefficient = 0.1

  c.optimizer = ConfigDict()
  c.optimizer.policy = _optimizer(learning_rate=2e-4)
  c.optimizer.value = _optimizer(learning_rate=5e-4)
  c.optimizer.value.mini_batch = 128
  # Tokens per packed row; 0 is max_prompt_length + max_response_length.
  # Larger rows hold more samples of a group, which then share their prompt.
  c.optimizer.row_tokens = 0

  c.eval = ConfigDict()
  # Steps between evaluations; also before the first and after the last.
  c.eval.every = 20
  # Responses per problem, k of avg@k and pass@k.
  c.eval.samples = 4
  # Most problems; 0 is all.
  c.eval.problems = 200
  # Where problems come from; '' follows data.source (its evaluation split).
  c.eval.source = ""
  c.eval.path = ""
  c.eval.temperature = 1.0
  c.eval.top_p = 1.0

  c.checkpoint = ConfigDict()
  # Steps between checkpoints; also after the last.
  c.checkpoint.every = 20
  # Newest checkpoints kept.
  c.checkpoint.keep = 2

  c.mesh = ConfigDict()
  # Sizes of the axes; data = -1 takes the devices that remain.
  c.mesh.data = -1
  c.mesh.fsdp = 1
  c.mesh.tensor = 1

  c.run = ConfigDict()
  c.run.seed = 0
  # Updates of the policy are steps * mini-batches per step.
  c.run.steps = 100
  # Steps between sample tables in the log; 0 is never.
  c.run.samples_every = 20
  # Updates in a row that are not finite before the run stops.
  c.run.max_skipped = 5
  return c.lock()


def _optimizer(*, learning_rate: float) -> ConfigDict:
  c = ConfigDict()
  c.learning_rate = learning_rate
  # Updates over which the rate rises linearly; constant afterwards.
  c.warmup_steps = 10
  c.max_grad_norm = 1.0
  c.weight_decay = 0.0
  c.b1 = 0.9
  c.b2 = 0.99
  c.eps = 1e-8
  # Responses per update.
  c.mini_batch = 256
  # Packed rows per micro-batch; accumulation is exact.
  c.micro_rows = 8
  # Passes over each batch of rollouts.
  c.epochs = 1
  return c


def pretrain_config() -> ConfigDict:
  """Keys of `scripts/pretrain.py`, which rebuilds the embedded base model."""
  c = ConfigDict()
  c.out = "jaxrl_llm/assets/chain_sum_base"
  c.seed = 0
  c.steps = 1500
  c.batch_size = 64
  c.learning_rate = 2e-3
  c.warmup_steps = 50
  c.weight_decay = 0.0
  c.hidden_size = 96
  c.num_layers = 3
  c.num_heads = 4
  c.intermediate_size = 256
  c.max_ops = 6
  c.max_prompt_length = 16
  c.max_response_length = 64
  return c.lock()


_DATA_SOURCES = ("chain_sum", "sums", "jsonl", "tfds")
_CHOICES = {
  "model.dtype": ("float32", "bfloat16"),
  "model.cache_dtype": ("", "float32", "bfloat16"),
  "data.source": _DATA_SOURCES,
  "data.template": ("completion", "few_shot", "chat"),
  "data.on_long": ("error", "drop"),
  "reward.name": ("chain_sum", "exact_line", "numeric", "math_verify"),
  "estimator.lambda_schedule": ("length_adaptive", "constant"),
  "loss.mode": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
  "eval.source": ("", *_DATA_SOURCES),
}

# key: (lowest, highest), both allowed.
_INF = float("inf")
_RANGES = {
  "model.head_chunk": (1, _INF),
  "value.pretrain_steps": (0, _INF),
  "value.pretrain_patience": (1, _INF),
  "data.prompts_per_step": (1, _INF),
  "data.group_size": (1, _INF),
  "data.max_prompt_length": (1, _INF),
  "reward.workers": (0, 256),
  "reward.deadline_s": (1e-3, _INF),
  "sampler.slots": (0, _INF),
  "sampler.max_response_length": (1, _INF),
  "sampler.temperature": (1e-3, 100.0),
  "sampler.top_k": (0, 0),
  "sampler.top_p": (1.0, 1.0),
  "sampler.min_p": (0.0, 0.0),
  "estimator.gamma": (0.0, 1.0),
  "estimator.alpha": (1e-6, _INF),
  "estimator.lambda_policy": (0.0, 1.0),
  "estimator.lambda_value": (0.0, 1.0),
  "loss.clip_low": (0.0, 0.999999),
  "loss.clip_high": (0.0, _INF),
  "loss.nll_coefficient": (0.0, _INF),
  "optimizer.row_tokens": (0, _INF),
  "eval.every": (1, _INF),
  "eval.samples": (1, _INF),
  "eval.problems": (0, _INF),
  "eval.temperature": (0.0, 100.0),
  "eval.top_p": (1e-6, 1.0),
  "checkpoint.every": (1, _INF),
  "checkpoint.keep": (1, _INF),
  "mesh.data": (-1, _INF),
  "mesh.fsdp": (1, _INF),
  "mesh.tensor": (1, _INF),
  "run.seed": (0, 2**31 - 1),
  "run.steps": (1, _INF),
  "run.samples_every": (0, _INF),
  "run.max_skipped": (1, _INF),
}
for _role in ("policy", "value"):
  _RANGES |= {
    f"optimizer.{_role}.learning_rate": (0.0, _INF),
    f"optimizer.{_role}.warmup_steps": (0, _INF),
    f"optimizer.{_role}.max_grad_norm": (1e-9, _INF),
    f"optimizer.{_role}.weight_decay": (0.0, _INF),
    f"optimizer.{_role}.b1": (0.0, 0.999999),
    f"optimizer.{_role}.b2": (0.0, 0.999999),
    f"optimizer.{_role}.eps": (1e-20, _INF),
    f"optimizer.{_role}.mini_batch": (1, _INF),
    f"optimizer.{_role}.micro_rows": (1, _INF),
    f"optimizer.{_role}.epochs": (1, _INF),
  }

_WHY = {
  "sampler.top_k": "; training uses the full softmax, so must the sampler",
  "sampler.top_p": "; training uses the full softmax, so must the sampler",
  "sampler.min_p": "; training uses the full softmax, so must the sampler",
}


def choose(preset: str, presets: Mapping[str, Any]) -> Any:
  """The preset of that name.

  Raises:
    InputError: there is none.
  """
  if preset not in presets:
    names = ", ".join(repr(name) for name in presets if name)
    raise InputError(f"preset {preset!r} is unknown; choose {names} or none")
  return presets[preset]


def get(config: ConfigDict, key: str):
  """The value at a dotted key."""
  for name in key.split("."):
    config = config[name]
  return config


def keys(config: ConfigDict, prefix: str = "") -> list[str]:
  """Every dotted key that holds a value."""
  found = []
  for name, value in config.items():
    inner = isinstance(value, ConfigDict) and len(value)
    path = prefix + name
    found += keys(value, f"{path}.") if inner else [path]
  return found


def batch_size(config: ConfigDict) -> int:
  """Responses per step."""
  return config.data.prompts_per_step * config.data.group_size


def row_tokens(config: ConfigDict) -> int:
  """Tokens per packed row."""
  longest = config.data.max_prompt_length + config.sampler.max_response_length
  return config.optimizer.row_tokens or longest


def validate(config: ConfigDict) -> None:
  """Checks every setting and their combinations.

  Raises:
    InputError: one line naming the key, its value and what is allowed.
  """
  for key, choices in _CHOICES.items():
    if get(config, key) not in choices:
      raise InputError(
        f"config.{key}={get(config, key)!r} must be one of"
        f" {', '.join(map(repr, choices))}"
      )
  for key, (low, high) in _RANGES.items():
    value = get(config, key)
    if not low <= value <= high:  # NaN fails too.
      raise InputError(
        f"config.{key}={value!r} must be in [{low:g}, {high:g}]"
        + _WHY.get(key, "")
      )
  _validate_combinations(config)


def _validate_combinations(config: ConfigDict) -> None:
  batch = batch_size(config)
  for role in ("policy", "value"):
    size = config.optimizer[role].mini_batch
    if batch % size:
      raise InputError(
        f"config.optimizer.{role}.mini_batch={size} must divide the batch of"
        f" {batch} = data.prompts_per_step * data.group_size"
      )
  slots = config.sampler.slots
  if slots and slots < max(config.data.group_size, config.eval.samples):
    raise InputError(
      f"config.sampler.slots={slots} must hold one group: data.group_size="
      f"{config.data.group_size}, eval.samples={config.eval.samples}"
    )
  longest = config.data.max_prompt_length + config.sampler.max_response_length
  if row_tokens(config) < longest:
    raise InputError(
      f"config.optimizer.row_tokens={config.optimizer.row_tokens} must hold"
      " the longest sample, data.max_prompt_length +"
      f" sampler.max_response_length = {longest}"
    )
  dual_clip = config.loss.dual_clip
  if dual_clip is not None and not dual_clip > 1:
    raise InputError(f"config.loss.dual_clip={dual_clip} must be over 1")
  clip_value = config.loss.clip_value
  if clip_value is not None and not clip_value > 0:
    raise InputError(f"config.loss.clip_value={clip_value} must be over 0")
  if config.data.source in ("jsonl", "tfds") and not config.data.path:
    raise InputError(
      f"config.data.source={config.data.source!r} needs config.data.path"
    )


def validate_mesh(config: ConfigDict, *, devices: int) -> None:
  """Checks the mesh against the number of devices.

  Raises:
    InputError: too few devices, or micro-batches that do not divide.
  """
  mesh = config.mesh
  rest = mesh.fsdp * mesh.tensor
  data = max(devices // rest, 1) if mesh.data == -1 else mesh.data
  if mesh.data == 0 or data * rest > devices:
    raise InputError(
      f"config.mesh data={mesh.data} x fsdp={mesh.fsdp} x tensor="
      f"{mesh.tensor} needs {max(data, 1) * rest} devices, but there are"
      f" {devices}; lower config.mesh"
    )
  for role in ("policy", "value"):
    rows = config.optimizer[role].micro_rows
    if rows % (data * mesh.fsdp):
      raise InputError(
        f"config.optimizer.{role}.micro_rows={rows} must be a multiple of"
        f" mesh data x fsdp = {data * mesh.fsdp}"
      )
