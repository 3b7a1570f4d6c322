"""The position in a response at which a stop string is complete."""

import pytest

from jaxrl_llm.sampling.stops import first_stop


def _letters(tokens):
  return "".join(map(chr, tokens))


def _bytes(tokens):
  """Detokenizes like a tokenizer with characters of several tokens."""
  return bytes(tokens).decode("utf-8", errors="replace")


def _find(text, strings, before=0):
  return first_stop(list(map(ord, text)), strings, _letters, before=before)


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
    ],
  )
  def test_counts_the_tokens_that_complete_one(self, text, strings, expected):
    assert _find(text, strings) == expected

  @pytest.mark.parametrize("strings", [["end"], ["n", "d"], ["x end of it"]])
  def test_does_not_depend_on_where_it_was_looked_at_before(self, strings):
    text = "this is the x end of it and more"
    length = _find(text, strings)
    assert length is not None
    for before in range(length):
      assert _find(text, strings, before) == length
      assert _find(text[:before], strings) is None

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
