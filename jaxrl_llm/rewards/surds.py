r"""Parses sums of square roots exactly, without evaluating any code.

A number is a sum of c·√n with rational c and square-free n, stored as a dict
from n to c, such as the value of `\frac{3+2\sqrt{5}}{4}`. Numbers are added,
multiplied, and divided by a single term; any other text gives None.
"""

import fractions
import re

_TOKEN = re.compile(
  r"[0-9]+(?:\.[0-9]+)?|\\sqrt|√|\\frac|\\cdot|\\times|[-+*/(){}]"
)
_ROOTS, _FRAC, _TIMES = (r"\sqrt", "√"), r"\frac", (r"\cdot", r"\times", "*")
_BRACKETS = {"(": ")"}
_ARGUMENT = _BRACKETS | {"{": "}"}  # Around arguments of roots and fractions.
_LARGEST_ROOT = 10**6  # Factors are found by trial division.
_MOST_DIGITS, _MOST_TOKENS, _MOST_TERMS = 30, 64, 8
Surd = dict[int, fractions.Fraction]  # Square-free n -> c.


def canonical(text: str) -> str | None:
  """Returns the canonical form of an irrational number, else None.

  Rational numbers are excluded, because sums would be evaluated: `1+1` must not
  be accepted where the answer is 2.
  """
  value = parse_surd(text)
  if value is None or not any(root > 1 for root in value):
    return None
  return "+".join(f"{value[root]}√{root}" for root in sorted(value))


def parse_surd(text: str) -> Surd | None:
  r"""Reads sums, products and ratios of integers, decimals and square roots.

  Args:
    text: text that may contain `\sqrt{n}`, `\sqrt n`, `√n`, `\frac{a}{b}`,
      `+ - * /`, `\cdot`, brackets, and implicit products as in `2\sqrt{3}`.

  Returns:
    The value; None if the text is not such a number, or too large.
  """
  tokens = _TOKEN.findall(text)
  if "".join(tokens) != re.sub(r"\s", "", text) or len(tokens) > _MOST_TOKENS:
    return None
  if max(map(len, tokens), default=0) > _MOST_DIGITS:
    return None
  tokens.reverse()
  try:
    value = _sum(tokens)
  except (ValueError, LookupError):
    return None
  return None if tokens else value


# Recursive descent: each function pops its tokens off the end of a list, and
# raises a ValueError or LookupError if they are not what it parses. The number
# of tokens bounds the depth.


def _read(tokens: list[str], *wanted: str) -> str:
  """Pops and returns the next token if it is in `wanted`; otherwise ''."""
  return tokens.pop() if tokens and tokens[-1] in wanted else ""


def _sum(tokens: list[str]) -> Surd:
  total, sign = {}, _read(tokens, "+", "-") or "+"
  while sign:
    for root, part in _product(tokens).items():
      total[root] = total.get(root, 0) + (part if sign == "+" else -part)
    sign = _read(tokens, "+", "-")
  return {root: part for root, part in total.items() if part}


def _product(tokens: list[str]) -> Surd:
  value = _factor(tokens)
  while True:
    if _read(tokens, "/"):
      value = _over(value, _factor(tokens))
    elif _read(tokens, *_TIMES) or (
      tokens and tokens[-1] in (*_ROOTS, _FRAC, "(")
    ):
      value = _times(value, _factor(tokens))
    else:
      return value


def _factor(tokens: list[str]) -> Surd:
  if _read(tokens, *_ROOTS):
    inner = _number(tokens, _ARGUMENT)
    if inner.keys() - {1}:
      raise ValueError("a root of a root")
    return _root(inner.get(1, fractions.Fraction(0)))
  if _read(tokens, _FRAC):
    top = _number(tokens, _ARGUMENT)
    return _over(top, _number(tokens, _ARGUMENT))
  return _number(tokens, _BRACKETS)


def _number(tokens: list[str], brackets: dict[str, str]) -> Surd:
  """Parses digits, or a sum in brackets."""
  token = tokens.pop()
  if token[0].isdigit():
    value = fractions.Fraction(token)
    return {1: value} if value else {}
  close, value = brackets[token], _sum(tokens)
  if tokens.pop() != close:
    raise ValueError(f"no {close}")
  return value


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
  """Returns √x as c·√n, using √(p/q) = √(p·q)/q."""
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
