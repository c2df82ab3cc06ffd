"""What a client was promised, and how much of it was kept."""

from dataclasses import dataclass

from cbresearch.checks import real
from cbresearch.metrics.basic import fraction, makespan
from cbresearch.trace import RequestRecord, Trace

__all__ = ["Slo", "goodput", "slo_attainment"]


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
            real(f"the SLO's {name}", seconds, positive=True, unit="seconds")

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request was served to its end within every demand."""
        if not record.is_complete:
            return False
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.latency, record.latency))
        return all(most is None or value is None or value <= most for most, value in pairs)


def slo_attainment(trace: Trace, slo: Slo) -> float | None:
    """Return the share of all requests that kept the SLO; rejected, failed and aborted ones did not.

    Source: DistServe, OSDI 2024, 2.2.

    Raises:
        TypeError: The SLO is something else.
    """
    return fraction(_num_kept(trace, slo), len(trace.requests))


def goodput(trace: Trace, slo: Slo) -> float | None:
    """Return the requests per second that kept the SLO, over the run's makespan.

    Source: as vLLM's `bench serve` defines it; DistServe's goodput is the largest rate with a wanted
    attainment (see `experiments.capacity`).

    Raises:
        TypeError: The SLO is something else.
    """
    return fraction(_num_kept(trace, slo), makespan(trace))


def _num_kept(trace: Trace, slo: Slo) -> int:
    if not isinstance(slo, Slo):
        raise TypeError(f"slo is {slo!r}; give an Slo, such as Slo(ttft=1.0)")
    return sum(map(slo.is_met, trace.requests))
