"""Files of a tokenizer directory in the Hugging Face format."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from jaxrl_llm.data.rows import read_text
from jaxrl_llm.errors import InputError, as_input_error

_MAX_TEMPLATE_CHARS = 1 << 16
AGAIN = "download it again"


@contextlib.contextmanager
def as_tokenizer_error(what: str, advice: str) -> Iterator[None]:
  """Turns errors of the tokenizer library into an InputError.

  The library raises Exception and, for failed assertions, PanicException, a
  BaseException that cannot be imported.
  """
  with as_input_error(what, advice, Exception):
    try:
      yield
    except BaseException as error:
      if type(error).__name__ != "PanicException":
        raise
      raise RuntimeError(str(error)) from error


def read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
  """Reads a `tokenizer.json`; raises an InputError if it is damaged."""
  text = read_text(path, "give a model directory that has a tokenizer.json")
  with as_tokenizer_error(f"{path}: damaged tokenizer", AGAIN):
    tokenizer = tokenizers.Tokenizer.from_str(text)
  # Published files may enable both, which would truncate long prompts.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def control_ids(
  kind: str,
  directory: pathlib.Path,
  tokenizer: tokenizers.Tokenizer,
  configs: Sequence[Mapping[str, Any]],
) -> tuple[int, ...]:
  """Returns the ids of a control token in all files, the first file's first.

  Chat models often end a turn with another token than a text, and name each of
  them in another file.
  """
  *id_configs, token_config = configs
  named = [config.get(f"{kind}_token_id") for config in id_configs]
  content = content_of(token_config.get(f"{kind}_token"))
  if isinstance(content, str):
    named.append(tokenizer.token_to_id(content))
  found = []
  for ids in (ids for ids in named if ids is not None):
    ids = ids if isinstance(ids, list) else [ids]
    known = [i for i in ids if _is_token(i, tokenizer)]
    # The first file decides; padding is never read or written.
    if known != ids and not found and kind != "pad":
      raise InputError(
        f"{directory}: {kind}_token_id {ids!r} is not a token of tokenizer.json"
        "; correct config.json or generation_config.json"
      )
    found += known
  return tuple(dict.fromkeys(found))


def _is_token(i: Any, tokenizer: tokenizers.Tokenizer) -> bool:
  is_id = type(i) is int and 0 <= i < 1 << 32
  return is_id and tokenizer.id_to_token(i) is not None


def content_of(token: Any) -> Any:
  """Returns the text of a token in `tokenizer_config.json`."""
  return token.get("content") if isinstance(token, dict) else token


def mark_special(tokenizer: tokenizers.Tokenizer, control: set[int]):
  """Marks all control tokens as special, even if the file does not."""
  for i, token in tokenizer.get_added_tokens_decoder().items():
    if i in control and not token.special:
      token.special = True
      tokenizer.add_special_tokens([token])


def prefix_of(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the control tokens that the tokenizer adds before a text."""
  if tokenizer.post_processor is None:
    return ()
  encoding = tokenizer.encode("0")
  added = zip(encoding.ids, encoding.special_tokens_mask)
  return tuple(i for i, _ in itertools.takewhile(lambda x: x[1], added))


def templates_of(
  directory: pathlib.Path, token_config: Mapping[str, Any]
) -> dict[str, str]:
  """Returns chat templates by name: 'default', and perhaps 'tool_use'."""
  path = directory / "chat_template.jinja"
  found = token_config.get("chat_template")
  if path.exists():
    found = read_text(path, AGAIN)
  if found is None:
    return {}
  if not isinstance(found, list):
    found = [{"name": "default", "template": found}]
  named = [x for x in found if isinstance(x, dict)]
  templates = {str(x.get("name")): x.get("template") for x in named}
  fits = lambda x: isinstance(x, str) and len(x) <= _MAX_TEMPLATE_CHARS
  if "default" not in templates or not all(map(fits, templates.values())):
    raise InputError(
      f"{directory}: chat_template must be a text of at most"
      f" {_MAX_TEMPLATE_CHARS} characters, or a list of such with their names,"
      " one of them 'default'; correct tokenizer_config.json"
    )
  return templates
