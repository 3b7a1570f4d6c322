"""Every setting of a training run: default, allowed values and meaning.

The defaults are plain PPO at the scale of the embedded task. A method file
`configs/METHOD.py` takes a scale (`scaled`) and sets what makes the method;
`--config.group.key=value` overrides once more. Unknown keys are errors.
`train.validation` holds a config against this table, and `--help_config` and
docs/config.md are printed from it (`describe`).
"""

import importlib
import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict

from jaxrl_llm import presets
from jaxrl_llm.errors import InputError


class Range(NamedTuple):
  """Finite numbers of the closed interval [low, high]."""

  low: float
  high: float = float("inf")
  open: bool = False  # Excludes `low`.

  def __contains__(self, value: Any) -> bool:
    # NaN is in no range.
    above = value > self.low or (value == self.low and not self.open)
    return above and value <= self.high and value < float("inf")

  def __str__(self) -> str:
    start = "(" if self.open else "["
    end = ")" if self.high == float("inf") else "]"
    return f"in {start}{self.low:g}, {self.high:g}{end}"


class Choice(tuple):
  """Allowed values of a key."""

  def __str__(self) -> str:
    names = ", ".join(map(repr, self))
    return f"one of {names}" if self else "a name that a plugin registers"


class Names:
  """The names of a table of functions, which is their only list."""

  def __init__(self, table: str, *more: str):
    """`table` is 'module:NAME' below jaxrl_llm; `more` are allowed beside."""
    self.table, self._more = table, more

  def __iter__(self) -> Iterator[str]:
    # Rooms import JAX, configs do not: only who asks for the names does.
    module, _, name = self.table.partition(":")
    table = getattr(importlib.import_module(f"jaxrl_llm.{module}"), name)
    return iter((*self._more, *table))

  def __contains__(self, value: Any) -> bool:
    return value in tuple(self)

  def __str__(self) -> str:
    return str(Choice(self))


# What a resume may change is decided by the checkpoint that it goes on from.
# Never: random numbers, the stream of prompts, tokens, the precision of stored
# log-probs, and the method.
FIXED = "fixed"
# Stronger or weaker, but not from or to 0: whether the part is on belongs to
# the method and to the content of a checkpoint.
SWITCH = "switch"
# Not while a checkpoint has unfinished responses: each must find a slot again.
IN_FLIGHT = "in flight"
# Not while a checkpoint has the weights of as many versions.
KEPT = "kept"
# Not where the source has no splits: other rows would be held out.
HELD_OUT = "held out"


class Key(NamedTuple):
  """A setting."""

  default: Any  # None: off, where a number turns it on.
  allowed: Range | Names | Choice | None  # None: any of the default's type.
  meaning: str
  resume: str = ""  # One of the above; '' may change.


KEYS: dict[str, Key] = {}  # By dotted path.


class Group:
  """Settings at one path of a config; a subclass enters its keys."""

  def __init_subclass__(cls, path: str):
    for kind in reversed(cls.__mro__):
      for name, key in vars(kind).items():
        if isinstance(key, Key):
          KEYS[f"{path}.{name}"] = getattr(cls, name)


_COUNT, _SOME, _NUMBER = Range(0), Range(1), Range(0.0)
_REWARD = Range(-1e6, 1e6)
_SHARE, _BELOW_1 = Range(0.0, 1.0), Range(0.0, 0.999999)
_DTYPES = Choice(("float32", "bfloat16"))
_DTYPE_OR_NONE = Choice(("", *_DTYPES))

# A table: default and allowed values on the line of a key, its meaning below.
# fmt: off

class Model(Group, path="model"):
  """The policy's model, and how it computes."""

  path = Key("", None,
    "Hugging Face directory of the policy; '' is the base model that the"
    " package has for data.source.", FIXED)
  dtype = Key("float32", _DTYPES, "Of activations and matrix products.", FIXED)
  sampler_dtype = Key("", _DTYPE_OR_NONE,
    "Of the sampler's parameters and matrix products; '' follows"
    " model.dtype.", FIXED)
  cache_dtype = Key("", _DTYPE_OR_NONE,
    "Of the sampler's KV cache; '' follows the sampler's dtype. On a CPU"
    " bfloat16 is several times slower here.", FIXED)
  remat_policy = Key("full", Names("models.transformer:REMAT_POLICIES"),
    "What the backward pass computes again: all of a layer ('full'), all but"
    " its matrix products ('dots'), or nothing ('none').")
  head_chunk = Key(128, _SOME,
    "Positions of time per application of the vocabulary head.")
  kernels = Key("auto", Names("models.kernels:NAMES"),
    "How attention is computed, by trainer and sampler; 'auto' is the one that"
    " is made for their devices.")


class Value(Group, path="value"):
  """The critic, where the estimator has one."""

  reads_logprobs = Key(False, None,
    "The critic also reads how likely each token was when it was written, which"
    " tells slips from what was meant; the papers' critics read tokens"
    " alone.", FIXED)
  reward_model_steps = Key(0, _COUNT,
    "Iterations before value pretraining in which the critic learns to judge"
    " whole responses alone, as a reward model does (the papers start from"
    " one).")
  pretrain_steps = Key(0, _COUNT,
    "Most iterations of value pretraining on a fixed policy (VAPO: 50).")
  pretrain_patience = Key(6, _SOME,
    "Stop after so many steps without a better held-out explained variance.")
  pretrain_min_delta = Key(0.01, None, "An improvement counts from here on.")
  init_from = Key("", None,
    "Workdir of an earlier run whose pretrained critic is reused.")


class Data(Group, path="data"):
  """Prompts."""

  source = Key("chain_sum", Names("data.sources:SOURCES"),
    "Where examples come from.", FIXED)
  path = Key("", None,
    "Files of 'jsonl' or 'parquet', separated by commas or as a pattern like"
    " data/*.jsonl; name[:version] of 'tfds'.", FIXED)
  split = Key("train", None, "Of a source that has splits.", FIXED)
  columns = Key({}, None,
    "Columns of the data by what they are to us, question, answer, id or"
    " source: {'question': 'problem', 'answer': 'info.solution'}. Those of verl"
    " and TRL are known.", FIXED)
  settings = Key({}, None,
    "Settings of the source, such as max_ops, digits, data_dir.", FIXED)
  pool = Key(0, _COUNT,
    "Only so many examples, the first, come back epoch after epoch; 0 is"
    " all.", FIXED)
  holdout = Key(0.05, _BELOW_1,
    "Share of the questions, at least one and at most 1,000, that are evaluated"
    " on and never trained on, where the source has no splits and eval.path is"
    " not given; 0 evaluates on training data.", HELD_OUT)
  order = Key("shuffled", Names("data.prompt_source:PROMPT_SOURCES"),
    "Who draws prompts: every example once an epoch, in a new order.", FIXED)
  template = Key("completion", Names("data.prompt_source:TEMPLATES"),
    "How a question becomes a prompt.", FIXED)
  template_settings = Key({}, None,
    "Keywords of the template: shots, shot_format, question_format, system, and"
    " kwargs, those of the model's chat template.", FIXED)
  prompts_per_step = Key(512, Range(1, 1e6), "Groups of a batch.", IN_FLIGHT)
  group_size = Key(1, Range(1, 1e5), "Responses per prompt (VAPO: 16).", FIXED)
  max_prompt_length = Key(16, _SOME, "Tokens.", FIXED)
  on_long = Key("error", Choice(("error", "drop")),
    "What a longer prompt does: 'error' refuses the data at the start, 'drop'"
    " leaves it out.")


class Reward(Group, path="reward"):
  """Who judges responses, and what a verdict is worth."""

  name = Key("chain_sum", Names("rewards:REWARDS"),
    "Who judges a response; 'verl' and 'trl' are functions of a file that were"
    " written for these libraries.")
  path = Key("", None, "Python file of 'verl' and 'trl'.")
  function = Key("compute_score", None,
    "Its function; of 'trl' several, separated by commas.")
  weights = Key({}, None,
    "Of the named parts of a reward; 1 where none is given.")
  threshold = Key(0.5, _REWARD,
    "A response is right if its reward is above this number. Of a reward in"
    " parts, the part 'right' (or else the first one) decides, not the sum."
    " Accuracy, dynamic sampling and the positive-example loss read it.")
  correct = Key(1.0, _REWARD, "Reward of a right response.")
  incorrect = Key(-1.0, _REWARD, "Reward of a wrong one.")
  workers = Key(0, Range(0, 256),
    "Processes that judge; 0 judges inline, for rewards that cannot hang.")
  deadline_s = Key(10.0, Range(1e-3),
    "Seconds a single verdict may take in a worker.")
  batch_deadline_s = Key(0.0, Range(0.0),
    "Seconds after which workers leave the rest of a batch without a verdict; 0"
    " is never.")
  overlong_buffer = Key(0, _COUNT,
    "Soft overlong punishment (DAPO eq. 13): the last so many tokens before"
    " sampler.max_response_length cost up to overlong_factor. Only tokens that"
    " the policy wrote count; the limit itself counts those of an environment"
    " too.")
  overlong_factor = Key(1.0, _NUMBER, "Cost of a response at the limit.")


class Mesh(Group, path="mesh"):
  """A mesh of devices."""

  data = Key(-1, Range(-1), "Copies; -1 takes the devices that remain.")
  fsdp = Key(1, _SOME, "Devices that share the parameters.")
  context = Key(1, _SOME,
    "Devices that share each row of tokens, and the parameters too.")
  tensor = Key(1, _SOME, "Devices that share each matrix.")


class Environment(Group, path="environment"):
  """Who answers a model that speaks in turns; a stop token ends a turn. Rewards
  read the model's turns, a line each, and none of the answers."""

  name = Key("", Names("rollout.turns:ENVIRONMENTS"),
    "'calculator' answers '7+5=' (sampler.stop=('=',)), 'guessing_game' is"
    " played, 'tools' answers a chat model's calls; '' is nobody.", FIXED)
  settings = Key({}, None, "Of the environment.", FIXED)
  rewards = Key("end", Names("learner.choices:TOKEN_REWARDS"),
    "Where the part of a response's reward lies that the environment gave: on"
    " the response's last token, or on that of each turn.", FIXED)
  max_turns = Key(16, _SOME,
    "Of the model; a response that needs more is overlong.")
  max_observation_tokens = Key(512, _SOME,
    "Maximum number of tokens of one answer's text. A longer text is cut and"
    " marked; the chat template's header and end are added to it.")
  workers = Key(0, Range(0, 256),
    "Processes that environments run in; 0 runs them inline.")
  deadline_s = Key(10.0, Range(1e-3),
    "Seconds that an answer may take in a worker. A response whose environment"
    " is late or fails ends there and is left out of every loss.")


class Sampler(Group, path="sampler"):
  """How responses are written."""

  slots = Key(0, Range(0, 1e6),
    "Responses written at a time; 0 is all that a step has in flight.")
  kv_pages = Key(0, Range(0, 1e7),
    "Pages of the KV cache, on all devices of the sampler; when they run out"
    " the youngest responses wait. 0 is what all slots need at full length.")
  max_response_length = Key(64, _SOME,
    "Tokens, those of an environment included.", FIXED)
  temperature = Key(1.0, Range(1e-3, 100.0), "Divides the logits.")
  entropy_tau = Key(0.0, Range(0.0, 0.999),
    "HAPO: a token's temperature is temperature * (1 + entropy_tau * h), with h"
    " in [-1, 1] from its entropy and those of the batch before.", SWITCH)
  stop = Key((), None,
    "Further stop tokens as text, each one token, e.g. ('\\n',).")
  drafter = Key("", Names("train.sampler:DRAFTERS"),
    "Drafts tokens that one step then checks, where that is measured to pay."
    " Responses stay the same, but not the last bits of their log-probs nor the"
    " order in which they end: not with schedule.stop='first_groups' or"
    " schedule.streaming.")
  num_draft_tokens = Key(4, _SOME,
    "Draft tokens per step, where they are measured to pay.")
  parity_check_every = Key(50, _COUNT,
    "Steps between checks that sampler and trainer hold the same weights and"
    " give the same log-probs, which stop the run where they differ; also at"
    " every start. 0 compares the weights at a start and nothing else.")


class SamplerMesh(Group, path="sampler.mesh"):
  """The sampler's own mesh."""

  data = Key(0, Range(-1),
    "A mesh of the sampler's own, on the devices that `mesh` leaves free or, if"
    " there are none, on the same ones. 0 shares the trainer's mesh, -1 takes"
    " the devices that remain.")
  fsdp = Key(1, _SOME, "Devices that share the parameters.")
  tensor = Key(1, _SOME, "Devices that share each matrix.")


class Schedule(Group, path="schedule"):
  """How a step comes by its batch: choices independent of each other."""

  stop = Key("all", Names("rollout.worker:STOPS"),
    "When a call of the sampler stops: 'all' responses have ended, or (APRIL)"
    " the 'first_groups' that a batch needs; the others go on in the next"
    " step.", FIXED)
  dynamic_sampling = Key(False, None,
    "Whether only groups with right and wrong responses count (DAPO).", FIXED)
  window = Key(0, _COUNT,
    "How many new tokens a response may get in a step (T-PPO); what has not"
    " ended goes on in the next one. 0 sets no bound.", SWITCH)
  over_provision = Key(1.0, Range(1.0, 16.0),
    "Groups begun, as a multiple of prompts_per_step: in flight at a time with"
    " 'first_groups', drawn per round with dynamic sampling.", IN_FLIGHT)
  max_staleness = Key(4, _SOME,
    "Most updates between the oldest and the newest tokens of a batch of"
    " 'first_groups'; what would grow older is waited for.", KEPT)
  lag = Key(0, Range(0, 16),
    "Updates between the weights that write a batch and those that it trains:"
    " sampler and learner work at the same time, best on meshes of their own. 0"
    " writes each batch with the newest weights.", FIXED)
  overlap = Key(True, None,
    "Whether they do so with a lag; False takes turns, with the same results.")
  streaming = Key(False, None,
    "Without a lag: the learner takes each group as it is complete, sums up the"
    " gradients and steps once all have come (periodic asynchrony). For methods"
    " that need nothing of the batch as a whole, in one mini-batch.")
  max_rounds = Key(10, _SOME, "Rounds before dynamic sampling gives up a step.")


class Estimator(Group, path="estimator"):
  """Advantages and the critic's targets."""

  name = Key("gae", Names("learner.choices:ESTIMATORS"),
    "With 'gae' there is a critic (and EGAE where a response is unfinished);"
    " without one 'group' is relative to the other responses, 'token_group' is"
    " HAPO's, 'reward_to_go' REINFORCE++'s, 'optimal_baseline' VCPO's.", FIXED)
  gamma = Key(1.0, _SHARE, "Discount of a token.")
  lambda_schedule = Key("constant", Names("learner.choices:LAMBDA_RULES"),
    "The policy's lambda: lambda_policy, or max(0, 1 - 1/(alpha * length)), the"
    " length in tokens that the policy wrote.")
  alpha = Key(0.05, Range(1e-6),
    "Of 'length_adaptive'. VAPO's 0.05 is for thousands of tokens.")
  lambda_policy = Key(0.95, _SHARE, "Of 'constant'.")
  lambda_value = Key(0.95, _SHARE,
    "Of the critic's targets; 1 is Monte Carlo (decoupled GAE).")
  boundary = Key("repeat", Names("estimators.egae:BOUNDARIES"),
    "V of the state where a window cuts: T-PPO's EGAE repeats the last one.")
  tail_drop = Key(0, _COUNT,
    "Last tokens of a cut response that its window does not train.")
  center = Key("mean", Names("estimators.group:CENTERS", "none"),
    "What 'group' subtracts; 'reward_to_go' does too, unless it is 'none': the"
    " same number, that of whole responses without a discount, from every"
    " token.")
  scale = Key("std", Names("estimators.group:SCALES"),
    "What 'group' divides by.")
  epsilon = Key(1e-6, _NUMBER, "Added to the scale.")
  gradient_norms = Key("length", Names("learner.choices:GRADIENT_NORMS"),
    "What 'optimal_baseline' takes for the squared norm of a response's"
    " gradient: the number of tokens that the policy wrote, or the 'exact' one"
    " by a backward pass of each alone.")
  drop_pivot = Key(False, None,
    "MC-GRPO: the group's median response takes no part in the loss.")
  normalize = Key("none", Names("learner.choices:NORMALIZATIONS"),
    "Of all advantages of a batch: 'whiten', or 'scale' by their std alone.")


class Loss(Group, path="loss"):
  """Losses."""

  name = Key("clip", Names("learner.choices:POLICY_LOSSES"),
    "Policy loss: 'clip' is PPO's.", FIXED)
  clip_low = Key(0.2, _BELOW_1, "The ratio is clipped below 1 - this.")
  clip_high = Key(0.2, _NUMBER, "The ratio is clipped above 1 + this.")
  dual_clip = Key(None, Range(1.0, open=True),
    "Bound of the loss of negative advantages; None is off.")
  clip_value = Key(None, Range(0.0, open=True),
    "Clip range of the value loss around the old values; None is off.")
  mode = Key("token-mean", Names("masked:MODES"),
    "How losses of tokens become one number, in verl's names.")
  norm = Key(0, _COUNT,
    "Constant length, in tokens, of a mode with one; 0 is the response limit.")
  nll_coefficient = Key(0.0, _NUMBER,
    "VAPO's mu, of the positive-example language-model loss.")
  kl_coefficient = Key(0.0, _NUMBER,
    "Of the KL to the initial policy as a loss.", SWITCH)
  kl = Key("k3", Names("learner.choices:KL_ESTIMATES"),
    "Its estimator; 'k1+' and 'k3+' have the gradient of k2.")
  kl_reward_coefficient = Key(0.0, _NUMBER,
    "Of the KL to the initial policy in the token rewards (k1).", SWITCH)
  entropy_coefficient = Key(0.0, _NUMBER, "Of the entropy bonus.")
  overlong_filter = Key(False, None,
    "Responses cut at the response limit take no part in the loss.")
  masks = Key((), Names("learner.choices:OWN_MASKS"),
    "Registered masks, which leave further tokens out of the policy loss.")
  hapo_sign = Key("intended", Names("estimators.entropy:SIGNS"),
    "Of 'hapo': the sign of low-entropy tokens.")


class OffPolicy(Group, path="off_policy"):
  """What corrects for tokens that another policy wrote."""

  proximal = Key("recompute", Names("learner.choices:PROXIMALS"),
    "Whom the loss takes its ratio against: the trainer's policy at the start"
    " of the update, 'stored' (sampler), 'interpolate' (A-3PO), 'ewma'"
    " (PPO-EWMA).", FIXED)
  ewma_decay = Key(0.889, _BELOW_1,
    "Of 'ewma'; the center of mass is 1 / (1 - decay) - 1 updates.")
  correction = Key("auto", Names("learner.choices:CORRECTIONS", "auto"),
    "Weight proximal/behaviour: 'truncate' (TIS) or 'mask' (IcePop, MIS)."
    " 'auto' is 'truncate' where a batch has tokens of older versions"
    " ('first_groups', a lag) or the proximal policy is an average ('ewma').")
  level = Key("token", Names("losses.offpolicy:LEVELS"),
    "Its ratio: of a token, of the sequence or its geometric mean.")
  high = Key(None, Range(1.0), "Its upper bound; None is 2, or 100 for 'ewma'.")
  low = Key(0.0, _SHARE, "Its lower bound.")
  keep_weights = Key("", _DTYPE_OR_NONE,
    "Keep the weights of the versions that may have written a token of a batch,"
    " in this dtype: the correction is then two, writer/behaviour (what sampler"
    " and trainer make of the same weights) times proximal/writer (the updates"
    " since), each with an upper bound of its own. Costs their memory, and one"
    " scoring pass per version; 'bfloat16' rounds the writer. '' keeps"
    " none.", FIXED)
  mismatch_high = Key(2.0, Range(1.0),
    "Upper bound of writer/behaviour with keep_weights; off_policy.high is then"
    " that of proximal/writer.")
  ess_scale = Key(False, None,
    "VCPO: scale the step by sqrt(effective sample ratio / ess_reference).")
  ess_reference = Key(1.0, Range(1e-6, 1.0),
    "Reference effective sample ratio; 1 is on-policy.")


class Optimizer(Group, path="optimizer.policy"):
  """How a model is trained: AdamW on mini-batches."""

  mini_batch = Key(256, _SOME, "Responses per update.")
  epochs = Key(1, _SOME, "Passes over each batch of rollouts.")
  learning_rate = Key(2e-4, _NUMBER, "Of AdamW.")
  # Read after mini_batch, which presets divide by.
  warmup_steps = Key(10, _COUNT,
    "Updates over which the rate rises; the presets of Qwen2.5 set the updates"
    " of 20 rollouts.")
  learning_rate_schedule = Key("constant", Names("learner.optimizer:SCHEDULES"),
    "How the rate falls from then on, to be lowest after run.steps, whatever"
    " number of updates each step really has.")
  min_learning_rate_ratio = Key(0.0, _SHARE,
    "The lowest rate, as a share of learning_rate.")
  max_grad_norm = Key(1.0, Range(1e-9),
    "Gradients of a larger norm are scaled down to it.")
  weight_decay = Key(0.0, _NUMBER, "Of AdamW, of matrices.")
  b1 = Key(0.9, _BELOW_1, "Decay of the mean of gradients.")
  b2 = Key(0.99, _BELOW_1, "Decay of the mean of their squares.")
  eps = Key(1e-8, Range(1e-20), "Added to the root of that mean.")
  mu_dtype = Key("float32", _DTYPES,
    "Of the mean of gradients; bfloat16 saves two bytes a parameter.", FIXED)
  micro_batch_size = Key(8, _SOME,
    "Packed rows per micro-batch; accumulation is exact.")
  frozen = Key((), None,
    "Parameters that keep their values: parts of their paths, such as 'embed'"
    " or 'layers/mlp'.")


class ValueOptimizer(Optimizer, path="optimizer.value"):
  """The critic, which learns faster and in smaller mini-batches."""

  learning_rate = Optimizer.learning_rate._replace(default=5e-4)
  mini_batch = Optimizer.mini_batch._replace(default=128)


class Rows(Group, path="optimizer"):
  """Packed rows, of both models."""

  max_tokens_per_row = Key(128, _COUNT,
    "Least tokens per packed row; the longest sample may need more. Larger rows"
    " hold more samples of a group, which then share their prompt.")


class Eval(Group, path="eval"):
  """Problems that are evaluated on."""

  every = Key(20, _SOME,
    "Steps between evaluations; also before the first and after the last.")
  samples = Key(4, _SOME, "Responses per problem, k of avg@k and pass@k.")
  greedy = Key(False, None,
    "One greedy response per problem too: its accuracy is 'greedy'.")
  problems = Key(200, _COUNT, "Most problems; 0 is all.")
  source = Key("", Names("data.sources:SOURCES", ""),
    "Where problems come from; '' follows data.source (its evaluation"
    " split).", HELD_OUT)
  path = Key("", None, "As data.path.", HELD_OUT)
  split = Key("eval", None,
    "As data.split; 'eval' is the test split of 'tfds'.")
  temperature = Key(1.0, Range(0.0, 100.0), "Divides the logits; 0 is greedy.")
  top_p = Key(1.0, Range(1e-6, 1.0), "Nucleus (top-p) probability mass.")


class Checkpoint(Group, path="checkpoint"):
  """What is kept of a run."""

  every = Key(20, _SOME, "Steps between checkpoints; also after the last.")
  keep = Key(2, Range(2),
    "Newest checkpoints kept; of one alone damage could not be survived.")
  keep_every = Key(0, _COUNT, "Steps divisible by it are kept too; 0 is none.")
  best = Key("", None,
    "Metric, as eval/chain_sum/avg@4, whose best step is kept too.")


class Run(Group, path="run"):
  """Run length, logging and supervision."""

  seed = Key(0, Range(0, 2**31 - 1), "Of every random number.", FIXED)
  steps = Key(100, _SOME,
    "Iterations; updates of the policy are steps * mini-batches per step.")
  samples_every = Key(20, _COUNT,
    "Steps between samples in the log; 0 is never.")
  method = Key("", None,
    "METHOD[:PRESET]; scripts/train.py takes it from --config.")
  plugins = Key((), None,
    "Files of your own parts; scripts/train.py takes --plugin in.")
  trackers = Key(("tensorboard",), Names("metrics.trackers:TRACKERS"),
    "Who draws the run's curves. The project of 'wandb' is the environment's"
    " WANDB_PROJECT, of 'trackio' TRACKIO_PROJECT, or 'jaxrl_llm'.")
  max_skipped = Key(5, _SOME,
    "Updates in a row that are not finite, or batches in a row without any"
    " verdict, before the run stops.")
  replay_every = Key(0, _COUNT,
    "Steps between updates that are done twice; the run stops if their bits"
    " differ, as on a processor that calculates wrongly. 0 is never.")
  stuck_after_s = Key(3600.0, Range(0.0),
    "Seconds of one phase after which the run says where it stands, with the"
    " stacks of all threads, and ends; 0 is never.")

# fmt: on


def default_config() -> ConfigDict:
  """All keys with their defaults, locked."""
  config = ConfigDict()
  for path, key in KEYS.items():
    *groups, name = path.split(".")
    group = config
    for part in groups:
      if part not in group:
        group[part] = ConfigDict()
      group = group[part]
    value = key.default
    if value is None:  # Or a number.
      value = config_dict.placeholder(float)
    if isinstance(value, dict):  # One value, not a group of keys.
      value = ConfigDict(value, convert_dict=False)
    group[name] = value
  return config.lock()


def scaled(preset: str = "") -> tuple[ConfigDict, presets.Scale]:
  """The defaults at a scale, for a method file to override.

  Args:
    preset: '' (the embedded task on a CPU) or a name of `presets.SCALES`.

  Returns:
    The config, and what of the scale only some methods need.

  Raises:
    InputError: there is no such preset.
  """
  if preset not in presets.SCALES:
    names = ", ".join(repr(name) for name in presets.SCALES if name)
    raise InputError(f"preset {preset!r} is unknown; choose {names} or none")
  config, scale = default_config(), presets.SCALES[preset]
  scale.apply(config)
  return config, scale


def methods() -> dict[str, pathlib.Path]:
  """The method files of the package by name, wherever it is installed."""
  package = pathlib.Path(__file__).parent
  folders = package / "configs", package.parent / "configs"  # Installed; clone.
  files = next(folder for folder in folders if folder.is_dir()).glob("*.py")
  return {file.stem: file for file in sorted(files) if file.stem != "pretrain"}


def get(config: Any, key: str):
  """The value at a dotted key."""
  for name in key.split("."):
    config = config[name]
  return config


def batch_size(config: Any) -> int:
  """Responses per step."""
  return config.data.prompts_per_step * config.data.group_size


def most_staleness(config: Any) -> int:
  """Most updates between the weights that write a token and those it trains."""
  schedule = config.schedule
  partial = schedule.stop != "all" and not schedule.window
  return schedule.lag + (schedule.max_staleness if partial else 0)


def describe(width: int = 80) -> str:
  """All keys for a person: default, what is allowed, and meaning."""
  lines = []
  for path, key in KEYS.items():
    allowed = f"; {key.allowed}" if key.allowed else ""
    lines += textwrap.wrap(
      f"{path} = {key.default!r}{allowed}", width, subsequent_indent="    "
    )
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    lines += textwrap.wrap(key.meaning, width, **indent)
  return "\n".join(lines)
