"""Who sits where, and how full the batch is."""

from collections.abc import Mapping
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cbresearch import metrics
from cbresearch.trace import Trace
from cbresearch.viz import axes, style, words
from cbresearch.viz.axes import Clock, area, line, waste
from cbresearch.viz.gantt import draw_seats, seat_legend
from cbresearch.viz.seating import request_colors
from cbresearch.viz.words import TimeAxis


def seats(
    trace: Trace,
    ax: Axes | None = None,
    *,
    time: TimeAxis = "step",
    title: str | None = None,
    max_requests_labelled: int = 100,
) -> Figure:
    """Draw who sits where, and which seats are empty or computed for nothing.

    Args:
        trace: The run.
        ax: Where to draw; a new figure by default.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; the mean number of busy seats by default.
        max_requests_labelled: Write ids into the bars only up to this many requests.
    """
    fig, ax = axes.axes(ax, height=1.6 + 0.3 * min(trace.scheduler.max_num_seqs, 24))
    clock = Clock.of([trace], time)
    drawn = draw_seats(ax, trace, clock, request_colors([trace]), max_requests_labelled)
    axes.title(ax, title or words.seats_finding(trace))
    clock.label(ax)
    seat_legend(fig, drawn)
    return fig


def seats_side_by_side(
    traces: Mapping[str, Trace],
    *,
    time: TimeAxis = "seconds",
    title: str | None = None,
    max_requests_labelled: int = 100,
    max_steps: int | None = None,
) -> Figure:
    """Draw who sits where in several runs on one time axis, so that the shorter run visibly ends earlier.

    Args:
        traces: The runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default which run ends first.
        max_requests_labelled: Write ids into the bars only up to this many requests.
        max_steps: Draw only this many steps of each run, from its first; all by default.
    """
    traces = axes.shortened(traces)
    rows = [min(trace.scheduler.max_num_seqs, 24) for trace in traces.values()]
    fig, axs = plt.subplots(
        len(traces),
        1,
        sharex=True,
        squeeze=False,
        figsize=(10, 1.3 + sum(0.65 + 0.22 * row for row in rows)),
        height_ratios=[2 + row for row in rows],
    )
    drawn_part = {label: replace(trace, steps=trace.steps[:max_steps]) for label, trace in traces.items()}
    clock = Clock.of(drawn_part.values(), time)
    colors = request_colors(drawn_part.values())
    drawn: set[str] = set()
    for ax, (label, trace) in zip(axs[:, 0], traces.items(), strict=True):
        part = drawn_part[label]
        drawn |= draw_seats(ax, part, clock, colors, max_requests_labelled)
        axes.title(ax, words.seats_finding(trace, label), size=12, weight="normal")
        end = float(clock.edges(part)[1].max(initial=0.0))
        ax.axvline(end, color=style.INK, linewidth=2, gid="end")
        ax.annotate(
            f"done: {words.length(trace, time)}" if len(part.steps) == len(trace.steps) else "goes on →",
            (end, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            rotation=90,
            va="center",
            fontsize=10,
        )
    clock.label(axs[-1, 0])
    # Room for the last run's end mark.
    axs[-1, 0].set_xlim(0, (clock.last or 1) * 1.03)
    axes.suptitle(fig, title or words.length_finding(traces, time))
    seat_legend(fig, drawn)
    return fig


def occupancy(traces: Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None) -> Figure:
    """Draw how many rows of the batch do useful work over time, one panel a run.

    Args:
        traces: The runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default each run's mean number of useful rows.
    """
    traces = axes.shortened(traces)
    fig, axs = plt.subplots(
        len(traces), 1, sharex=True, sharey=True, squeeze=False, figsize=(9, 1.5 + 1.4 * len(traces))
    )
    clock = Clock.of(traces.values(), time)
    looks = axes.looks(traces)
    num_padding = 0
    for ax, (label, trace) in zip(axs[:, 0], traces.items(), strict=True):
        padding = trace.step_columns["num_padding_rows"]
        rows, edges = clock.stairs(trace, np.transpose([trace.step_columns["num_scheduled"], padding]))
        useful, computed = rows[:, 0], rows.sum(axis=1)
        num_padding += int(sum(padding))
        color, limit = looks[label].color, trace.scheduler.max_num_seqs
        axes.title(ax, label, size=12, weight="normal")
        ax.set_ylabel("rows\n(requests)")
        area(ax, edges, useful, computed, **waste(), gid="padding")
        area(ax, edges, 0, useful, color=color, alpha=0.3, linewidth=0, gid="useful area")
        line(ax, edges, useful, color=color, linewidth=1.8, gid="useful")
        ax.axhline(limit, color=style.INK, linestyle="--", linewidth=1.2, gid="seat limit")
        axes.end_label(ax, limit, f"{limit} seats", style.INK)
        mean = metrics.occupancy(trace)
        if mean is not None:
            ax.axhline(mean, color=style.INK, linestyle=":", linewidth=2.2, gid="mean")
            # Below the label of the limit where the two would meet.
            axes.end_label(ax, min(mean, 0.78 * limit), f"mean {mean:.1f}", style.INK, weight="bold")
    most = max(trace.scheduler.max_num_seqs for trace in traces.values())
    axs[0, 0].set_ylim(0, most * 1.12)
    axs[0, 0].set_yticks(sorted({0, most // 2, most}))
    clock.label(axs[-1, 0])
    axes.suptitle(fig, title or words.occupancy_finding(traces))
    handles = [
        Patch(facecolor="#9A9A9A", alpha=0.5, label="served"),
        axes.padding_patch(),
        Line2D([], [], color=style.INK, linestyle=":", label="mean of the rows served"),
        Line2D([], [], color=style.INK, linestyle="--", label="all seats"),
    ]
    if not num_padding:
        del handles[1]
    fig.legend(handles=handles, loc="outside lower left", ncols=4)
    return fig
