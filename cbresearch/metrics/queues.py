"""Queues over time, from the requests' own times: exact, whatever a step's length."""

import math
from dataclasses import replace

from cbresearch.metrics.basic import Summary, summarize
from cbresearch.trace import Trace


def mean_queue_length(trace: Trace) -> float | None:
    """Return the time-weighted mean number of requests that wait for a first seat.

    It is the waiting time of all divided by the time from the first arrival to the end of the run, which is
    Little's law as an identity. Who was preempted does not count.
    """
    waits = (
        (record.first_scheduled if record.first_scheduled is not None else trace.duration) - record.arrival
        for record in trace.served
    )
    return _per_second(trace, math.fsum(waits))


def mean_in_system(trace: Trace) -> float | None:
    """Return the time-weighted mean number of requests that have arrived and are not finished."""
    return _per_second(
        trace,
        math.fsum(
            (record.token_times[-1] if record.is_complete else trace.duration) - record.arrival
            for record in trace.served
        ),
    )


def residence_time(trace: Trace) -> Summary:
    """Summarize the seconds from a request's first seat to its last token, of those that are complete."""
    return summarize(
        record.token_times[-1] - record.first_scheduled
        for record in trace.served
        if record.is_complete and record.first_scheduled is not None
    )


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
        steps=tuple(step for step in trace.steps if step.start >= seconds),
        requests=tuple(record for record in trace.requests if record.arrival >= seconds),
    )


def _per_second(trace: Trace, total: float) -> float | None:
    if not trace.served:
        return None
    span = trace.duration - min(record.arrival for record in trace.served)
    return total / span if span > 0 else None
