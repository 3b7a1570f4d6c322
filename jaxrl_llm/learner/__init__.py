"""Trains models on judged responses: what a training loop is built from.

An `Algorithm` says what an update computes, members are the models that it
trains, and a `Learner` updates them; its state is a value.
"""

from jaxrl_llm.learner.algorithm import (
  Algorithm as Algorithm,
  Critic as Critic,
  MemberSpec as MemberSpec,
  ProcessorSpec as ProcessorSpec,
  Settings as Settings,
  View as View,
)
from jaxrl_llm.learner.core import make_algorithm as make_algorithm
from jaxrl_llm.learner.learner import Learner as Learner
from jaxrl_llm.learner.members import (
  critic_training as critic_training,
  make_member as make_member,
  policy_training as policy_training,
)
from jaxrl_llm.learner.parts import (
  Auxiliary as Auxiliary,
  Part as Part,
  part as part,
  then as then,
)
from jaxrl_llm.learner.optimizer import UpdateSettings as UpdateSettings
from jaxrl_llm.learner.state import (
  LearnerSettings as LearnerSettings,
  LearnerState as LearnerState,
)
