"""Settings of the algorithm, its updates and the run; see `keys`."""

from typing import Any

from jaxrl_llm.config.schema import (
  BELOW_1,
  COUNT,
  DTYPES,
  FIXED,
  HELD_OUT,
  NUMBER,
  PATH,
  SHARE,
  SOME,
  SWITCH,
  Choice,
  Group,
  Names,
  Range,
  setting,
)

# fmt: off

class Estimator(Group, path="estimator"):
  """Advantages and value targets."""

  name: str = setting("gae", Names("learner.core:ESTIMATORS"),
    "Advantage estimator: 'gae' uses a critic (EGAE for unfinished responses),"
    " 'group' compares the responses to a prompt. method.use changes them.",
    FIXED)
  gamma: float = setting(1.0, SHARE,
    "Discount per token.")
  lambda_schedule: str = setting(
    "constant", Choice(("constant", "length_adaptive")),
    "The policy's lambda: 'constant' is lambda_policy, 'length_adaptive' is"
    " max(0, 1 - 1/(alpha * length)), where length counts generated tokens.")
  alpha: float = setting(0.05, Range(1e-6),
    "Coefficient of 'length_adaptive'. VAPO's 0.05 suits thousands of tokens;"
    " raise it for shorter responses.")
  lambda_policy: float = setting(0.95, SHARE,
    "Lambda of the policy's advantages for 'constant'.")
  lambda_value: float = setting(0.95, SHARE,
    "Lambda of the critic's targets; 1 gives Monte Carlo returns.")
  boundary: str = setting("repeat", Names("estimators.egae:BOUNDARIES"),
    "Value of the state at a window's cut: 'repeat' takes that of the previous"
    " state (T-PPO's EGAE), 'bootstrap' that of the state itself, 'zero' is 0.")
  tail_drop: int = setting(0, COUNT,
    "Number of tokens before a window's cut that are not trained on in that"
    " window.")
  center: str = setting("mean", Names("estimators.group:CENTERS", "none"),
    "Baseline that 'group' subtracts; 'none' is for methods that can do"
    " without.")
  scale: str = setting("std", Names("estimators.group:SCALES"),
    "Divisor of 'group': a measure of spread of the rewards of a group.")
  epsilon: float = setting(1e-6, NUMBER,
    "Added to the divisor of estimator.scale.")
  normalize: str = setting("none", Choice(("none", "whiten", "scale")),
    "Normalizes the advantages of a batch: 'whiten' to mean 0 and std 1,"
    " 'scale' to std 1 only.")
  settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of a registered estimator, mask or input.", path=PATH)


class Loss(Group, path="loss"):
  """Policy and value losses."""

  name: str = setting("clip", Names("learner.core:LOSSES"),
    "Policy loss: 'clip' is PPO's, or a registered one. method.use replaces"
    " it.",
    FIXED)
  clip_low: float = setting(0.2, SHARE,
    "Clips the probability ratio from below at 1 - clip_low. 1 disables it.")
  clip_high: float = setting(0.2, NUMBER,
    "Clips the probability ratio from above at 1 + clip_high.")
  dual_clip: float | None = setting(None, Range(1.0, open=True),
    "Upper bound of the ratio for negative advantages; None disables it.")
  clip_value: float | None = setting(None, Range(0.0, open=True),
    "Clip range of the value loss around the old values; None disables it.")
  mode: str = setting("token-mean", Names("masked:MODES"),
    "Reduction of per-token losses to one number, in verl's names.")
  norm: int = setting(0, COUNT,
    "Constant length in tokens that modes with a norm divide by; 0 is"
    " sampler.max_response_length.")
  nll_coefficient: float = setting(0.0, NUMBER,
    "Coefficient of the language-model loss on correct responses (VAPO's mu).")
  kl_coefficient: float = setting(0.0, NUMBER,
    "Coefficient of the KL loss to the initial policy.", SWITCH)
  kl: str = setting("k3", Names("learner.core:KL_ESTIMATES"),
    "Estimator of the KL loss. 'k1+' and 'k3+' have the gradient of 'k2'; that"
    " of 'k1' is 0 on average, so it is refused here.")
  kl_reward_coefficient: float = setting(0.0, NUMBER,
    "Coefficient of the KL penalty ('k1') in the token rewards.", SWITCH)
  entropy_coefficient: float = setting(0.0, NUMBER,
    "Coefficient of the entropy bonus.")
  overlong_filter: bool = setting(False, None,
    "Leaves responses cut at the length limit out of the policy loss.")
  masks: tuple[Any, ...] = setting((), Names("learner.core:MASKS"),
    "Registered masks that leave further tokens out of the policy loss.")
  settings: dict[str, Any] = setting({}, None,
    "Keyword arguments of a registered loss or input.", path=PATH)


class OffPolicy(Group, path="off_policy"):
  """Correction for tokens sampled from other weights."""

  proximal: str = setting("recompute", Choice(("recompute", "stored")),
    "Policy in the denominator of the ratio: the one at the start of the update"
    " ('recompute') or the sampler ('stored').", FIXED)
  correction: str = setting(
    "auto", Choice(("auto", "none", "truncate", "mask")),
    "Bounds of the weight proximal/behavior: 'truncate' (TIS) or 'mask'"
    " (IcePop, MIS). 'auto' truncates if tokens may be stale ('first_groups', a"
    " lag, replay) and proximal is not 'stored', and is 'none' otherwise.")
  level: str = setting("token", Names("losses.offpolicy:LEVELS"),
    "Level of the weight: per token, sequence, or its geometric mean.")
  high: float | None = setting(None, Range(1.0),
    "Upper bound of the weight. None is 2, or that of the method.")
  low: float = setting(0.0, SHARE,
    "Lower bound of the weight.")


class Optimizer(Group, path="optimizer.policy"):
  """AdamW on mini-batches."""

  name: str = setting("adamw", Names("learner.optimizer:OPTIMIZERS"),
    "Optimizer: 'adamw'; 'adafactor', whose state is half as large and which"
    " ignores b2 and eps; or a registered one.", FIXED)
  mini_batch: int = setting(256, COUNT,
    "Responses per update (mini-batch size); 0 divides the batch into"
    " updates_per_step.")
  updates_per_step: int = setting(1, SOME,
    "Mini-batches per batch if mini_batch is 0, that is, updates per step and"
    " epoch.")
  epochs: int = setting(1, SOME,
    "Passes over each batch of rollouts.")
  learning_rate: float = setting(2e-4, NUMBER,
    "Peak learning rate.")
  # Defined after mini_batch and updates_per_step: presets compute with them.
  warmup_steps: int = setting(10, COUNT,
    "Number of updates of linear learning-rate warm-up. Presets for full"
    " training of Qwen models warm up for 20 steps.")
  learning_rate_schedule: str = setting(
    "constant", Names("learner.optimizer:SCHEDULES"),
    "Learning rate after the warm-up; the minimum is reached at run.steps.")
  min_learning_rate_ratio: float = setting(0.0, SHARE,
    "Final learning rate as a fraction of learning_rate.")
  max_grad_norm: float = setting(1.0, Range(1e-9),
    "Clips the global gradient norm to this value.")
  weight_decay: float = setting(0.0, NUMBER,
    "Weight decay, for matrices only.")
  b1: float = setting(0.9, BELOW_1,
    "Decay rate of the first moment.")
  b2: float = setting(0.99, BELOW_1,
    "Decay rate of AdamW's second moment.")
  eps: float = setting(1e-8, Range(1e-20),
    "Added to AdamW's denominator for numerical stability.")
  mu_dtype: str = setting("float32", DTYPES,
    "Data type of the first moment; bfloat16 saves memory.", FIXED)
  micro_batch_size: int = setting(8, SOME,
    "Packed rows per forward and backward pass. Affects memory only:"
    " accumulation is exact, but for the tokens that model.expert_capacity"
    " drops.")
  frozen: tuple[Any, ...] = setting((), None,
    "Parameters that are not trained, as substrings of their paths, such as"
    " 'embed' or 'layers/mlp'.", FIXED)


class ValueOptimizer(Optimizer, path="optimizer.value"):
  """AdamW on mini-batches of the critic, with faster defaults."""

  learning_rate: float = Optimizer.learning_rate._replace(default=5e-4)
  mini_batch: int = Optimizer.mini_batch._replace(default=128)


class Optimizers(Group, path="optimizer"):
  """Updates of both models, and their packed rows."""

  policy: Optimizer
  value: ValueOptimizer
  max_tokens_per_row: int = setting(128, COUNT,
    "Tokens per packed row, raised to the longest possible sample if lower."
    " Responses of a group in one row share their prompt.")


class Eval(Group, path="eval"):
  """Evaluation on held-out problems."""

  every: int = setting(20, SOME,
    "Steps between evaluations. The first evaluation is before the first step,"
    " the last one after the last step.")
  samples: int = setting(4, SOME,
    "Sampled responses per problem, the k of avg@k and pass@k.")
  pass_k: tuple[Any, ...] = setting((), SOME,
    "Additional n of pass@n, each from 1 to eval.samples, e.g. (1, 8).")
  greedy: bool = setting(False, None,
    "Also decodes one greedy response per problem, reported as 'greedy'.")
  problems: int = setting(200, COUNT,
    "Maximum number of problems per set, from its beginning; 0 uses all.")
  source: str = setting("", Names("data.sources:SOURCES", ""),
    "Source of the problems; '' is the evaluation split of data.source.",
    HELD_OUT)
  path: str = setting("", None,
    "Evaluation sets, separated by commas: files, 'tfds:NAME', a source such as"
    " chain_sum, or gsm8k, math500, aime24, aime25, amc23, minerva or"
    " olympiadbench in the Hugging Face cache. Each has its own metrics,"
    " eval/NAME/*.", HELD_OUT, PATH)
  on_overlap: str = setting("warn", Choice(("warn", "drop")),
    "Treatment of problems whose question, up to whitespace, is also in the"
    " training data: 'warn' counts them at the start, 'drop' leaves them out of"
    " the evaluation.")
  split: str = setting("eval", None,
    "Split of the problems; 'eval' is the test split of 'tfds'.")
  temperature: float = setting(1.0, Range(0.0, 100.0),
    "Sampling temperature, which divides the logits; 0 is greedy.")
  top_p: float = setting(1.0, Range(1e-6, 1.0),
    "Nucleus (top-p) probability mass.")


class Checkpoint(Group, path="checkpoint"):
  """Checkpoints of a run."""

  every: int = setting(20, SOME,
    "Steps between checkpoints; also saves the last step.")
  keep: int = setting(2, Range(2),
    "Number of newest checkpoints to keep, at least 2 so that a run survives a"
    " damaged checkpoint.")
  keep_every: int = setting(0, COUNT,
    "Also keeps checkpoints of steps divisible by this number; 0 disables it.")
  best: str = setting("", None,
    "Metric whose best checkpoint is also kept, e.g. eval/chain_sum/avg@4.")


class Run(Group, path="run"):
  """Run length, logging and supervision."""

  seed: int = setting(0, Range(0, 2**31 - 1),
    "Seed of all random numbers.", FIXED)
  steps: int = setting(100, Range(0, 2**31 - 1),
    "Number of steps; each updates the policy once per mini-batch. 0 only saves"
    " a checkpoint of step 0.")
  samples_every: int = setting(20, COUNT,
    "Logs responses to samples.jsonl every this many steps; 0 logs none.")
  samples: int = setting(4, COUNT,
    "Number of responses to log in such a step, drawn at random; 0 logs all.")
  method: str = setting("", None,
    "METHOD[:PRESET]; set by train.py --config.")
  plugins: tuple[Any, ...] = setting((), None,
    "Python files that register custom parts; set by train.py --plugin.",
    path=PATH)
  trackers: tuple[Any, ...] = setting(
    ("tensorboard",), Names("metrics.trackers:TRACKERS"),
    "Experiment trackers. The project name comes from WANDB_PROJECT ('wandb')"
    " or TRACKIO_PROJECT ('trackio'), else it is 'jaxrl_llm'.")
  max_skipped: int = setting(5, SOME,
    "Stops the run after this many consecutive non-finite updates, or batches"
    " without a single verdict.")
  replay_every: int = setting(0, COUNT,
    "Steps between updates that are computed twice; a difference in any bit"
    " indicates faulty hardware and stops the run. 0 disables it.")
  stuck_after_s: float = setting(3600.0, Range(0.0),
    "Ends the run if a phase takes longer than this many seconds, and prints"
    " the stacks of all threads; 0 disables it.")
  watch_hosts_s: float = setting(4.0, Range(0.0),
    "Seconds between health samples of each process in a multi-process run."
    " Reports a process that is slow, silent or uses far more memory than the"
    " others for four samples; 0 disables it.")
  on_suspect: str = setting("warn", Choice(("warn", "stop")),
    "Reaction to a suspect process: 'warn' logs a line, 'stop' also saves after"
    " the step and exits with code 75.")

# fmt: on
