r"""Numeric answers: extraction, equality, and hostile text."""

import contextlib
import fractions
import random
import sys

import pytest
from helpers import cases

from jaxrl_llm.rewards import math

_CASES = cases.load("math")


@cases.table("text, expected", _CASES["boxed"])
def test_the_last_whole_box(text, expected):
  assert math.last_boxed(text) == expected


class TestExtractAnswer:
  @cases.table("text, expected", _CASES["extracted"])
  def test_cases(self, text, expected):
    assert math.extract_answer(text) == expected

  def test_too_long_ones_are_not_read(self):
    assert math.extract_answer(r"\boxed{" + "1" * 600 + "}") is None
    assert math.extract_answer(r"\boxed{1}" + "x" * 20_000) is None

  @pytest.mark.parametrize(
    "text, expected",
    [
      ("12 or 120", None),
      ("12 or 12.", None),
      ("7 is it, so", None),
      (r"\boxed{7} and 12", "7"),
      ("#### 7\n", "7"),
      ("first 5, #### 12", None),
      ("12", None),
    ],
  )
  def test_a_cut_text_needs_a_whole_box_or_line(self, text, expected):
    assert math.extract_answer(text, finished=False) == expected


# (size, path of a file that must not be created) -> text of a policy.
_PATTERNS = [
  lambda n, path: f"__import__('os').system('touch {path}')" * n,
  lambda n, path: f"open('{path}', 'w')" + " " * n,
  lambda n, path: f"(lambda: exec(\"open('{path}','w')\"))()" + ";" * n,
  lambda n, path: "9" * n + "**9" * n,
  lambda n, path: r"\sqrt{" * n + "5" + "}" * n,
  lambda n, path: r"\frac{1}{" * n + "7" + "}" * n,
  lambda n, path: r"\frac" * n + "12" * n,
  lambda n, path: "(" * n + r"\sqrt{8}" + ")" * n,
  lambda n, path: "+".join(rf"\sqrt{{{i}}}" for i in range(2, n + 2)),
  lambda n, path: r"(\sqrt{2}+\sqrt{3})" * n,
  lambda n, path: rf"\sqrt{{{'9' * n}}}",
  lambda n, path: rf"{'9' * n}\sqrt{{999983}}",
  lambda n, path: r"\sqrt{2}/" * n + r"\sqrt{3}",
  lambda n, path: "-" * n + r"\sqrt{5}",
  lambda n, path: r"\sqrt" + " " * n + "5",
  lambda n, path: "(" + "1," * n + "2)",
  lambda n, path: "[" + r"\sqrt{7}," * n + "2)",
  lambda n, path: r"\{" * n + r"\sqrt{7},1" + r"\}" * n,
  lambda n, path: f"{n}/0",
  lambda n, path: r"\frac{\sqrt{7}}{0}" * n,
  lambda n, path: "0." + "3" * n + r"\sqrt{7}",
  lambda n, path: "√" * n,
  lambda n, path: "".join(map(chr, range(0x660, 0x660 + n))),
  lambda n, path: r"\boxed{" * n + r"\sqrt{2}" + "}" * (n - 1),
  lambda n, path: "7" + r"\sqrt{7}" * n + "1",
]
_AUDITED = {"exec", "compile", "open", "os.system", "subprocess.Popen"}


@pytest.fixture
def audited():
  """Records executed code and opened files."""
  events = []
  watching.append(events)
  yield events
  watching.remove(events)


watching = []


@pytest.fixture(autouse=True, scope="module")
def _audit():
  # A hook cannot be removed: one for all tests.
  sys.addaudithook(
    lambda event, _: [w.append(event) for w in watching if event in _AUDITED]
  )


class TestNumeric:
  @cases.table("response, gold", _CASES["equal"])
  def test_equal(self, response, gold):
    verdicts = [
      math.numeric(rf"so it is \boxed{{{spelled}}}.", gold, finished=True)
      for spelled in (response, math.gold_answer(gold))
    ]
    assert verdicts[0].correct
    assert verdicts[0] == verdicts[1]  # Votes are counted this way.

  @cases.table("response, gold", _CASES["unequal"])
  def test_not_equal(self, response, gold):
    assert not math.numeric(
      rf"\boxed{{{response}}}", gold, finished=True
    ).correct

  @pytest.mark.parametrize(
    "text", [r"\sqrt+2{", r"\sqrt)2{", "√√2{", r"\frac+\sqrt2{*1{"]
  )
  def test_roots_and_fractions_need_brackets_or_a_number(self, text):
    gold = r"\sqrt{2}"
    assert math.numeric("#### √2", gold, finished=True).correct
    assert not math.numeric(f"#### {text}", gold, finished=True).correct

  @cases.table("parts", [*_CASES["hostile"], ["\x00\ud800\u0661"]])
  def test_hostile_text_is_just_wrong(self, parts):
    response = last = ""
    for part in parts:
      response += part if isinstance(part, str) else last * (part - 1)
      last = part
    for finished in (True, False):
      assert not math.numeric(response, "42", finished=finished).correct

  @pytest.mark.parametrize("pattern", _PATTERNS)
  def test_nothing_that_is_written_is_run(self, pattern, tmp_path, audited):
    canary = tmp_path / "canary"
    for size in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233):
      answer = pattern(size, str(canary))
      for text in (answer, rf"\boxed{{{answer}}}", f"#### {answer}"):
        assert not math.numeric(text, r"\sqrt{7}", finished=True).correct
    assert not canary.exists() and audited == []

  def test_random_text_never_raises(self):
    pieces = [*"0123456789+-/.,{}$%= #\n", r"\boxed{", r"\frac", r"\text{"]
    pieces += [r"\left(", r"\$", "####", "x", "cm", r"\circ", "\u2212"]
    rng = random.Random(0)
    for _ in range(3000):
      text = "".join(rng.choices(pieces, k=rng.randrange(1, 30)))
      answer = math.extract_answer(text)
      if answer is not None and math.gold_answer(answer) == answer:
        assert math.numeric(text, answer, finished=True).correct
      math.normalize_answer(text)

  def test_spellings_of_random_fractions_agree(self):
    rng = random.Random(1)
    for _ in range(500):
      top, bottom = rng.randint(-999, 999), rng.choice([1, 2, 4, 5, 8, 25])
      exact = fractions.Fraction(top, bottom)
      spellings = [
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        f"{float(exact)}",
        f"${exact}$",
        f"{float(exact):,} kg",
      ]
      for text in spellings:
        assert math.parse_number(math.normalize_answer(text)) == exact, text


# No number is the answer, in sentences as in formulas.
_NO_NUMBER = (
  r"""
x^2; x_2; 2^{10}; 2^10; 10^{-5}; 10^-5; 2^x; x²; 52_8; \log_2 8
\sqrt[3]{5}; \sqrt 2; 3:30; 3:4; 1.5e6; 1.5e-6
3*10^5; 3 \times 10^5; 3 x 10^5; 5/1/2024; 2024-05-01
2nd; (3,4); (3, 4); [3, 4); {3, 4}; \{3, 4\}; 3,4; 72,5; 3 or 4; 3-4; 5 ± 2
f(3); |x-3|; 2x; 3x; 2 + 3; x + 3; 5 - 3; 3 + 2i; 2x + 3
x > 3; 3 < x; 2x = 6; \binom{5}{3}
2\sqrt{3}; 2√3; 2 \pi; \pi; 2π; x1; H2O; v2.5; 5C3
""".replace("\n", ";")
  .strip(";")
  .split(";")
)
_FORMS = [
  *("With 3 of 4, the result is therefore {}.", "The answer is {}"),
  *("Answer: **{}**", "So ${}$.", r"It is \({}\).", "$$\n{}\n$$", "#### {}"),
]


class TestSentences:
  @pytest.mark.parametrize("written", map(str.strip, _NO_NUMBER))
  def test_no_number_is_read_out_of_an_expression(self, written):
    for form in _FORMS:
      text = form.replace("{}", written)
      found = math.numeric(text, written, finished=True)
      assert math.parse_number(found.extracted or "") is None, text
      assert found.correct or form[:4] == "With", text

  @cases.table("text, number", _CASES["sentences"])
  def test_numbers_at_the_end_are_read(self, text, number):
    assert math.numeric(text, number, finished=True).correct

  @cases.table("piece", _CASES["pieces"])
  def test_hostile_text_is_read_in_linear_time(self, piece):
    text = (piece * 100_000)[:100_000] + " 7"
    for form in ("{}", "#### {}", "the answer is {}"):
      math.numeric(form.replace("{}", text), "42", finished=True)


class TestMathVerify:
  def test_symbolic_answers_agree(self, capfd):
    pytest.importorskip("math_verify")
    from jaxrl_llm import rewards

    with contextlib.closing(
      rewards.RewardPool(
        rewards.get_reward("math_verify"), workers=1, deadline_s=60.0
      )
    ) as pool:
      cases = [
        (r"\boxed{\frac{\sqrt{12}}{2}}", r"\sqrt{3}", True),
        *((r"\boxed{2}", "3", False), ("none", "3", False)),
        # Whatever `numeric` accepts, although the library does not.
        *((r"\boxed{18.90 dollars}", "18.9", True), ("1 234", "1234", True)),
        # An expression that ends a sentence reaches the library as a whole.
        *(
          (r"So $\frac{x+x}{4}$.", r"\frac{x}{2}", True),
          ("2^10", "1024", True),
        ),
        *((r"So $\frac{3}{4}$.", "4", False), ("3 1/2", "2", False)),
        *(("$3$ or $4$", "4", False), ("$4$ or $3$", r"\{3, 4\}", True)),
        (r"<think>\boxed{x}</think> $2x$", "2x", True),
      ]
      texts, answers, right = zip(*cases)
      verdicts = pool.judge(
        [
          {"response": r, "answer": a, "finished": True, "columns": {}}
          for r, a in zip(texts, answers)
        ]
      )
    assert tuple(v.correct for v in verdicts) == right
    assert not any(v.error for v in verdicts)
    assert not capfd.readouterr().err  # No time-limit warnings.
