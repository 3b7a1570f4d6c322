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
      *(("so 3+4 = 7.", "3+4 = 7"), ("it costs $1,234.50.", "$1,234.50")),
      *(("it is -5", "-5"), ("5-3", "5-3"), ("x=-3", "x=-3")),
      *(("it is \u22125", "\u22125"), ("5\u22123", "5\u22123")),
      *(("pages 10-12", "10-12"), ("a fraction 3/4 of it", "3/4")),
      *(("about .5", ".5"), ("1,2,3", "1,2,3"), ("#### 18", "18")),
      *((r"at 3, so $\frac{3}{4}$.", r"$\frac{3}{4}$"), ("2^10", "2^10")),
      *((r"\(x\) is \[ 2 \]", r"\[ 2 \]"), ("$3$ or $4$", "$3$ or $4$")),
      *(("buys at $5 and sells at $8.", "$8"), ("at 3:30", "3:30")),
      *(("is 2 + 3", "2 + 3"), ("in (3, 4)", "(3, 4)"), ("2x + 3", "2x + 3")),
      *(("2 1/2 pies", "2 1/2"), ("1 234", "1 234"), (r"2 \pi", r"2 \pi")),
      *(
        ("12 cm^2", "12"),
        ("12 cm\xb2", "12"),
        ("9.8 m/s^2", "9.8"),
        ("H2O", "H2O"),
      ),
      *(("Answer: 72. It took 3 steps", "72"), ("<answer>7</answer>", "7")),
      *(("#### **72**\nSo", "72"), ("#### 72 ####", "72"), ("####72", "72")),
      *(("#### **Answer:** 72 kg", "72 kg"), ("#### Total: **7**", "7")),
      *(("#### 72\n#### End", "72"), ("3 ran. #### Ann", "Ann")),
      *(("#### Step 1: add\nso 2+2=4.", "2+2=4"), ("#### 3:30", "3:30")),
      *(("answer: 72\n\n#### Why\n36*2", "72"), ("#### 1. Add\n4", "4")),
      *((r"\boxed{3}</think> It is 4", "4"), ("<think>3</think>", None)),
      *((r"4 <think>\boxed{3}", "4"), (r"<think>\boxed{3}", None)),
      *((r"[THINK]3[/THINK]4", "4"), (r"so \boxed{7", None)),
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
      *(("€72", "72"), ("72£", "72"), ("72 USD", "72"), ("(72)", "72")),
      *(("72 km/h", "72"), ("72 m^2", "72"), ("72 cm\xb2", "72")),
      *(("72kg", "72"), ("72/hour", "72"), ("72°C", "72"), ("72,", "72")),
      *((r"\bf 72", "72"), ("**72**", "72"), (r"\approx 72", "72")),
      *(("9*8 = 72", "72"), ("9 x 8 = 72", "72"), ("f(2) = 72", "72")),
      *((r"\text{Total} = 72", "72"), (r"\frac{9}{2} = 4.5", "4.5")),
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
      *(("2x = 6", "6"), ("x+y = 6", "6"), ("x > 6", "6"), ("x=6,y=4", "4")),
      *(("5!", "5"), ("2xy", "2"), ("5m", "5"), ("3 pi/hour", "3")),
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

  @pytest.mark.parametrize(
    "text, number",
    [
      *(("It costs \\$5 and then $8.", "8"), ("from $5, it rose by $3", "3")),
      *(("9 * 2 = $18 every day", "18"), ("16 - 3 = <<16-3=13>>13 eggs", "13")),
      *(("Total:8/2=4 balls", "4"), ("12/20 x 100% = 60% of them", "60")),
      *((r"Hence \[9 \times 2 = 18\]", "18"), ("it is -$5.", "-5")),
      *(
        (r"3 of \frac{3}{4}.", "3/4"),
        (r"$\frac34$", "3/4"),
        ("1 234", "1234"),
      ),
      *(("(72).", "72"), ("3 1/2 hours", "7/2"), ("the answer is 5!", "5")),
      *(('He said "5".', "5"), ("$x = 5$ dollars", "5"), ("*5*", "5")),
    ],
  )
  def test_numbers_at_the_end_are_read(self, text, number):
    assert math.numeric(text, number, finished=True).correct

  @pytest.mark.parametrize(
    "piece",
    [
      *(
        r"\(",
        r"\[",
        "$",
        "$$",
        "$x",
        r"\$",
        "(",
        "(1",
        "{1",
        r"\{",
        "1 ",
        "1 - ",
      ),
      *("x + ", "1=", "$a$, ", "$a$ and ", "1 or ", "1 000 ", "<<", "<a", "**"),
      *("#### a: ", "answer is ", r"\pi ", r"$a\$", "<think>", "</think>", "'"),
    ],
  )
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
