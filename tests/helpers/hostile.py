"""Environments that misbehave; worker processes can import this module."""

import os
import time

from jaxrl_llm.rollout.environments import Observation


class Hostile:
  """Misbehaves at its second turn in the configured way."""

  def __init__(self, how=""):
    self.state, self._how = 0, how

  def start(self, example):
    return None

  def step(self, response):
    self.state += 1
    if self.state == 2:
      return getattr(self, self._how)()
    return Observation("1", done=self.state > 3)

  def hang(self):
    time.sleep(600)

  def crash(self):
    os._exit(3)

  def fail(self):
    raise KeyError("no such tool")

  def flood(self):
    return Observation("7" * (1 << 20))

  def broken_text(self):
    return Observation("\udcff\x00", rewards={"kept": 1.0})

  def silence(self):
    return Observation()

  def number_as_text(self):
    return Observation(5)

  def no_role(self):
    return Observation("1", role=None)

  def no_json(self):
    self.state = {1, 2}
    return Observation("1")

  def one_reward(self):
    return Observation("1", rewards=1.0)

  def numbers(self):
    return Observation("1", rewards={"much": float("nan")})
