"""Writes a random chat model over all ASCII characters to a directory."""

import dataclasses
import json
import pathlib
import string
from collections.abc import Sequence

from helpers import tiny_run

_TEMPLATE = (
  "{% for t in tools or [] %}{{ t['function']['name'] }}:"
  " {{ t['function']['description'] }}\n{% endfor %}"
  "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n"
  "{% endfor %}"
  "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(directory: pathlib.Path, words: Sequence[str] = ()) -> pathlib.Path:
  """Writes a model of 2 layers, width 32, one token per character, a template.

  Args:
    directory: a new directory.
    words: further tokens, which only the model writes.
  """
  vocabulary = [*sorted(set(string.printable) - set("\r\v\f\t")), *words]
  config = dataclasses.replace(
    tiny_run.model_config(),
    vocab_size=len(vocabulary) + 2,
    max_position_embeddings=512,
  )
  tiny_run.write_model(directory, config, vocabulary)
  template = json.dumps({"chat_template": _TEMPLATE})
  (directory / "tokenizer_config.json").write_text(template)
  return directory
