"""Which host of a fleet is broken, from what every host reports of itself.

Hosts of one role do the same work at the same time, so a healthy host changes
as the others do, whatever the job does. A host that changes in another way, and
stays so for minutes, is broken (Minder, Deng et al. 2024, arXiv 2411.01791).
Arrays are [H, S, K]: hosts, seconds, metrics. `fleet.denoiser` needs JAX and is
imported by its name.
"""

from jaxrl_llm.fleet.alarm import FEWEST, Alarm, detect, slow_hosts, watch
from jaxrl_llm.fleet.live import HostWatch
from jaxrl_llm.fleet.reports import Reports, read_reports
from jaxrl_llm.fleet.scores import THRESHOLD, fill_gaps, median_scores

__all__ = [
  "FEWEST",
  "THRESHOLD",
  "Alarm",
  "HostWatch",
  "Reports",
  "detect",
  "fill_gaps",
  "median_scores",
  "read_reports",
  "slow_hosts",
  "watch",
]
