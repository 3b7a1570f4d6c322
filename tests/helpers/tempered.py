"""A method that only adapts the sampling temperature, as HAPO does."""

from jaxrl_llm.learner import core

METHOD = f"{__file__}:tempered"  # For `method.use`.
SLIGHTLY = f"{__file__}:slightly"


def tempered(algorithm, s, *, tau=0.5):
  """Adds HAPO's logits processor to any algorithm."""
  hapo = core.find("hapo")(algorithm, s, tau=tau)
  return algorithm.change(processors=hapo.processors)


def slightly(algorithm, s):
  """Tempers so little that rounding differences stay small."""
  return tempered(algorithm, s, tau=0.05)
