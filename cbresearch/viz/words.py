"""Numbers and findings as a reader wants them: with units, rounded, and a dash where there is none."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cbresearch.metrics import fragmentation, occupancy, peak_kv_tokens
from cbresearch.trace import RequestRecord, Trace

NOTHING = "–"

TimeAxis = Literal["step", "seconds"]


def number(value: Any) -> str:
    """Return a number with about four digits, a text as it is, and a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """Return a signed relative error in percent, such as "+1.3 %".

    Args:
        value: A fraction, or None.
    """
    if value is None or math.isnan(value):
        return NOTHING
    return f"{100 * value:+.3g} %".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Return a time with the unit that suits its size.

    Args:
        seconds: The time, or None.
    """
    if seconds is None:
        return NOTHING
    factor, unit = time_scale(seconds)
    return f"{number(float(f'{seconds * factor:.3g}'))} {unit}"


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the factor and the unit for an axis that reaches up to `seconds`."""
    if seconds >= 1 or seconds <= 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def length(trace: Trace, time: TimeAxis) -> str:
    """Return how long a run took, in steps or in seconds."""
    return _steps(len(trace.steps)) if time == "step" else duration(trace.duration)


def latencies(requests: Sequence[RequestRecord], name: Literal["ttft", "tpot"]) -> list[float]:
    """Return a latency of the requests that have it, in seconds."""
    found = (getattr(request, name) for request in requests)
    return [value for value in found if value is not None]


def seats_finding(trace: Trace, label: str | None = None) -> str:
    """Say how well a run used its seats.

    Args:
        trace: The run.
        label: Its name; the policy's by default.
    """
    label = label or trace.policy
    mean = occupancy(trace)
    if mean is None:
        return f"{label} ran no step"
    seats = trace.scheduler.max_num_seqs
    return f"{label} keeps {mean:.1f} of {seats} seats busy on average over {_steps(len(trace.steps))}"


def length_finding(traces: Mapping[str, Trace], time: TimeAxis = "seconds") -> str:
    """Say which run ends first and how far the last is behind.

    Args:
        traces: The runs by label.
        time: Whether to count steps or seconds.
    """
    sizes = {label: len(trace.steps) if time == "step" else trace.duration for label, trace in traces.items()}
    first = min(sizes, key=lambda label: sizes[label])
    last = max(sizes, key=lambda label: sizes[label])
    if sizes[first] == sizes[last]:
        who = "Each run takes" if len(sizes) > 1 else f"{first} takes"
        return f"{who} {length(traces[first], time)}"
    soon, late = length(traces[first], time), length(traces[last], time)
    ratio = f", {sizes[last] / sizes[first]:.2f} times as long" if sizes[first] else ""
    return f"{first} is done after {soon}, {last} after {late}{ratio}"


def kv_finding(trace: Trace, label: str | None = None) -> str:
    """Say how full the held KV blocks are and how many the run needs at most.

    Args:
        trace: The run.
        label: Its name; the policy's by default.
    """
    label = label or trace.policy
    empty, peak = fragmentation(trace), peak_kv_tokens(trace)
    if empty is None or peak is None:
        return f"{label} holds no KV"
    blocks = f"{peak // trace.cache.block_size:,} of {trace.cache.num_blocks:,}"
    return f"{label}: {100 * (1 - empty):.0f} % of held KV is in use, at most {blocks} blocks held"


def kv_findings(traces: Mapping[str, Trace]) -> str:
    """Say how full the held KV blocks are, run by run.

    Args:
        traces: The runs by label.
    """
    empty = {label: fragmentation(trace) for label, trace in traces.items()}
    parts = [f"{label} {100 * (1 - value):.0f} %" for label, value in empty.items() if value is not None]
    return f"Held KV that is in use: {', '.join(parts)}" if parts else "No KV is held"


def occupancy_finding(traces: Mapping[str, Trace]) -> str:
    """Say how many rows do useful work on average, run by run.

    Args:
        traces: The runs by label.
    """
    means = {label: occupancy(trace) for label, trace in traces.items()}
    parts = [f"{label} {mean:.1f}" for label, mean in means.items() if mean is not None]
    return f"Useful rows on average: {', '.join(parts)}" if parts else "No step was run"


def latency_finding(traces: Mapping[str, Trace]) -> str:
    """Say which run has the lowest median time to first token, and which the highest.

    Args:
        traces: The runs by label.
    """
    times = {label: latencies(trace.served, "ttft") for label, trace in traces.items()}
    medians = {label: float(np.percentile(found, 50)) for label, found in times.items() if found}
    if not medians:
        return "No request got a token"
    low = min(medians, key=lambda label: medians[label])
    high = max(medians, key=lambda label: medians[label])
    finding = f"Median time to first token: {low} {duration(medians[low])}"
    return finding if low == high else f"{finding}, {high} {duration(medians[high])}"


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
