"""The position in a response at which a stop string is complete."""

import pytest

from jaxrl_llm.sampling.stops import first_stop


def _letters(tokens):
  return "".join(map(chr, tokens))


def _bytes(tokens):
  """Detokenizes like a tokenizer with characters of several tokens."""
  return bytes(tokens).decode("utf-8", errors="replace")


class TestFirstStop:
  @pytest.mark.parametrize(
    "text, strings, expected",
    [
      ("abcabc", ["c"], 3),
      ("abcabc", ["bc"], 3),
      ("abcabc", ["ca", "bca"], 4),
      ("abcabc", ["abcabc"], 6),
      ("abcabc", ["cb", "abcd", "x"], None),
      ("abcabc", ["x", "ab", "a"], 1),  # The first one completed.
      ("a", ["ab"], None),
      ("this is the x end of it and more", ["x end of it"], 23),
      ("this is the x end of it and more", ["n", "d"], 16),
    ],
  )
  def test_counts_the_tokens_that_complete_one(self, text, strings, expected):
    tokens = list(map(ord, text))
    for before in range(expected or len(text)):
      got = first_stop(tokens, strings, _letters, before=before)
      assert got == expected, before

  def test_a_token_may_have_many_characters_or_none(self):
    words = ["The", "", " answer", "", "", " is:", " 4", "\n\n", "Next"]
    detokenize = lambda tokens: "".join(words[t] for t in tokens)
    for strings, expected in (
      ([": 4\n"], 8),  # It ends inside a token.
      (["er is"], 6),
      (["The answer"], 3),
      (["is: 4\n\nN"], 9),
    ):
      for before in range(expected):
        got = first_stop(range(9), strings, detokenize, before=before)
        assert got == expected, (strings, before)

  def test_any_number_of_control_tokens_may_be_inside(self):
    tokens = [*b"so", *[0] * 40, *b"up"]
    detokenize = lambda tokens: _letters(filter(None, tokens))
    for before in range(43):
      assert first_stop(tokens, ["ou"], detokenize, before=before) == 43, before

  @pytest.mark.parametrize("string", ["é", "∎", "🙂", "∎ 🙂", "x∎"])
  def test_a_character_may_have_many_tokens(self, string):
    tokens = list("ab ∎é🙂 x∎ 🙂é".encode())
    lengths = [
      end for end in range(1, len(tokens) + 1) if string in _bytes(tokens[:end])
    ]
    for before in range(lengths[0]):
      got = first_stop(tokens, [string], _bytes, before=before)
      assert got == lengths[0], before
