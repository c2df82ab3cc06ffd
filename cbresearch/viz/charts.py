"""Which policy to take, how long requests wait, and what a machine allows."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox, BboxBase

from cbresearch import formulas, metrics
from cbresearch.costs import Roofline
from cbresearch.metrics.basic import defined
from cbresearch.step import Plan, Scheduled
from cbresearch.trace import Trace
from cbresearch.viz import style, text
from cbresearch.viz.style import Array

LARGER_IS_BETTER = frozenset(
    (
        *("output_throughput_tokens_per_s", "total_throughput_tokens_per_s", "prefix_hit_rate"),
        *("request_throughput_requests_per_s", "goodput_requests_per_s", "slo_attainment", "num_finished"),
        *("occupancy_rows", "time_weighted_occupancy_rows", "utilization", "time_weighted_utilization"),
    )
)
"""Metrics of `metrics.summary` of which more is better; of all others less is."""

_LATENCIES = (("ttft", "time to first token"), ("tpot", "time per output token"))
# Medians farther apart than this would leave the shorter ones on the axis.
_MOST_TIMES_APART = 20


def latency_cdfs(traces: Trace | Mapping[str, Trace], *, title: str | None = None) -> Figure:
    """Draw the distributions of the time to first token and of the time per output token.

    Args:
        traces: One run, or runs by label.
        title: What the figure shows; by default whose median time to first token is lowest.
    """
    traces = style.labelled(traces)
    fig, axs = plt.subplots(1, 2, figsize=(10, 4.4 + 0.2 * len(traces)), sharey=True)
    looks = style.looks({label: trace.policy for label, trace in traces.items()})
    for ax, (kind, name) in zip(axs, _LATENCIES, strict=True):
        found = {label: _latencies(trace, kind) for label, trace in traces.items()}
        factor, unit = text.time_scale(
            max((times.max() for times in found.values() if len(times)), default=1.0)
        )
        for place, (label, times) in enumerate(found.items()):
            color, marker, linestyle = looks[label]
            if not len(times):
                ax.plot([], [], color=color, linestyle=linestyle, label=f"{label}: no value, n = 0")
                continue
            p50, p99 = np.percentile(times, (50, 99))
            words = f"{label}: p50 {text.duration(p50)}, p99 {text.duration(p99)}, n = {len(times):,}"
            ax.plot([], [], color=color, linestyle=linestyle, marker=marker, label=words)
            # Later lines are thinner, so that equal distributions all stay visible.
            width = max(1.6, 4.0 - 1.1 * place)
            gid = f"{kind} of {label}"
            ax.ecdf(times * factor, color=color, linestyle=linestyle, linewidth=width, gid=gid)
            look: dict[str, Any] = {"color": color, "marker": marker, "markeredgecolor": "white", "zorder": 5}
            look |= {"linestyle": "none", "markersize": 11 - 1.5 * min(place, 3), "clip_on": False}
            percentiles = [p50 * factor, p99 * factor]
            ax.plot(percentiles, [0.5, 0.99], **look, gid=f"{kind} percentiles of {label}")
        medians = [float(np.median(times)) for times in found.values() if len(times)]
        if medians and 0 < _MOST_TIMES_APART * min(medians) < max(medians):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:g}")
        else:
            ax.set_xlim(left=0)
        ax.set_ylim(0, 1.02)
        ax.set_xlabel(f"{name}, {kind.upper()} ({unit})")
        ax.grid(axis="both")
        style.plain(ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16)).get_texts())
    axs[0].set_ylabel("fraction of requests")
    waits = {label: _latencies(trace, "ttft") for label, trace in traces.items()}
    middle = {label: float(np.median(seconds)) for label, seconds in waits.items() if len(seconds)}
    style.suptitle(fig, title or _extremes("Median time to first token", middle))
    return fig


def tradeoff(
    runs: Mapping[str, Mapping[float, Trace]],
    *,
    rank: int = 99,
    load: str = "requests/s",
    title: str | None = None,
) -> Figure:
    """Draw time to first token and time per output token over throughput, a line a policy, a point a load.

    Args:
        runs: The runs by label and load; the label's policy is that of the lowest load.
        rank: Percentile of the times, in percent.
        load: What the loads count, such as "requests/s" or "seats".
        title: What the figure shows; by default the lowest and the highest wait at the highest load.

    Raises:
        ValueError: There is no run.
    """
    given = {label: dict(sorted(by_load.items())) for label, by_load in runs.items() if by_load}
    if not given:
        raise ValueError("there is no run to draw; give at least one trace at one load")
    first = style.labelled({label: next(iter(by_load.values())) for label, by_load in given.items()})
    looks = style.looks({label: trace.policy for label, trace in first.items()})
    short = dict(zip(first, given.values(), strict=True))
    fig, axs = plt.subplots(1, 2, figsize=(10.5, 5))
    for ax, (kind, name) in zip(axs, _LATENCIES, strict=True):
        points, colors = [], []
        for label, by_load in short.items():
            found = [
                (f"{value:g}", throughput, float(np.percentile(times, rank)))
                for value, trace in by_load.items()
                if (throughput := metrics.output_throughput(trace)) is not None
                and len(times := _latencies(trace, kind))
            ]
            points += found
            colors += [looks[label].color] * len(found)
            look = looks[label]._asdict() | {"markersize": 8, "markeredgecolor": "white", "label": label}
            x, y = [point[1] for point in found], [point[2] for point in found]
            ax.plot(x, y, **look, gid=f"{kind} of {label}")
        ax.set_yscale("log")
        ax.set_xlim(left=0)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: text.duration(value))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("output throughput (tokens/s)")
        ax.set_ylabel(f"{name}, p{rank}")
        ax.grid(axis="both")
        label_points(ax, points, colors=colors, size=10)
    style.legend(fig, axs[0].get_legend_handles_labels()[0], title=f"numbers: load in {load}")
    style.suptitle(fig, title or _tradeoff_finding(short, rank, load))
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
    costs = np.array(list(points.values())).reshape(-1, 2) * signs
    beaten = [((costs <= mine).all(axis=1) & (costs < mine).any(axis=1)).any() for mine in costs]
    best = [label for label, is_beaten in zip(points, beaten, strict=True) if not is_beaten]
    return sorted(best, key=lambda label: points[label])


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
    traces = style.labelled(traces)
    looks = style.looks({label: trace.policy for label, trace in traces.items()})
    points: dict[str, tuple[float, float]] = {}
    for label, trace in traces.items():
        summary = metrics.summary(trace)
        for name in (x, y):
            if name not in summary:
                raise ValueError(f"no metric {name!r}; there is {', '.join(summary)}")
        first, second = summary[x], summary[y]
        if first is not None and second is not None:
            points[label] = float(first), float(second)
    signs = tuple(-1.0 if name in larger_is_better else 1.0 for name in (x, y))
    front = non_dominated(points, (signs[0], signs[1]))
    fig, ax = _axes(ax)
    look: dict[str, Any] = {"color": style.HATCH_COLOR, "linewidth": 5, "alpha": 0.35, "zorder": 1}
    ax.plot([points[label][0] for label in front], [points[label][1] for label in front], **look, gid="front")
    for label, point in points.items():
        color, marker, _ = looks[label]
        size, alpha = (12, 1.0) if label in front else (8, 0.65)
        look = {"color": color, "marker": marker, "markersize": size, "markeredgecolor": "white"}
        ax.plot(*point, **look, alpha=alpha, gid=f"run {label}")
    ax.margins(0.14)
    axis_values = np.array(list(points.values())).T
    for set_scale, values in zip((ax.set_xscale, ax.set_yscale), axis_values, strict=False):
        if values.min() > 0 and values.max() > 20 * values.min():
            set_scale("log")
    label_points(ax, [(label, *point) for label, point in points.items()], bold=front)
    for set_label, name, sign in ((ax.set_xlabel, x, signs[0]), (ax.set_ylabel, y, signs[1])):
        set_label(f"{text.metric(name)}, {'more' if sign < 0 else 'less'} is better")
    ax.grid(axis="both")
    style.title(ax, title or _pareto_finding(front, len(points)))
    return fig


class RooflinePoint(NamedTuple):
    """A step on the roofline.

    Attributes:
        intensity: FLOP per byte moved.
        flops: FLOP/s that the step reaches.
    """

    intensity: float
    flops: float


def roofline_point(cost: Roofline, kind: str, num_tokens: int, context_length: int) -> RooflinePoint:
    """Return where a step lies: its FLOP over its bytes, and over its seconds.

    Bytes are the weights, read once, and the cached keys and values that attention reads.

    Args:
        cost: Model and machine.
        kind: "decode": so many requests with a token each; "prefill": one prompt of so many tokens.
        num_tokens: Tokens in the step.
        context_length: Tokens that each decode attends to, itself included; a prefill attends to its own.
    """
    is_prefill = kind == "prefill"
    start, size = (0, num_tokens) if is_prefill else (context_length - 1, 1)
    rows = [Scheduled(str(row), row, start, size, is_prefill, True, ()) for row in range(num_tokens // size)]
    plan = Plan(0, tuple(rows))
    # A prompt's tokens attend to half of it on average.
    context = (num_tokens + 1) / 2 if is_prefill else context_length
    flop = num_tokens * formulas.flops_per_token(cost.shape, context)
    read = plan.num_context_tokens * formulas.kv_bytes_per_token(cost.shape)
    return RooflinePoint(flop / (formulas.weight_bytes(cost.shape) + read), flop / cost(plan))


def roofline(
    cost: Roofline,
    ax: Axes | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8, 64, 256),
    prompt_lengths: Sequence[int] = (128, 2048),
    context_length: int = 1024,
    title: str | None = None,
) -> Figure:
    """Draw a machine's roofline, and where decode and prefill steps of a model lie below it.

    A step's dot is below the roof since linear layers and attention, each on a roof of its own, follow one
    another, and where the cost has an overhead or efficiencies below 1.

    Args:
        cost: Model and machine.
        ax: Where to draw; a new figure by default.
        batch_sizes: Requests of the decode steps.
        prompt_lengths: Tokens of the prefill steps, a prompt each.
        context_length: Tokens that each decode attends to.
        title: What the figure shows; by default what share of the peak decode and prefill reach.
    """
    peak, bandwidth = cost.hardware.peak_flops, cost.hardware.bandwidth
    fig, ax = _axes(ax)
    parts, labels = [], []
    context = f"{context_length:,} token{'s' * (context_length > 1)} of context"
    kinds = (
        ("decode", batch_sizes, f"decode, {context}", "request", 4, "o-"),
        ("prefill", prompt_lengths, "prefill of a prompt", "token", 5, "s"),
    )
    for kind, sizes, words, unit, color, look in (row for row in kinds if row[1]):
        points = [roofline_point(cost, kind, size, context_length) for size in sizes]
        labels += [(f"{size:,} {unit}{'s' * (size > 1)}", *p) for size, p in zip(sizes, points, strict=True)]
        x, y = [point.intensity for point in points], [point.flops for point in points]
        marks: dict[str, Any] = {"color": style.REQUEST_COLORS[color], "markeredgecolor": "white"}
        ax.plot(x, y, look, label=words, gid=kind, markersize=9, **marks)
        share = 100 * points[-1].flops / peak
        parts.append(f"{kind} of {sizes[-1]:,} {share:.{0 if share > 10 else 1}f} %")
    ridge = peak / bandwidth
    x = [ridge, *(intensity for _, intensity, _ in labels)]
    span = np.array([min(x) / 2, ridge, max(x) * 3])
    ax.plot(span, np.minimum(span * bandwidth, peak), color=style.INK, linewidth=2.4, zorder=1, gid="roof")
    ax.axvline(ridge, color=style.GRAY, linestyle=":", linewidth=1.4, gid="ridge")
    words, coords = f"ridge: {ridge:,.0f} FLOP/byte", ("data", "axes fraction")
    style.note(ax, words, (ridge, 0.04), coords, (-5, 0), ha="right")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(span[0], span[-1])
    ax.set_xlabel("arithmetic intensity (FLOP/byte)")
    ax.set_ylabel("arithmetic (FLOP/s)")
    ax.grid(axis="both")
    ax.legend(loc="upper left")
    label_points(ax, labels, size=10)
    style.title(ax, title or f"{cost.hardware.name}: share of the peak, {', '.join(parts)}")
    return fig


def label_points(
    ax: Axes,
    points: Sequence[tuple[str, float, float]],
    *,
    colors: Sequence[str] | None = None,
    bold: Collection[str] = (),
    size: float = 11,
) -> None:
    """Write a label beside each point of an axis where it covers no point and no other label.

    Args:
        ax: The axis, with its points and scales.
        points: What to write, and where the point is.
        colors: Colour of each label; black by default.
        bold: Labels in bold type, which get their places first.
        size: Type size in points.
    """
    # Until then the limits are not those of the points.
    ax.autoscale_view()
    pixels = style.figure_of(ax).dpi / 72
    places = ax.transData.transform([point[1:] for point in points] or [(0, 0)])
    marks = [Bbox.from_bounds(x - 6 * pixels, y - 6 * pixels, 12 * pixels, 12 * pixels) for x, y in places]
    taken = list(marks)
    steps = [sign * number * 1.2 * size for number in range(1, 7) for sign in (1, -1)]
    for number in sorted(range(len(points)), key=lambda n: (points[n][0] not in bold, -places[n][1])):
        words, at = points[number][0], points[number][1:]
        note = ax.annotate(
            words,
            at,
            xytext=(0, 0),
            textcoords="offset points",
            va="center",
            fontsize=size,
            fontweight="bold" if words in bold else "normal",
            color=colors[number] if colors else style.INK,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": style.GRAY, "linewidth": 0.8},
        )
        style.plain([note])
        extent = Text.get_window_extent(note)
        # Beside the point first, then above and below it, then farther away with a line that leads there.
        beside = [(side, 9.0 * side, y) for y, side in product((0.0, *steps), (1, -1))]
        shifts = [*beside[:2], (0, 0.0, steps[0]), (0, 0.0, steps[1]), *beside[2:]]
        boxes = []
        for side, x, y in shifts:
            left = places[number][0] + x * pixels + extent.width * (side - 1) / 2
            low = places[number][1] + y * pixels - extent.height / 2
            boxes.append(Bbox.from_bounds(left, low, extent.width, extent.height))
        others = [box for box in taken if box is not marks[number]]
        best = min(range(len(boxes)), key=lambda place: (_hidden(boxes[place], ax.bbox, others), place))
        side, x, y = shifts[best]
        note.set(position=(x, y), horizontalalignment={1: "left", 0: "center", -1: "right"}[side])
        assert note.arrow_patch is not None
        note.arrow_patch.set_visible(abs(y) > steps[0])
        taken.append(boxes[best])


def _hidden(box: Bbox, whole: BboxBase, others: Sequence[Bbox]) -> float:
    """Return how much of a box lies outside of the whole or on other boxes, in pixels squared."""

    def common(other: BboxBase) -> float:
        both = Bbox.intersection(box, other)
        return 0.0 if both is None else float(both.width * both.height)

    return round(common(box) - common(whole) + sum(map(common, others)), 3)


def _axes(ax: Axes | None) -> tuple[Figure, Axes]:
    if ax is not None:
        return style.figure_of(ax), ax
    fig, ax = plt.subplots(figsize=(9, 5))
    return fig, ax


def _latencies(trace: Trace, kind: str) -> Array:
    """Return a latency in seconds of the requests that have it."""
    return defined(trace.request_columns[f"{kind}_s"])


def _extremes(quantity: str, seconds: Mapping[str, float]) -> str:
    """Return which run has the least of a time, and which the most."""
    if not seconds:
        return "No request got a token"
    shown = dict.fromkeys((min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)))
    return f"{quantity}: {', '.join(f'{label} {text.duration(seconds[label])}' for label in shown)}"


def _tradeoff_finding(runs: Mapping[str, Mapping[float, Trace]], rank: int, load: str) -> str:
    shared = set.intersection(*(set(by_load) for by_load in runs.values()))
    if not shared:
        return "No load is shared by all runs"
    most = max(shared)
    times = {label: _latencies(by_load[most], "ttft") for label, by_load in runs.items()}
    waits = {label: float(np.percentile(found, rank)) for label, found in times.items() if len(found)}
    return _extremes(f"Time to first token (p{rank}) at {most:g} {load}", waits)


def _pareto_finding(front: Sequence[str], num_runs: int) -> str:
    if not front:
        return "No run defines both"
    if len(front) == 1:
        return f"{front[0]} is best in both" if num_runs > 1 else f"{front[0]} is the only run"
    return f"No policy is best in both: on the frontier are {', '.join(front)}"
