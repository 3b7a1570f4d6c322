"""Stop strings: finds the token of a response that completes one."""

from collections.abc import Callable, Sequence

_MARGIN = 4  # Tokens before a string: decoders may drop a leading space.


def first_stop(
  tokens: Sequence[int],
  strings: Sequence[str],
  detokenize: Callable[[Sequence[int]], str],
  *,
  before: int,
) -> int | None:
  """Returns the length of the shortest prefix that contains a stop string.

  Args:
    tokens: tokens of a response.
    strings: stop strings, none of them empty.
    detokenize: tokens to text.
    before: number of tokens searched earlier, which contain no stop string.

  Returns:
    The number of tokens, or None. The result does not depend on `before`, that
    is, on where decoding was interrupted.
  """
  # A string may begin in tokens searched before: at most as many as it has
  # bytes, since a token has at least one, or more if control tokens without
  # text are among them.
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
