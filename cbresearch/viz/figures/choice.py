"""Which policy to take: what each gives at each load, and which none of the others beats."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from cbresearch import metrics
from cbresearch.trace import Trace
from cbresearch.viz import axes, style, words

LARGER_IS_BETTER = frozenset(
    {
        "output_throughput_tokens_per_s",
        "total_throughput_tokens_per_s",
        "request_throughput_requests_per_s",
        "goodput_requests_per_s",
        "slo_attainment",
        "occupancy_rows",
        "time_weighted_occupancy_rows",
        "utilization",
        "time_weighted_utilization",
        "prefix_hit_rate",
        "num_finished",
    }
)
"""Metrics of `metrics.summary` of which more is better; of all others less is."""


_MAX_NAMED = 12
# How far a label may move up or down, as a fraction of the axis.
_OFFSETS = (0.0, *(sign * number * 0.055 for number in range(1, 8) for sign in (-1, 1)))
# Above, below, before, behind.
_SIDES = ((0, 1), (0, -1), (-1, 0), (1, 0))


def tradeoff(
    runs: Mapping[str, Mapping[float, Trace]],
    *,
    rank: int = 99,
    load: str = "requests/s",
    title: str | None = None,
) -> Figure:
    """Draw time to first token and time per output token over throughput, a line a policy, a point a load.

    Args:
        runs: The runs by label and load; the label's policy is that of its first run.
        rank: Percentile of the times, in percent.
        load: What the loads count, such as "requests/s" or "seats".
        title: What the figure shows; by default who waits least and who most at the highest load.

    Raises:
        ValueError: There is no run.
    """
    runs = {label: dict(sorted(by_load.items())) for label, by_load in runs.items() if by_load}
    if not runs:
        raise ValueError("there is no run to draw; give at least one trace at one load")
    first = {label: next(iter(by_load.values())) for label, by_load in runs.items()}
    short = dict(zip(axes.shortened(first), runs.values(), strict=True))
    looks = axes.looks(axes.shortened(first))
    fig, axs = plt.subplots(1, 2, figsize=(10.5, 5))
    kinds: tuple[tuple[Literal["ttft", "tpot"], str], ...] = (
        ("ttft", "time to first token"),
        ("tpot", "time per output token"),
    )
    for ax, (kind, name) in zip(axs, kinds, strict=True):
        for place, (label, by_load) in enumerate(short.items()):
            found = [
                (throughput, seconds, value)
                for value, trace in by_load.items()
                if (throughput := metrics.output_throughput(trace)) is not None
                and (seconds := metrics.percentile(words.latencies(trace.served, kind), rank)) is not None
            ]
            x, y = [point[0] for point in found], [point[1] for point in found]
            color, marker, linestyle = looks[label]
            ax.plot(
                x,
                y,
                color=color,
                marker=marker,
                linestyle=linestyle,
                markersize=8,
                label=label,
                markeredgecolor="white",
                gid=f"{kind} of {label}",
            )
            _number_points(ax, found, color, place)
        ax.set_yscale("log")
        ax.set_xlim(left=0)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: words.duration(value))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("output throughput (tokens/s)")
        ax.set_ylabel(f"{name}, p{rank}")
        ax.grid(axis="both")
    handles, labels = axs[0].get_legend_handles_labels()
    axes.plain(
        fig.legend(
            handles, labels, loc="outside lower left", ncols=4, title=f"numbers: load in {load}"
        ).get_texts()
    )
    axes.suptitle(fig, title or words.tradeoff_finding(short, rank, load))
    return fig


def non_dominated(
    points: Mapping[str, tuple[float, float]], signs: tuple[float, float] = (1.0, 1.0)
) -> list[str]:
    """Return the labels that no other beats in both values, by the first value.

    One beats another that is at least as good in both and better in one.

    Args:
        points: Two values by label.
        signs: Per value 1 if less is better, −1 if more is.
    """
    costs = {
        label: tuple(sign * value for sign, value in zip(signs, pair, strict=True))
        for label, pair in points.items()
    }

    def is_beaten(mine: tuple[float, ...]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine
            for other in costs.values()
        )

    front = [label for label, mine in costs.items() if not is_beaten(mine)]
    return sorted(front, key=lambda label: points[label])


def front(
    summaries: Mapping[str, Mapping[str, Any]],
    x: str = "ttft_p99_s",
    y: str = "output_throughput_tokens_per_s",
    larger_is_better: Collection[str] = LARGER_IS_BETTER,
) -> list[str]:
    """Return the labels of the runs that no other beats in both of two metrics, by the first.

    Args:
        summaries: What `metrics.summary` says of the runs, by label; whoever does not define both metrics is
            left out.
        x: A metric.
        y: Another one.
        larger_is_better: Metrics of which more is better.

    Raises:
        ValueError: There is no such metric.
    """
    return non_dominated(_points(summaries, x, y), _signs(x, y, larger_is_better))


def pareto(
    traces: Mapping[str, Trace],
    ax: Axes | None = None,
    *,
    x: str = "ttft_p99_s",
    y: str = "output_throughput_tokens_per_s",
    larger_is_better: Collection[str] = LARGER_IS_BETTER,
    title: str | None = None,
) -> Figure:
    """Draw runs by two metrics, and join those that no other run beats in both.

    Args:
        traces: The runs by label.
        ax: Where to draw; a new figure by default.
        x: A metric, as `metrics.summary` names it.
        y: Another one.
        larger_is_better: Metrics of which more is better.
        title: What the figure shows; by default which runs no other beats.

    Raises:
        ValueError: There is no such metric.
    """
    traces = axes.shortened(traces)
    looks = axes.looks(traces)
    points = _points({label: metrics.summary(trace) for label, trace in traces.items()}, x, y)
    signs = _signs(x, y, larger_is_better)
    best = non_dominated(points, signs)
    fig, ax = axes.axes(ax, height=5)
    ax.plot(
        *_columns([points[label] for label in best]),
        color="#7A7A7A",
        linewidth=5,
        alpha=0.35,
        solid_capstyle="round",
        zorder=1,
        gid="front",
    )
    for label, (first, second) in points.items():
        look, is_best = looks[label], label in best
        ax.plot(
            [first],
            [second],
            color=look.color,
            marker=look.marker,
            linestyle="none",
            markersize=12 if is_best else 8,
            alpha=1.0 if is_best else 0.65,
            markeredgecolor="white",
            gid=f"run {label}",
        )
    ax.margins(0.14)
    for set_scale, values in (
        (ax.set_xscale, [pair[0] for pair in points.values()]),
        (ax.set_yscale, [pair[1] for pair in points.values()]),
    ):
        if values and min(values) > 0 and max(values) > 20 * min(values):
            set_scale("log")
    _name_points(ax, points, best)
    for set_label, name, sign in ((ax.set_xlabel, x, signs[0]), (ax.set_ylabel, y, signs[1])):
        set_label(f"{words.metric(name)}, {'more' if sign < 0 else 'less'} is better")
    ax.grid(axis="both")
    axes.title(ax, title or words.pareto_finding(best, len(points)))
    return fig


def _points(summaries: Mapping[str, Mapping[str, Any]], x: str, y: str) -> dict[str, tuple[float, float]]:
    found = {}
    for label, summary in summaries.items():
        for name in (x, y):
            if name not in summary:
                raise ValueError(f"no metric {name!r}; there is {', '.join(summary)}")
        if summary[x] is not None and summary[y] is not None:
            found[label] = (float(summary[x]), float(summary[y]))
    return found


def _signs(x: str, y: str, larger_is_better: Collection[str]) -> tuple[float, float]:
    first, second = (-1.0 if name in larger_is_better else 1.0 for name in (x, y))
    return first, second


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _number_points(ax: Axes, points: Sequence[tuple[float, float, float]], color: str, place: int) -> None:
    """Write each point's load beside it, on a side that depends on the line's place among the lines."""
    x, y = _SIDES[place % len(_SIDES)]
    for throughput, seconds, load in points:
        ax.annotate(
            f"{load:g}",
            (throughput, seconds),
            xytext=(9 * x, 10 * y),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=10,
            color=color,
        )


def _name_points(ax: Axes, points: Mapping[str, tuple[float, float]], front: Collection[str]) -> None:
    """Write labels beside the points where they cover nothing; those that nobody beats get theirs first."""
    # Until then the limits are not those of the points.
    ax.autoscale_view()
    to_axes = ax.transData + ax.transAxes.inverted()
    places = {label: to_axes.transform(pair) for label, pair in points.items()}
    # Left, right, low and high end of what no label may cover.
    taken = [(x - 0.012, x + 0.012, y - 0.022, y + 0.022) for x, y in places.values()]
    for label in sorted(places, key=lambda label: (label not in front, -places[label][1])):
        (x, y), width = places[label], 0.011 * len(label) + 0.005
        for offset, side in product(_OFFSETS, (1, -1) if x <= 0.5 else (-1, 1)):
            left = x + 0.02 if side > 0 else x - 0.02 - width
            box = (left, left + width, y + offset - 0.026, y + offset + 0.026)
            if box[0] >= 0 and box[1] <= 1.02 and box[2] >= 0 and box[3] <= 1.02 and not _covers(box, taken):
                break
        else:
            if label not in front:
                continue
            offset = 0.0
        if label not in front and len(points) > _MAX_NAMED and offset:
            continue
        taken.append(box)
        text = ax.annotate(
            label,
            points[label],
            xytext=(x + 0.02 * side, y + offset),
            textcoords="axes fraction",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=11,
            fontweight="bold" if label in front else "normal",
            color=style.INK,
            arrowprops={"arrowstyle": "-", "color": "#9A9A9A", "linewidth": 0.8} if offset else None,
        )
        axes.plain([text])


def _covers(box: tuple[float, ...], others: Sequence[tuple[float, ...]]) -> bool:
    return any(
        box[0] < right and left < box[1] and box[2] < high and low < box[3]
        for left, right, low, high in others
    )
