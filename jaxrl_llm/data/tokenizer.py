"""Text to tokens and back, from a Hugging Face style directory.

The spelling of a control token inside a text is ordinary text: others wrote it.
The ids of control tokens enter only through `prefix` and a chat template.
"""

import contextvars
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2.nodes
import tokenizers
from jinja2 import sandbox

from jaxrl_llm.data.rows import read_object, read_text
from jaxrl_llm.errors import InputError, as_input_error

_MAX_TEMPLATE_CHARS = 1 << 16
_MAX_RENDERED_CHARS = 1 << 20
_MAX_ROUNDS = 1 << 18  # Of all loops and calls while a template is rendered.
_AGAIN = "download it again"
_PRIVATE_USE = range(0xE000, 0xF900)


class Tokenizer:
  """A tokenizer with the ids that sampling needs.

  Attributes:
    path: directory it was read from, for messages.
    vocab_size: one more than the largest token id.
    eos_id: the first stop token.
    stop_tokens: all tokens that end a response.
    bos_id: the token that begins a text, or None.
    prefix: control tokens that the files put before every text (Llama 3 begins
      with its bos token; most others with nothing).
    chat_template: Jinja source, or None.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads `tokenizer.json` and the small files beside it.

    Args:
      path: directory with `tokenizer.json`; `generation_config.json`,
        `config.json` and `tokenizer_config.json` are read where present, for
        the end, padding and begin tokens (in this order).

    Raises:
      InputError: a file is missing or damaged, or no end token is named.
    """
    directory = pathlib.Path(path)
    plain = _read_tokenizer(directory / "tokenizer.json")
    names = ("generation_config", "config", "tokenizer_config")
    files = [directory / f"{name}.json" for name in names]
    configs = [read_object(f, _AGAIN) if f.exists() else {} for f in files]
    eos, pad, bos = (
      _control_ids(kind, directory, plain, configs)
      for kind in ("eos", "pad", "bos")
    )
    if not eos:
      raise InputError(
        f"{directory}: no end token; name eos_token_id in config.json"
      )
    _mark_special(plain, {*eos, *pad, *bos})
    self.path, self.prefix = str(directory), _prefix(plain)
    self.vocab_size = max(plain.get_vocab(with_added_tokens=True).values()) + 1
    self.stop_tokens, self.eos_id = eos, eos[0]
    self.bos_id = bos[0] if bos else None
    self.chat_template = _chat_template(directory, configs[-1])
    plain.encode_special_tokens = True
    self._plain = plain
    self._special = {
      token.content: i
      for i, token in plain.get_added_tokens_decoder().items()
      if token.special
    }

  def check_model(self, vocab_size: int) -> None:
    """Raises an InputError if a model of this vocabulary lacks some tokens."""
    if self.vocab_size > vocab_size:
      raise InputError(
        f"{self.path}: the tokenizer has {self.vocab_size} tokens but the model"
        f" only {vocab_size}; use the model's own"
      )

  def encode(self, text: str) -> list[int]:
    """Returns the tokens of plain text: no control token is added or read."""
    what = f"{self.path}/tokenizer.json cannot tokenise {text[:40]!r}"
    # The library raises bare Exception.
    with as_input_error(what, "use characters of its vocabulary", Exception):
      return self._plain.encode(text, add_special_tokens=False).ids

  def single_tokens(self, texts: Iterable[str], name: str) -> list[int]:
    """Returns the token that each text is.

    Raises:
      InputError: a text is several; the setting of this name has it.
    """
    tokens = [self.encode(text) for text in texts]
    for text, found in zip(texts, tokens):
      if len(found) != 1:
        raise InputError(
          f"{name} has {text!r}, which is {len(found)} tokens of {self.path};"
          " give texts that are one"
        )
    return [token for (token,) in tokens]

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of `ids`, control tokens left out unless asked for."""
    return self._plain.decode(
      [int(i) for i in ids], skip_special_tokens=skip_special
    )

  def apply_chat(
    self,
    messages: Sequence[Mapping[str, str]],
    kwargs: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Returns the tokens of a conversation, ready for the model's answer.

    Control tokens that the template writes become control tokens; the same
    spelling inside a message's content stays plain text.

    Args:
      messages: mappings with the keys `role` and `content`.
      kwargs: further variables of the template.

    Returns:
      Tokens, up to and with the opening of the assistant's turn.

    Raises:
      InputError: there is no template, or it fails.
    """
    if self.chat_template is None:
      raise InputError(
        f"{self.path}: has no chat template, neither chat_template.jinja nor in"
        " tokenizer_config.json; give prompts as text, not as messages, with"
        " data.template='completion' or without --chat"
      )
    special = "|".join(
      re.escape(t) for t in sorted(self._special, key=len, reverse=True)
    )
    pattern = re.compile(f"({special})" if special else r"(?!)")
    # Spellings in the content are swapped for characters that occur nowhere,
    # so the template may trim and split content as it likes, and swapped back
    # once the template's own control tokens have been cut out.
    taken = self.chat_template + "".join(m["content"] for m in messages)
    unused = (chr(c) for c in _PRIVATE_USE if chr(c) not in taken)
    disguise = dict(zip(self._special, unused))
    reveal = str.maketrans({v: k for k, v in disguise.items()})
    hidden = [
      {
        "role": m["role"],
        "content": pattern.sub(lambda x: disguise[x[0]], m["content"]),
      }
      for m in messages
    ]
    tokens = []
    for piece in pattern.split(self._render(hidden, kwargs or {})):
      if piece in self._special:
        tokens.append(self._special[piece])
      elif piece:
        tokens.extend(self.encode(piece.translate(reveal)))
    return tokens

  def _render(
    self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]
  ) -> str:
    spelling = {i: text for text, i in self._special.items()}
    pieces, size = [], 0
    with as_input_error(
      f"{self.path}: the chat template failed",
      "check chat_template in tokenizer_config.json",
      Exception,  # The template is foreign code.
    ):
      template = _compile(self.chat_template)
      _rounds.set(iter(range(_MAX_ROUNDS)))
      known = {
        "messages": messages,
        "add_generation_prompt": True,
        "bos_token": spelling.get(self.bos_id, ""),
        "eos_token": spelling.get(self.eos_id, ""),
      }
      for piece in template.generate({**known, **kwargs}):
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_RENDERED_CHARS:
          raise ValueError(f"more than {_MAX_RENDERED_CHARS} characters")
    return "".join(pieces)


# Left to the template that is being rendered.
_rounds: contextvars.ContextVar[Iterator[int]] = contextvars.ContextVar(
  "rounds"
)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
  """A sandbox: no reach of the machine, no giant values, no endless loops."""

  intercepted_binops = frozenset(["*", "**", "%"])

  def call_binop(self, context, operator, left, right):
    if not all(type(x) in (int, float) for x in (left, right)):
      raise sandbox.SecurityError(f"{operator!r} works on numbers only")
    if operator == "**" or max(abs(left), abs(right)) > 1e9:
      raise sandbox.SecurityError(f"{operator!r} of too large numbers")
    return super().call_binop(context, operator, left, right)

  def call(self, context, called, *args, **kwargs):
    _count_round()
    return super().call(context, called, *args, **kwargs)


def _count_round() -> None:
  if next(_rounds.get(), None) is None:
    raise sandbox.SecurityError(f"more than {_MAX_ROUNDS} rounds of its loops")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
  """The items of a loop, as long as it may go on."""
  for item in items:
    _count_round()
    yield item


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


_ENVIRONMENT = _Environment(
  trim_blocks=True,
  lstrip_blocks=True,
  extensions=["jinja2.ext.loopcontrols"],
)
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.filters["counted"] = _counted


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
  tree = _ENVIRONMENT.parse(template)
  for loop in tree.find_all(jinja2.nodes.For):
    loop.iter = jinja2.nodes.Filter(
      loop.iter, "counted", [], [], None, None, lineno=loop.lineno
    )
    loop.iter.set_environment(_ENVIRONMENT)
  code = _ENVIRONMENT.compile(tree)
  names = _ENVIRONMENT.make_globals(None)
  return jinja2.Template.from_code(_ENVIRONMENT, code, names)


def _read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
  text = read_text(path, "give a model directory that holds tokenizer.json")
  # The library raises bare Exception.
  with as_input_error(f"{path}: damaged tokenizer", _AGAIN, Exception):
    tokenizer = tokenizers.Tokenizer.from_str(text)
  # Files are published with both switched on; they would cut long prompts.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _control_ids(
  kind: str,
  directory: pathlib.Path,
  tokenizer: tokenizers.Tokenizer,
  configs: Sequence[Mapping[str, Any]],
) -> tuple[int, ...]:
  """Returns the ids of a control token, () where no file names one."""
  *id_configs, token_config = configs
  named = [config.get(f"{kind}_token_id") for config in id_configs]
  token = token_config.get(f"{kind}_token")
  content = token.get("content") if isinstance(token, dict) else token
  if isinstance(content, str):
    named.append(tokenizer.token_to_id(content))
  found = next((found for found in named if found is not None), [])
  ids = found if isinstance(found, list) else [found]
  for i in ids:
    if type(i) is not int or i < 0 or tokenizer.id_to_token(i) is None:
      raise InputError(
        f"{directory}: {kind}_token_id {i!r} is no token of tokenizer.json;"
        " correct config.json or generation_config.json"
      )
  return tuple(ids)


def _mark_special(tokenizer: tokenizers.Tokenizer, control: set[int]):
  """Makes every control token special, also where the file forgot to say so."""
  for i, token in tokenizer.get_added_tokens_decoder().items():
    if i in control and not token.special:
      token.special = True
      tokenizer.add_special_tokens([token])


def _prefix(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the control tokens that the file puts before a text."""
  if tokenizer.post_processor is None:
    return ()
  encoding = tokenizer.encode("0")
  added = zip(encoding.ids, encoding.special_tokens_mask)
  return tuple(i for i, _ in itertools.takewhile(lambda x: x[1], added))


def _chat_template(
  directory: pathlib.Path, token_config: Mapping[str, Any]
) -> str | None:
  path = directory / "chat_template.jinja"
  template = token_config.get("chat_template")
  if path.exists():
    template = read_text(path, _AGAIN)
  if template is None:
    return None
  if not isinstance(template, str) or len(template) > _MAX_TEMPLATE_CHARS:
    raise InputError(
      f"{directory}: chat_template must be one string of at most"
      f" {_MAX_TEMPLATE_CHARS} characters; correct tokenizer_config.json"
    )
  return template
