"""Two test-time methods: refinement of drafts, and a knockout tournament.

    python docs/test_time.py --model=MODEL_OR_RUN --question='3+5-2?'
      [--drafts=8,8,4] [--max_new_tokens=256]

Both use only `generate` and `tokenizer` of a `Policy`, so they also work with
any other object that has these two.
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import Any

from jaxrl_llm import api
from jaxrl_llm.errors import InputError

_REFINE = """{question}

Earlier attempts, which may be wrong:
{workspace}

Use what is right in them, and answer the question."""
_JUDGE = """{question}

Answer A: {a}

Answer B: {b}

Which answer is better? Reply with A or B."""


def sample(
  policy: Any, texts: Sequence[str], samples: int = 1, **sampling: Any
) -> list[list[str]]:
  """Samples responses to each text, in the chat format if the model has one."""
  prompts = list(texts)
  if policy.tokenizer.chat_template:
    prompts = [[{"role": "user", "content": text}] for text in texts]
  found = policy.generate(prompts, samples=samples, **sampling)
  return [[response["text"].strip() for response in each] for each in found]


def distill(drafts: Sequence[str], *, kept: int, room: int) -> str:
  """Returns the ends of drafts with different last lines, in bounded space.

  Args:
    drafts: texts of the drafts.
    kept: maximum number of drafts to return, one for each last line, the most
      frequent last lines first.
    room: maximum number of characters per draft.
  """
  last = [draft.rpartition("\n")[2] for draft in drafts]
  first_of = dict(zip(reversed(last), reversed(drafts)))
  common = [line for line, _ in collections.Counter(last).most_common(kept)]
  ends = [first_of[line][-room:] for line in common]
  return "\n".join(f"[{i}] {end}" for i, end in enumerate(ends, start=1))


def refine(
  policy: Any,
  question: str,
  *,
  drafts: Sequence[int] = (8, 8, 1),
  kept: int = 4,
  room: int = 500,
  seed: int = 0,
  **sampling: Any,
) -> list[str]:
  """Parallel-Distill-Refine (Madaan et al. 2025, arXiv:2510.01123).

  Every round samples drafts in parallel. They are distilled into a workspace of
  bounded size, which the next round reads. In the paper, a model writes the
  workspace; here it consists of the ends of the drafts.

  Args:
    policy: a policy, as returned by `jaxrl_llm.load`.
    question: text of the question.
    drafts: number of drafts in each round.
    kept: maximum number of drafts in the workspace.
    room: maximum number of characters of each draft in it.
    seed: seed of the sampling.
    **sampling: keyword arguments of `Policy.generate`.

  Returns:
    The drafts of the last round.
  """
  text, found = question, []
  for number, count in enumerate(drafts):
    (found,) = sample(policy, [text], count, seed=seed + number, **sampling)
    workspace = distill(found, kept=kept, room=room)
    text = _REFINE.format(question=question, workspace=workspace)
  return found


def tournament(
  policy: Any, question: str, answers: Sequence[str], **sampling: Any
) -> str:
  """Returns the answer that wins a knockout tournament, judged by the model.

  Each pair is judged in both orders, because models tend to prefer one
  position; if the two judgements disagree, the earlier answer wins.

  Args:
    policy: a policy, as returned by `jaxrl_llm.load`.
    question: text of the question.
    answers: one or more answers.
    **sampling: keyword arguments of `Policy.generate`.
  """
  left = list(answers)
  while len(left) > 1:
    pairs = list(zip(left[::2], left[1::2]))
    texts = [
      _JUDGE.format(question=question, a=a, b=b)
      for pair in pairs
      for a, b in (pair, pair[::-1])
    ]
    said = [found for (found,) in sample(policy, texts, **sampling)]
    won = [
      second if (first_said[:1], then_said[:1]) == ("B", "A") else first
      for (first, second), first_said, then_said in zip(
        pairs, said[::2], said[1::2]
      )
    ]
    left = won + left[2 * len(pairs) :]
  return left[0]


def _counts(text: str) -> list[int]:
  counts = [int(x) for x in text.split(",")]
  if min(counts) < 1:
    raise ValueError("a round has at least one draft")
  return counts


def main() -> None:
  """Refines drafts; prints the drafts of the last round and the best one."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", required=True, help="model directory or run")
  parser.add_argument("--question", required=True)
  parser.add_argument(
    "--drafts", type=_counts, default="8,8,4", help="drafts of each round"
  )
  parser.add_argument("--max_new_tokens", type=int, default=256)
  given = parser.parse_args()
  length = {"max_new_tokens": given.max_new_tokens}
  try:
    policy = api.load(given.model)
    answers = refine(policy, given.question, drafts=given.drafts, **length)
    best = tournament(policy, given.question, answers, **length)
  except InputError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  print(*answers, f"best: {best}", sep="\n")


if __name__ == "__main__":
  main()
