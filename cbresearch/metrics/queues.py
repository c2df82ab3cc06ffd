"""Queues over time, from the requests' own times: exact, whatever a step's length."""

from dataclasses import replace

import numpy as np

from cbresearch.metrics.basic import Summary, defined, fraction, of_served, summarize
from cbresearch.trace import Trace

__all__ = ["mean_in_system", "mean_queue_length", "residence_time", "without_warm_up"]


def mean_queue_length(trace: Trace) -> float | None:
    """Return the time-weighted mean number of requests that wait for a first seat.

    It is the waiting time of all divided by the time from the first arrival to the end of the run, which is
    Little's law as an identity. Requests that wait after a preemption do not count.
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
    """Return a run's requests that arrived after some seconds, and the steps that began after them.

    A run begins empty, so its first requests meet no queue. Metrics of a steady state should leave them
    out; `warm_up_length` says how many. Requests that arrived before and were still served load the steps,
    which is the point, but they are not in the sample.

    Args:
        trace: The run.
        seconds: How much of its start to leave out.
    """
    return replace(
        trace,
        steps=trace.steps[int(np.searchsorted(trace.step_columns["start_s"], seconds)) :],
        requests=tuple(record for record in trace.requests if record.arrival >= seconds),
    )


def _mean_number(trace: Trace, until: str) -> float | None:
    """Return the mean number of requests between their arrival and a time; without it, the end of the run."""
    arrivals, ends = of_served(trace, "arrival_s"), of_served(trace, until)
    if not arrivals.size:
        return None
    seconds = np.where(np.isnan(ends), trace.duration, ends) - arrivals
    return fraction(float(seconds.sum()), max(0.0, trace.duration - float(arrivals.min())))
