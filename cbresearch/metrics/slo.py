"""What a client was promised, and how much of it was kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbresearch.metrics.basic import makespan
from cbresearch.trace import RequestRecord, Trace


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: what each request must stay within; None for no demand.

    Attributes:
        ttft: Seconds from arrival to the first token, at most.
        tpot: Mean seconds per output token after the first, at most; an output of one token has none, and
            keeps it.
        latency: Seconds from arrival to the last token, at most.

    Raises:
        ValueError: Nothing is demanded, or a demand is not a positive number of seconds.
    """

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        if not given:
            raise ValueError("an SLO demands nothing; give ttft, tpot or latency in seconds")
        for name, seconds in given.items():
            if not 0 < seconds < math.inf:
                raise ValueError(f"the SLO's {name} is {seconds!r}; give a positive number of seconds")

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request was served to its end within every demand."""
        if not record.is_complete:
            return False
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.latency, record.latency))
        return all(most is None or value is None or value <= most for most, value in pairs)


def slo_attainment(trace: Trace, slo: Slo) -> float | None:
    """Return the share of all requests that kept the SLO; refused, failed and aborted ones did not.

    Source: DistServe, OSDI 2024, 2.2.
    """
    if not trace.requests:
        return None
    return sum(map(slo.is_met, trace.requests)) / len(trace.requests)


def goodput(trace: Trace, slo: Slo) -> float | None:
    """Return the requests per second that kept the SLO, over the run's makespan.

    Source: as vLLM's `bench serve` defines it; DistServe's goodput is the largest rate with a wanted
    attainment (see `experiments.capacity`).
    """
    seconds = makespan(trace)
    return sum(map(slo.is_met, trace.requests)) / seconds if seconds else None


def fluidity_index(record: RequestRecord, first: float, following: float) -> float | None:
    """Return the share of a request's token deadlines that were met.

    A token that is early saves slack for those after it. One that is late misses its deadline and those that
    went by while it was waited for, and then begins afresh.

    Source: Etalon, arXiv 2407.07000, algorithm 1.

    Args:
        record: The request.
        first: Seconds from arrival to the first token's deadline.
        following: Seconds from one deadline to the next.

    Returns:
        1 − missed / all, between 0 and 1; None without a token.

    Raises:
        ValueError: A deadline is not a positive number of seconds.
    """
    if not (0 < first < math.inf and 0 < following < math.inf):
        raise ValueError(f"the deadlines are {first!r} and {following!r}; give positive numbers of seconds")
    gaps = _gaps(record)
    if not gaps:
        return None
    slack, num_missed, num_deadlines = 0.0, 0, 0
    for place, gap in enumerate(gaps):
        deadline = following if place else first
        num_deadlines += 1
        if gap <= slack + deadline:
            slack += deadline - gap
        else:
            missed = math.floor((gap - slack - deadline) / following) + 1
            num_missed += missed
            num_deadlines += missed - 1
            slack = 0.0
    return 1 - num_missed / num_deadlines


def _gaps(record: RequestRecord) -> Sequence[float]:
    return () if record.ttft is None else (record.ttft, *record.itl)
