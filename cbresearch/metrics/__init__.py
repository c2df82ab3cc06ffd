"""What a run achieved, measured from its `Trace` alone; `formulas` predicts the same quantities.

A quantity that the trace does not define (a mean of nothing, a rate over no time) is None, never 0.
Rejected requests are counted and enter nothing else. Step-weighted means count each step once, time-weighted
ones count it by its duration; they differ where a step's duration depends on what is in it.
"""

from cbresearch.metrics.basic import *  # noqa: F403
from cbresearch.metrics.clients import *  # noqa: F403
from cbresearch.metrics.cost import *  # noqa: F403
from cbresearch.metrics.intervals import *  # noqa: F403
from cbresearch.metrics.pool import *  # noqa: F403
from cbresearch.metrics.queues import *  # noqa: F403
from cbresearch.metrics.reporting import *  # noqa: F403
from cbresearch.metrics.slo import *  # noqa: F403
from cbresearch.metrics.tables import *  # noqa: F403
