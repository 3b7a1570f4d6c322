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

from jaxrl_llm import estimators, register
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import choices, parts, providers

_COLUMN = "teacher"


def _directories(settings: choices.Settings) -> list[str]:
  """Returns the directories of the teachers, in order."""
  paths = settings["teachers"] if "teachers" in settings else ""
  return [path for path in str(paths).split(",") if path]


def make_teachers(settings: choices.Settings) -> dict[str, str]:
  """Returns the directories of the teachers by name.

  Raises:
    InputError: There are no teachers.
  """
  paths = _directories(settings)
  if not paths:
    raise InputError(
      "config.estimator.settings: 'distillation' needs a teacher; give its"
      " directory, {'teachers': DIR}, or several separated by commas"
    )
  return {f"teacher_{i}": path for i, path in enumerate(paths)}


def make_estimator(settings: choices.Settings) -> parts.Part:
  """Returns the part that reads the only teacher, or each row's teacher."""
  several = len(_directories(settings)) > 1
  name = "chosen_teacher_logprobs" if several else "teacher_logprobs"
  return parts.part(estimators.teacher_advantages, teacher_logprobs=name)


def teacher_logprobs(scoring: providers.Scoring) -> np.ndarray:
  """Provides the log-probs of the only teacher, [B, T]."""
  return _scores(scoring, np.zeros(len(scoring.rollout.lengths), int))


def chosen_teacher_logprobs(scoring: providers.Scoring) -> np.ndarray:
  """Provides the log-probs of each row's teacher, [B, T].

  Raises:
    InputError: A row has the index of no teacher.
  """
  ids = scoring.rollout.example_id
  chosen = scoring.learner.column(_COLUMN, ids)
  count = len(_teachers(scoring))
  wrong = np.flatnonzero(~np.isin(chosen, range(count)))
  if wrong.size:
    raise InputError(
      f"row {ids[wrong[0]]} of the data: column {_COLUMN!r} is"
      f" {chosen[wrong[0]]:g}; give 0 to {count - 1}, the index of its teacher"
      " in config.estimator.settings"
    )
  return _scores(scoring, chosen)


def _teachers(scoring: providers.Scoring) -> list[str]:
  return [x for x in scoring.learner.frozen if x.startswith("teacher_")]


def _scores(scoring: providers.Scoring, chosen: np.ndarray) -> np.ndarray:
  """Scores each row with its teacher."""
  out = scoring.zeros()
  for number, name in enumerate(_teachers(scoring)):
    theirs = chosen == number
    scored = scoring.tokens(name, providers.LOGPROBS, rows=theirs)
    out[theirs] = scored[theirs]
  return out


choices.ESTIMATORS["distillation"] = make_estimator
choices.FROZEN["teachers"] = make_teachers
register.leaf(
  "teacher_logprobs", teacher_logprobs, needs=("policy", "teachers")
)
register.leaf(
  "chosen_teacher_logprobs",
  chosen_teacher_logprobs,
  needs=("policy", "teachers", providers.COLUMN + _COLUMN),
)
