"""Settings of models, data and rollouts, with their defaults.

The defaults are plain PPO on the built-in task; `training_keys` has the rest.
"""

from typing import Any

from jaxrl_llm.config.schema import (
  BELOW_1,
  COUNT,
  DTYPE_OR_NONE,
  DTYPES,
  FIXED,
  HELD_OUT,
  IN_FLIGHT,
  NUMBER,
  PATH,
  SOME,
  SWITCH,
  Choice,
  Group,
  Names,
  Range,
  setting,
)

_REWARD = Range(-1e6, 1e6)

# Each key: default and allowed values first, then the meaning.
# fmt: off

class Model(Group, path="model"):
  """The policy's model and its numerics."""

  path: str = setting("", None,
    "Hugging Face directory of the policy. '' is the base model that the"
    " package ships for data.source. A run may resume with a copy of its model;"
    " the weights of the copy are not checked.", FIXED, PATH)
  dtype: str = setting("float32", DTYPES,
    "Data type of activations and matrix products.", FIXED)
  sampler_dtype: str = setting("", DTYPE_OR_NONE,
    "Data type of the sampler, parameters included; '' is model.dtype.", FIXED)
  cache_dtype: str = setting("", Choice(("", *DTYPES, "float8_e4m3fn")),
    "Data type of the sampler's KV cache; '' is the sampler's own. A cache of"
    " 8-bit floats holds twice the tokens of bfloat16, but log-probs differ"
    " more. On CPUs, both are several times slower than float32.", FIXED)
  remat_policy: str = setting(
    "full", Names("models.transformer:REMAT_POLICIES"),
    "Recomputation in the backward pass: everything in a layer ('full'), all"
    " but matrix products ('dots') or nothing ('none'). More recomputation"
    " saves memory.")
  head_chunk: int = setting(0, COUNT,
    "Positions per call of the vocabulary head. Lower it to save memory; 0"
    " chooses by device: 128 on CPUs, otherwise 512 MiB of logits.")
  lora_rank: int = setting(0, Range(0, 4096),
    "Rank of the policy's adapters (LoRA), which are then trained instead of"
    " its weights; 0 trains the weights.", FIXED)
  lora_alpha: float = setting(16.0, Range(0.0, open=True),
    "Adapters are scaled by alpha / rank; see model.lora_scaling.", FIXED)
  lora_targets: tuple[Any, ...] = setting(("attention", "mlp"), None,
    "Linear layers with adapters: parts of the paths attention/q, /k, /v, /o,"
    " mlp/gate, /up, /down. Experts get none, and a router only if 'router' is"
    " listed.", FIXED)
  lora_scaling: str = setting("lora", Names("models.adapters:SCALINGS"),
    "Scale of adapters: alpha / rank ('lora') or alpha / sqrt(rank)"
    " ('rslora').",
    FIXED)
  base_dtype: str = setting("float32", Names("models.adapters:BASE_DTYPES"),
    "Data type of the frozen weights under adapters. Layer matrices can have 8"
    " bits with a scale per output ('int8'), or 4 bits with a scale per 64"
    " weights of an output ('nf4', QLoRA).", FIXED)
  matmul: str = setting("", Names("models.numerics:MATMULS"),
    "Precision of linear layers in trainer and sampler: '' is model.dtype,"
    " 'fp8' rounds weights and activations to 8-bit floats in blocks, 'int8'"
    " rounds only weights. CPUs emulate both.", FIXED)
  sampler_matmul: str = setting("", Names("models.numerics:MATMULS"),
    "Precision of the sampler's linear layers; '' is model.matmul. If it"
    " differs from the trainer's, so do log-probs: set off_policy.correction.",
    FIXED)
  expert_capacity: float = setting(0.0, NUMBER,
    "Maximum tokens per device and expert in a micro-batch of training,"
    " relative to an even load; tokens above it are dropped. 0 drops none.")
  replay_routing: bool = setting(False, None,
    "Trains the policy with the experts that the sampler chose for each token"
    " of a response, instead of the trainer's own choice. Other models, and"
    " other versions of its weights, use their own. Costs layers * experts per"
    " token bytes per response token.", FIXED)
  kernels: str = setting("auto", Names("models.backends:NAMES"),
    "Attention backend of trainer and sampler: plain XLA, or kernels for TPUs"
    " and GPUs ('pallas'). 'auto' chooses by device.")


class Value(Group, path="value"):
  """The critic; ignored by estimators without one."""

  lora_rank: int = setting(0, Range(0, 4096),
    "Rank of the critic's adapters, whose other settings are those of the"
    " policy. If both models have adapters, they share one base. 0 trains the"
    " weights.", FIXED)
  reads_logprobs: bool = setting(False, None,
    "Gives the critic the log-prob of each sampled token as an input, which"
    " helps it to recognise slips. The papers' critics do not read log-probs.",
    FIXED)
  reward_model_steps: int = setting(0, COUNT,
    "Iterations before value pretraining that train the critic as a reward"
    " model, on last tokens only. The papers start from a reward model.")
  pretrain_steps: int = setting(0, COUNT,
    "Maximum number of iterations of value pretraining, on a fixed policy"
    " (VAPO: 50). 0 skips it.")
  pretrain_patience: int = setting(6, SOME,
    "Ends value pretraining after this many iterations without a better"
    " explained variance on new responses.")
  pretrain_min_delta: float = setting(0.01, None,
    "Minimum increase of the explained variance that counts as better.")
  init_from: str = setting("", None,
    "Initial critic: the pretrained critic of a run (its workdir), or a Hugging"
    " Face directory of a critic (scripts/convert.py --critic) or of another"
    " model with the policy's tokenizer, which gets a new head. '' is the"
    " policy.", path=PATH)


class Data(Group, path="data"):
  """Prompts and their source."""

  source: str = setting("chain_sum", Names("data.sources:SOURCES"),
    "Source of the examples: a built-in task, files ('jsonl', 'parquet') or"
    " TensorFlow Datasets ('tfds').", FIXED)
  path: str = setting("", None,
    "Files of 'jsonl' or 'parquet', separated by commas or as a pattern such as"
    " data/*.jsonl; gsm8k is the training set in the Hugging Face cache. A run"
    " may resume with copies of its files. With 'tfds', NAME[:VERSION].",
    FIXED, PATH)
  split: str = setting("train", None,
    "Split to train on, for sources that have splits.", FIXED)
  columns: dict[str, Any] = setting({}, None,
    "Maps question, answer, completion (the target of SFT), id and source to"
    " columns of the data, such as {'question': 'problem', 'answer':"
    " 'info.solution'}. The column names of verl and TRL need no mapping.",
    FIXED)
  settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of the source, such as max_ops or digits.", FIXED, PATH)
  pool: int = setting(0, COUNT,
    "Trains only on the first N examples of the data; those of a built-in task"
    " then do not depend on run.seed. 0 uses all examples, or 1,024 of an"
    " endless task if the method keeps a record of each example.", FIXED)
  holdout: float = setting(0.05, BELOW_1,
    "Fraction of the questions held out for evaluation, at least 1 and at most"
    " 1,000 questions. Applies to sources without splits if eval.path is not"
    " set; 0 evaluates on training data.", HELD_OUT)
  order: str = setting("shuffled", Names("data.prompt_source:PROMPT_SOURCES"),
    "Order of the prompts: 'shuffled' draws every example once per epoch, in a"
    " new order each time; or a registered prompt source.", FIXED)
  order_settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of a registered prompt source.", FIXED, PATH)
  template: str = setting("completion", Names("data.prompt_source:TEMPLATES"),
    "Template that turns a question into a prompt: the bare text, worked"
    " examples first ('few_shot'), or the model's chat template.", FIXED)
  template_settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of the template: shots, shot_format, question_format,"
    " system, or kwargs (passed on to the model's chat template).", FIXED)
  prompts_per_step: int = setting(512, Range(1, 1e6),
    "Prompts per batch of rollouts, each with a group of responses.", IN_FLIGHT)
  group_size: int = setting(1, Range(1, 1e5),
    "Responses per prompt (VAPO: 16).", FIXED)
  max_prompt_length: int = setting(16, SOME,
    "Maximum length of a prompt in tokens; see data.on_long.", FIXED)
  on_long: str = setting("error", Choice(("error", "drop")),
    "Treatment of prompts over data.max_prompt_length, and of given responses"
    " over sampler.max_response_length: 'error' refuses the data at the start,"
    " 'drop' skips them.")


class Reward(Group, path="reward"):
  """The reward of a response."""

  name: str = setting("chain_sum", Names("rewards:REWARDS"),
    "Reward function. 'verl' and 'trl' call functions written for these"
    " libraries, see reward.path.")
  group: str = setting("", Names("rewards:GROUP_REWARDS"),
    "Reward that compares the responses of a group and replaces their verdicts"
    " in training; '' keeps the verdicts.")
  path: str = setting("", None,
    "Python file with the functions of 'verl' and 'trl'.", path=PATH)
  function: str = setting("compute_score", None,
    "Function in reward.path; several, separated by commas, for 'trl'.")
  weights: dict[str, Any] = setting({}, None,
    "Weights of the parts of a reward, by name; the default weight is 1.")
  threshold: float = setting(0.5, _REWARD,
    "Responses with a reward above this are correct, for accuracy, dynamic"
    " sampling and the positive-example loss. A reward with parts is judged by"
    " its part 'right', else by its first.")
  correct: float = setting(1.0, _REWARD,
    "Reward of a correct response.")
  incorrect: float = setting(-1.0, _REWARD,
    "Reward of an incorrect response.")
  workers: int = setting(0, Range(0, 256),
    "Processes that compute rewards. 0 computes them in the main process; use 0"
    " only for rewards that cannot hang.")
  deadline_s: float = setting(10.0, Range(1e-3),
    "Time limit of a single reward in a worker, in seconds.")
  batch_deadline_s: float = setting(0.0, Range(0.0),
    "Time limit of a batch of rewards in workers, in seconds; responses without"
    " a reward by then are not trained on. 0 sets no limit.")
  overlong_buffer: int = setting(0, COUNT,
    "Tokens before sampler.max_response_length over which the soft overlong"
    " punishment grows (DAPO eq. 13); 0 disables it. Tokens of an environment"
    " do not count towards the length.")
  overlong_factor: float = setting(1.0, NUMBER,
    "Largest penalty of the soft overlong punishment, at the length limit.")


class Mesh(Group, path="mesh"):
  """The trainer's device mesh."""

  data: int = setting(-1, Range(-1),
    "Size of the data axis (replicas); -1 uses all remaining devices, so the"
    " other sizes must divide the number of devices.")
  fsdp: int = setting(1, SOME,
    "Size of the fsdp axis, which shards parameters and batches.")
  context: int = setting(1, SOME,
    "Size of the context axis, which shards each packed row and parameters.")
  tensor: int = setting(1, SOME,
    "Size of the tensor axis, which shards each matrix product.")
  expert: int = setting(1, SOME,
    "Devices over which the experts of a layer are distributed: all of a tensor"
    " group and some along fsdp. 1 shards experts like other MLPs.")


class Environment(Group, path="environment"):
  """Multi-turn environments.

  A stop token ends a turn of the model. Rewards read the model's turns, one per
  line, and no observations.
  """

  name: str = setting("", Names("rollout.turns:ENVIRONMENTS"),
    "Environment of multi-turn responses: 'calculator' computes '7+5=' (set"
    " sampler.stop=('=',)), 'guessing_game' is a game, 'tools' runs the calls"
    " of a chat model. '' means single-turn responses.", FIXED)
  settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of the environment.", FIXED, PATH)
  rewards: str = setting("end", Choice(("end", "turns")),
    "Token that receives the environment's rewards: the last of the response"
    " ('end') or of each turn ('turns').", FIXED)
  max_turns: int = setting(16, SOME,
    "Maximum number of model turns. Responses that need more are overlong.")
  max_observation_tokens: int = setting(512, SOME,
    "Maximum number of text tokens in an observation. Longer texts are cut and"
    " marked; tokens that the chat template adds do not count.")
  workers: int = setting(0, Range(0, 256),
    "Processes that run environments. 0 runs them in the main process.")
  deadline_s: float = setting(10.0, Range(1e-3),
    "Time limit of an observation in a worker, in seconds. If the environment"
    " fails or exceeds it, the response ends and is left out of every loss.")


class Sampler(Group, path="sampler"):
  """Sampling of responses."""

  mesh: "SamplerMesh"
  engine: str = setting("", Names("rollout.engine:ENGINES"),
    "Sampling engine: '' is the built-in one; plugins can register others.",
    FIXED)
  engine_settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of a registered engine.", path=PATH)
  slots: int = setting(0, Range(0, 1e6),
    "Responses decoded concurrently: the rows of a decode batch. 0 is the"
    " number of responses in flight.")
  kv_pages: int = setting(0, Range(0, 1e7),
    "Pages of the KV cache on all devices of the sampler. When pages run out,"
    " the youngest responses are preempted. 0 fits all slots at full length.")
  kv_block: int = setting(0, Range(0, 1e5),
    "Tokens per block of keys and values in the sampler's attention kernels for"
    " TPUs and GPUs. 0 chooses by shape.")
  max_response_length: int = setting(64, SOME,
    "Maximum number of response tokens, including observations.", FIXED)
  temperature: float = setting(1.0, Range(1e-3, 100.0),
    "Sampling temperature, which divides the logits.")
  stop: tuple[Any, ...] = setting((), None,
    "Additional stop strings, each a single token, such as ('\\n',).")
  drafter: str = setting("", Names("trainer.sampler:DRAFTERS"),
    "Drafter of speculative decoding, used while it is measured to be faster;"
    " '' disables it. Responses stay the same, but the last bits of log-probs"
    " and the completion order vary, so a run is reproducible only up to"
    " rounding. Not allowed with 'first_groups' or streaming.")
  num_draft_tokens: int = setting(4, SOME,
    "Maximum draft tokens per step of speculative decoding; half of them or"
    " none are drafted where that is measured to be faster.")
  exact: bool = setting(False, None,
    "Computes contexts and the learner's old log-probs with the sampling"
    " program, so that on a CPU the log-probs of sampler and trainer are equal"
    " for responses of the current version. Scoring then takes about as long as"
    " sampling.")
  parity_check_every: int = setting(50, COUNT,
    "Steps between checks that sampler and trainer have equal weights and"
    " log-probs; a difference stops the run. The check also runs at startup;"
    " sampled tokens are compared in every step. 0 compares only the weights,"
    " at startup.")


class SamplerMesh(Group, path="sampler.mesh"):
  """The sampler's device mesh."""

  data: int = setting(0, Range(-1),
    "Size of the data axis of a separate mesh for the sampler, on devices that"
    " `mesh` leaves free, otherwise on the same ones. 0 shares the trainer's"
    " mesh, -1 uses all remaining devices.")
  fsdp: int = setting(1, SOME,
    "Size of the fsdp axis, which shards the parameters.")
  tensor: int = setting(1, SOME,
    "Size of the tensor axis, which shards each matrix product.")
  expert: int = setting(1, SOME,
    "Devices over which experts are distributed, as in `mesh.expert`.")


class Schedule(Group, path="schedule"):
  """Collection of a batch of rollouts."""

  stop: str = setting("all", Names("rollout.schedule:STOPS"),
    "When generation for a batch stops: after 'all' responses, or after the"
    " 'first_groups' that fill the batch (APRIL). Unfinished responses then"
    " continue in the next step.", FIXED)
  dynamic_sampling: bool = setting(False, None,
    "Drops groups whose responses are all correct or all incorrect (DAPO).",
    FIXED)
  window: int = setting(0, COUNT,
    "Maximum number of new tokens per response and step (T-PPO). Unfinished"
    " responses continue in the next step; 0 sets no limit.", SWITCH)
  over_provision: float = setting(1.0, Range(1.0, 16.0),
    "Groups in flight as a multiple of data.prompts_per_step: at any time with"
    " 'first_groups', per round with dynamic sampling.", IN_FLIGHT)
  max_staleness: int = setting(4, SOME,
    "Maximum number of updates between the oldest and the newest token of a"
    " batch, with 'first_groups'. Groups that would exceed it are finished"
    " before new ones start. Tokens are trained on at most schedule.lag updates"
    " later.")
  lag: int = setting(0, Range(0, 16),
    "Updates between sampling a batch and training on it. Above 0, sampler and"
    " learner run concurrently, best on separate meshes; 0 is on-policy.",
    FIXED)
  overlap: bool = setting(True, None,
    "Runs sampler and learner concurrently if schedule.lag > 0. False"
    " alternates them, with the same results.")
  replay: float = setting(0.0, BELOW_1,
    "Fraction of a batch's groups that are drawn from a replay store of earlier"
    " steps; off_policy.correction corrects for their older weights.", SWITCH)
  replay_capacity: int = setting(512, SOME,
    "Capacity of the replay store in groups, or in the responses that the"
    " method stores; the oldest are evicted first.")
  replay_keep: str = setting("mixed", Names("data.replay:KEEP"),
    "Groups to store: those with correct and incorrect responses ('mixed'),"
    " such groups of other policies only ('foreign'), or 'all'.")
  streaming: bool = setting(False, None,
    "Accumulates the gradients of each group as it completes and updates after"
    " the last one (periodic asynchrony). Needs lag=0, one mini-batch and a"
    " method without statistics of the whole batch.")
  max_rounds: int = setting(10, SOME,
    "Maximum rounds of dynamic sampling per step before the run stops.")

# fmt: on
