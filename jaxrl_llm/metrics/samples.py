"""Judged responses as a person sees them."""

from collections.abc import Sequence

from jaxrl_llm.metrics.writers import Sample
from jaxrl_llm.rewards.judge import Judged
from jaxrl_llm.types import Status


def make_samples(judged: Judged, rows: Sequence[int]) -> list[Sample]:
  """The given rows for the sample table."""
  rollout, rewards = judged.responses.rollout, judged.responses.rewards
  return [
    Sample(
      prompt=judged.prompts[i].text,
      response=judged.texts[i],
      gold=judged.prompts[i].answer,
      extracted=judged.verdicts[i].extracted,
      reward=float(rewards[i]),
      length=int(rollout.lengths[i]),
      stop=Status(int(rollout.status[i])).name.lower(),
      error=judged.verdicts[i].error,
    )
    for i in rows
  ]
