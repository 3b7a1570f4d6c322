"""Rebuilds a shipped base model, bitwise for the same machine and JAX version.

    python scripts/dev/pretraining.py [--task=chain_sum] [--out=DIR]

Tasks: chain_sum (running sums of up to 6 operations, step by step) or remainder
(divisions by up to 32 subtractions, with long solutions). The model is trained
on noisy solutions, see `noisy_solution`. Every field of `Settings` is a flag.
"""

import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from jaxrl_llm import base_models, models
from jaxrl_llm.data.remainder import RemainderProblem
from jaxrl_llm.data.sources import make_source
from jaxrl_llm.data.tasks import CHARACTERS, MAX_TOTAL, ChainProblem, Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import optimizer, packing
from jaxrl_llm.learner.members import Training
from jaxrl_llm.learner.packing import PackedBatch
from jaxrl_llm.learner.parts import part
from jaxrl_llm.learner.update import make_update, policy_objective
from jaxrl_llm.methods.sft import likelihood
from jaxrl_llm.models import ModelFns
from jaxrl_llm.sampling import EngineConfig, new_requests
from jaxrl_llm.types import Origin, Status

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from parts import program  # noqa: E402


class Settings(NamedTuple):
  """Settings of a shipped base model; lengths are in tokens."""

  task: str = "chain_sum"
  task_settings: Mapping[str, Any] = {"max_ops": 6}
  seed: int = 0
  steps: int = 1500
  batch_size: int = 64
  micro_batch_size: int = 16  # Packed rows.
  learning_rate: float = 2e-3
  warmup_steps: int = 50
  weight_decay: float = 0.0
  hidden_size: int = 96
  num_layers: int = 3
  num_heads: int = 4
  intermediate_size: int = 256
  max_position_embeddings: int = 512
  max_prompt_length: int = 16
  max_response_length: int = 64


TASKS = {
  "chain_sum": Settings(),
  # Longer solutions, in smaller batches.
  "remainder": Settings(
    task="remainder",
    task_settings={"max_ops": 32, "tail": 1.1},
    steps=1200,
    batch_size=48,
    micro_batch_size=8,
    max_position_embeddings=320,
    max_prompt_length=8,
    max_response_length=288,
  ),
}


def character_tokenizer_json(characters: str) -> str:
  """Returns a `tokenizer.json` with one token for each distinct character.

  Ids: `<pad>` 0, `<eos>` 1, then the characters in order.
  """
  # The unknown token is deliberately not in the vocabulary: an unknown
  # character raises an error.
  vocab = {c: i for i, c in enumerate(["<pad>", "<eos>", *characters])}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token="<unk>")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.add_special_tokens(["<pad>", "<eos>"])
  return tokenizer.to_str(pretty=True)


def pretrain(
  fns: ModelFns,
  tokenizer: Tokenizer,
  settings: Settings,
  *,
  log: Callable[[int, float], None],
) -> Any:
  """Trains on noisy solutions of a task; a pure function of the settings.

  The loss is that of SFT: the token-mean negative log-likelihood of a solution.

  Args:
    fns: functions of the model.
    tokenizer: tokenizer of the model.
    settings: settings of the base model.
    log: called with (step, loss) every 100 steps and after the last.

  Returns:
    The trained params.

  Raises:
    InputError: there are no steps after the warm-up.
  """
  if settings.steps <= settings.warmup_steps:
    raise InputError(
      f"--steps={settings.steps} must be over"
      f" --warmup_steps={settings.warmup_steps}; change one of them"
    )
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, settings.learning_rate, settings.warmup_steps, settings.steps
  )
  transform = optimizer.make_optimizer(
    schedule,
    max_grad_norm=1.0,
    weight_decay=settings.weight_decay,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
  )
  params = jax.jit(fns.init)(jax.random.key(settings.seed))
  train_state = optimizer.create_train_state(params, transform)
  loss = part(likelihood)
  training = Training(
    policy_objective(fns, loss, {}),
    score=None,
    reads=("advantages",),
    mask="mask",
    mode="token-mean",
  )
  update = make_update(training.objective, transform, schedule)
  task = (settings.task, settings.task_settings)
  source = make_source(*task, seed=settings.seed)
  for i in range(settings.steps):
    batch = _batch(tokenizer, source, settings, i, training)
    train_state, metrics = update.whole(train_state, batch)
    if i % 100 == 0 or i == settings.steps - 1:
      log(i, float(metrics["policy/loss"]))
  return train_state.trained


def _batch(tokenizer, source, settings, i, training) -> PackedBatch:
  rng = np.random.default_rng((settings.seed, i))
  size, room = settings.batch_size, settings.max_response_length
  problems = [source.problem(i * size + row) for row in range(size)]
  rollout = new_requests(
    [tokenizer.encode(problem.question) for problem in problems],
    sample_ids=np.zeros((size, 1), np.int32),
    group_ids=range(size),  # No prompts are shared.
    config=EngineConfig(size, settings.max_prompt_length, room, stop_tokens=()),
  )
  for row, problem in enumerate(problems):
    solution = noisy_solution(rng, problem, max_length=room)
    response = tokenizer.encode(solution.text)
    response = (response + [tokenizer.eos_id] * solution.stops)[:room]
    rollout.lengths[row] = len(response)
    rollout.tokens[row, : len(response)] = response
    rollout.mask[row, : len(response)] = True
  rollout.origin[:] = int(Origin.FOREIGN)
  rollout.status[:] = int(Status.FINISHED)
  (batch,) = packing.mini_batches(
    rollout,
    size=size,
    rng=None,
    capacity=settings.max_prompt_length + room,
    rows=settings.micro_batch_size,
  )
  inputs = {"mask": rollout.mask, "advantages": rollout.mask.astype(np.float32)}
  return training.prepare(inputs, batch).replace(schedule_step=np.int32(i))


_DIRECT_RIGHT = 0.25  # Fraction of the guesses that are correct.
_RAMBLE = 0.15  # Fraction of the `skip` solutions that never end.


class Noise(NamedTuple):
  """Noise of solutions: how often steps are skipped or wrong."""

  # Kind of solution -> fraction; they sum to 1:
  #   direct: a bare guess `#N.`;
  #   clean: the clean solution;
  #   misread: the clean solution of the misread problem;
  #   slip: one wrong step, which affects the answer;
  #   skip: some steps are left out;
  #   early: ends too early, with an intermediate total as the answer;
  #   stuck: repeats a line endlessly.
  shares: Mapping[str, float]
  largest: float  # Largest total after a wrong step.
  # (rng, problem) -> a wrong guess.
  wrong_answer: Callable[[np.random.Generator, Any], int]
  # (problem, step, total) -> the remaining problem if the result of `step` (1,
  # 2, ...) is `total`.
  rest: Callable[[Any, int, int], Problem]
  # Problem -> the problem as it is misread.
  misread: Callable[[Any], Problem] | None = None


def _wrong_sum(rng: np.random.Generator, problem: ChainProblem) -> int:
  total = problem.totals[-1]
  offset = int(rng.integers(1, 10)) * (1 if rng.random() < 0.5 else -1)
  # A guess below 0 or above 99 is mirrored to the other side of the answer.
  return total + (offset if 0 <= total + offset <= MAX_TOTAL else -offset)


def _wrong_remainder(rng: np.random.Generator, x: RemainderProblem) -> int:
  return (x.number + int(rng.integers(1, x.divisor))) % x.divisor


NOISE: dict[type[Problem], Noise] = {
  ChainProblem: Noise(
    shares=dict(misread=0.58, clean=0.27, slip=0.05, direct=0.05, skip=0.05),
    largest=MAX_TOTAL,
    wrong_answer=_wrong_sum,
    rest=lambda x, step, total: ChainProblem((total, *x.terms[step + 1 :])),
    # Minus signs are overlooked.
    misread=lambda problem: ChainProblem(tuple(map(abs, problem.terms))),
  ),
  RemainderProblem: Noise(
    shares=dict(direct=0.38, clean=0.36, slip=0.14, early=0.09, stuck=0.03),
    largest=math.inf,  # Any total can be reduced by subtractions.
    wrong_answer=_wrong_remainder,
    rest=lambda x, step, total: RemainderProblem(total, x.divisor),
  ),
}


class Solution(NamedTuple):
  """A solution text of the pretraining mixture."""

  text: str
  stops: bool  # Whether an end token follows.


def noisy_solution(
  rng: np.random.Generator, problem: Problem, *, max_length: int
) -> Solution:
  """Draws a solution from a mixture of clean and flawed ones.

  Each step of the clean solution is the most frequent continuation, so that a
  model trained on the mixture decodes it greedily, but seldom samples it. If
  most solutions misread the problem, greedy decoding misreads it too, and only
  the reward can single out the clean solutions among the samples. The flaw is
  drawn once per solution, not per line: otherwise mistakes would compound and
  long problems would hardly ever be solved.

  Args:
    rng: random generator; advanced.
    problem: the problem to solve.
    max_length: number of characters to which endless solutions are cut.

  Returns:
    The text, and whether it ends.
  """
  noise = NOISE[type(problem)]
  kinds, values = zip(*noise.shares.items())
  lines, end = problem.lines, f"#{problem.answer}."
  kind = kinds[rng.choice(len(kinds), p=np.divide(values, sum(values)))]
  if kind == "misread":
    return Solution(noise.misread(problem).solution, True)
  if kind == "direct":
    lines = []
    if rng.random() >= _DIRECT_RIGHT:
      end = f"#{noise.wrong_answer(rng, problem)}."
  elif kind == "slip":
    lines, end = _slip(rng, problem, noise)
  elif kind == "skip":  # Each with probability 1/2, and at least one.
    kept = rng.random(len(lines)) < 0.5
    kept[rng.integers(len(lines))] = False
    some = list(itertools.compress(lines, kept))
    if rng.random() < _RAMBLE:
      lines, end = (some or lines) * max_length, ""
    else:
      lines = some
  elif kind == "early":
    kept = int(rng.integers(len(lines)))
    lines, end = lines[:kept], f"#{problem.totals[kept]}."
  elif kind == "stuck":
    last = int(rng.integers(len(lines)))
    lines, end = lines[:last] + [lines[last]] * max_length, ""
  text = "".join(lines) + end
  return Solution(text if end else text[:max_length], bool(end))


def _slip(
  rng: np.random.Generator, problem: Problem, noise: Noise
) -> tuple[list[str], str]:
  """Returns lines and end of a solution whose only error is in one step."""
  step = 1 + int(rng.integers(problem.operations))
  right = problem.totals[step]
  errors = (-10, -2, -1, 1, 2, 10)
  rests = [noise.rest(problem, step, right + x) for x in errors]
  fits = lambda x: min(x.totals) >= 0 and max(x.totals) <= noise.largest
  rests = [x for x in rests if fits(x) and x.answer != problem.answer]
  rests = rests or [noise.rest(problem, step, right)]
  rest = rests[int(rng.integers(len(rests)))]
  lines = problem.lines[:step]
  lines[-1] = lines[-1].replace(f"={right};", f"={rest.terms[0]};")
  return lines + rest.lines, f"#{rest.answer}."


def rebuild(settings: Settings, out: pathlib.Path) -> None:
  """Trains a base model and writes its directory."""
  out.mkdir(parents=True, exist_ok=True)
  text = character_tokenizer_json(CHARACTERS)
  (out / "tokenizer.json").write_text(text, encoding="utf-8")
  ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
  # For converted policies, which transformers loads.
  names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
  for file, fields in (("generation", ids), ("tokenizer", names)):
    (out / f"{file}_config.json").write_text(json.dumps(fields, indent=1))
  tokenizer = Tokenizer(out)
  sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads")
  sizes = (*sizes, "max_position_embeddings")
  config = models.ModelConfig(
    family="llama",
    vocab_size=tokenizer.vocab_size,
    num_kv_heads=settings.num_heads,
    head_dim=settings.hidden_size // settings.num_heads,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    **{name: getattr(settings, name) for name in sizes},
  )
  fns, start = models.make_policy(config), time.process_time()

  def log(step, loss):
    seconds = time.process_time() - start
    print(f"step {step}: nll {loss:.4f}, {seconds:.0f} CPU-s", flush=True)

  params = pretrain(fns, tokenizer, settings, log=log)
  # bfloat16 halves the file; the stored values define the base model.
  stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  models.save(str(out), fns, stored, tokenizer_from=str(out))
  print(f"wrote {models.num_params(config):,} parameters to {out}")


@program.one_line
def main(arguments: list[str] | None = None) -> None:
  """Runs the command."""
  parser = program.make_parser(__doc__)
  parser.add_argument("--task", choices=TASKS, default="chain_sum")
  parser.add_argument("--out", help="folder; default: that of the package")
  for name, kind in list(Settings.__annotations__.items())[1:]:
    kind = json.loads if name == "task_settings" else kind
    parser.add_argument(f"--{name}", type=kind)
  options = vars(parser.parse_args(arguments))
  given = {k: v for k, v in options.items() if v is not None}
  out = given.pop("out", base_models.BASE.parent / f"{given['task']}_base")
  rebuild(TASKS[given["task"]]._replace(**given), pathlib.Path(out))


if __name__ == "__main__":
  sys.exit(main())
