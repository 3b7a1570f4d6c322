"""An environment that counts its turns."""

from jaxrl_llm.rollout.environments import Observation


class Echo:
  """Replies with the turn's number for three turns, each with reward 1."""

  state = None

  def start(self, example):
    self.state = {"said": 0, "question": example.question}

  def step(self, response):
    self.state["said"] += 1
    said = self.state["said"]
    return Observation(str(said), done=said > 3, rewards={"turns": 1.0})
