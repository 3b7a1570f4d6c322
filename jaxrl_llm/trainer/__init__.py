"""Runs: their components, the training loop, and its iteration."""

from jaxrl_llm.trainer.build import (
  make_run as make_run,
  update_settings as update_settings,
)
from jaxrl_llm.trainer.iteration import iterate as iterate
from jaxrl_llm.trainer.loop import (
  begin as begin,
  evaluate as evaluate,
  train as train,
)
from jaxrl_llm.trainer.run import (
  Run as Run,
  States as States,
  restore as restore,
  save as save,
)
