"""Figures of recorded runs. Each function returns a figure and reads nothing but traces."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cbresearch import metrics
from cbresearch.trace import Trace
from cbresearch.viz import axes, style, words
from cbresearch.viz.axes import Clock
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
        padding = [len(record.plan.padding) for record in trace.steps]
        useful, edges = clock.stairs(trace, [len(record.plan.scheduled) for record in trace.steps])
        computed = useful + clock.stairs(trace, padding)[0]
        num_padding += sum(padding)
        color, limit = looks[label].color, trace.scheduler.max_num_seqs
        axes.title(ax, label, size=12, weight="normal")
        ax.set_ylabel("rows\n(requests)")
        _area(ax, edges, useful, computed, **_waste(), gid="padding")
        _area(ax, edges, 0, useful, color=color, alpha=0.3, linewidth=0, gid="useful area")
        _line(ax, edges, useful, color=color, linewidth=1.8, gid="useful")
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


def kv_memory(
    trace: Trace, ax: Axes | None = None, *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw how much of the KV pool is held, and how much of that holds a token that is still needed.

    Args:
        trace: The run.
        ax: Where to draw; a new figure by default.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default how full the held blocks are, and their peak.
    """
    fig, ax = axes.axes(ax, height=4)
    clock = Clock.of([trace], time)
    _draw_kv(ax, trace, clock)
    axes.title(ax, title or words.kv_finding(trace))
    clock.label(ax)
    fig.legend(loc="outside lower left", ncols=4)
    return fig


def kv_memory_side_by_side(
    traces: Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw the KV pool of several runs on one time axis.

    Args:
        traces: The runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default how full each run's held blocks are.
    """
    traces = axes.shortened(traces)
    fig, axs = plt.subplots(
        len(traces), 1, sharex=True, sharey=True, squeeze=False, figsize=(9, 1.5 + 2.1 * len(traces))
    )
    clock = Clock.of(traces.values(), time)
    meanings: dict[str, Any] = {}
    tops = []
    for ax, (label, trace) in zip(axs[:, 0], traces.items(), strict=True):
        _draw_kv(ax, trace, clock)
        tops.append(ax.get_ylim()[1])
        axes.title(ax, words.kv_finding(trace, label), size=12, weight="normal")
        handles, labels = ax.get_legend_handles_labels()
        meanings |= dict(zip(labels, handles, strict=True))
    axs[0, 0].set_ylim(0, max(tops))
    clock.label(axs[-1, 0])
    axes.suptitle(fig, title or words.kv_findings(traces))
    fig.legend(list(meanings.values()), list(meanings), loc="outside lower left", ncols=4)
    return fig


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
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1.02)
        ax.set_xlabel(f"{name} ({unit})")
        ax.grid(axis="both")
        axes.plain(ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16)).get_texts())
    axs[0].set_ylabel("fraction of requests")
    axes.suptitle(fig, title or words.latency_finding(traces))
    return fig


def _draw_kv(ax: Axes, trace: Trace, clock: Clock) -> None:
    size, pool = trace.cache.block_size, trace.cache.num_tokens
    held, edges = clock.stairs(trace, [record.num_held_blocks * size for record in trace.steps])
    valid, _ = clock.stairs(trace, [record.num_held_tokens for record in trace.steps])
    _area(ax, edges, valid, held, **_waste(), gid="waste", label="held without a token in use")
    _area(ax, edges, 0, valid, color="#56B4E9", linewidth=0, gid="valid", label="tokens in use")
    _line(ax, edges, held, color="#0072B2", linewidth=1.6, gid="held", label="held blocks")
    peak = int(held.max(initial=0))
    top = max(1, peak) * 1.3
    if pool <= 3 * peak:
        top = pool * 1.12
        ax.axhline(pool, color=style.INK, linestyle="--", linewidth=1.2, gid="pool")
        axes.end_label(ax, pool, f"pool\n{pool:,}", style.INK)
    else:
        # Drawn to scale, a pool this large would flatten all the rest.
        axes.end_label(ax, top, f"pool\n{pool:,} ↑", style.INK)
    starts = clock.edges(trace)[0]
    lost = [start for start, record in zip(starts, trace.steps, strict=True) if record.plan.preempted]
    if lost:
        ax.plot(
            lost,
            [top] * len(lost),
            linestyle="none",
            marker="v",
            color=style.INK,
            clip_on=False,
            gid="preempted",
            label="preemption",
        )
    ax.set_ylim(0, top)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel("KV (tokens)")


# Not `Axes.stairs`: it walks each edge in Python, which takes seconds for a long run.
def _area(ax: Axes, edges: np.ndarray, low: np.ndarray | int, high: np.ndarray, **look: Any) -> None:
    """Fill the steps between two values per interval."""
    if len(high):
        low = np.broadcast_to(low, high.shape)
        ax.fill_between(edges, _to_last_edge(high), _to_last_edge(low), step="post", **look)


def _line(ax: Axes, edges: np.ndarray, values: np.ndarray, **look: Any) -> None:
    """Draw a value per interval as a line in steps, under the lines that mark a limit or a mean."""
    if len(values):
        look |= {"solid_joinstyle": "miter", "solid_capstyle": "butt"}
        ax.plot(edges, _to_last_edge(values), drawstyle="steps-post", zorder=1, **look)


def _to_last_edge(values: np.ndarray) -> np.ndarray:
    return np.append(values, values[-1])


def _waste() -> dict[str, Any]:
    return {
        "facecolor": style.PADDING_COLOR,
        "edgecolor": style.HATCH_COLOR,
        "hatch": style.PADDING_HATCH,
        "linewidth": 0,
    }
