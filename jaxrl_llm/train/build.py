"""From a validated config to the objects of a run."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import (
  checkpoint,
  losses,
  models,
  rewards,
  sampling,
  sharding,
  sync,
)
from jaxrl_llm import (
  config as config_lib,
)
from jaxrl_llm.checkpoint.manager import abstract
from jaxrl_llm.data import prompts as prompts_lib
from jaxrl_llm.data import sources
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import hf
from jaxrl_llm.sampling import Engine, SamplingSettings
from jaxrl_llm.train import experience, score, state, step
from jaxrl_llm.train import recipe as recipe_lib

# The base models of the package; scripts/pretrain.py makes them.
_ASSETS = pathlib.Path(__file__).parents[1] / "assets"
BASE = _ASSETS / "chain_sum_base"
_BASE_OF = {"remainder": _ASSETS / "remainder_base"}  # By source; else BASE.
EVAL_POSITIONS = 10_000  # Most problems of an endless source that are read.


@dataclasses.dataclass(frozen=True)
class Role:
  """A trained model: its functions, optimizer, update and place on the mesh."""

  fns: Any  # ModelFns or ValueFns.
  optimizer: optax.GradientTransformation
  update: Callable[..., tuple[state.TrainState, dict[str, jax.Array]]]
  shapes: state.TrainState  # ShapeDtypeStructs with shardings.
  settings: Any  # config.optimizer.policy or .value.


class Average(NamedTuple):
  """PPO-EWMA's moving average of parameters: {'params', 'weight'}."""

  begin: Callable[[Any], Any]  # (params) -> average.
  move: Callable[[Any, Any], Any]  # (average, params) -> average.
  shapes: Any  # ShapeDtypeStructs with shardings.


@dataclasses.dataclass(frozen=True)
class Job:
  """Everything an iteration needs; built once, without side effects."""

  config: Any
  mesh: jax.sharding.Mesh
  recipe: recipe_lib.Recipe
  policy: Role
  value: Role | None  # None: the method has no critic.
  engine: Engine
  for_sampling: Callable[[Any], Any]
  link: sync.Link  # Carries the policy's parameters to the sampler.
  gate: sync.Gate  # Lets only the weights of now into the sampler.
  score_logprobs: Callable[..., jax.Array]
  score_values: Callable[..., jax.Array]
  estimate: Callable[..., Any]
  average: "Average | None"  # Of the policy's parameters; None: not needed.
  tokenizer: Tokenizer
  train_prompts: prompts_lib.PromptStream
  eval_prompts: list[prompts_lib.Prompt]
  eval_name: str
  pool: rewards.RewardPool
  sampling: SamplingSettings
  eval_sampling: SamplingSettings
  model_path: str


def model_path(config: Any) -> str:
  """Directory of the policy that a run starts from."""
  return config.model.path or str(_BASE_OF.get(config.data.source, BASE))


def make_job(config: Any) -> Job:
  """Builds the objects of a run; loads no weights and compiles nothing.

  Raises:
    InputError: the config, the model's files or the data cannot be used.
  """
  config_lib.validate(config)
  config_lib.validate_mesh(config, devices=len(jax.devices()))
  mesh = sharding.make_mesh(**config.mesh)
  path = model_path(config)
  model_config = hf.read_config(path)
  tokenizer = Tokenizer.load(path)
  _check_context(config, model_config, tokenizer)
  policy_fns, value_fns = _make_fns(config, model_config, mesh)
  recipe = recipe_lib.make_recipe(config)
  policy = _make_role(
    policy_fns,
    config.optimizer.policy,
    functools.partial(
      step.make_policy_step,
      policy_loss=recipe.policy_loss,
      terms=recipe.terms,
    ),
    jax.eval_shape(policy_fns.init, jax.random.key(0)),
    mesh,
  )
  value = None
  if recipe.returns is not None:
    value = _make_role(
      value_fns,
      config.optimizer.value,
      functools.partial(step.make_value_step, value_loss=recipe.value_loss),
      jax.eval_shape(value_fns.init, jax.random.key(0)),
      mesh,
    )
  train_prompts, eval_prompts, eval_name = _make_prompts(config, tokenizer)
  limit = config.sampler.max_response_length
  link = _make_link(policy_fns, policy.shapes.params, mesh)
  return Job(
    config=config,
    mesh=mesh,
    recipe=recipe,
    policy=policy,
    value=value,
    engine=_make_engine(config, policy_fns, tokenizer, mesh),
    for_sampling=jax.jit(policy_fns.for_sampling),
    link=link,
    gate=sync.Gate(link),
    score_logprobs=jax.jit(
      functools.partial(score.score_logprobs, fns=policy_fns),
      out_shardings=sharding.replicated(mesh),
    ),
    score_values=jax.jit(
      functools.partial(score.score_values, fns=value_fns),
      out_shardings=sharding.replicated(mesh),
    ),
    estimate=jax.jit(
      functools.partial(experience.make_experience, recipe=recipe)
    ),
    average=_make_average(config.off_policy, policy, mesh),
    tokenizer=tokenizer,
    train_prompts=train_prompts,
    eval_prompts=eval_prompts,
    eval_name=eval_name,
    pool=_make_pool(config),
    sampling=SamplingSettings(
      temperature=config.sampler.temperature, max_new_tokens=limit
    ),
    eval_sampling=SamplingSettings(
      temperature=config.eval.temperature,
      top_p=config.eval.top_p,
      max_new_tokens=limit,
    ),
    model_path=path,
  )


def load_policy_params(job: Job) -> Any:
  """The parameters in the model directory, placed on the mesh."""

  def put(path, array):
    shape = _leaf(job.policy.shapes.params, path)
    return jax.device_put(array, shape.sharding)

  return hf.read_params(
    job.model_path, job.policy.fns.config, dtype=jnp.float32, put=put
  )


def create_policy_state(job: Job) -> state.TrainState:
  """The policy's state at step 0, read from the model directory."""
  return _create(job.policy, load_policy_params(job))


def create_value_state(job: Job, params: Any) -> state.TrainState:
  """A critic's state at step 0 around its parameters."""
  return _create(job.value, params)


def fresh_value_params(job: Job, policy_params: Any) -> Any:
  """The policy's backbone with a new scalar head, placed on the mesh."""
  place = jax.jit(
    job.value.fns.from_policy,
    out_shardings=jax.tree.map(lambda x: x.sharding, job.value.shapes.params),
  )
  return place(policy_params)


def load_value_params(job: Job, workdir: str) -> Any:
  """The critic that an earlier run pretrained.

  Raises:
    InputError: that run has none, or of another model.
  """
  path = pathlib.Path(workdir) / "value_pretrained"
  return checkpoint.load_tree(path, job.value.shapes.params)


def _create(role: Role, params: Any) -> state.TrainState:
  shardings = jax.tree.map(lambda x: x.sharding, role.shapes)
  create = functools.partial(state.create_train_state, optimizer=role.optimizer)
  return jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)


def _leaf(tree, path: str):
  for name in path.split("/"):
    tree = tree[name]
  return tree


def _make_fns(config, model_config, mesh):
  settings = {
    "dtype": jnp.dtype(config.model.dtype),
    "remat": config.model.remat,
    "sharding": sharding.along_batch(mesh),
  }
  cache_dtype = config.model.cache_dtype
  policy = models.make_policy(
    model_config,
    cache_dtype=jnp.dtype(cache_dtype) if cache_dtype else None,
    head_chunk=config.model.head_chunk,
    **settings,
  )
  return policy, models.make_value(model_config, **settings)


def _make_role(fns, settings, make_step, params, mesh) -> Role:
  schedule = state.make_schedule(
    settings.learning_rate, warmup_steps=settings.warmup_steps
  )
  optimizer = state.make_optimizer(
    schedule,
    max_grad_norm=settings.max_grad_norm,
    weight_decay=settings.weight_decay,
    b1=settings.b1,
    b2=settings.b2,
    eps=settings.eps,
  )
  shapes = jax.eval_shape(
    functools.partial(state.create_train_state, optimizer=optimizer), params
  )
  shardings = sharding.tree_shardings(shapes, mesh)
  update = make_step(
    fns,
    optimizer,
    schedule,
    state_shardings=shardings,
    metrics_sharding=sharding.replicated(mesh),
  )
  return Role(fns, optimizer, update, abstract(shapes, shardings), settings)


def _make_average(settings, policy: Role, mesh) -> Average | None:
  if settings.proximal != "ewma":
    return None
  shapes = {
    "params": policy.shapes.params,
    "weight": jax.ShapeDtypeStruct(
      (), jnp.float32, sharding=sharding.replicated(mesh)
    ),
  }
  shardings = jax.tree.map(lambda x: x.sharding, shapes)

  def begin(params):
    copied = jax.tree.map(jnp.copy, params)
    return {"params": copied, "weight": jnp.ones((), jnp.float32)}

  def move(average, params):
    params, weight = losses.ewma_update(
      average["params"], average["weight"], params, decay=settings.ewma_decay
    )
    return {"params": params, "weight": weight}

  return Average(
    jax.jit(begin, out_shardings=shardings),
    jax.jit(move, out_shardings=shardings, donate_argnums=0),
    shapes,
  )


def _make_link(fns, shapes, mesh) -> sync.Link:
  """Sampler and trainer share the mesh; the copy keeps its shardings."""
  placed = sync.layout_shardings(fns.for_sampling, shapes, mesh)
  return sync.Link(fns.for_sampling, shapes, source=placed)


DRAFTERS: Mapping[str, Callable[[Any], Any]] = {
  "": lambda fns: None,
  "prompt_lookup": lambda fns: sampling.prompt_lookup(),
  "quantized_copy": sampling.quantized_copy,
}


def _make_engine(config, fns, tokenizer, mesh) -> Engine:
  slots = config.sampler.slots or config_lib.in_flight(config)
  split = sharding.batch_size_of(mesh)
  drafter = DRAFTERS[config.sampler.drafter](fns)
  return Engine(
    fns,
    slots=-(-slots // split) * split,
    max_prompt_length=config.data.max_prompt_length,
    max_response_length=config.sampler.max_response_length,
    stop_tokens=_stop_tokens(config, tokenizer),
    sharding=sharding.along_batch(mesh),
    tempering=recipe_lib.make_tempering(config.sampler),
    detokenize=tokenizer.decode,
    drafter=drafter,
    drafts=config.sampler.drafts if drafter else 0,
  )


def _stop_tokens(config, tokenizer) -> list[int]:
  stops = list(tokenizer.stop_tokens)
  for text in config.sampler.stop:
    tokens = tokenizer.encode(text)
    if len(tokens) != 1:
      raise InputError(
        f"config.sampler.stop has {text!r}, which is {len(tokens)} tokens of"
        f" {tokenizer.path}; only single tokens can stop"
      )
    stops += tokens
  return stops


def _make_pool(config) -> rewards.RewardPool:
  try:
    return rewards.RewardPool(
      rewards.get_reward(config.reward.name),
      workers=config.reward.workers,
      deadline_s=config.reward.deadline_s,
    )
  except ValueError as error:
    raise InputError(f"config.reward: {error}") from error


def _make_prompts(config, tokenizer):
  """Training stream and evaluation problems, under one template."""
  data, evaluation = config.data, config.eval
  settings = dict(data.settings)
  train = _source(data.source, data.path, "train", config.run.seed, settings)
  name = evaluation.source or data.source
  # A set of its own brings its own layout; the same one keeps its settings.
  eval_settings = settings if name == data.source else {}
  eval_path = evaluation.path or data.path
  held_out = _source(name, eval_path, "eval", config.run.seed, eval_settings)
  stream = functools.partial(
    prompts_lib.PromptStream,
    template=_template(config, tokenizer, train),
    tokenizer=tokenizer,
    max_prompt_length=data.max_prompt_length,
    on_long=data.on_long,
  )
  problems = stream(held_out, seed=None)
  count = min(evaluation.problems or len(problems), len(problems))
  label = pathlib.Path(eval_path).stem if name in ("jsonl", "tfds") else name
  return (
    stream(train, seed=config.run.seed),
    problems.take(0, min(count, EVAL_POSITIONS)),
    label,
  )


def _source(name, path, split, seed, settings):
  try:
    return sources.make_source(
      name, path=path, split=split, seed=seed, **settings
    )
  except (TypeError, ValueError) as error:
    if isinstance(error, InputError):
      raise
    raise InputError(f"config.data.settings={settings}: {error}") from error


def _template(config, tokenizer, pool):
  settings = dict(config.data.template_settings)
  if config.data.template == "few_shot":
    settings["pool"] = pool
  try:
    return prompts_lib.TEMPLATES[config.data.template](tokenizer, **settings)
  except (TypeError, ValueError) as error:
    if isinstance(error, InputError):
      raise
    shown = dict(config.data.template_settings)
    raise InputError(
      f"config.data.template_settings={shown}: {error}"
    ) from error


def _check_context(config, model_config, tokenizer) -> None:
  total = config.data.max_prompt_length + config.sampler.max_response_length
  context = model_config.max_position_embeddings
  if total > context:
    raise InputError(
      "config.data.max_prompt_length + config.sampler.max_response_length ="
      f" {total} is over the model's context of {context}"
    )
  if tokenizer.vocab_size > model_config.vocab_size:
    raise InputError(
      f"{tokenizer.path}: the tokenizer has {tokenizer.vocab_size} tokens but"
      f" the model only {model_config.vocab_size}; use the model's own"
    )
