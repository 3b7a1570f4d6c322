"""Finds faulty hosts of a fleet in the metrics that every host reports.

Hosts of one role do the same work at the same time, so the metrics of healthy
hosts change alike, whatever the job does. A host whose metrics differ for
minutes is faulty (Minder, Deng et al. 2024, arXiv 2411.01791). Arrays are
[H, S, K]: hosts, seconds, metrics.
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
