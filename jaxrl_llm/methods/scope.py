"""SCOPE: continues wrong responses from their corrected first wrong step.

An oracle finds the first wrong step, keeps the text before it and replaces it
with a correct step; the policy continues from there in a new response. Differs
from ADHint in that the policy itself wrote most of the prefix. The authors'
oracle is a process reward model; here it is a function that is exact for the
built-in tasks, so results on these are an upper bound. All responses to a
prompt, including repaired ones, share one baseline, as in DARS.

Reference: Ren et al. 2026 (SCOPE), arXiv:2602.24110.
"""

import bisect
import collections
import dataclasses
from typing import Any

from jaxrl_llm.data.oracles import ORACLES
from jaxrl_llm.data.prompt_source import PromptSource, PromptSourceState
from jaxrl_llm.errors import check_choice
from jaxrl_llm.learner import Algorithm, Settings, part
from jaxrl_llm.methods.dars import by_example
from jaxrl_llm.rewards.judge import Judged


class Repairs(PromptSource):
  """Draws a prompt again for each wrong response, with a repaired prefix.

  At most half of a group's responses are repaired.
  """

  def __init__(
    self, *args: Any, max_response_length: int, oracle: str, **settings: Any
  ):
    super().__init__(*args, **settings)
    self._find, self._room = ORACLES[oracle], max_response_length - 1

  def again(self, state: PromptSourceState, judged: Judged):
    prompts, responses = [], judged.responses
    ids = responses.rollout.group_id.tolist()
    left = {i: n // 2 for i, n in collections.Counter(ids).items()}
    wrong = responses.judged & ~responses.correct
    for row in wrong.nonzero()[0].tolist():
      prompt, group = judged.prompts[row], ids[row]
      found = self._find(prompt, judged.texts[row]) if left[group] else None
      if found is None:
        continue
      length = int(responses.rollout.lengths[row])
      written = responses.rollout.tokens[row, :length].tolist()
      opening = self._opening(written, *found)
      if len(opening) <= self._room:
        left[group] -= 1
        new = self.prompt(prompt.example_id, state.drawn + len(prompts))
        prompts.append(dataclasses.replace(new, tries=1, opening=opening))
    return prompts, state.replace(drawn=state.drawn + len(prompts))

  def _opening(self, tokens: list[int], kept: str, step: str):
    """Returns the original tokens of the kept text, followed by the step.

    Encoding all of the text again could give other tokens than the policy's.
    Only a token across the end of the kept text is encoded again.
    """
    text = lambda count: self._tokenizer.decode(tokens[:count])
    fits = bisect.bisect_right(
      range(len(tokens) + 1), len(kept), key=lambda count: len(text(count))
    )
    own = fits - 1
    rest = kept[len(text(own)) :] + step
    return (*tokens[:own], *self._tokenizer.continued(rest))


def scope(
  algorithm: Algorithm, s: Settings, *, oracle: str = "lines"
) -> Algorithm:
  """Continues wrong responses from their corrected first wrong step.

  Args:
    algorithm: an algorithm without a critic.
    s: settings of the run.
    oracle: Finds the first wrong step, a name of `data.oracles.ORACLES`.
  """
  check_choice("oracle", oracle, ORACLES)
  return algorithm.change(
    advantages=part(by_example),
    critic=None,
    prompts=Repairs,
    prompt_settings={"oracle": oracle},
  )
