"""How long requests wait, and what a shorter wait costs."""

from collections.abc import Mapping
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from cbresearch.trace import Trace
from cbresearch.viz import axes, words

# Medians farther apart than this would leave the shorter ones on the axis.
_MOST_TIMES_APART = 20


def latency_cdfs(traces: Mapping[str, Trace], *, title: str | None = None) -> Figure:
    """Draw the distributions of the time to first token and of the time per output token.

    Args:
        traces: The runs by label.
        title: What the figure shows; by default whose median time to first token is lowest.
    """
    traces = axes.shortened(traces)
    fig, axs = plt.subplots(1, 2, figsize=(10, 4.4 + 0.2 * len(traces)), sharey=True)
    looks = axes.looks(traces)
    kinds: tuple[tuple[Literal["ttft", "tpot"], str], ...] = (
        ("ttft", "time to first token, TTFT"),
        ("tpot", "time per output token, TPOT"),
    )
    for ax, (kind, name) in zip(axs, kinds, strict=True):
        found = {label: words.latencies(trace.served, kind) for label, trace in traces.items()}
        factor, unit = words.time_scale(max((max(times) for times in found.values() if times), default=1.0))
        for place, (label, times) in enumerate(found.items()):
            color, marker, linestyle = looks[label]
            if not times:
                ax.plot([], [], color=color, linestyle=linestyle, label=f"{label}: no value, n = 0")
                continue
            p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
            text = f"{label}: p50 {words.duration(p50)}, p99 {words.duration(p99)}, n = {len(times)}"
            ax.plot([], [], color=color, linestyle=linestyle, marker=marker, label=text)
            # Later lines are thinner, so that equal distributions all stay visible.
            width = max(1.6, 4.0 - 1.1 * place)
            scaled = [value * factor for value in times]
            ax.ecdf(scaled, color=color, linestyle=linestyle, linewidth=width, gid=f"{kind} of {label}")
            ax.plot(
                [p50 * factor, p99 * factor],
                [0.5, 0.99],
                color=color,
                linestyle="none",
                marker=marker,
                markersize=11 - 1.5 * min(place, 3),
                markeredgecolor="white",
                clip_on=False,
                zorder=5,
                gid=f"{kind} percentiles of {label}",
            )
        medians = [float(np.median(times)) * factor for times in found.values() if times]
        if medians and 0 < _MOST_TIMES_APART * min(medians) < max(medians):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        else:
            ax.set_xlim(left=0)
        ax.set_ylim(0, 1.02)
        ax.set_xlabel(f"{name} ({unit})")
        ax.grid(axis="both")
        axes.plain(ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16)).get_texts())
    axs[0].set_ylabel("fraction of requests")
    axes.suptitle(fig, title or words.latency_finding(traces))
    return fig
