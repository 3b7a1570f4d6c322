r"""Sums of square roots in text, read exactly and without evaluating anything.

A number here is a sum of c·√n with rational c and square-free n, by n: the
values that `\frac{3+2\sqrt{5}}{4}` and its like can have. They are added,
multiplied, and divided by a single term; whatever else a text holds is None.
"""

import fractions
import re

_TOKEN = re.compile(
  r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<root>\\sqrt|√)|(?P<frac>\\frac)|"
  r"(?P<times>\\cdot|\\times|\*)|(?P<sign>[-+/(){}]))"
)
_LARGEST_ROOT = 10**6  # Its factors are looked for one by one.
_MOST_DIGITS, _MOST_TOKENS, _MOST_TERMS, _DEEPEST = 30, 64, 8, 8
Surd = dict[int, fractions.Fraction]  # Square-free n -> c.


def canonical(text: str) -> str | None:
  """One spelling for all spellings of an irrational number, else None.

  Rational ones have no roots and are not read: `1+1` is an answer to no
  question whose answer is 2.
  """
  value = parse_surd(text)
  if value is None or not any(root > 1 for root in value):
    return None
  return "+".join(f"{value[root]}√{root}" for root in sorted(value))


def parse_surd(text: str) -> Surd | None:
  r"""Reads sums, products and ratios of integers, decimals and square roots.

  Args:
    text: with `\sqrt{n}`, `\sqrt n`, `√n`, `\frac{a}{b}`, `+ - * /`, `\cdot`,
      brackets, and products written side by side as in `2\sqrt{3}`.

  Returns:
    The value, or None where it is no such number, too large or too deep.
  """
  try:
    reader = _Reader(text)
    value = reader.sum(0)
    return value if reader.at == len(reader.tokens) else None
  except (ValueError, LookupError):
    return None


class _Reader:
  """Recursive descent; raises ValueError or LookupError for other texts."""

  def __init__(self, text: str):
    self.tokens, self.at, end = [], 0, 0
    text = text.rstrip()
    while end < len(text):
      match = _TOKEN.match(text, end)
      if match is None or len(self.tokens) == _MOST_TOKENS:
        raise ValueError("no token, or too many")
      token = match[match.lastgroup]
      if len(token) > _MOST_DIGITS:
        raise ValueError("too many digits")
      self.tokens.append((match.lastgroup, token))
      end = match.end()

  def peek(self) -> tuple[str, str]:
    return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

  def take(self, wanted: str) -> None:
    if self.peek()[1] != wanted:
      raise ValueError(f"no {wanted}")
    self.at += 1

  def sum(self, depth: int) -> Surd:
    if depth > _DEEPEST:
      raise ValueError("too deep")
    total, sign = {}, self.sign() or 1
    while sign:
      for root, part in self.product(depth).items():
        total[root] = total.get(root, 0) + sign * part
      sign = self.sign()
    return {root: part for root, part in total.items() if part}

  def sign(self) -> int:
    """Reads a sign, 1 or -1; returns 0 if there is none."""
    sign = {"+": 1, "-": -1}.get(self.peek()[1], 0)
    self.at += abs(sign)
    return sign

  def product(self, depth: int) -> Surd:
    value = self.factor(depth)
    while True:
      kind, token = self.peek()
      if kind == "times":
        self.at += 1
        value = _times(value, self.factor(depth))
      elif token == "/":
        self.at += 1
        value = _over(value, self.factor(depth))
      elif kind in ("root", "frac") or token == "(":
        value = _times(value, self.factor(depth))
      else:
        return value

  def factor(self, depth: int) -> Surd:
    kind, token = self.tokens[self.at]
    self.at += 1
    if kind == "number":
      return _rational(token)
    if kind == "root":
      inner = self.argument(depth)
      if inner.keys() - {1}:
        raise ValueError("a root of a root")
      return _root(inner.get(1, fractions.Fraction(0)))
    if kind == "frac":
      top = self.argument(depth)
      return _over(top, self.argument(depth))
    if token == "(":
      value = self.sum(depth + 1)
      self.take(")")
      return value
    raise ValueError(f"{token} begins no number")

  def argument(self, depth: int) -> Surd:
    r"""Parses an argument of \sqrt or \frac: braces or a number."""
    kind, token = self.peek()
    if kind == "number":
      self.at += 1
      return _rational(token)
    close = {"{": "}", "(": ")"}[token]
    self.at += 1
    value = self.sum(depth + 1)
    self.take(close)
    return value


def _rational(digits: str) -> Surd:
  value = fractions.Fraction(digits)
  return {1: value} if value else {}


def _times(a: Surd, b: Surd) -> Surd:
  if len(a) * len(b) > _MOST_TERMS:
    raise ValueError("too many terms")
  product = {}
  for m, x in a.items():
    for n, y in b.items():
      for root, part in _root(fractions.Fraction(m * n)).items():
        product[root] = product.get(root, 0) + x * y * part
  return {root: part for root, part in product.items() if part}


def _over(a: Surd, b: Surd) -> Surd:
  if len(b) != 1:
    raise ValueError("no single term to divide by, or 0")
  ((root, part),) = b.items()
  # 1/(c√n) = √n/(c·n)
  return _times(a, {root: 1 / (part * root)})


def _root(x: fractions.Fraction) -> Surd:
  """√x as c·√n: of a ratio √(p·q)/q."""
  inner = x.numerator * x.denominator
  if not 0 <= inner <= _LARGEST_ROOT:
    raise ValueError("a root of a negative or a very large number")
  outer, factor = 1, 2
  while factor * factor <= inner:
    while inner and inner % (factor * factor) == 0:
      inner //= factor * factor
      outer *= factor
    factor += 1
  return {inner: fractions.Fraction(outer, x.denominator)} if inner else {}
