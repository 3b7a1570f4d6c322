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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxrl_llm.data import chat_template
from jaxrl_llm.data import tokenizer_files as files
from jaxrl_llm.data.rows import read_object
from jaxrl_llm.errors import InputError, as_input_error

_MAX_BYTES = 4  # UTF-8 bytes of a character.
_PRIVATE_USE = range(0xE000, 0xF900)
_MOST_CHARS = 1 << 24  # The library needs a hundred times as many bytes.
_BEFORE = "\n=;.aA"  # Texts that a continuation may follow, best first.


class Tokenizer:
  """A tokenizer with the ids that sampling needs.

  Attributes:
    path: directory of the tokenizer, for messages.
    vocab_size: one more than the largest token id.
    eos_id: the first stop token.
    stop_tokens: all tokens that end a response: those of each file.
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
        `tokenizer_config.json`, in this order, where present. All eos tokens
        count.

    Raises:
      InputError: A file is missing or damaged, or no eos token is given.
    """
    directory = pathlib.Path(path)
    plain = files.read_tokenizer(directory / "tokenizer.json")
    names = ("generation_config", "config", "tokenizer_config")
    paths = [directory / f"{name}.json" for name in names]
    configs = [
      read_object(path, files.AGAIN) if path.exists() else {} for path in paths
    ]
    eos, pad, bos = (
      files.control_ids(kind, directory, plain, configs)
      for kind in ("eos", "pad", "bos")
    )
    if not eos:
      raise InputError(
        f"{directory}: no end token; name eos_token_id in config.json"
      )
    files.mark_special(plain, {*eos, *pad, *bos})
    self.path = str(directory)
    vocabulary = plain.get_vocab(with_added_tokens=True)
    ids = set(vocabulary.values())
    self.vocab_size = self._rows = max(ids) + 1
    self._longest = max(map(len, vocabulary))
    with files.as_tokenizer_error(
      f"{directory}/tokenizer.json: damaged tokenizer", files.AGAIN
    ):
      self.prefix = files.prefix_of(plain)
      plain.decode_batch([[i] for i in ids])  # Fails here, not in a run.
    if not ids.issuperset(self.prefix):
      raise InputError(
        f"{directory}/tokenizer.json: it adds the tokens {self.prefix} to"
        f" every text, but its vocabulary does not contain them; {files.AGAIN}"
      )
    self.stop_tokens, self.eos_id = eos, eos[0]
    self.bos_id = bos[0] if bos else None
    templates = files.templates_of(directory, configs[-1])
    self.chat_template = templates.get("default")
    self._tool_template = templates.get("tool_use")
    self._token_config = configs[-1]
    plain.encode_special_tokens = True
    self._plain, self._silent = plain, {*eos, *pad, *bos}
    self._special = {
      token.content: i
      for i, token in plain.get_added_tokens_decoder().items()
      if token.special
    }

  def check_model(self, vocab_size: int) -> None:
    """Makes texts that need a token without an embedding input errors.

    Published tokenizers may have tokens beyond the model's vocabulary, such as
    that of an image.

    Args:
      vocab_size: number of rows of the model's embedding.

    Raises:
      InputError: A stop or bos token has no row.
    """
    self._rows = min(self._rows, vocab_size)
    self._with_rows([*self.stop_tokens, self.bos_id or 0, *self.prefix])

  def _with_rows(self, tokens: list[int]) -> list[int]:
    """Returns the tokens; raises an InputError if one has no embedding."""
    if tokens and max(tokens) >= self._rows:
      raise InputError(
        f"{self.path}: token {self._plain.id_to_token(max(tokens))!r} has the"
        f" id {max(tokens)}, but the model's embedding only {self._rows} rows;"
        " use the model's own tokenizer, or do without this token"
      )
    return tokens

  def unused(self, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size` that are no tokens."""
    # Not by text: a vocabulary names each text once, even if two ids have it.
    missing = lambda i: self._plain.id_to_token(i) is None
    return tuple(filter(missing, range(vocab_size)))

  def check_same(self, other: "Tokenizer") -> None:
    """Raises an InputError if the other tokenizer has different tokens."""
    tokens, others = (x._plain.get_vocab(True) for x in (self, other))
    if tokens != others:
      raise InputError(
        f"{other.path}: its tokens differ from those of {self.path}; use a"
        " model with the same tokenizer"
      )

  def fewest(self, texts: Iterable[str]) -> int:
    """Returns a lower bound of the number of tokens of texts."""
    return sum(map(len, texts)) // self._longest

  def encode(self, text: str) -> list[int]:
    """Encodes plain text; adds and recognizes no control tokens."""
    return self._encode(self._plain, text)

  def continued(self, text: str) -> list[int]:
    """Encodes plain text that continues another one.

    Differs from `encode` for tokenizers that mark the beginning of a text, such
    as those of Llama 2 and Mistral by a space.
    """
    for before in _BEFORE:
      with contextlib.suppress(InputError):
        start, whole = self.encode(before), self.encode(before + text)
        # Unknown characters could be joined with others.
        known = before in self.decode(start, skip_special=False)
        if known and whole[: len(start)] == start:
          return whole[len(start) :]
    return self.encode(text)

  @functools.cached_property
  def _encode_part(self) -> Callable[[str], list[int]]:
    """`encode` or `continued`: how texts after control tokens are encoded."""
    name = next(iter(self._special))
    for text in _BEFORE.strip():  # Some control tokens take a line break away.
      with contextlib.suppress(InputError):
        if self._encode(self._control, name + text)[1:] != self.encode(text):
          return self.continued
    return self.encode

  def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    what = f"{self.path}/tokenizer.json cannot tokenise {text[:40]!r}"
    if len(text) > _MOST_CHARS:
      raise InputError(
        f"{what}: it has {len(text)} characters, more than {_MOST_CHARS};"
        " shorten the text"
      )
    with files.as_tokenizer_error(what, "use characters of its vocabulary"):
      tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return self._with_rows(tokens)

  @functools.cached_property
  def _control(self) -> tokenizers.Tokenizer:
    """The same tokenizer, except that it recognizes control tokens in texts."""
    control = tokenizers.Tokenizer.from_str(self._plain.to_str())
    control.encode_special_tokens = False
    return control

  def single_tokens(self, texts: Iterable[str], name: str) -> list[int]:
    """Returns the single token of each text that continues another one.

    A control token is given by its name.

    Raises:
      InputError: A text is not exactly one token; the message contains `name`.
    """
    found = []
    for text in texts:
      own = self._special.get(text)
      tokens = self.continued(text) if own is None else [own]
      if len(tokens) != 1:
        raise InputError(
          f"{name} has {text!r}, which is {len(tokens)} tokens of {self.path};"
          " each text must be a single token"
        )
      found += tokens
    return found

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of `ids`, by default without stop, bos and padding.

    Other control tokens, such as `<think>` in some tokenizers, are text.
    """
    ids = [int(i) for i in ids]
    if skip_special:
      ids = [i for i in ids if i not in self._silent]
    with files.as_tokenizer_error(
      f"{self.path}/tokenizer.json cannot decode tokens", files.AGAIN
    ):
      return self._plain.decode(ids, skip_special_tokens=False)

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

  @functools.cached_property
  def _spelling(self) -> re.Pattern:
    """Matches the name of a control token."""
    names = sorted(self._special, key=len, reverse=True)
    special = "|".join(map(re.escape, names))
    return re.compile(f"({special})" if special else r"(?!)")

  def spelled(self, text: str) -> str:
    """Returns the first name of a control token in a text, or ''."""
    found = self._spelling.search(text)
    return found[0] if found else ""

  def show(self, ids: Sequence[int]) -> str:
    """Returns the text of `ids`, with marks at names of control tokens.

    `<s>` is the control token, `[text <s>]` its name as plain text.
    """
    special, out = {*self._special.values()}, []
    pairs = zip(ids, self.pieces(ids))
    for control, run in itertools.groupby(pairs, lambda x: x[0] in special):
      text = "".join(piece for _, piece in run)
      out.append(text if control else self._spelling.sub(r"[text \1]", text))
    return "".join(out)

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
      kwargs: additional template variables; control tokens in their texts are
        plain text, too.

    Returns:
      Tokens, up to and including the opening of the assistant's turn; without
      it if kwargs have `add_generation_prompt=False`.

    Raises:
      InputError: There is no template, or it fails.
    """
    if self.chat_template is None:
      raise InputError(
        f"{self.path}: has no chat template, neither chat_template.jinja nor in"
        " tokenizer_config.json; give prompts as text, not as messages, with"
        " data.template='completion' or without --chat"
      )
    given = {"messages": [*map(dict, messages)], **(kwargs or {})}
    rendered, reveal = self._render_disguised(given)
    if rendered == rendered.translate(reveal):
      # Encode everything at once: the tokens of a piece may depend on context.
      # If the normalizer turned other text into a control token, fall through
      # and encode the pieces separately.
      tokens = self._encode(self._control, rendered)
      ids, names = {*self._special.values()}, self._spelling.findall(rendered)
      if [i for i in tokens if i in ids] == [self._special[x] for x in names]:
        return tokens
    tokens = []
    for piece in self._spelling.split(rendered):
      if piece in self._special:
        tokens.append(self._special[piece])
      elif piece:
        encode = self._encode_part if tokens else self.encode
        tokens.extend(encode(piece.translate(reveal)))
    return self._with_rows(tokens)

  def _render_disguised(
    self, given: Mapping[str, Any]
  ) -> tuple[str, dict[int, str]]:
    """Renders the chat template without names of control tokens in variables.

    They are replaced by characters that occur nowhere else, so that the
    template may trim and split texts freely.

    Args:
      given: variables of the template.

    Returns:
      The text, and a table for `str.translate` that restores the names.
    """
    written = json.dumps(given, ensure_ascii=False, default=_as_json)
    taken = self.chat_template + written
    unused = (chr(c) for c in _PRIVATE_USE if chr(c) not in taken)
    disguise = dict(zip(self._special, unused))

    def hide(value: Any):
      if isinstance(value, str):
        return self._spelling.sub(lambda x: disguise[x[0]], value)
      if isinstance(value, list):
        return [hide(x) for x in value]
      if isinstance(value, dict):
        return {k: hide(x) for k, x in value.items() if x is not None}
      return value

    # Unlike in messages, a variable may be None.
    given = {name: hide(value) for name, value in json.loads(written).items()}
    reveal = str.maketrans({v: k for k, v in disguise.items()})
    return self._render(given), reveal

  def _render(self, given: Mapping[str, Any]) -> str:
    spelling = {i: text for text, i in self._special.items()}
    # None, not undefined, as in transformers: templates test for either.
    known = {"add_generation_prompt": True, "tools": None, "documents": None}
    # Undefined if the tokenizer has none, also if config.json has one (Qwen).
    for name, i in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
      content = files.content_of(self._token_config.get(name, spelling.get(i)))
      known |= {} if content is None else {name: content}
    with as_input_error(
      f"{self.path}: the chat template failed",
      "check chat_template in tokenizer_config.json",
      Exception,
    ):
      known |= given
      by_tools = known["tools"] and self._tool_template
      return chat_template.render(by_tools or self.chat_template, known)


def _as_json(value: Any) -> Any:
  """Returns what JSON has for a value of another type."""
  return dict(value) if isinstance(value, Mapping) else str(value)
