r"""Numeric answers: extraction, equality, and hostile text."""

import contextlib
import fractions
import random
import sys

import pytest

from jaxrl_llm.rewards import math


class TestLastBoxed:
  @pytest.mark.parametrize(
    "text, expected",
    [
      *((r"\boxed{5}", "5"), (r"\boxed{1} then \boxed{2}", "2")),
      (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
      *((r"\boxed{1} and \boxed{2", "1"), (r"\boxed{2 \boxed{3}", "3")),
      *((r"\boxed{a \boxed{3} b}", "3"), (r"\boxed{4}}", "4")),
      *((r"{ \boxed{4}", "4"), (r"\boxed{\{1,2\}}", r"\{1,2\}")),
      *((r"\boxed {7}", "7"), (r"\fbox{7}", "7"), (r"\\boxed{7}", "7")),
      *((r"boxed{7}", None), (r"\boxed{", None), (r"\boxed{}", "")),
      *((r"\boxed{1} \text{unit}", "1"), ("", None)),
      (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
      (r"\boxed{1 \\{2}}", r"1 \\{2}"),
    ],
  )
  def test_cases(self, text, expected):
    assert math.last_boxed(text) == expected


class TestExtractAnswer:
  @pytest.mark.parametrize(
    "text, expected",
    [
      *(("so 3+4 = 7.", "7"), ("it costs $1,234.50 in all", "$1,234.50")),
      *(("it is -5", "-5"), ("5-3", "3"), ("x=-3", "-3")),
      *(("it is \u22125", "\u22125"), ("5\u22123", "3")),
      *(("pages 10-12", "12"), ("a fraction 3/4 of it", "3/4")),
      *(("about .5", ".5"), ("1,2,3", "3"), ("#### 18", "18")),
      *(("#### 1,000\nand 7", "1,000"), ("#### 3\n#### 4\n", "4")),
      *((r"#### 3 but \boxed{4}", "4"), (r"\boxed{}", None)),
      *(("no number", None), ("", None)),
      *(
        (r"\boxed{" + "1" * 600 + "}", None),
        (r"\boxed{1}" + "x" * 20_000, None),
      ),
    ],
  )
  def test_cases(self, text, expected):
    assert math.extract_answer(text) == expected

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
  @pytest.mark.parametrize(
    "response, gold",
    [
      *(("18", "18"), ("18.", "18"), ("18.0", "18"), ("+18", "18")),
      *(("1,000,000", "1000000"), ("1000", "1,000"), ("1{,}234", "1234")),
      *(("{5}", "5"), ("$18$", "18"), (r"\$18", "18")),
      *((r"\$1,234.50", "1234.5"), ("50%", "50"), (r"50\%", "50")),
      *((r"18\text{ cm}", "18"), (r"18~\mathrm{cm}^2", "18")),
      *(("18 dollars", "18"), ("18 square feet", "18"), ("5 cm^2", "5")),
      *((r"90^\circ", "90"), (r"90^{\circ}", "90"), (r"\frac{1}{2}", "0.5")),
      *((r"\dfrac{1}{2}", "1/2"), (r"\tfrac12", "1/2")),
      *((r"-\frac{3}{4}", "-0.75"), (r"\frac{-3}{4}", "-3/4")),
      *((r"\frac{2}{4}", r"\frac{1}{2}"), (r"1\frac{1}{2}", "3/2")),
      *((r"1 \frac{1}{2}", "3/2"), (r"-2\,\frac12", "-2.5")),
      *(("1 1/2", "1.5"), ("11/2", "5.5"), (r"\text{Evelyn}", "Evelyn")),
      (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
      *(("x = 5", "5"), ("x=5", "x = 5"), ("\u22125", "-5"), (".5", "0.5")),
      *(("0.10", "0.1"), ("-0", "0"), (r"2\sqrt{3}", r"2\sqrt{3}")),
      *((r"x^2 + 1", "x^2+1"), ("18", "$18$")),
      *((r"5\text{ million}", "5 million"), (r"2\text{ or }3", "2 or 3")),
      *((r"\frac{2x}{3}", "2x/3"), (r"\dfrac3{2x}", r"\frac{3}{2x}")),
      *(("18", "She makes 9*2=18. #### 18"), ("18", r"\boxed{18}")),
      (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
      *((r"\sqrt{12}", r"2\sqrt{3}"), (r"2\sqrt3", r"2 \cdot \sqrt{3}")),
      (r"\sqrt{\frac{1}{3}}", r"\dfrac{\sqrt{3}}{3}"),
      (r"\frac{\sqrt{5}-1}{2}", r"\frac{-1+\sqrt{5}}{2}"),
      (r"\frac{1}{4}(2+2\sqrt{5})", r"\frac{1+\sqrt5}{2}"),
      *((r"x = -\sqrt 8", "-2√2"), (r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}")),
      ("(1, 0.5)", r"\left(1,\frac{1}{2}\right)"),
      (r"[2,\sqrt{8})", r"\left[ 2, 2\sqrt{2} \right)"),
      (r"\{0.5, 2\}", r"\{\frac12,2\}"),
      ("(" * 25 + r"\sqrt2" + ")" * 25, r"\sqrt2"),
    ],
  )
  def test_equal(self, response, gold):
    verdicts = [
      math.numeric(rf"so it is \boxed{{{spelled}}}.", gold, finished=True)
      for spelled in (response, math.gold_answer(gold))
    ]
    assert verdicts[0].correct
    assert verdicts[0] == verdicts[1]  # Votes are counted this way.

  @pytest.mark.parametrize(
    "response, gold",
    [
      *(("19", "18"), ("-18", "18"), ("180", "18"), ("0.333333", "1/3")),
      *(("9+9", "20-2"), ("1 1/0", "1"), (r"\sqrt{2})", r"\sqrt{2}")),
      (r"2\sqrt{3}+\sqrt{\sqrt{2}}", r"2\sqrt{3}"),
      *(("1e3", "1000"), ("10^3", "1000"), ("9+9", "18"), ("1/0", "0")),
      *((r"\frac{1}{0}", "1"), ("1,2", "12"), ("1,23", "123"), (r"\{5\}", "5")),
      *(("{1}{2}", "12"), ("18, 19", "18"), ("(1,2)", "12"), ("2x", "2")),
      *((r"2\pi", "2"), (r"2\sqrt{3}", "2"), (r"\pi", "3"), ("3 or 4", "3")),
      *(("2 x", "2"), ("2 pi", "2"), (r"\frac{x+1}{2}", "x+1/2")),
      *(("5 million", "5"), ("5 thousand dollars", "5"), (r"\text{A}", "B")),
      *((r"5\text{ million}", "5"), (r"2 \text{ or } 3", "23")),
      *((r"2\text{ thirds}", "2"), ("5 squared", "5"), ("2 plus two", "2")),
      *(("", "0"), ("None", "0"), (r"2\sqrt{3}", r"3\sqrt{2}")),
      *((r"\sqrt[3]{2}", r"\sqrt{2}"), (r"\sqrt{-4}", r"\sqrt{4}")),
      (r"\frac{1}{2x}", r"\frac{1}{2}x"),
      (r"\frac{1}{2n}(n+1)", r"\frac{1}{2}n(n+1)"),
      (r"\sqrt{4}", "2"),  # Not evaluated.
      (r"\sqrt{2}\sqrt{2}", "2"),
      ("1.41421356", r"\sqrt{2}"),
      (r"\sqrt{2}, -\sqrt{2}", r"\sqrt{2}"),
      (r"\pm\sqrt{2}", r"\sqrt{2}"),
      ("(1,2)", "(2,1)"),
      ("(1,2)", "[1,2]"),
      ("(1,2,3)", "(1,2)"),
      ("(1,2)", "1,2"),
    ],
  )
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

  @pytest.mark.parametrize(
    "response",
    [
      "{" * 3000,
      r"\boxed{" * 3000,
      r"\boxed{" * 3000 + "1" + "}" * 2999,
      r"\frac{" * 3000 + "}" * 3000,
      r"\boxed{9^{9^{9^{9}}}}",
      r"\boxed{1e999999999}",
      "1" * 10**6,
      "1," * (10**6 // 2),
      "1,234" * 10**5,
      "1/" * 10**5,
      "-" * 10**6,
      "a" * 10**6,
      "####" * 10**5,
      "=" * 10**6,
      r"\boxed{" + "x " * 250 + "}",
      r"\boxed{1" + " a" * 250 + "}",
      r"\boxed{1" + "a" * 500 + "!}",
      r"\boxed{" + " " * 500 + "}",
      r"\boxed{" + "x_" * 250 + "=}",
      r"\boxed{" + r"\text{" * 60 + "}" * 60 + "}",
      "\x00\ud800\u0661",
    ],
  )
  def test_hostile_text_is_just_wrong(self, response):
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


class TestMathVerify:
  def test_symbolic_answers_agree(self, capfd):
    pytest.importorskip("math_verify")
    from jaxrl_llm import rewards

    with contextlib.closing(
      rewards.RewardPool(
        rewards.get_reward("math_verify"), workers=1, deadline_s=60.0
      )
    ) as pool:
      texts = [r"\boxed{\frac{\sqrt{12}}{2}}", r"\boxed{2}", "none"]
      answers = [r"\sqrt{3}", "3", "3"]
      verdicts = pool.judge(
        [
          {"response": r, "answer": a, "finished": True, "columns": {}}
          for r, a in zip(texts, answers)
        ]
      )
    assert [v.correct for v in verdicts] == [True, False, False]
    assert not any(v.error for v in verdicts)
    assert not capfd.readouterr().err  # No time-limit warnings.
