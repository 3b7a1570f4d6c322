"""Stop strings: where in a response a text is complete."""

from collections.abc import Callable, Sequence

_MARGIN = 4  # Tokens before a string, lest it lose the space it begins with.


def first_stop(
  tokens: Sequence[int],
  strings: Sequence[str],
  detokenize: Callable[[Sequence[int]], str],
  *,
  before: int,
) -> int | None:
  """Length of the shortest prefix whose text has one of the strings.

  Args:
    tokens: tokens of a response.
    strings: none of them empty.
    detokenize: tokens to text.
    before: tokens that were searched earlier and had none.

  Returns:
    The number of tokens, or None. What it is does not depend on `before`, that
    is on where the decoding was interrupted.
  """
  # A string can begin in tokens seen before: as many as it has bytes, since a
  # token has one at least, or more if control tokens without a text are there.
  enough = max(len(string.encode()) for string in strings) + _MARGIN
  size = enough
  while size < before:
    if len(detokenize(tokens[before - size : before])) >= enough:
      break
    size *= 2
  start = max(before - size, 0)
  has = lambda end: any(s in detokenize(tokens[start:end]) for s in strings)
  if not has(len(tokens)):
    return None
  return next(end for end in range(before + 1, len(tokens) + 1) if has(end))
