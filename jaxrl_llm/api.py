"""Training, loading and using a policy from Python.

    config = jaxrl_llm.config.method("grpo", **{"data.path": "train.jsonl"})
    policy = jaxrl_llm.train(config, "run")
    policy.generate(["3+5?"], samples=4)
    policy.save("model")

The programs of scripts/ that read a policy use the same class.
"""

import copy
import dataclasses
import functools
import operator
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm import base_models, models, sharding, workdir
from jaxrl_llm import config as config_lib
from jaxrl_llm.config import Settings
from jaxrl_llm.data.prompt_source import TEMPLATES, Template
from jaxrl_llm.data.rows import Row
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError, check_number
from jaxrl_llm.evaluate import pass_counts
from jaxrl_llm.models.files import hf
from jaxrl_llm.rollout.turns import ConversationConfig
from jaxrl_llm.rollout.writer import ResponseWriter
from jaxrl_llm.sampling import Engine, EngineConfig, SamplingSettings
from jaxrl_llm.system import plugin, signals
from jaxrl_llm.tools.generate import MAX_SAMPLES, Generation, make_prompts


@dataclasses.dataclass(frozen=True)
class Policy:
  """The policy of a run or of a Hugging Face model directory; see `load`.

  Weights are read on first use.

  Attributes:
    path: directory of the run, or of the model.
    step: checkpoint of the run; None for a model directory.
    dtype: data type of the computation and, for a model, of its weights.
    trust_code: whether `evaluate` may run the Python files that the settings of
      the run name.
  """

  path: pathlib.Path
  step: int | None = None
  dtype: str = "float32"
  trust_code: bool = False

  @property
  def directory(self) -> str:
    """Directory with the model's configuration and tokenizer."""
    if self.step is None:
      return str(self.path)
    return workdir.model_path(self.path)

  @functools.cached_property
  def model_config(self) -> models.ModelConfig:
    """The model's architecture."""
    return hf.read_config(self.directory)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The model's tokenizer."""
    tokenizer = Tokenizer(self.directory)
    tokenizer.check_model(self.model_config.vocab_size)
    return tokenizer

  @functools.cached_property
  def fns(self) -> models.ModelFns:
    """The model's functions, for parameters such as `params`."""
    numerics = models.Numerics.all(self.dtype)
    return models.make_policy(self._own_tokens, numerics=numerics)

  @functools.cached_property
  def _own_tokens(self) -> models.ModelConfig:
    """The architecture, with the ids that are no tokens of the tokenizer."""
    if not pathlib.Path(self.directory, "tokenizer.json").exists():
      return self.model_config
    unused = self.tokenizer.unused(self.model_config.vocab_size)
    return dataclasses.replace(self.model_config, unused=unused)

  @functools.cached_property
  def params(self) -> Any:
    """The parameters, a nested dict; float32 for a run.

    Adapters are merged.

    Raises:
      InputError: The weights are damaged or of another model.
    """
    if self.step is None:
      return models.load(self.directory, dtype=self.dtype)[1]
    model, params = workdir.load_params(self.path, self.step)
    return params if model.adapters is None else model.adapters.merge(params)

  def generate(
    self,
    prompts: str | Sequence[str | Sequence[Mapping[str, str]]],
    *,
    samples: int = 1,
    seed: int = 0,
    slots: int = 64,
    **sampling: Any,
  ) -> list[list[dict[str, Any]]]:
    """Samples responses to prompts.

    Equal arguments give equal responses, for any number of slots.

    Args:
      prompts: one text, or N prompts. A text is continued as it is; a list of
        messages (`role`, `content`) is formatted with the model's chat
        template.
      samples: responses to each prompt, at most 1,024.
      seed: seed of the randomness.
      slots: maximum number of responses sampled at a time.
      **sampling: fields of `sampling.SamplingSettings`, such as `temperature`,
        `top_p`, `stop_strings` and `max_new_tokens` (256 by default).

    Returns:
      The responses to each prompt: dicts with `text`, `tokens`, `logprobs` (of
      the distribution that was sampled from: 0 at temperature 0) and
      `stop_reason` ('finished', or 'overlong' at max_new_tokens).

    Raises:
      InputError: There is no prompt, one does not fit the model's context, or
        there is no such setting.
      ValueError: A setting is out of range.
    """
    known = [field.name for field in dataclasses.fields(SamplingSettings)]
    for name in sampling.keys() - known:
      raise InputError(f"generate has no {name!r}; it has {', '.join(known)}")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
      raise InputError("prompts is empty; give at least one text")
    rows = [
      Row(f"prompt {index}", {"prompt": prompt})
      for index, prompt in enumerate(prompts, start=1)
    ]
    if sampling.get("max_new_tokens") is None:
      sampling["max_new_tokens"] = 256
    settings = SamplingSettings(**sampling)
    job = self.generation(
      rows,
      settings,
      template=TEMPLATES["completion"](self.tokenizer),
      samples=samples,
      seed=seed,
      slots=slots,
    )
    every = [(i, k) for i in range(len(rows)) for k in range(samples)]
    names = ("text", "tokens", "logprobs", "stop_reason")
    found = [[] for _ in rows]
    for record in job.sample(every):
      found[record["prompt_index"]].append({k: record[k] for k in names})
    return found

  def generation(
    self,
    rows: Sequence[Row],
    sampling: SamplingSettings,
    *,
    template: Template,
    samples: int,
    seed: int,
    slots: int,
    conversations: ConversationConfig | None = None,
    identity: str = "",
  ) -> Generation:
    """Makes an engine and prompts for the samples of a file; reads the weights.

    Args:
      rows: rows of data with a prompt or a question.
      sampling: sampling parameters.
      template: turns a row into tokens.
      samples: responses to each prompt.
      seed: seed of the randomness.
      slots: maximum number of responses sampled at a time.
      conversations: conversations with an environment; None without one.
      identity: identifies everything that the samples depend on.

    Raises:
      InputError: A prompt cannot be used or does not fit the model's context.
      ValueError: The number of samples is out of range.
    """
    check_number("samples", samples, f"[1, {MAX_SAMPLES}]")
    samples, slots = operator.index(samples), operator.index(slots)
    prompts = make_prompts(
      rows,
      template,
      context=self.model_config.max_position_embeddings,
      max_new_tokens=sampling.max_new_tokens,
    )
    # Slots are sharded over all devices, each of which holds the whole model.
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    fns = models.make_policy(
      self._own_tokens,
      numerics=models.Numerics.all(self.dtype),
      sampler_sharding=sharding.along_batch(mesh),
    )
    stop = () if self.step is None else self._run_config.sampler.stop
    stop = self.tokenizer.single_tokens(stop, "config.sampler.stop")
    slots = min(slots, len(prompts) * samples)
    sizes = EngineConfig(
      slots=-(-slots // mesh.size) * mesh.size,
      max_prompt_length=max(len(prompt.tokens) for prompt in prompts),
      max_response_length=sampling.max_new_tokens,
      stop_tokens=[*self.tokenizer.stop_tokens, *stop],
    )
    writer = ResponseWriter(
      Engine(fns, sizes, detokenize=self.tokenizer.decode),
      sampling,
      jax.random.key(seed),
      group_size=min(samples, sizes.slots),
      turn_taking=conversations,
    )
    params = jax.jit(fns.for_sampling)(self.params)
    return Generation(
      writer=writer,
      params=jax.device_put(params, sharding.replicated(mesh)),
      prompts=prompts,
      decode=self.tokenizer.decode,
      settings=identity,
    )

  def evaluate(
    self,
    datasets: str = "",
    *,
    seed: int | None = None,
    critic: bool = False,
    search: str = "",
    **settings: Any,
  ) -> dict[str, dict[str, float]]:
    """Samples and judges k responses to each problem of one or more sets.

    Without arguments, it repeats the last evaluation of a run. By default, a
    model directory is evaluated in its chat format, and the verifier compares
    the last number of a response.

    Args:
      datasets: comma-separated sets as in `eval.path`, such as
        'gsm8k,mine.jsonl'; '' is the sets of the run.
      seed: seed of the sampling; None is the seed of the run.
      critic: adds `best@k` and `weighted_maj@k` by the run's critic.
      search: search guided by that critic: 'particles', 'dora' or 'beam'; ''
        samples responses independently.
      **settings: values of dotted keys, as `**{"eval.samples": 8}`.

    Returns:
      Name of each set -> `avg@k`, `pass@n`, `maj@k` and further metrics, with
      standard errors `*_se`.

    Raises:
      InputError: A setting or a set cannot be used, or the run names code that
        is not trusted.
    """
    if not datasets and self.step is None and "data.source" not in settings:
      raise InputError(
        f"{self.path} is a model directory; give the sets to evaluate on"
      )
    from jaxrl_llm.tools import evaluation

    config = evaluation.make_config(self, datasets, settings)
    tries = pass_counts(config.eval.samples)
    return {
      one.name: one.results(tries) | one.errors(tries)
      for one in evaluation.evaluations(
        self, config, seed=seed, critic=critic, search=search
      )
    }

  def save(self, path: str | os.PathLike, *, dtype: str = "float32") -> None:
    """Writes a Hugging Face model directory, with the tokenizer's files.

    An earlier model in the directory is replaced if it has the same
    architecture.

    Args:
      path: directory to write.
      dtype: data type of the saved weights; float32 is exact.

    Raises:
      InputError: The directory cannot be written, has a model of another
        architecture, or is that of a run or of the model that the policy or its
        run started from.
    """
    self._check_out(path)
    self._write(path, self.fns, self.params, dtype)

  def save_adapters(self, path: str | os.PathLike) -> None:
    """Writes the adapters of a run to a directory that PEFT can load.

    Args:
      path: directory to write.

    Raises:
      InputError: The policy has no adapters, or the directory is one that
        `save` refuses.
    """
    self._check_out(path)
    if self.step is None or not self._run_config.model.lora_rank:
      raise InputError(
        f"{self.path}: has no adapters; train a run with"
        " --config.model.lora_rank=16"
      )
    model, params = workdir.load_params(self.path, self.step)
    factors = models.partition(params, ()).trained
    base = base_models.model_path(self._run_config)
    hf.write_adapters(path, model, factors, base=base)

  def save_critic(
    self, path: str | os.PathLike, *, dtype: str = "float32"
  ) -> None:
    """Writes the critic of a run as a Hugging Face token classifier.

    `value.init_from` can start another critic from it.

    Args:
      path: directory to write.
      dtype: data type of the saved weights; float32 is exact.

    Raises:
      InputError: There is no critic that can be saved as a token classifier, or
        the directory is one that `save` refuses.
    """
    self._check_out(path)
    if self.step is None:
      raise InputError(f"{self.path}: is a model directory; give a run")
    fns, params = workdir.load_critic(self.path, self.step)
    self._write(path, fns, params, dtype)

  def _check_out(self, path: str | os.PathLike) -> None:
    """Refuses the directories of runs, and those that the policy is from."""
    own = [self.directory]
    if self.step is not None:
      own.append(base_models.model_path(self._run_config))
    own, out = [pathlib.Path(p).resolve() for p in own], pathlib.Path(path)
    if workdir.is_workdir(out) or out.resolve() in own:
      raise InputError(
        f"{path} is the folder of a run, or the model that this policy was"
        " loaded from; choose another directory"
      )

  def _write(self, path, fns, params, dtype) -> None:
    """Writes a model directory, unless it would replace another model."""
    old = pathlib.Path(path) / "config.json"
    config = dataclasses.replace(fns.config, unused=())
    if old.exists() and hf.read_config(path) != config:
      raise InputError(
        f"{path}: contains another model, whose weights would be overwritten;"
        " choose another directory"
      )
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    models.save(path, fns, params, tokenizer_from=self.directory)

  @functools.cached_property
  def _run_config(self) -> Any:
    return workdir.read_config(self.path)


def load(
  path: str | os.PathLike = "",
  *,
  step: int | str | None = None,
  dtype: str = "float32",
  trust_code: bool = False,
) -> Policy:
  """Loads a policy.

  Args:
    path: the workdir of a run or a Hugging Face model directory; '' is the base
      model of the package.
    step: checkpoint of the run; 'best' is the best one by `checkpoint.best`,
      None the newest.
    dtype: data type of the computation.
    trust_code: whether `Policy.evaluate` may run the plugins and the file of
      rewards that the settings of the run name. Otherwise import them first.

  Raises:
    InputError: There is no such directory or checkpoint.

  Example:
    >>> policy = load()
    >>> policy.generate("3+5?", max_new_tokens=9, temperature=0)[0][0]["text"]
    '3+5=8;#8.'
  """
  path = pathlib.Path(path or base_models.BASE)
  if not path.is_dir():
    raise InputError(
      f"{path}: no such directory; give a model directory or the --workdir of a"
      " run"
    )
  if workdir.is_workdir(path):
    return Policy(path, workdir.find_step(path, step), dtype, trust_code)
  for run in filter(workdir.is_workdir, path.parents[:2]):
    if not hf.is_model(path):  # A model may have been exported into the run.
      raise InputError(
        f"{path}: is part of the run {run}; give the folder of the run, and"
        " select a checkpoint by its step"
      )
  if step is not None:
    raise InputError(
      f"{path}: is not the --workdir of a run and has no step {step}; leave"
      " out the step"
    )
  return Policy(path, dtype=dtype)


def train(
  config: Settings,
  folder: str | os.PathLike,
  *,
  step: int | None = None,
  use: Sequence[Callable[..., Any]] = (),
) -> Policy:
  """Trains or resumes a run and returns its policy.

  Args:
    config: settings, for example from `config.method`.
    folder: directory of the run, created if necessary. A checkpoint in it is
      resumed.
    step: checkpoint to resume; None is the newest.
    use: methods, applied after those of `config.method.use`; see
      `register.method`.

  Raises:
    InputError: The config, the model's files or the data cannot be used, or the
      folder has a run with other settings.
    TrainingStopped: The run cannot continue.
    KeyboardInterrupt: The run was interrupted. It is saved and continues when
      `train` is called again; `load(folder)` is the policy so far.
  """
  from jaxrl_llm import register
  from jaxrl_llm.trainer import build, loop

  config_lib.check_config(config, "train was given")
  for file in config.run.plugins:
    plugin.load(file)
  if use:
    config = copy.deepcopy(config)
  for method in use:
    name = getattr(method, "func", method).__name__  # Of a functools.partial.
    register.method(name, method)
    config.method.use += (name,)
  number = loop.train(build.make_run(config), folder, step=step)
  if number:
    raise KeyboardInterrupt(f"{signals.name(number)}, saved in {folder}")
  return load(folder, trust_code=True)  # It has just run here.
