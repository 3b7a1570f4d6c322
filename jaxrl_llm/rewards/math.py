r"""Extracts numeric answers from text and compares them.

A policy exploits every weakness of its verifier. Hence nothing is evaluated:
text is scanned in linear time, lengths are capped, and numbers are compared as
exact fractions.
"""

import dataclasses
import fractions
import logging
import re

from jaxrl_llm.rewards import surds
from jaxrl_llm.rewards.verdict import Verdict

_MAX_RESPONSE = 20_000  # Characters searched, counted from the end.
_MAX_ANSWER = 512

_BRACE = re.compile(r"[{}]")
_BRACED = re.compile(r"\A(?:\{([^{}]*)\}|\(([^(),]*)\))\Z")
_BOX = re.compile(r"\\f?box(?:ed)?[ ]{0,4}\Z")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
# The reasoning of a model, which is not its answer.
_THINKS = re.compile(r"<(?:think(?:ing)?|thought|reasoning)>|\[THINK\]")
_THOUGHT = re.compile(r"</(?:think(?:ing)?|thought|reasoning)>|\[/THINK\]")
# Tags, bold text (but no powers such as `2**3`) and calculations of GSM8K.
_MARKUP = re.compile(
  r"</?[A-Za-z]{1,20}>|<<[^<>]*>>|(?<![\w)])\*\*|\*\*(?![\w(])"
)
# A formula in delimiters. As in Pandoc, `$` opens before and closes after text,
# and none closes before a digit, so that amounts of money are no formulas.
_FORMULA = (
  r"(?:\$\$[^$]+\$\$|\\\[(?:[^\\]|\\[^()\[\]])+\\\]"
  r"|\\\((?:[^\\]|\\[^()\[\]])+\\\)"
  r"|(?<![\w\\])\$(?=\S)(?:[^$\n\\]|\\.)+(?<=\S)\$(?![0-9]))"
)
# A word, a bracket such as `(3, 4)`, or `\log_2 8`, outside of formulas. `;`
# and `#` separate words: `3+4=7;#7.`
_WORD = (
  r"(?:[-+\u2212]?\$)?"
  r"(?:(?:[(\[]|\\?\{)[^()\[\]{}\n$]{0,80}[)\]}]|[^\s$\\;#]"
  r"|\\[A-Za-z]+(?:_[0-9A-Za-z])? (?=[0-9])|\\[^\s()\[\]])+"
)
# Joins words to expressions: `3 + 4 = 7`, `3 or 4`, `2 1/2`, `1 234`, `2 \pi`.
_JOINT = (
  r" (?<![A-Za-z]{2} )(?<=[0-9A-Za-z)}%\]] )"
  r"(?:(?:[-+*/^=<>\u2212\xd7\xf7\xb7\xb1\u2248\u2264\u2265x]|\\[a-z]{1,6}) "
  r"|(?<=[0-9)}%\]] )(?:(?:and|or) (?=[-$\\]?[0-9])|(?=[0-9]+/[0-9]"
  r"|[0-9]{3}(?![0-9])|\\[a-z])))"
)
_EXPRESSION = re.compile(
  rf"{_FORMULA}(?:,?(?: and| or)? {_FORMULA})*|{_WORD}(?:{_JOINT}{_WORD})*"
)
# Expressions that may be an answer; `cm^2` is a unit.
_VALUE = re.compile(
  r"(?!(?:[cdkm]?m|in|ft|yd|mi|inch(?:es)?|feet|met(?:er|re)s|units?)"
  r"(?:/[a-z]{1,4})?[\^\xb2\xb3])(?:\$.|(?:[^0-9\\]|\\[^A-Za-z(\[])*"
  r"(?:[0-9\xb2\xb3\u221a\u03c0\u221e]|\\[A-Za-z(\[]))"
)
_QUOTES = " _`\"'\u201c\u201d"
_STATED = re.compile(r"(?i:answer(?: is|\s*:))[\s:]*")
# A label before a value, and the heading of a section.
_LABEL = re.compile(r"(?<=[A-Za-z]{2}) ?:|\b(?:is|are)\s")
_HEADING = re.compile(r"(?:[0-9]+[.):]+ *)?[A-Za-z]{3}|\Z")
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
# The left side of an equation: a name, such as `f(2)`, or arithmetic; `2x = 6`
# and `x + y = 6` have no value.
_LEFT = re.compile(
  r"[^-+*/^<>!:,;0-9][^-+*/^<>!:,;]*|(?:[^A-Za-z<>!:;\\]|\\[A-Za-z$%,]+"
  r"|x(?= ?[$.(0-9]))*"
)
# Words of two letters or more after a space: `2x` and `2 x` are not 2.
_UNIT = re.compile(
  rf"(?P<number>[-+]?{_UNSIGNED}(?:/[0-9]+)?)"
  rf"(?![ /]{_WORDS})(?:(?:[ /][A-Za-z]{{2,20}}|[cdk]m|kg| [mg])"
  r"(?:/[A-Za-z]{1,20})?(?:\^\{?[0-9]\}?|[\xb2\xb3])?){1,4}\.?\Z"
)
_DROP = re.compile(
  r"\\(?:left|right|bf|rm|it|displaystyle|approx|sim)(?![a-z])|\\[()\[\]!]|"
  r"\\?[$%]|[€£¥₹≈]|\^ ?\{? ?\\circ ?\}?|°[CF]?"
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
  r"""Finds the answer: last `\boxed{}`, else after `####`, else at the end.

  The text in `<think>` has no answer. A line after `####` counts if it is not a
  heading. The end is what follows 'the answer is', else the last formula or
  number. It is read as a whole: `$\frac{3}{4}$`, `2^10`, `3:30` and `(3, 4)`
  are not the number at their end.

  Args:
    response: text; only its last 20,000 characters are read.
    finished: False if the text was cut off. Then its end does not count as an
      answer, because that would reward listing numbers; a complete `\boxed{}`
      or a complete line after `####` is required.

  Returns:
    The answer as written, or None.
  """
  text = _THINKS.split(_THOUGHT.split(response)[-1])[0][-_MAX_RESPONSE:]
  found = last_boxed(text)
  if found is None:
    found = _unboxed(text, finished)
  if found is None or not found.strip() or len(found) > _MAX_ANSWER:
    return None
  return found.strip()


def _unboxed(text: str, finished: bool) -> str | None:
  """Finds the answer in complete lines after `####`, else at the end."""
  text = _MARKUP.sub(" ", text)
  if not finished:
    text = text[: text.rfind("\n") + 1]
  lines = [part.partition("\n")[0] for part in text.split("####")[1:]]
  lines = [_LABEL.split(line)[-1].strip(" \t*_`#") for line in reversed(lines)]
  found = next((line for line in lines if not _HEADING.match(line)), None)
  if found is not None or not finished:
    return found
  *before, stated = _STATED.split(text)
  end = _EXPRESSION.match(stated) if before else None
  if not end or not _VALUE.match(end[0]):
    if lines and lines[0] and text.rstrip().endswith(lines[0]):
      return lines[0]  # A word, such as a name.
    ends = [m for m in _EXPRESSION.finditer(text) if _VALUE.match(m[0])]
    end = ends[-1] if ends else None
  found = end[0].strip(_QUOTES).rstrip(f"{_QUOTES}.,;:!?") if end else ""
  if found.count("{") != found.count("}"):
    return None  # A box that is not closed, for instance.
  return found if "$" in found or "\\" in found else _LABEL.split(found)[-1]


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
  text = _SPACE.sub(" ", _DROP.sub("", text)).strip(" *").rstrip(" ,;:")
  text = _BRACED.sub(r"\1\2", text)
  text = _FRAC.sub(r"\\frac", text)
  text = _FRAC_ARGS.sub(_as_ratio, text)
  text = _WORDS_IN_TEXT.sub(r"\1", text)
  bare = _TEXT.sub("", text).strip()
  # `18\text{ cm}` is 18, but `\text{Evelyn}` is Evelyn.
  text = bare if bare else _TEXT.sub(r"\1", text).strip()
  *left, value = text.split("=")
  if left and all(map(_LEFT.fullmatch, left)):
    text = value.strip()
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
  r"""Checks symbolic answers: as `numeric`, else with the Math-Verify library.

  The library evaluates text of the policy and may hang or run out of memory, so
  this reward runs only in the worker processes of a `RewardPool`.

  Args:
    response: the model's response.
    answer: the gold answer.
    finished: whether the response ended with a stop token.
  """
  import math_verify as library  # Optional and slow to import (sympy).

  verdict = numeric(response, answer, finished=finished)
  if verdict.correct or verdict.extracted is None:
    return verdict
  extracted = extract_answer(response, finished=finished)
  # The library's time limits use signals; the pool's deadline applies instead.
  gold = f"\\boxed{{{gold_answer(answer)}}}"
  gold = library.parse(gold, parsing_timeout=None)
  # The library reads 2 1/2 as a product.
  if parse_number(verdict.extracted) and "%" not in extracted:
    extracted = verdict.extracted
  found = library.parse(f"\\boxed{{{extracted}}}", parsing_timeout=None)
  correct = bool(library.verify(gold, found, timeout_seconds=None))
  return dataclasses.replace(verdict, correct=correct)


def _prepare_math_verify() -> None:
  """Imports the library and makes it build its parsers."""
  # The library warns about missing time limits.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  math_verify(r"\boxed{\frac{1}{2}}", "0.5", finished=True)


math_verify.needs_worker = True
math_verify.prepare = _prepare_math_verify
