"""An example plugin: a custom environment and a tool.

scripts/train.py --config=configs/grpo.py --plugin=docs/plugin_environment.py
  --config.environment.name=second_try --config.reward.name=environment
"""

from jaxrl_llm import register
from jaxrl_llm.rollout.environments import Observation


class SecondTry:  # Asks again after a wrong answer.
  def start(self, example):  # None: the model reads the question of the data.
    self.state = {"asked": example.question, "answer": example.answer, "try": 1}

  def step(self, response):
    right, number = f"#{self.state['answer']}." in response, self.state["try"]
    if right or number == 2:
      return Observation(done=True, rewards={"right": right / number})
    self.state["try"] += 1
    return Observation(self.state["asked"])


def double(number: int) -> int:  # Offered to a chat model by its docstring.
  """Doubles a number."""
  return 2 * number


register.environment("second_try", SecondTry)
register.tools("doubling", double)
