"""A method that only adapts the sampling temperature, as HAPO does."""

from jaxrl_llm.learner import core

METHOD = f"{__file__}:tempered"  # For `method.use`.


def tempered(algorithm, s, *, tau=0.5):
  """Adds HAPO's logits processor to any algorithm."""
  hapo = core.find("hapo")(algorithm, s, tau=tau)
  return algorithm.change(processors=hapo.processors)
