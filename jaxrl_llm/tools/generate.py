"""Batch generation: prompts in, one JSON object per response out.

A sample depends only on weights, settings, seed, and the indices of its prompt
and sample, not on the slots or the rest of the batch. A file that was cut off
anywhere can therefore be completed by adding the missing samples.
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

# A sample's id is prompt index * MAX_SAMPLES + sample index, so that samples,
# or prompts at the end, can be added to a file without changing its samples.
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
    requests: N rows, with a prompt or the fields of training data.
    template: turns an example into tokens.
    context: maximum number of tokens of a prompt and its response.
    max_new_tokens: maximum number of response tokens.

  Raises:
    InputError: A prompt is too long or cannot be tokenised, or the name of one
      of its fields is reserved.
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
  prompts: Sequence[Prompt]  # Their columns are copied to the samples.
  decode: Callable[[Sequence[int]], str]
  settings: str  # Identifies everything that the samples depend on.

  def sample(
    self,
    chunk: Sequence[Place],
    rule: rules.SchedulingRule = rules.continuous_batching,
  ) -> list[dict[str, Any]]:
    """Generates the samples of a chunk.

    Args:
      chunk: indices of the samples, grouped by prompt.
      rule: scheduling rule; if it halts, only ended samples are returned.

    Returns:
      One JSON object per sample, in order.
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

  def _record(
    self, rollout: Rollout, row: int, talks: Conversations
  ) -> dict[str, Any]:
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
    prompts: number of prompts.
    samples: number of samples per prompt.
    done: samples that are already written.
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
  """Generates chunks one after the other, and writes one line per sample.

  Args:
    job: generates the samples.
    work: chunks of samples.
    file: file to write to, after each chunk.
    progress: progress display.
    halted: once it returns True, ended samples are written and generation
      stops.

  Returns:
    The number of samples by stop reason.

  Raises:
    InputError: The file cannot be written.
  """
  reasons = collections.Counter()

  def rule(view: rules.SchedulerView):
    progress.report(int(view.ended.sum()), int(view.lengths.sum()))
    if halted():
      return rules.Decision(halt=True)
    return rules.continuous_batching(view)

  for chunk in work:
    records = job.sample(chunk, rule=rule)
    with as_input_error("cannot write samples", "use another file", OSError):
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
  """Prepares a file for more samples: removes an incomplete last line.

  Args:
    path: path of the file.
    prompts: prompts of the samples.
    settings: identifies the settings of the samples.

  Returns:
    The samples in the file.

  Raises:
    InputError: The file has other contents.
  """
  done, size = set(), 0
  with path.open("r+b") as file:
    for number, line in enumerate(file, start=1):
      if line.endswith(b"\n"):
        done.add(_identify(line, f"{path}:{number}", prompts, settings))
        size += len(line)
    file.truncate(size)
  return done


def _identify(
  line: bytes, where: str, prompts: Sequence[Prompt], settings: str
) -> Place:
  """Returns the indices of a line's sample; checks its prompt and settings."""
  record = parse_object(line.decode("utf-8", "replace"), where)
  prompt, sample = (record.get(key) for key in _AT)
  if type(prompt) is not int or sample not in range(MAX_SAMPLES):
    raise InputError(
      f"{where}: not a sample of generate.py; choose another file"
    )
  if record.get("settings") != settings:
    raise InputError(
      f"{where}: written with another model, seed or setting; use the same ones"
      " or another file"
    )
  known = prompts[prompt].columns if 0 <= prompt < len(prompts) else None
  if {k: v for k, v in record.items() if k not in KEYS} != known:
    raise InputError(
      f"{where}: written for a prompt other than the current number {prompt};"
      " keep the prompts in order or write to another file"
    )
  return prompt, sample
