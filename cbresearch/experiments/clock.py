"""Whether other work on the computer disturbed the clock of measured runs."""

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
    if not traces:
        return {}
    columns = [trace.step_columns for trace in traces.values()]
    kinds = [
        np.stack(
            (
                steps["num_scheduled"] + steps["num_padding_rows"],
                steps["num_tokens"],
                np.frexp(steps["num_context_tokens"])[1],
            ),
            axis=1,
        )
        for steps in columns
    ]
    _, kind, number = np.unique(np.concatenate(kinds), axis=0, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    seconds = np.concatenate([steps["duration_s"] for steps in columns])
    usual = np.array([np.percentile(seconds[kind == one], 25) for one in range(len(number))])
    found: dict[str, float | None] = {}
    ends = np.cumsum([len(steps["duration_s"]) for steps in columns])
    for label, places in zip(traces, np.split(np.arange(len(seconds)), ends[:-1]), strict=True):
        alike = places[number[kind[places]] >= 4]
        expected = float(usual[kind[alike]].sum())
        is_known = expected > 0 and 2 * len(alike) >= len(places)
        found[label] = float(seconds[alike].sum()) / expected if is_known else None
    return found


def caution(slowdown: Mapping[str, float | None]) -> str:
    """Return what to say of runs whose clock was disturbed, or an empty text.

    Args:
        slowdown: From `slowdowns`.
    """
    disturbed = {name: value for name, value in slowdown.items() if value and value > MOST_SLOWDOWN}
    if not disturbed:
        return ""
    times = ", ".join(f"{value:.2f} times under {name}" for name, value in disturbed.items())
    return (
        f"The clock was disturbed, as by other work on the computer: steps took {times} as long as like "
        f"steps at their usual pace, where up to {MOST_SLOWDOWN} is normal. Compare steps, not seconds, or "
        "run again on an idle computer."
    )
