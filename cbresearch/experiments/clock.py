"""Whether other work on the computer disturbed the clock of measured runs."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from cbresearch.trace import Trace

MOST_SLOWDOWN = 1.25
"""From here on a run's seconds are not to be compared with another's."""


def slowdowns(traces: Mapping[str, Trace]) -> dict[str, float | None]:
    """Return how much longer the steps of each run took, in all, than like steps of any of the runs.

    Like steps have as many rows and tokens, and contexts within a factor of two. The lower quartile of their
    seconds stands for an undisturbed moment, so up to three quarters of them may be disturbed.

    Args:
        traces: Measured runs on one model, by label.

    Returns:
        The ratio, about 1 on an idle computer; None for a run of which fewer than half of the steps have four
        like ones, themselves included.
    """
    steps: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    alike: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    for label, trace in traces.items():
        columns = trace.step_columns
        num_rows = columns["num_scheduled"] + columns["num_padding_rows"]
        kinds = np.stack((num_rows, columns["num_tokens"], np.frexp(columns["num_context_tokens"])[1]))
        steps[label] = list(zip(map(tuple, kinds.T.tolist()), columns["duration_s"].tolist(), strict=True))
        for kind, seconds in steps[label]:
            alike[kind].append(seconds)
    usual = {kind: float(np.percentile(times, 25)) for kind, times in alike.items() if len(times) >= 4}
    found: dict[str, float | None] = {}
    for label, timed in steps.items():
        known = [(seconds, usual[kind]) for kind, seconds in timed if kind in usual]
        expected = sum(one for _, one in known)
        is_known = expected > 0 and 2 * len(known) >= len(timed)
        found[label] = sum(seconds for seconds, _ in known) / expected if is_known else None
    return found


def caution(slowdown: Mapping[str, float | None]) -> str:
    """Return what to say of runs whose clock was disturbed, or an empty text.

    Args:
        slowdown: From `slowdowns`.
    """
    disturbed = {name: value for name, value in slowdown.items() if value and value > MOST_SLOWDOWN}
    times = ", ".join(f"{value:.2f} times under {name}" for name, value in disturbed.items())
    reason = f"steps took {times} as long as like steps at their usual pace (up to {MOST_SLOWDOWN} is normal)"
    remedy = "Compare steps, not seconds, or run again on an idle computer."
    return times and f"The clock was disturbed, as by other work on the computer: {reason}. {remedy}"
