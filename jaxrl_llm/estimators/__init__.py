"""Advantage estimators: pure functions from arrays to arrays."""

from jaxrl_llm.estimators.distillation import (
  teacher_advantages as teacher_advantages,
)
from jaxrl_llm.estimators.egae import (
  boundary_error as boundary_error,
  drop_tail as drop_tail,
  egae as egae,
)
from jaxrl_llm.estimators.entropy import (
  ClipBounds as ClipBounds,
  EntropyStatistics as EntropyStatistics,
  adaptive_clip as adaptive_clip,
  adaptive_temperature as adaptive_temperature,
  entropy_code as entropy_code,
  entropy_statistics as entropy_statistics,
  redistribute as redistribute,
)
from jaxrl_llm.estimators.gae import (
  gae as gae,
  lambda_returns as lambda_returns,
)
from jaxrl_llm.estimators.group import (
  group_relative as group_relative,
  median_pivot as median_pivot,
  optimal_baseline as optimal_baseline,
  token_group_relative as token_group_relative,
)
from jaxrl_llm.estimators.shaping import (
  length_adaptive_lambda as length_adaptive_lambda,
  penalize_kl as penalize_kl,
  soft_overlong_punishment as soft_overlong_punishment,
  whiten as whiten,
)
