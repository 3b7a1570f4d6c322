"""Advantage estimators: pure functions from arrays to arrays."""

from jaxrl_llm.estimators.gae import gae, lambda_returns
from jaxrl_llm.estimators.group import group_relative
from jaxrl_llm.estimators.schedules import length_adaptive_lambda

__all__ = [
  "gae",
  "group_relative",
  "lambda_returns",
  "length_adaptive_lambda",
]
