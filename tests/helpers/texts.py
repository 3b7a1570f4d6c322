"""Responses whose tokens are the code points of their texts."""

import numpy as np
from helpers import tiny_run

from jaxrl_llm.data.tasks import Prompt


def decode(tokens):
  """Returns the text of tokens."""
  return "".join(chr(t) for t in tokens)


def make_prompt(number, question, answer):
  """Makes a prompt of one token."""
  return Prompt(
    id=f"book-{number}",
    question=question,
    answer=answer,
    source="book",
    example_id=number,
    group_id=number,
    tokens=(number,),
    text=question,
  )


def write(texts, status, *, room=6, group_size=2):
  """Makes a rollout of the texts; nothing marks their ends but the lengths."""
  rollout = tiny_run.random_rollout(
    np.random.default_rng(0), rows=len(texts), room=room, group_size=group_size
  )
  padded = [[ord(c) for c in text.ljust(room, "7")] for text in texts]
  lengths = np.array([len(text) for text in texts], np.int32)
  return rollout.replace(
    tokens=np.array(padded, np.int32),
    lengths=lengths,
    mask=np.arange(room) < lengths[:, None],
    status=np.array(status, np.int32),
  )
