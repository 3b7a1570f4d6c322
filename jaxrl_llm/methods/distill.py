"""On-policy distillation: a teacher scores the policy's own responses.

    A_t = log π_teacher(y_t) - log π_old(y_t)

Differs from the other methods in that no reward is needed: every token has its
own advantage, from a frozen model with the same tokenizer. With several
teachers, the data column `teacher` holds the index of each row's teacher, from
0.

Reference: Thinking Machines Lab 2025, "On-Policy Distillation"; Agarwal et al.
2023 (GKD), arXiv:2306.13649.
"""

import numpy as np

from jaxrl_llm import estimators
from jaxrl_llm.config import Path
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, part, providers

_COLUMN = "teacher"


def distill(
  algorithm: Algorithm, s: Settings, *, teachers: Path = ""
) -> Algorithm:
  """Takes the advantages from one teacher, or from the teacher of each row.

  Args:
    algorithm: any algorithm; its critic is dropped.
    s: settings of the run.
    teachers: Directory of the teacher, or several separated by commas.

  Raises:
    InputError: There is no teacher.
  """
  paths = [path for path in teachers.split(",") if path]
  if not paths:
    raise InputError(
      "'distill' needs a teacher; give method.distill.teachers its directory,"
      " or several separated by commas"
    )
  names = [f"teacher_{i}" for i in range(len(paths))]
  column = (providers.COLUMN + _COLUMN,) if len(paths) > 1 else ()
  return algorithm.change(
    advantages=part(estimators.teacher_advantages),
    critic=None,
    frozen=dict(zip(names, paths)),
    providers=providers.provider(
      "teacher_logprobs", teacher_logprobs, "policy", *names, *column
    ),
  )


def teacher_logprobs(scoring: providers.Scoring) -> np.ndarray:
  """Provides the log-probs of each row's teacher, [B, T].

  Raises:
    InputError: A row has the index of no teacher.
  """
  names = [x for x in scoring.learner.frozen if x.startswith("teacher_")]
  ids = scoring.rollout.example_id
  chosen = np.zeros(len(ids), int)
  if len(names) > 1:
    chosen = scoring.learner.column(_COLUMN, ids)
  wrong = np.flatnonzero(~np.isin(chosen, range(len(names))))
  if wrong.size:
    raise InputError(
      f"row {ids[wrong[0]]} of the data: column {_COLUMN!r} is"
      f" {chosen[wrong[0]]:g}; give 0 to {len(names) - 1}, the index of its"
      " teacher in config.method.distill.teachers"
    )
  out = scoring.zeros()
  for number, name in enumerate(names):
    theirs = chosen == number
    scored = scoring.tokens(name, providers.LOGPROBS, rows=theirs)
    out[theirs] = scored[theirs]
  return out
