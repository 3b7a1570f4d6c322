"""Tokenizer loaded from a directory in the Hugging Face format.

Texts are untrusted, so the spelling of a control token in a text is encoded as
plain text. Control tokens come only from `prefix` and a chat template.
"""

import contextlib
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from jaxrl_llm.data import chat_template
from jaxrl_llm.data.rows import read_object, read_text
from jaxrl_llm.errors import InputError, as_input_error

_MAX_TEMPLATE_CHARS = 1 << 16
_AGAIN = "download it again"
_MAX_BYTES = 4  # UTF-8 bytes of a character.
_PRIVATE_USE = range(0xE000, 0xF900)


class Tokenizer:
  """A tokenizer with the ids that sampling needs.

  Attributes:
    path: directory of the tokenizer, for messages.
    vocab_size: one more than the largest token id.
    eos_id: the first stop token.
    stop_tokens: all tokens that end a response.
    bos_id: the token that begins a text, or None.
    prefix: control tokens that the tokenizer adds before every text (Llama 3
      adds its bos token; most others add none).
    chat_template: Jinja source, or None.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads `tokenizer.json` and the config files next to it.

    Args:
      path: directory with `tokenizer.json`. The eos, padding and bos tokens are
        looked up in `generation_config.json`, `config.json` and
        `tokenizer_config.json`, in this order, where present.

    Raises:
      InputError: A file is missing or damaged, or no eos token is given.
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
    self.path = str(directory)
    ids = set(plain.get_vocab(with_added_tokens=True).values())
    self.vocab_size = max(ids) + 1
    with _library(f"{directory}/tokenizer.json: damaged tokenizer", _AGAIN):
      self.prefix = _prefix(plain)
      plain.decode_batch([[i] for i in ids])  # Fails here, not in a run.
    if not ids.issuperset(self.prefix):
      raise InputError(
        f"{directory}/tokenizer.json: it adds the tokens {self.prefix} to"
        f" every text, but its vocabulary does not contain them; {_AGAIN}"
      )
    self.stop_tokens, self.eos_id = eos, eos[0]
    self.bos_id = bos[0] if bos else None
    self.chat_template = _chat_template(directory, configs[-1])
    self._token_config = configs[-1]
    plain.encode_special_tokens = True
    self._plain = plain
    self._special = {
      token.content: i
      for i, token in plain.get_added_tokens_decoder().items()
      if token.special
    }

  def check_model(self, vocab_size: int) -> None:
    """Raises an InputError if the model's vocabulary is too small."""
    if self.vocab_size > vocab_size:
      raise InputError(
        f"{self.path}: the tokenizer has {self.vocab_size} tokens but the model"
        f" only {vocab_size}; use the model's own"
      )

  def check_same(self, other: "Tokenizer") -> None:
    """Raises an InputError if the other tokenizer has different tokens."""
    tokens, others = (x._plain.get_vocab(True) for x in (self, other))
    if tokens != others:
      raise InputError(
        f"{other.path}: its tokens differ from those of {self.path}; use a"
        " model with the same tokenizer"
      )

  def encode(self, text: str) -> list[int]:
    """Encodes plain text; adds and recognizes no control tokens."""
    return self._encode(self._plain, text)

  def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    what = f"{self.path}/tokenizer.json cannot tokenise {text[:40]!r}"
    with _library(what, "use characters of its vocabulary"):
      return tokenizer.encode(text, add_special_tokens=False).ids

  @functools.cached_property
  def _control(self) -> tokenizers.Tokenizer:
    """The same tokenizer, except that it recognizes control tokens in texts."""
    control = tokenizers.Tokenizer.from_str(self._plain.to_str())
    control.encode_special_tokens = False
    return control

  def single_tokens(self, texts: Iterable[str], name: str) -> list[int]:
    """Returns the single token of each text.

    Raises:
      InputError: A text is not exactly one token; the message contains `name`.
    """
    tokens = [self.encode(text) for text in texts]
    for text, found in zip(texts, tokens):
      if len(found) != 1:
        raise InputError(
          f"{name} has {text!r}, which is {len(found)} tokens of {self.path};"
          " each text must be a single token"
        )
    return [token for (token,) in tokens]

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of `ids`, by default without control tokens."""
    with _library(f"{self.path}/tokenizer.json cannot decode tokens", _AGAIN):
      return self._plain.decode(
        [int(i) for i in ids], skip_special_tokens=skip_special
      )

  def pieces(self, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token, including control tokens.

    The concatenation is the decoded text. A character that spans several tokens
    belongs to the last of them.
    """
    decode = functools.partial(self.decode, skip_special=False)
    # Tokens before `read` are done; decoders need the previous one as context.
    out, before, read = [], 0, 0
    for end in range(1, len(ids) + 1):
      known = decode(ids[before:read])
      text = decode(ids[before:end])[len(known) :]
      unfinished = end < len(ids) and end - read < _MAX_BYTES
      if unfinished and (not text or text.endswith("\ufffd")):
        out.append("")
        continue
      out.append(text)
      before, read = read, end
    return out

  def apply_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Returns the tokens of a conversation, up to the model's next turn.

    Control tokens written by the template become control tokens; the same
    spelling inside a message stays plain text. A template that writes the date
    gets 26 July 2024, so that prompts are the same on every day.

    Args:
      messages: mappings with the keys `role` and `content`, and others that the
        template reads, such as `tool_calls`. Values that are None are absent.
      kwargs: additional template variables.

    Returns:
      Tokens, up to and including the opening of the assistant's turn.

    Raises:
      InputError: There is no template, or it fails.
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
    # Replace spellings in messages by characters that occur nowhere else, so
    # that the template may trim and split content freely, and restore them
    # after the template's own control tokens have been cut out.
    plain = [*map(dict, messages)]
    written = json.dumps(plain, ensure_ascii=False, default=str)
    taken = self.chat_template + written
    unused = (chr(c) for c in _PRIVATE_USE if chr(c) not in taken)
    disguise = dict(zip(self._special, unused))
    reveal = str.maketrans({v: k for k, v in disguise.items()})

    def hide(value):
      if isinstance(value, str):
        return pattern.sub(lambda x: disguise[x[0]], value)
      if isinstance(value, list):
        return [hide(x) for x in value]
      if isinstance(value, dict):
        return {k: hide(x) for k, x in value.items() if x is not None}
      return value

    rendered = self._render(hide(json.loads(written)), kwargs or {})
    if rendered == rendered.translate(reveal):
      # Encode everything at once: the tokens of a piece may depend on context.
      # If the normalizer turned other text into a control token, fall through
      # and encode the pieces separately.
      tokens = self._encode(self._control, rendered)
      ids = {*self._special.values()}
      control = [self._special[text] for text in pattern.findall(rendered)]
      if [token for token in tokens if token in ids] == control:
        return tokens
    tokens = []
    for piece in pattern.split(rendered):
      if piece in self._special:
        tokens.append(self._special[piece])
      elif piece:
        tokens.extend(self.encode(piece.translate(reveal)))
    return tokens

  def _render(
    self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]
  ) -> str:
    spelling = {i: text for text, i in self._special.items()}
    known = {
      "messages": messages,
      "add_generation_prompt": True,
      # None, not undefined, as in transformers: templates test for either.
      "tools": None,
      "documents": None,
    }
    # Undefined if the tokenizer has none, also if config.json has one (Qwen).
    for name, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
      content = _content(self._token_config.get(name, spelling.get(i)))
      known |= {} if content is None else {name: content}
    with as_input_error(
      f"{self.path}: the chat template failed",
      "check chat_template in tokenizer_config.json",
      Exception,  # Includes variables that cannot be serialized.
    ):
      return chat_template.render(self.chat_template, {**known, **kwargs})


@contextlib.contextmanager
def _library(what: str, advice: str) -> Iterator[None]:
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


def _read_tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
  text = read_text(path, "give a model directory that has a tokenizer.json")
  with _library(f"{path}: damaged tokenizer", _AGAIN):
    tokenizer = tokenizers.Tokenizer.from_str(text)
  # Published files may enable both, which would truncate long prompts.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _control_ids(
  kind: str,
  directory: pathlib.Path,
  tokenizer: tokenizers.Tokenizer,
  configs: Sequence[Mapping[str, Any]],
) -> tuple[int, ...]:
  """Returns the ids of a control token; () if no file specifies one."""
  *id_configs, token_config = configs
  named = [config.get(f"{kind}_token_id") for config in id_configs]
  content = _content(token_config.get(f"{kind}_token"))
  if isinstance(content, str):
    named.append(tokenizer.token_to_id(content))
  found = next((found for found in named if found is not None), [])
  ids = found if isinstance(found, list) else [found]
  for i in ids:
    if type(i) is not int or i < 0 or tokenizer.id_to_token(i) is None:
      raise InputError(
        f"{directory}: {kind}_token_id {i!r} is not a token of tokenizer.json;"
        " correct config.json or generation_config.json"
      )
  return tuple(ids)


def _content(token: Any) -> Any:
  """Returns the text of a token in `tokenizer_config.json`."""
  return token.get("content") if isinstance(token, dict) else token


def _mark_special(tokenizer: tokenizers.Tokenizer, control: set[int]):
  """Marks all control tokens as special, even if the file does not."""
  for i, token in tokenizer.get_added_tokens_decoder().items():
    if i in control and not token.special:
      token.special = True
      tokenizer.add_special_tokens([token])


def _prefix(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Returns the control tokens that the tokenizer adds before a text."""
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
