"""Batch generation: prompts in, one JSON object per response out.

Weights, settings, seed, a prompt's index and a sample's index fix a sample, and
nothing else does: neither the slots, nor what is generated beside it. So a file
that was cut off anywhere is completed by writing what it lacks.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO

from jaxrl_llm.data.prompt_source import Template
from jaxrl_llm.data.rows import Row, parse_object, to_example
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.metrics.progress import Progress
from jaxrl_llm.rollout.turns import Conversations
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.sampling import rules
from jaxrl_llm.types import Origin, Rollout, Status, ended

# A sample's number is prompt index * MAX_SAMPLES + sample index: a file may be
# given more samples, or more prompts at the end, and keeps those it has.
MAX_SAMPLES = 1 << 10
MAX_PROMPTS = (1 << 31) // MAX_SAMPLES
_AT = ("prompt_index", "sample_index")
# Fields of a sample, in addition to those of its prompt.
KEYS = (*_AT, "text", "tokens", "logprobs", "stop_reason", "turns", "settings")
_ROUNDS = 8  # Size of a chunk of samples, in multiples of the slots.

# (prompt index, sample index)
Place = tuple[int, int]


def make_prompts(
  requests: Sequence[Row],
  template: Template,
  *,
  context: int,
  max_new_tokens: int,
) -> list[Prompt]:
  """Returns the prompts of rows, checking that each leaves room to respond.

  Args:
    requests: N rows; a row of data may ask as in training.
    template: turns an example into tokens.
    context: most tokens of a prompt and its response.
    max_new_tokens: maximum number of response tokens.

  Raises:
    InputError: a prompt is too long, cannot be tokenised, or has a field of the
      name of one that samples have.
  """
  room = context - max_new_tokens
  prompts = []
  for index, (where, fields) in enumerate(requests):
    for name in KEYS:
      if name in fields:
        raise InputError(
          f"{where}: the field {name!r} is reserved for samples; rename it"
        )
    example = to_example(Row(where, fields), solved=False)
    with located(where):
      tokens = tuple(template(example))
    if len(tokens) > room:
      raise InputError(
        f"{where}: the prompt has {len(tokens)} tokens, but"
        f" max_new_tokens={max_new_tokens} leaves {max(room, 0)} of the"
        f" model's context of {context}; lower it or shorten the prompt"
      )
    if not tokens:
      raise InputError(f"{where}: the prompt is empty; add text")
    numbers = {"example_id": index, "group_id": index}
    prompts.append(Prompt(**vars(example), **numbers, tokens=tokens))
  return prompts


@dataclasses.dataclass(frozen=True)
class Generation:
  """Everything that the samples of a file share."""

  writer: ResponseWriter
  params: Any  # In the sampler's layout.
  prompts: Sequence[Prompt]  # With the fields that come out again as columns.
  decode: Callable[[Sequence[int]], str]
  settings: str  # Stands for what the samples depend on.

  def sample(
    self,
    chunk: Sequence[Place],
    rule: rules.SchedulingRule = rules.continuous_batching,
  ) -> list[dict[str, Any]]:
    """Writes the samples of a chunk.

    Args:
      chunk: samples, those of a prompt one after the other.
      rule: the engine's; if it halts, what has ended is returned.

    Returns:
      A JSON object a sample, in their order.
    """
    numbers = {prompt: [] for prompt, _ in chunk}
    for prompt, sample in chunk:
      numbers[prompt].append(prompt * MAX_SAMPLES + sample)
    asked = [self.prompts[prompt] for prompt in numbers]
    ids = list(numbers.values())
    writer, weights = self.writer, Weights(self.params)
    begun, talks = writer.begin(asked, ids), writer.conversations(asked, ids)
    rollout = writer.write(begun, weights, rule=rule, conversations=talks)
    rows = ended(rollout).nonzero()[0]
    return [self._record(rollout, row, talks) for row in rows]

  def _record(self, rollout, row: int, talks: Conversations) -> dict[str, Any]:
    prompt, sample = divmod(int(rollout.sample_id[row]), MAX_SAMPLES)
    length = rollout.lengths[row]
    tokens = rollout.tokens[row, :length].tolist()
    logprobs = rollout.behavior_logprobs[row, :length]
    talk = json.loads(talks.get(str(rollout.sample_id[row]), "{}"))
    status = Status(int(rollout.status[row])).name.lower()
    return {
      "prompt_index": prompt,
      "sample_index": sample,
      **self.prompts[prompt].columns,
      "text": self.decode(tokens),
      "tokens": tokens,
      # The shortest decimal that identifies a float32.
      "logprobs": [float(str(x)) for x in logprobs],
      "stop_reason": "failed" if "failed" in talk else status,
      **({"turns": self._turns(rollout, row)} if talk else {}),
      "settings": self.settings,
    }

  def _turns(self, rollout: Rollout, row: int) -> list[dict[str, str]]:
    """Returns the turns of a response: role and text."""
    both = zip(rollout.origin[row], rollout.tokens[row, : rollout.lengths[row]])
    return [
      {
        "role": "model" if origin == Origin.POLICY else "environment",
        "text": self.decode([token for _, token in tokens]),
      }
      for origin, tokens in itertools.groupby(both, key=lambda pair: pair[0])
    ]


def chunks(
  prompts: int, samples: int, *, done: Collection[Place], slots: int
) -> Iterator[list[Place]]:
  """Yields the missing samples in order, in chunks that fill the slots.

  Args:
    prompts: N.
    samples: number of samples per prompt.
    done: the samples already written.
    slots: number of slots of the engine.
  """
  every = itertools.product(range(prompts), range(samples))
  missing = (place for place in every if place not in done)
  while chunk := list(itertools.islice(missing, _ROUNDS * slots)):
    yield chunk


def write(
  job: Generation,
  work: Iterable[Sequence[Place]],
  file: TextIO,
  progress: Progress,
  *,
  halted: Callable[[], bool] = lambda: False,
) -> collections.Counter[str]:
  """Writes chunks one after the other, one line per sample.

  Args:
    job: everything that the samples share.
    work: chunks.
    file: takes the lines of each chunk when it has ended.
    progress: shows what is done.
    halted: once true, what has ended is written, and nothing more.

  Returns:
    The number of samples by stop reason.

  Raises:
    InputError: the file cannot be written.
  """
  reasons = collections.Counter()

  def rule(view):
    progress.report(int(view.ended.sum()), int(view.lengths.sum()))
    if halted():
      return rules.Decision(halt=True)
    return rules.continuous_batching(view)

  for chunk in work:
    records = job.sample(chunk, rule=rule)
    with as_input_error("cannot write samples", "free disk space", OSError):
      file.write("".join(json.dumps(record) + "\n" for record in records))
      file.flush()
    reasons.update(record["stop_reason"] for record in records)
    progress.complete(len(records), sum(len(r["tokens"]) for r in records))
    if halted():
      break
  return reasons


def resume(
  path: pathlib.Path, prompts: Sequence[Prompt], *, settings: str
) -> set[Place]:
  """Prepares a file for more samples: an incomplete last line is removed.

  Args:
    path: path of the samples.
    prompts: prompts of the samples.
    settings: identifies their settings.

  Returns:
    The samples in it.

  Raises:
    InputError: it holds something else.
  """
  done, size = set(), 0
  with path.open("r+b") as file:
    for number, line in enumerate(file, start=1):
      if line.endswith(b"\n"):
        done.add(_identify(line, f"{path}:{number}", prompts, settings))
        size += len(line)
    file.truncate(size)
  return done


def _identify(line, where, prompts, settings) -> Place:
  """Returns the place of a line's sample, checking that it fits the prompts."""
  record = parse_object(line.decode("utf-8", "replace"), where)
  prompt, sample = (record.get(key) for key in _AT)
  if type(prompt) is not int or sample not in range(MAX_SAMPLES):
    raise InputError(f"{where}: no sample of generate.py; choose another file")
  if record.get("settings") != settings:
    raise InputError(
      f"{where}: written with another model, seed or setting; use the same ones"
      " or another file"
    )
  known = prompts[prompt].columns if 0 <= prompt < len(prompts) else None
  if {k: v for k, v in record.items() if k not in KEYS} != known:
    raise InputError(
      f"{where}: written for another prompt than the current number {prompt};"
      " keep the prompts in order or write to another file"
    )
  return prompt, sample
