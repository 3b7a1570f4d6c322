r"""Extracts numeric answers from text and compares them.

A policy exploits every weakness of its verifier. Hence nothing is evaluated:
text is scanned in linear time, lengths are capped, and numbers are compared as
exact fractions.
"""

import fractions
import logging
import re

from jaxrl_llm.rewards import surds
from jaxrl_llm.rewards.verdict import Verdict

_MAX_RESPONSE = 20_000  # Characters searched, counted from the end.
_MAX_ANSWER = 512

_BRACE = re.compile(r"[{}]")
_BRACED = re.compile(r"\A\{([^{}]*)\}\Z")
_BOX = re.compile(r"\\f?box(?:ed)?[ ]{0,4}\Z")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_IN_TEXT = re.compile(
  rf"(?:(?<![\w)}}.])[-+\u2212])?(?:\$|\\\$)?{_UNSIGNED}(?:/[0-9]+)?"
)
_SIGNED = rf"([-+]?{_UNSIGNED})"
_PLAIN = re.compile(rf"{_SIGNED}\.?\Z")
_RATIO = re.compile(rf"{_SIGNED}/{_SIGNED}\Z")
_MIXED = re.compile(r"([-+]?)([0-9]+) ([0-9]+)/([0-9]+)\Z")
_FRAC = re.compile(r"\\[dtc]?frac")
_FRAC_ARGS = re.compile(
  r"\\frac[ ]?(?:\{([^{}]*)\}|([0-9]))[ ]?(?:\{([^{}]*)\}|([0-9]))"
)
_TEXT_OF = r"\\(?:text|textbf|mathrm|mathbf|mbox)[ ]?\{"
_TEXT = re.compile(
  _TEXT_OF + r"([^{}]*)\}"
  r"(?:[ ]?\^\{?[0-9]\}?)?"  # The square of `cm^2`.
)
# Words after a number that are not a unit: they change it or join another one.
_WORDS = (
  r"(?:pi|or|and|plus|minus|over|dozen|hundred|thousand|[a-z]{1,4}illion"
  r"|half|halves|thirds?|fifths?|squared|cubed|factorial)\b"
)
_WORDS_IN_TEXT = re.compile(rf"{_TEXT_OF}( ?{_WORDS}[^{{}}]*)\}}")
_NAMED = re.compile(r"[A-Za-z](?:_[0-9a-z])?[ ]?=(?P<value>[^=]*)\Z")
# Words of two letters or more after a space: `2x` and `2 x` are not 2.
_UNIT = re.compile(
  rf"(?P<number>[-+]?{_UNSIGNED}(?:/[0-9]+)?)"
  rf"(?! {_WORDS})"
  r"(?: [A-Za-z]{2,20}(?:\^\{?[0-9]\}?)?){1,4}\.?\Z"
)
_DROP = re.compile(
  r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]!]|\\?[$%]|"
  r"\^ ?\{? ?\\circ ?\}?|°"
)
# A point, an interval or a set, without inner brackets.
_TUPLE = re.compile(
  r"(?P<open>[(\[]|\\\{)(?P<inner>[^()\[\]]*,[^()\[\]]*?)(?P<close>[)\]]|\\\})"
)
_SPACE = re.compile(r"\\[,;: ]|~|\\quad|\s+")


def last_boxed(text: str) -> str | None:
  r"""Returns the content of the last `\boxed{}` whose braces balance.

  Returns the innermost of nested boxes. Makes a single pass over the braces,
  whatever the nesting.
  """
  opened, best = [], None
  for match in _BRACE.finditer(text):
    at = match.start()
    if text[at - 1 : at] == "\\" and text[at - 2 : at - 1] != "\\":
      continue  # An escaped brace.
    if match[0] == "{":
      opened.append(at)
    elif opened:
      start = opened.pop()
      if best is not None and start < best[0]:
        continue
      if _BOX.search(text[max(0, start - 12) : start]):
        best = (start, at)
  return None if best is None else text[best[0] + 1 : best[1]]


def extract_answer(response: str, *, finished: bool = True) -> str | None:
  r"""Finds the answer: last `\boxed{}`, else after `####`, else last number.

  Args:
    response: text; only its last 20,000 characters are read.
    finished: False if the text was cut off. Then the last number does not count
      as an answer, because that would reward listing numbers; a complete
      `\boxed{}` or a complete line after `####` is required.

  Returns:
    The answer as written, or None.
  """
  text = response[-_MAX_RESPONSE:]
  found = last_boxed(text)
  if found is None and "####" in text:
    line, newline, _ = text.rpartition("####")[2].lstrip(" ").partition("\n")
    found = line if newline or finished else None
  if found is None and finished:
    ends = [m for m in _IN_TEXT.finditer(text) if len(m[0]) <= _MAX_ANSWER]
    found = ends[-1][0] if ends else None
  if found is None or not found.strip() or len(found) > _MAX_ANSWER:
    return None
  return found.strip()


def gold_answer(answer: str) -> str:
  r"""Returns the answer of a gold text that may contain `####` or a box."""
  if "####" in answer or "\\boxed" in answer:
    return extract_answer(answer) or answer
  return answer


def normalize_answer(answer: str) -> str:
  r"""Strips parts that do not affect equality: `$`, `%`, units, LaTeX spacing.

  `\frac{a}{b}` becomes `a/b` where a is plain and b one number or letter,
  thousands separators are removed, and units are removed only after a number.
  The parts of a point, an interval or a set are normalized separately, and
  square roots get a canonical form.
  """
  text = answer[:_MAX_ANSWER].replace("\u2212", "-").replace("{,}", ",")
  text = _SPACE.sub(" ", _DROP.sub("", text)).strip()
  text = _BRACED.sub(r"\1", text)
  text = _FRAC.sub(r"\\frac", text)
  text = _FRAC_ARGS.sub(_as_ratio, text)
  text = _WORDS_IN_TEXT.sub(r"\1", text)
  bare = _TEXT.sub("", text).strip()
  # `18\text{ cm}` is 18, but `\text{Evelyn}` is Evelyn.
  text = bare if bare else _TEXT.sub(r"\1", text).strip()
  if named := _NAMED.match(text):
    text = named["value"].strip()
  if unit := _UNIT.match(text):
    text = unit["number"]
  number = parse_number(text)
  if number is not None:
    return str(number)
  if parts := _TUPLE.fullmatch(text):
    inner = ",".join(map(normalize_answer, parts["inner"].split(",")))
    return f"{parts['open']}{inner}{parts['close']}"
  return surds.canonical(text) or text.replace(" ", "")


def _as_ratio(match: re.Match) -> str:
  top, bottom = match[1] or match[2] or "", match[3] or match[4] or ""
  before = match.string[: match.start()]
  gap = " " if before[-1:].isdigit() else ""  # 1\frac{1}{2} is one and a half.
  # 1/2x could also mean half of x.
  plain = re.fullmatch(r"[-+]?[0-9.,a-z]+", top) and re.fullmatch(
    r"[-+]?(?:[0-9.,]+|[a-z])", bottom
  )
  return f"{gap}{top}/{bottom}" if plain else rf"\frac{{{top}}}{{{bottom}}}"


def parse_number(text: str) -> fractions.Fraction | None:
  """Reads an integer, decimal, ratio or mixed number as an exact fraction.

  Args:
    text: at most 512 characters, without exponents or operators.

  Returns:
    The number, or None.
  """
  text = text.strip()
  if len(text) > _MAX_ANSWER:
    return None
  read = lambda digits: fractions.Fraction(digits.replace(",", ""))
  if match := _PLAIN.match(text):
    return read(match[1])
  match = _MIXED.match(text)
  if match and int(match[4]):
    size = int(match[2]) + fractions.Fraction(int(match[3]), int(match[4]))
    return -size if match[1] == "-" else size
  match = _RATIO.match(text)
  if match and read(match[2]):
    return read(match[1]) / read(match[2])
  return None


def numeric(response: str, answer: str, *, finished: bool) -> Verdict:
  r"""Checks a numeric answer: equal as exact fractions, else equal as text.

  Args:
    response: the model's response.
    answer: the gold answer, which may contain `\boxed{}` or `####`.
    finished: whether the response ended with a stop token; if not, only a
      complete `\boxed{}` or `####` line counts, see `extract_answer`.

  Returns:
    The verdict, with the normalized answer.
  """
  extracted = extract_answer(response, finished=finished)
  if extracted is None:
    return Verdict(False, None)
  found = normalize_answer(extracted)
  return Verdict(found == normalize_answer(gold_answer(answer)), found)


def math_verify(response: str, answer: str, *, finished: bool) -> Verdict:
  r"""Checks symbolic answers with the Math-Verify library.

  The library evaluates text of the policy and may hang or run out of memory, so
  this reward runs only in the worker processes of a `RewardPool`.

  Args:
    response: the model's response.
    answer: the gold answer.
    finished: whether the response ended with a stop token.
  """
  import math_verify as library  # Optional and slow to import (sympy).

  extracted = extract_answer(response, finished=finished)
  if extracted is None:
    return Verdict(False, None)
  # The library's time limits use signals; the pool's deadline applies instead.
  gold = f"\\boxed{{{gold_answer(answer)}}}"
  gold = library.parse(gold, parsing_timeout=None)
  found = library.parse(f"\\boxed{{{extracted}}}", parsing_timeout=None)
  correct = bool(library.verify(gold, found, timeout_seconds=None))
  return Verdict(correct, normalize_answer(extracted))


def _prepare_math_verify() -> None:
  """Imports the library and makes it build its parsers."""
  # The library warns about missing time limits.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  math_verify(r"\boxed{\frac{1}{2}}", "0.5", finished=True)


math_verify.needs_worker = True
math_verify.prepare = _prepare_math_verify
