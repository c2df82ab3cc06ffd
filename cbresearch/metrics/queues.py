"""Queues over time, from the requests' own times: exact, whatever a step's length."""

import numpy as np

from cbresearch.metrics.basic import Summary, defined, fraction, of_served, summarize
from cbresearch.trace import Trace

__all__ = ["mean_in_system", "mean_queue_length", "residence_time", "without_warm_up"]


def mean_queue_length(trace: Trace) -> float | None:
    """Return the time-weighted mean number of requests that wait for a first seat.

    It is the waiting time of all divided by the time from the first arrival to the end of the run, or by the
    window, which is Little's law as an identity. Requests that wait after a preemption do not count.
    """
    return _mean_number(trace, "first_scheduled_s")


def mean_in_system(trace: Trace) -> float | None:
    """Return the time-weighted mean number of requests that have arrived and are not finished."""
    return _mean_number(trace, "finish_s")


def residence_time(trace: Trace) -> Summary:
    """Summarize the seconds from a request's first seat to its last token, of those that are complete."""
    requests = trace.request_columns
    return summarize(defined(requests["finish_s"] - requests["first_scheduled_s"]))


def without_warm_up(trace: Trace, seconds: float) -> Trace:
    """Return a run's window from some seconds on, see `Trace.between`; without any, the run itself.

    A run begins empty, so its first requests meet no queue. Metrics of a steady state should leave them
    out; `warm_up_length` says how many.

    Args:
        trace: The run.
        seconds: How much of its start to leave out.

    Raises:
        ValueError: `seconds` is not a finite number of 0 or more.
    """
    return trace if seconds == 0 else trace.between(seconds)


def _mean_number(trace: Trace, until: str) -> float | None:
    """Return the mean number of requests between their arrival and a time; without it, the end of the run."""
    run = trace.whole or trace
    arrivals, ends = of_served(run, "arrival_s"), of_served(run, until)
    begin = float(arrivals.min(initial=run.end)) if trace is run else trace.begin
    waits = np.fmin(ends, trace.end) - np.maximum(arrivals, begin)
    return fraction(float(np.maximum(waits, 0.0).sum()), max(0.0, trace.end - begin))
