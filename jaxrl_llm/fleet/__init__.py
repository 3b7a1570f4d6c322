"""Which host of a fleet is broken, from what every host reports of itself.

Hosts of one role do the same work at the same time, so a healthy host looks
like the others, whatever the job does. A host that stays unlike them for
minutes is broken (Minder, Deng et al. 2024, arXiv 2411.01791). Arrays are
[H, S, K]: hosts, seconds, metrics. `fleet.denoiser` needs JAX, and is imported
by its name.
"""

from jaxrl_llm.fleet.alarm import Alarm, Watch, detect, slow_hosts, watch
from jaxrl_llm.fleet.scores import (
  THRESHOLD,
  fill_gaps,
  joint,
  median_scores,
)

__all__ = [
  "THRESHOLD",
  "Alarm",
  "Watch",
  "detect",
  "fill_gaps",
  "joint",
  "median_scores",
  "slow_hosts",
  "watch",
]
