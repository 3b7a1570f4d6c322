"""Methods of single variants of a study, for `method.use=FILE.py:NAME`."""

from jaxrl_llm.learner import Algorithm, Settings, core


def shuffled(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Draws prompts as without a method, but keeps the method's baseline."""
  del s
  return algorithm.change(prompts=None, prompt_settings={})


def step_scale(algorithm: Algorithm, s: Settings) -> Algorithm:
  """Scales steps as VCPO does, but keeps the baseline."""
  vcpo = core.find("vcpo")(algorithm, s)
  return algorithm.change(step_scale=vcpo.step_scale, whole_batch=True)
