"""Checks of an algorithm's parts that users have written."""

import difflib
import functools
import inspect
from collections.abc import Collection

from jaxrl_llm.errors import InputError, as_input_error, located
from jaxrl_llm.learner import providers
from jaxrl_llm.learner.algorithm import Algorithm, Settings
from jaxrl_llm.masked import check_mode


def check_parts(
  algorithm: Algorithm, s: Settings, inputs: Collection[str]
) -> None:
  """Checks the modes, the arguments and the inputs of a user's parts.

  Args:
    algorithm: complete algorithm.
    s: settings of the run.
    inputs: names of registered token inputs.

  Raises:
    InputError: a part has another mode or other arguments than its place needs,
      or reads an input that the algorithm does not have.
  """
  for name, term in algorithm.auxiliary.items():
    with located(f"auxiliary loss {name!r}"):
      check_mode(term.mode, term.norm)
  for name, processor in algorithm.processors.items():
    what = f"logits processor {name!r}"
    advice = "its arguments must be distribution, context and state"
    with as_input_error(what, advice, TypeError):
      inspect.signature(processor.fn).bind("distribution", "context", "state")
  parts = algorithm.parts
  known = {"policy", "reference", *algorithm.members, *algorithm.companions}
  known |= {*algorithm.frozen} | ({"critic"} if algorithm.critic else set())
  rollout_reads = [algorithm.pruning.reads] if algorithm.pruning else []
  readers = {
    **{f"token input {name!r}": parts[name].reads for name in inputs},
    "loss.name": algorithm.policy_loss.reads,
    "estimator.name": parts["advantages"].reads,
    "loss.masks": parts["unwindowed_policy_mask"].reads,
    **{
      f"auxiliary loss {name!r}": (*term.loss.reads, term.mask)
      for name, term in algorithm.auxiliary.items()
    },
    **{f"member {k!r}": x.reads for k, x in algorithm.members.items()},
    **{f"metric {k!r}": x.reads for k, x in algorithm.metrics.items()},
    **{
      f"logits processor {k!r}": x.state.reads
      for k, x in algorithm.stateful_processors.items()
    },
  }
  gives = functools.partial(providers.gives, algorithm)
  for leaf in sorted({*algorithm.leaves, *rollout_reads}):
    needs = algorithm.needs([leaf])
    lacks = [x for x in needs if not (x in known or gives(x))]
    if gives(leaf) and not lacks:
      continue
    names = [name for name, reads in readers.items() if leaf in reads]
    where, why = names[0] if names else "the method", ""
    group, _, key = where.partition(".")
    if group in s:
      where = f"config.{where}={s[group][key]!r}"
      if s.method.use:
        where += f" with config.method.use={s.method.use!r}"
    if lacks:
      why = f" (it needs {lacks[0]!r})"
    elif near := difflib.get_close_matches(
      leaf, [*parts, *providers.OF_THE_BATCH, *algorithm.providers], 1, 0.8
    ):
      why = f" (did you mean {near[0]!r}?)"
    raise InputError(
      f"{where}: this part reads {leaf!r}, which the method does not have{why};"
      " rename the argument, or add the input with register.token_input or"
      " Algorithm.change"
    )
