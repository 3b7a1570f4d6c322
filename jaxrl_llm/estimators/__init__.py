"""Advantage estimators: pure functions from arrays to arrays."""

from jaxrl_llm.estimators.batch import whiten
from jaxrl_llm.estimators.egae import boundary_error, drop_tail, egae
from jaxrl_llm.estimators.entropy import (
  ClipBounds,
  EntropyStatistics,
  adaptive_clip,
  adaptive_temperature,
  entropy_code,
  entropy_statistics,
  redistribute,
)
from jaxrl_llm.estimators.gae import gae, lambda_returns
from jaxrl_llm.estimators.group import (
  group_relative,
  median_pivot,
  optimal_baseline,
  token_group_relative,
)
from jaxrl_llm.estimators.schedules import length_adaptive_lambda
from jaxrl_llm.estimators.shaping import penalize_kl, soft_overlong_punishment

__all__ = [
  "ClipBounds",
  "EntropyStatistics",
  "adaptive_clip",
  "adaptive_temperature",
  "boundary_error",
  "drop_tail",
  "egae",
  "entropy_code",
  "entropy_statistics",
  "gae",
  "group_relative",
  "lambda_returns",
  "length_adaptive_lambda",
  "median_pivot",
  "optimal_baseline",
  "penalize_kl",
  "redistribute",
  "soft_overlong_punishment",
  "token_group_relative",
  "whiten",
]
