"""The data of a run: training prompts and evaluation problems."""

import collections
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm import base_models, digest, rewards
from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Settings
from jaxrl_llm.data import benchmarks, curriculum, prompt_source, rows, sources
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.sources import MOST_READ
from jaxrl_llm.data.tasks import Example, Prompt
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.learner import core
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.files import hf
from jaxrl_llm.rollout import turns
from jaxrl_llm.rollout.turns import ConversationConfig, EnvironmentCalls
from jaxrl_llm.system import processes
from jaxrl_llm.trainer.validation import own_settings

EVAL_POSITIONS = 10_000  # Maximum number of problems read from a source.
_POOL = 1024  # Prompts of an endless source if each prompt has a record.
CHECKED = 100_000  # Number of prompts that are tokenized at the start.


class Problems(NamedTuple):
  """The problems of an evaluation set."""

  prompts: list[Prompt]
  name: str
  origin: str  # Line on the origin of the problems, or ''.


def make_prompts(
  config: Settings, tokenizer: Tokenizer, algorithm: Algorithm
) -> tuple[PromptSource, list[Problems]]:
  """Makes the training prompts and the problems of each evaluation set.

  All of them share one template. Prompts are tokenized at the start, so that
  none of them stops the run later; problems that a task generates are not.

  Args:
    config: settings of the run.
    tokenizer: tokenizer of the run.
    algorithm: algorithm of the run. If it reads rewards, the training data must
      have their inputs, as the evaluation sets always must.

  Raises:
    InputError: The data cannot be used.
  """
  data, examples = config.data, _Examples(config, algorithm)
  train, sets = examples.train, examples.sets
  rewarded = {"rewards", "correct"} & algorithm.leaves
  if rewarded and not (config.reward.group or algorithm.group_reward):
    check_inputs(config.reward, [train[i] for i in _checked(train)])
  settings = _prompt_settings(config, tokenizer, examples)
  trained = _trained(train, sets)
  problems = [_problems(config, one, trained, settings) for one in sets]
  if count := _contradictions(train):
    line = f"{count} questions of the training data have different answers"
    origin = "; ".join(filter(None, [problems[0].origin, line]))
    problems[0] = problems[0]._replace(origin=origin)
  make, own = _prompt_source(config, algorithm)
  sizes = {"max_response_length": config.sampler.max_response_length}
  sizes["group_size"] = data.group_size
  read = sizes.keys() & inspect.signature(make).parameters
  sizes = {name: sizes[name] for name in read}
  named = own_settings(config, "data.order_settings", data.order)
  if algorithm.prompts:
    what = f"config.method.use={config.method.use!r}"
    advice = "correct the arguments of its prompt source"
    named = as_input_error(what, advice, TypeError, ValueError)
  with named:
    stream = make(train, seed=config.run.seed, **settings, **sizes, **own)
  processes.in_shares(stream.check, _checked(stream))
  return stream, problems


def make_problems(
  config: Settings, tokenizer: Tokenizer, algorithm: Algorithm
) -> list[Problems]:
  """Makes the problems of each evaluation set, as `make_prompts` does.

  Reads the training data only for worked examples, for questions that are held
  out of them, or to drop questions that occur in them.
  """
  examples = _Examples(config, algorithm)
  settings = _prompt_settings(config, tokenizer, examples)
  sets, trained = examples.sets, set()
  if config.eval.on_overlap == "drop":
    trained = _trained(examples.train, sets)
  return [_problems(config, one, trained, settings) for one in sets]


def _prompt_source(
  config: Settings, algorithm: Algorithm
) -> tuple[Callable[..., PromptSource], Mapping[str, Any]]:
  """Returns the function that makes the prompt source, and its settings."""
  if algorithm.prompts is not None:
    return algorithm.prompts, algorithm.prompt_settings
  make = prompt_source.PROMPT_SOURCES[config.data.order]
  return make, config.data.order_settings


def _prompt_settings(
  config: Settings, tokenizer: Tokenizer, examples: "_Examples"
) -> dict[str, Any]:
  """Returns the arguments that all prompt sources of a run share."""
  play, chosen = make_play(config), config.data
  name, own = chosen.template, dict(chosen.template_settings)
  if play is not None:
    own = play.template_settings(name, own)
  if name == "few_shot":
    own["pool"] = examples.train
  with own_settings(config, "data.template_settings", name):
    template = prompt_source.TEMPLATES[name](tokenizer, **own)
  return {
    "template": play.opened(template) if play else template,
    "tokenizer": tokenizer,
    "max_prompt_length": chosen.max_prompt_length,
    "on_long": chosen.on_long,
  }


def _checked(source: sources.Source | PromptSource) -> range:
  """Returns the rows to check at the start; none of an endless source."""
  return range(min(len(source), CHECKED) if len(source) <= MOST_READ else 0)


def notes(stream: PromptSource) -> list[str]:
  """Returns lines on data that are probably not what was meant."""
  spelled = processes.in_shares(stream.spelled, _checked(stream))
  found = [name for name in spelled if name]
  if not found:
    return []
  return [
    f"warning: {len(found)} of {len(spelled)} prompts contain names of control"
    f" tokens, such as {found[0]!r}, which are read as plain text; give"
    " conversations as messages, to which the model's chat template adds them"
  ]


def _problems(config, one, trained, settings) -> Problems:
  """Draws the first problems of a set; reports or drops those trained on.

  Args:
    config: settings of the run.
    one: name, source and origin of the set.
    trained: result of `_trained`.
    settings: arguments of the prompt source.

  Raises:
    InputError: No problem is left, or a problem cannot be used.
  """
  name, source, origin = one
  if config.eval.on_overlap == "drop" and trained:
    read = range(min(len(source), EVAL_POSITIONS))
    kept = [i for i in read if _normal(source[i].question) not in trained]
    if not kept:
      raise InputError(
        f"evaluation set {name}: all questions are in the training data; choose"
        " another eval.path, or eval.on_overlap='warn'"
      )
    if left_out := len(read) - len(kept):
      origin = f"{left_out} training questions are left out of {name}"
    source = sources.LazySource(source.__getitem__, kept)
  drawn = PromptSource(source, seed=None, **settings)
  most = config.eval.problems or EVAL_POSITIONS
  prompts, _ = drawn.draw(drawn.init(), min(most, len(drawn), EVAL_POSITIONS))
  # After dropped prompts, the draw starts again with the first problems.
  prompts = prompts[: len({prompt.example_id for prompt in prompts})]
  check_inputs(config.reward, prompts)
  asked = {_normal(prompt.question) for prompt in prompts}
  if not origin and (shared := asked & trained):
    origin = (
      f"{len(shared)} of {len(asked)} evaluated questions of {name} are trained"
      " on; remove them from data.path, or set eval.on_overlap='drop'"
    )
  return Problems(prompts, name, origin)


def _trained(train, sets) -> set[str]:
  """Returns the normalized questions that are trained and evaluated on."""
  asked = {
    _normal(source[i].question)
    for _, source, _ in sets
    for i in range(min(len(source), EVAL_POSITIONS))
  }
  read = range(len(train) if len(train) <= MOST_READ else 0)
  return asked.intersection(_normal(train[i].question) for i in read)


def _contradictions(source: sources.Source) -> int:
  """Returns the number of questions that occur with different answers."""
  answers = collections.defaultdict(set)
  for one in map(source.__getitem__, _checked(source)):
    asked = _normal(one.question), str(one.messages)
    answers[asked].add((one.answer, one.alternatives))
  return sum(len(different) > 1 for different in answers.values())


def _normal(question: str) -> str:
  return " ".join(question.split())


def digests(config: Settings) -> dict[str, str]:
  """Returns digests of data and code files, by the config key of their path."""
  data, plugins = config.data, ",".join(config.run.plugins)
  evaluated = ",".join(one.path for one in _own_sets(config))
  named = {"eval.path": evaluated or config.eval.path}
  named |= {"data.path": benchmarks.training_files(data.path, data.source)}
  named |= {"reward.path": config.reward.path, "run.plugins": plugins}
  texts = [x for x in data.order_settings.values() if isinstance(x, str)]
  named["data.order_settings"] = ",".join(texts)
  paths = [
    config_lib.get(config, key)
    for key, setting in config_lib.KEYS.items()
    if key.startswith("method.") and setting.path == config_lib.PATH
  ]
  texts = [path for path in paths if isinstance(path, str)]
  named["method"] = ",".join(texts + core.files(config))
  of = lambda paths: filter(pathlib.Path.is_file, rows.files(paths))
  found = {key: digest.of_files(of(paths)) for key, paths in named.items()}
  model = hf.settings_digest(base_models.model_path(config))
  return found | {"model.path": model}


class _Examples:
  """The training examples of a run and its evaluation sets, read on demand."""

  def __init__(self, config: Settings, algorithm: Algorithm):
    self._config = config
    make, _ = _prompt_source(config, algorithm)
    ranked = isinstance(make, type) and issubclass(make, curriculum.Curriculum)
    # Whether the run keeps a record of each prompt.
    self._records = bool(algorithm.feed or algorithm.replay or ranked)
    # Runs with different seeds that share a pool have the same questions.
    shared = config.data.pool or self._records
    self._seed = 0 if shared else config.run.seed

  @property
  def _label(self) -> str:
    return benchmarks.label(self._config.data.path, self._config.data.source)

  @property
  def _holds_out(self) -> bool:
    """Whether evaluation has no set of its own."""
    reads = sources.reads(self._config.data.source)
    return not _own_sets(self._config) and "split" not in reads

  @functools.cached_property
  def _whole(self) -> sources.Source:
    data = self._config.data
    return sources.make_source(
      data.source,
      seed=self._seed,
      split=data.split,
      path=benchmarks.training_files(data.path, data.source),
      settings=dict(data.settings),
      columns=dict(data.columns),
    )

  @functools.cached_property
  def _split(self) -> tuple[sources.Source, sources.Source | None]:
    """Training examples, and those held out of them; None without any."""
    data, evaluation = self._config.data, self._config.eval
    if not self._holds_out or evaluation.path or not data.holdout:
      return self._whole, None
    return sources.hold_out(self._whole, data.holdout, self._label)

  @functools.cached_property
  def train(self) -> sources.Source:
    """The training examples."""
    train, size = self._split[0], self._config.data.pool
    if not size and self._records and len(train) > curriculum.LARGEST:
      size = _POOL
    if not size:
      return train
    return sources.LazySource(train.__getitem__, range(min(size, len(train))))

  @functools.cached_property
  def sets(self) -> list[tuple[str, sources.Source, str]]:
    """The name, examples and origin of each evaluation set."""
    config, label = self._config, self._label
    data = config.data
    if self._holds_out:
      train, held_out = self._split
      if held_out is None:
        origin = f"evaluation uses {label}, which is also the training data"
        return [(f"{label}_training_data", train, origin)]
      origin = (
        f"{len(held_out)} of {len(self._whole)} examples of {label}, by hash of"
        " the question, are held out for evaluation and never trained on"
      )
      return [(f"{label}_heldout", held_out, origin)]
    found, own = [], {"columns": dict(data.columns)}
    # Columns that the training data do not have are those of files.
    free = "columns" not in sources.reads(data.source)
    path = benchmarks.training_files(data.path, data.source)
    sets = _own_sets(config) or [benchmarks.Dataset(label, data.source, path)]
    for one in sets:
      # Known benchmarks and other sources have their own layout.
      layout = {}
      if one.source == data.source and not one.known:
        layout = own | {"settings": dict(data.settings)}
      if free and one.source in sources.FILES and not one.known:
        layout = own
      given = {"seed": self._seed, "split": config.eval.split, "path": one.path}
      source = sources.make_source(one.source, **given, **layout)
      found.append((one.name, source, ""))
    return found


def _own_sets(config: Settings) -> list[benchmarks.Dataset]:
  """Returns the sets that are separate from the training data, if any."""
  data, path = config.data, config.eval.path
  source = config.eval.source or data.source
  same = source == data.source
  if not path:
    return [] if same else [benchmarks.Dataset(source, source)]
  if same and path == benchmarks.training_files(data.path, source):
    return []
  reads = source if sources.needs_path(source) else "jsonl"
  return benchmarks.find_sets(path, reads)


def check_inputs(reward: Any, examples: Sequence[Example]) -> None:
  """Refuses data without the answers or columns that a reward requires."""
  fn = rewards.get_reward(reward.name, reward.path, reward.function)
  reads_text = rewards.gold_response(reward.name, "") is not None
  for name in rewards.needs(fn):
    bare, mapped = [x.id for x in examples if name not in x.columns], ""
    if name == "answer":
      mapped = " set its column with data.columns={'answer': NAME},"
      objects = ('{"', "[{") if reads_text else ()
      bare = [
        x.id for x in examples if not x.answer or x.answer.startswith(objects)
      ]
    if bare:
      raise InputError(
        f"{bare[0]} has no {name}{' in text' * reads_text}, but"
        f" config.reward.name={reward.name!r} needs one ({len(bare):,} of"
        f" {len(examples):,} rows have none);"
        f"{mapped} complete the rows, or choose another reward"
      )


def make_play(config: Settings) -> EnvironmentCalls | None:
  """Makes the environment of a config; None without one.

  Raises:
    InputError: The environment does not accept its settings.
  """
  chosen = config.environment
  make = turns.ENVIRONMENTS[chosen.name]
  if make is None:
    return None
  with own_settings(config, "environment.settings", chosen.name):
    make(**chosen.settings)
  return EnvironmentCalls(make, chosen.settings)


def make_conversation_config(
  config: Settings, tokenizer: Tokenizer
) -> ConversationConfig | None:
  """Makes the conversation config of a run; None without an environment.

  Raises:
    InputError: The environment does not accept its settings.
  """
  play, chosen, data = make_play(config), config.environment, config.data
  if play is None:
    return None
  limits = "workers", "deadline_s", "max_turns", "max_observation_tokens"
  with located("config.environment"):
    return turns.make_conversation_config(
      play,
      tokenizer,
      data.template,
      data.template_settings,
      weights=dict(config.reward.weights),
      **{name: chosen[name] for name in limits},
    )


def check_context(
  config: Settings,
  model_config: ModelConfig,
  tokenizer: Tokenizer,
  *,
  before: int = 0,
) -> None:
  """Checks that samples fit the model's context and tokens its vocabulary.

  Args:
    config: settings of the run.
    model_config: architecture of the model.
    tokenizer: tokenizer of the run.
    before: maximum number of tokens that the model reads before a prompt.
  """
  total = config.data.max_prompt_length + config.sampler.max_response_length
  context = model_config.max_position_embeddings
  if total + before > context:
    answers = " + the tokens of the critic's view" if before else ""
    raise InputError(
      "config.data.max_prompt_length + config.sampler.max_response_length"
      f"{answers} = {total + before} exceeds the model's context of {context}"
    )
  tokenizer.check_model(model_config.vocab_size)
