"""Evaluation: k sampled responses per problem, judged and averaged."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import metrics
from jaxrl_llm.data.tasks import Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Verdict
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.types import Responses, Rollout, Status

_SHOWN = 4  # Number of responses of an evaluation that are logged.


def majority_at_k(
  verdicts: Sequence[Verdict], k: int, weights: Sequence[float] | None = None
) -> float:
  """Returns the accuracy of majority votes over k responses per problem.

  Ties go to the answer that appears first; a response without an extracted
  answer has no vote.

  Args:
    verdicts: verdicts, problem by problem.
    k: responses per problem.
    weights: weight of each response's vote, at least 0; 1 by default.
  """
  right, weights = 0, weights if weights is not None else [1.0] * len(verdicts)
  for start in range(0, len(verdicts), k):
    rows = slice(start, start + k)
    votes = collections.defaultdict(float)
    for verdict, weight in zip(verdicts[rows], weights[rows]):
      if verdict.extracted is not None:
        votes[verdict.extracted] += float(weight)
    winners = [max(votes, key=votes.get)] if votes else []
    right += any(v.correct and v.extracted in winners for v in verdicts[rows])
  return right / (len(verdicts) // k)


def pass_counts(samples: int) -> list[int]:
  """Returns each n of pass@n to report: powers of two, and all samples."""
  powers = (2**i for i in range(samples.bit_length()))
  return [*(n for n in powers if n < samples), samples]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """k judged responses to each of N problems, problem by problem."""

  name: str  # Name of the problem set.
  samples: int  # k.
  judged: Judged
  generate_s: float  # Seconds that the sampler took.
  generated: int  # Tokens that it generated, including discarded ones.
  # float32 [N k], the critic's value of each response; None without a critic.
  values: np.ndarray | None = None

  @property
  def responses(self) -> Responses:
    """The responses with their rewards."""
    return self.judged.responses

  @property
  def problems(self) -> int:
    """The number of problems, N."""
    return len(self.judged.texts) // self.samples

  def results(self, tries: Sequence[int]) -> dict[str, float]:
    """Returns avg@k, its standard error over problems, pass@n, maj@k and more.

    maj@k is left out if the verifier extracts no answers. With a critic, best@k
    is the accuracy of the response with the highest value, and weighted_maj@k
    is maj@k with votes that grow linearly with the value, from 0 for the
    lowest.

    Args:
      tries: each n of pass@n, 1 to k.
    """
    k, responses, verdicts = self.samples, self.responses, self.judged.verdicts
    mean, error = metrics.mean_and_standard_error(self._right() / k)
    results = {f"avg@{k}": mean, f"avg@{k}_se": error}
    for n in tries:
      results[f"pass@{n}"] = float(self._passed(n).mean())
    if responses.judged.any():
      rewards = responses.rewards[responses.judged]
      results["reward_mean"] = float(rewards.mean())
    answered = any(v.extracted is not None for v in verdicts)
    if answered:
      results[f"maj@{k}"] = majority_at_k(verdicts, k)
    if (values := self.values) is not None:
      chosen = values.reshape(-1, k).argmax(axis=1)[:, None]
      correct = np.take_along_axis(responses.correct.reshape(-1, k), chosen, 1)
      results[f"best@{k}"] = float(correct.mean())
      if answered:
        votes = values - values.min()
        results[f"weighted_maj@{k}"] = majority_at_k(verdicts, k, votes)
    overlong = responses.rollout.status == Status.OVERLONG
    return results | {
      "response_length_mean": float(responses.rollout.lengths.mean()),
      "overlong_fraction": float(overlong.mean()),
      "unjudged_fraction": float((~responses.judged).mean()),
    }

  def errors(self, tries: Sequence[int]) -> dict[str, float]:
    """Returns standard errors of pass@n over problems; NaN for one problem."""
    error = lambda n: metrics.mean_and_standard_error(self._passed(n))[1]
    return {f"pass@{n}_se": error(n) for n in tries}

  def _right(self) -> np.ndarray:
    """Returns the number of correct responses to each problem, int [N]."""
    return self.responses.correct.reshape(-1, self.samples).sum(axis=1)

  def _passed(self, n: int) -> np.ndarray:
    """Returns pass@n of each problem, [N]."""
    return metrics.pass_at_k(self._right(), self.samples, n)

  def shown(self) -> list[metrics.Sample]:
    """Returns a few responses for display."""
    count = len(self.judged.texts)
    evenly = range(0, count, max(count // _SHOWN, 1))[:_SHOWN]
    rows = [*self.judged.new_failures, *evenly]
    return metrics.make_samples(self.judged, rows)


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Evaluates a policy on held-out problems.

  Attributes:
    name: name of the problem set, part of the metrics' names.
    prompts: the problems, N of them.
    writer: samples and judges k responses per problem, reproducibly.
  """

  name: str
  prompts: Sequence[Prompt]
  writer: ResponseWriter
  origin: str = ""  # Line on the origin of the problems, or ''.
  # (function that continues responses, new responses) -> ended responses; see
  # `rollout.search`. None samples responses independently.
  search: Callable[[Callable[..., Rollout], Rollout], Rollout] | None = None

  def greedy(self) -> "Evaluator":
    """Returns an evaluator that decodes one greedy response per problem."""
    settings = dataclasses.replace(self.writer.settings, temperature=0.0)
    writer = dataclasses.replace(self.writer, settings=settings, group_size=1)
    return dataclasses.replace(self, writer=writer)

  def __call__(self, params: Any) -> Evaluation:
    """Samples and judges responses; `params` are in the sampler's layout."""
    writer, samples = self.writer, self.writer.group_size
    ids = np.arange(len(self.prompts) * samples).reshape(-1, samples)
    start, generated = time.perf_counter(), []
    conversations = writer.conversations(self.prompts, ids)
    weights = Weights(params)

    def write(rows: Rollout, window: int | None = None) -> Rollout:
      longer = writer.write(
        rows, weights, window=window, conversations=conversations
      )
      generated.append(int(longer.mask.sum() - rows.mask.sum()))
      return longer

    begun = writer.begin(self.prompts, ids)
    rollout = self.search(write, begun) if self.search else write(begun)
    seconds = time.perf_counter() - start
    asked = [prompt for prompt in self.prompts for _ in range(samples)]
    judged = writer.judge(rollout, asked, conversations)
    return Evaluation(self.name, samples, judged, seconds, sum(generated))


def check_metric(
  name: str,
  evaluators: Sequence[Evaluator],
  tries: Sequence[int],
  *,
  greedy: bool,
) -> None:
  """Checks that an evaluation can have a metric, or raises InputError."""
  k = evaluators[0].writer.group_size
  names = [f"avg@{k}", *(f"pass@{n}" for n in tries), f"maj@{k}", "reward_mean"]
  names += ["greedy"] * greedy
  known = [f"eval/{one.name}/{x}" for one in evaluators for x in names]
  if name not in known:
    raise InputError(
      f"config.checkpoint.best={name!r} must be one of {', '.join(known)}"
    )
