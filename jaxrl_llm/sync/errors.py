"""The error of a sampler that does not hold what it should."""

from jaxrl_llm.errors import InputError


class SyncError(InputError):
  """Weights or a patch of them are not what they are said to be.

  One line that names the leaf, the versions and what to do.
  """
