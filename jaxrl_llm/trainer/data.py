"""The data of a run: training prompts and evaluation problems."""

import inspect
import pathlib
from typing import Any, NamedTuple

from jaxrl_llm import digest, rewards
from jaxrl_llm.data import prompt_source, rows, sources
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, as_input_error
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.rollout import turns
from jaxrl_llm.rollout.turns import ConversationConfig, EnvironmentCalls
from jaxrl_llm.system import processes

EVAL_POSITIONS = 10_000  # Most problems of an endless source that are read.
CHECKED = 100_000  # First prompts of a data set, tokenized at the start.


class Problems(NamedTuple):
  """The evaluation problems."""

  prompts: list[Prompt]
  name: str
  origin: str  # Line about the origin of the problems, or ''.


def make_prompts(
  config: Any, tokenizer: Tokenizer
) -> tuple[PromptSource, Problems]:
  """Training prompts, and evaluation problems; one template.

  Raises:
    InputError: the data cannot be used.
  """
  data, evaluation = config.data, config.eval
  train, held_out, label, origin = _sources(config)
  if data.pool:
    train = sources.LazySource(
      train.__getitem__, range(min(data.pool, len(train)))
    )
  play = make_play(config)
  template = _template(config, tokenizer, train, play)
  settings = {
    "template": play.opened(template) if play else template,
    "tokenizer": tokenizer,
    "max_prompt_length": data.max_prompt_length,
    "on_long": data.on_long,
  }
  problems = PromptSource(held_out, seed=None, **settings)
  asked = evaluation.problems or EVAL_POSITIONS
  count = min(asked, len(problems), EVAL_POSITIONS)
  prompts, _ = problems.draw(problems.init(), count)
  _check_answers(config.reward.name, prompts)
  make, own = prompt_source.PROMPT_SOURCES[data.order], data.order_settings
  longest = {"max_response_length": config.sampler.max_response_length}
  if not longest.keys() & inspect.signature(make).parameters:
    longest = {}
  with as_input_error(
    f"config.data.order_settings={dict(own)}",
    f"correct those of {data.order!r}",
    TypeError,
    ValueError,
  ):
    stream = make(train, seed=config.run.seed, **settings, **longest, **own)
  origin = origin or _overlap(train, prompts)
  return stream, Problems(prompts, label, origin)


def digests(config: Any) -> dict[str, str]:
  """Digests of the files of data and code, by the key that names them."""
  plugins, reward = ",".join(config.run.plugins), config.reward.path
  named = {"data.path": config.data.path, "eval.path": config.eval.path}
  named |= {"reward.path": reward, "run.plugins": plugins}
  of = lambda paths: filter(pathlib.Path.is_file, rows.files(paths))
  return {key: digest.of_files(of(paths)) for key, paths in named.items()}


def check_prompts(source: PromptSource) -> None:
  """Tokenizes prompts at the start, so that none of them ends a run later.

  Problems that a task generates are not checked.

  Raises:
    InputError: a prompt is too long or cannot be tokenized.
  """
  if len(source) <= sources.MOST_READ:
    processes.in_shares(source.check, range(min(len(source), CHECKED)))


def _overlap(train: sources.Source, prompts: list[Prompt]) -> str:
  """A line if evaluated questions are among those of the training data."""
  trained = range(len(train) if len(train) <= sources.MOST_READ else 0)
  evaluated = {prompt.question for prompt in prompts}
  shared = evaluated.intersection(train[i].question for i in trained)
  line = (
    f"{len(shared)} of {len(evaluated)} evaluated questions are trained on;"
    " remove them from data.path or from eval.path"
  )
  return line if shared else ""


def _sources(config) -> tuple[sources.Source, sources.Source, str, str]:
  """Examples to train and to evaluate on, and the latter's name and origin."""
  data, evaluation = config.data, config.eval
  # A set of its own brings its own layout; the same one keeps its settings.
  name = evaluation.source or data.source
  same = name == data.source
  path = evaluation.path or (data.path if same else "")
  own = {"settings": dict(data.settings), "columns": dict(data.columns)}
  given = {"seed": config.run.seed, "path": path, "split": evaluation.split}
  train = sources.make_source(
    data.source, **own, **given | {"path": data.path, "split": data.split}
  )
  stems = [pathlib.Path(file).stem for file in path.split(",")]
  label = "+".join(stems).partition(":")[0].replace("*", "") or name
  if not same or path != data.path or "split" in sources.reads(name):
    held_out = sources.make_source(name, **given, **own if same else {})
    return train, held_out, label, ""
  if evaluation.path or not data.holdout:
    origin = f"evaluation asks {label}, which is trained on too"
    return train, train, f"{label}_training_data", origin
  parts = sources.hold_out(train, data.holdout, label)
  origin = (
    f"{len(parts[1])} of {len(train)} examples of {label}, by hash of the"
    " question, are held out for evaluation and never trained on"
  )
  return *parts, f"{label}_heldout", origin


def _check_answers(reward: str, prompts: list[Prompt]) -> None:
  """Refuses data without the answers that a verifier compares with."""
  bare = [prompt.id for prompt in prompts if not prompt.answer]
  if bare and rewards.gold_response(reward, ""):
    raise InputError(
      f"{bare[0]} has no answer, which config.reward.name={reward!r} compares"
      " with; name its column, data.columns={'answer': NAME}, or choose another"
      " reward"
    )


def _template(config, tokenizer, pool, play):
  settings = dict(config.data.template_settings)
  if play is not None:
    settings = play.template_settings(config.data.template, settings)
  if config.data.template == "few_shot":
    settings["pool"] = pool
  with as_input_error(
    f"config.data.template_settings={dict(config.data.template_settings)}",
    f"correct those of {config.data.template!r}",
    TypeError,
    ValueError,
  ):
    return prompt_source.TEMPLATES[config.data.template](tokenizer, **settings)


def make_play(config: Any) -> EnvironmentCalls | None:
  """Returns the environment of a config; None without one.

  Raises:
    InputError: its settings are not its own.
  """
  chosen = config.environment
  make = turns.ENVIRONMENTS[chosen.name]
  if make is None:
    return None
  try:
    make(**chosen.settings)
  except (TypeError, ValueError) as error:
    raise InputError(
      f"config.environment.settings={dict(chosen.settings)}: {error}"
    ) from error
  return EnvironmentCalls(make, chosen.settings)


def make_conversation_config(
  config: Any, tokenizer: Tokenizer
) -> ConversationConfig | None:
  """Makes the conversation settings of a config; None without environment.

  Raises:
    InputError: its settings are not its own.
  """
  play, chosen, data = make_play(config), config.environment, config.data
  if play is None:
    return None
  try:
    return turns.make_conversation_config(
      play,
      tokenizer,
      data.template,
      data.template_settings,
      workers=chosen.workers,
      deadline_s=chosen.deadline_s,
      max_turns=chosen.max_turns,
      max_observation_tokens=chosen.max_observation_tokens,
      weights=dict(config.reward.weights),
    )
  except ValueError as error:
    raise InputError(f"config.environment: {error}") from error


def check_context(
  config: Any, model_config: ModelConfig, tokenizer: Tokenizer
) -> None:
  """Refuses samples that the model cannot hold, and a foreign tokenizer."""
  total = config.data.max_prompt_length + config.sampler.max_response_length
  context = model_config.max_position_embeddings
  if total > context:
    raise InputError(
      "config.data.max_prompt_length + config.sampler.max_response_length ="
      f" {total} is over the model's context of {context}"
    )
  tokenizer.check_model(model_config.vocab_size)
