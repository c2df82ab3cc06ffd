"""Which request has which seat when, what the seat does for it, and how full the batch is."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cbresearch import metrics
from cbresearch.trace import Trace
from cbresearch.viz import style, text
from cbresearch.viz.style import REQUEST_COLORS, Array, Clock, TimeAxis, area, line

KINDS = ("served", "held", "padding")
_SERVED, _HELD, _PADDING = range(len(KINDS))

# A request that follows another in its seat must look different; one in the next seat had better.
_WEIGHTS_BY_SEAT = ((0, 1000), (-1, 1), (1, 1))

_HALF_BAR, _LABEL_POINTS, _TALLEST = 0.4, 9, 24
_HELD_LOOK: Mapping[str, Any] = MappingProxyType(
    {"hatch": "..", "edgecolor": style.HATCH_COLOR, "linewidth": 0.4, "alpha": 0.4}
)
_PREEMPTED_LOOK: Mapping[str, Any] = MappingProxyType(
    {"linestyle": "none", "marker": "X", "markersize": 9, "color": style.INK, "markeredgecolor": "white"}
)


class Span(NamedTuple):
    """Consecutive steps in which a seat did the same for its request.

    Attributes:
        kind: "served": tokens were computed; "held": seated but not served; "padding": finished already,
            computed for nothing.
        first: Index of the first step.
        end: Index after the last one.
    """

    kind: str
    first: int
    end: int


class Prefill(NamedTuple):
    """A step that computes known tokens of a request: of its prompt or, after a preemption, of its output.

    Attributes:
        step: Index of the step.
        num_tokens: Tokens that it computes.
        samples: Whether the step yields a new token as well.
    """

    step: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class SeatStay:
    """A request's stay in a seat, with what each of its steps was good for.

    Unlike `export.Stay`, it tells the steps in which the request was served from those in which it was not,
    and a preempted request's seat is taken until the step that takes it away.

    Attributes:
        request_id: The request.
        seat: Its row in the batch.
        first: Index of the first step.
        num_tokens_before: Output tokens that the request had when it took the seat.
        num_computed_before: Its tokens whose KV was there by then: cached, forked or swapped in.
        end: Index after the last step.
        outcome: "finished", "preempted", "aborted", or "seated" if the record ends before the stay does.
        spans: The steps from `first` to `end`, without gaps.
        prefills: The served steps that are no plain decoding, in order.
    """

    request_id: str
    seat: int
    first: int
    num_tokens_before: int
    num_computed_before: int
    end: int = 0
    outcome: Literal["finished", "preempted", "seated", "aborted"] = "seated"
    spans: list[Span] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)


def excerpt(trace: Trace, max_steps: int | None) -> Trace:
    """Return a run with its first steps only; all of them by default."""
    return replace(trace, steps=trace.steps[:max_steps])


def seat_stays(trace: Trace) -> list[SeatStay]:
    """Return every stay in a seat, in the order in which the stays begin; a window cuts them at its edges."""
    num_steps = len(trace.steps)
    kinds = np.full((num_steps, trace.scheduler.max_num_seqs), _HELD, dtype=np.uint8)
    seated: dict[str, SeatStay] = {}
    done: list[SeatStay] = []
    for step, record in trace.steps_so_far():
        plan = record.plan
        for request_id in plan.preempted:
            stay = seated.pop(request_id)
            stay.end, stay.outcome = step, "preempted"
            done.append(stay)
        for request_id in plan.aborted:
            if request_id in seated:
                seated[request_id].end, seated[request_id].outcome = step, "aborted"
        starts = {entry.request_id: entry.start for entry in plan.scheduled} if plan.admitted else {}
        for request, seat, tokens in plan.admitted:
            seated[request.id] = SeatStay(request.id, seat, max(step, 0), len(tokens), starts[request.id])
        if step >= 0:
            kinds[step, [entry.seat for entry in plan.scheduled]] = _SERVED
            kinds[step, [row.seat for row in plan.padding]] = _PADDING
        for entry in plan.scheduled:
            stay = seated[entry.request_id]
            if step < 0:
                stay.num_tokens_before += entry.samples
                stay.num_computed_before = entry.context_length
            elif entry.is_prefill:
                stay.prefills.append(Prefill(step, entry.num_tokens, entry.samples))
        for row in plan.padding:
            seated[row.request_id].end = step + 1
        for request_id in record.finished:
            seated[request_id].end, seated[request_id].outcome = step + 1, "finished"
    for stay in seated.values():
        stay.end = num_steps if stay.outcome == "seated" else stay.end
    inside = (stay for stay in (*done, *seated.values()) if stay.first < stay.end)
    stays = sorted(inside, key=lambda stay: (stay.first, stay.seat))
    for stay in stays:
        column = kinds[stay.first : stay.end, stay.seat]
        cuts = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
        stay.spans = [
            Span(KINDS[column[begin]], stay.first + begin, stay.first + end) for begin, end in pairwise(cuts)
        ]
    return stays


def request_colors(runs: Iterable[Sequence[SeatStay]]) -> dict[str, int]:
    """Return each request's index into `REQUEST_COLORS`, the same in all the runs given.

    Requests that follow one another in a seat differ, and so do those side by side as far as the number
    of colours allows.

    Args:
        runs: The stays of each run that is shown, in the order in which they begin.
    """
    rivals: dict[str, Counter[str]] = defaultdict(Counter)
    for stays in runs:
        latest: dict[int, str] = {}
        for stay in stays:
            mine = rivals[stay.request_id]
            for offset, weight in _WEIGHTS_BY_SEAT:
                other = latest.get(stay.seat + offset, stay.request_id)
                if other != stay.request_id:
                    mine[other] += weight
                    rivals[other][stay.request_id] += weight
            latest[stay.seat] = stay.request_id
    colors: dict[str, int] = {}
    for place, request_id in enumerate(rivals):
        costs = [0] * len(REQUEST_COLORS)
        for rival, weight in rivals[request_id].items():
            if rival in colors:
                costs[colors[rival]] += weight
        # Ties go round the palette, so that all colours are used.
        order = [(place + offset) % len(costs) for offset in range(len(costs))]
        colors[request_id] = min(order, key=costs.__getitem__)
    return colors


def seats(
    traces: Trace | Mapping[str, Trace],
    *,
    time: TimeAxis = "seconds",
    title: str | None = None,
    max_steps: int | None = None,
    max_requests_labelled: int = 100,
) -> Figure:
    """Draw which request has which seat, and which seats are empty or computed for nothing; a panel a run.

    The runs share one time axis, so a shorter run visibly ends earlier. Seats behind the last one that is
    used are left out.

    Args:
        traces: One run, or runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default which run ends first.
        max_steps: Draw only this many steps of each run, from its first; all by default.
        max_requests_labelled: Write ids into the bars only up to this many requests.
    """
    traces = style.labelled(traces)
    parts = {label: excerpt(trace, max_steps) for label, trace in traces.items()}
    stays = {label: seat_stays(part) for label, part in parts.items()}
    clock = Clock.of(parts, time)
    colors = request_colors(stays.values())
    used = {label: max((stay.seat + 1 for stay in found), default=1) for label, found in stays.items()}
    rows = [min(number, _TALLEST) for number in used.values()]
    size = (10, 1.3 + sum(0.65 + 0.24 * row for row in rows))
    fig, axs = style.panels(len(traces), 0, figsize=size, height_ratios=[2 + row for row in rows])
    drawn: set[str] = set()
    for ax, (label, trace) in zip(axs, traces.items(), strict=True):
        part = parts[label]
        starts, ends = clock.edges(part)
        drawn |= _draw_stays(ax, stays[label], part, clock, used[label], colors)
        if used[label] < trace.scheduler.max_num_seqs:
            ax.set_ylabel(f"used: {used[label]} of {trace.scheduler.max_num_seqs}\nseat")
        if len(colors) <= max_requests_labelled:
            _label_stays(ax, stays[label], starts, ends, clock.last - clock.first, colors)
        end = float(ends.max(initial=clock.begin(trace)))
        ax.axvline(end, color=style.INK, linewidth=2, gid="end")
        is_whole = len(part.steps) == len(trace.steps) and trace.end == (trace.whole or trace).end
        words = f"done: {_length(trace, time)}" if is_whole else "goes on →"
        style.note(ax, words, (end, 0.5), ("data", "axes fraction"), (5, 0), rotation=90, fontsize=10)
    clock.label(axs[-1])
    # Room for the last run's end mark.
    axs[-1].set_xlim(right=clock.last + 0.03 * ((clock.last - clock.first) or 1))
    findings = {label: busy_seats(trace, time) for label, trace in traces.items()}
    style.headings(fig, axs, findings, title, _length_finding(traces, time))
    marks = {
        "served": Patch(facecolor=REQUEST_COLORS[0], label="served (a colour per request)"),
        "padding": style.waste_patch("finished, still computed (padding)"),
        "held": Patch(facecolor=REQUEST_COLORS[0], label="seated, not served", **_HELD_LOOK),
        "empty": Patch(facecolor="white", edgecolor=style.GRAY, label="empty seat"),
        "preempted": Line2D([], [], label="preempted", **_PREEMPTED_LOOK),
    }
    shown = [mark for kind, mark in marks.items() if kind in drawn]
    style.legend(fig, shown, ncols=4 if len(shown) < 5 else 3)
    return fig


def occupancy(
    traces: Trace | Mapping[str, Trace], *, time: TimeAxis = "seconds", title: str | None = None
) -> Figure:
    """Draw how many rows of the batch do useful work over time, a panel a run.

    Args:
        traces: One run, or runs by label.
        time: Whether the time axis counts steps or seconds.
        title: What the figure shows; by default each run's mean number of useful rows.
    """
    traces = style.labelled(traces)
    fig, axs = style.panels(len(traces), 1.4, sharey=True)
    clock = Clock.of(traces, time)
    looks = style.looks({label: trace.policy for label, trace in traces.items()})
    has_padding = False
    for ax, (label, trace) in zip(axs, traces.items(), strict=True):
        columns = trace.step_columns
        useful_and_padding = np.stack([columns["num_scheduled"], columns["num_padding_rows"]], axis=1)
        rows, edges = clock.stairs(trace, useful_and_padding)
        useful, computed = rows[:, 0], rows.sum(axis=1)
        has_padding |= bool((computed > useful).any())
        color, limit = looks[label].color, trace.scheduler.max_num_seqs
        ax.set_ylabel("rows\n(requests)")
        area(ax, edges, useful, computed, **style.WASTE, gid="padding")
        area(ax, edges, 0, useful, color=color, alpha=0.3, gid="useful area")
        line(ax, edges, useful, color=color, gid="useful")
        ax.axhline(limit, color=style.INK, linestyle="--", linewidth=1.2, gid="seat limit")
        style.end_label(ax, limit, f"{limit} seats")
        if (mean := metrics.occupancy(trace)) is not None:
            ax.axhline(mean, color=style.INK, linestyle=":", linewidth=2.2, gid="mean")
            # Below the label of the limit where the two would meet.
            style.end_label(ax, min(mean, 0.78 * limit), f"mean {mean:.1f}", weight="bold")
    most = max(trace.scheduler.max_num_seqs for trace in traces.values())
    axs[0].set_ylim(0, most * 1.12)
    axs[0].set_yticks(sorted({0, most // 2, most}))
    clock.label(axs[-1])
    findings = {label: busy_seats(trace, time) for label, trace in traces.items()}
    style.headings(fig, axs, findings, title, _occupancy_finding(traces))
    handles = [
        Patch(facecolor=style.GRAY, alpha=0.5, label="served"),
        *([style.waste_patch("finished, still computed (padding)")] if has_padding else []),
        Line2D([], [], color=style.INK, linestyle=":", label="mean of the rows served"),
        Line2D([], [], color=style.INK, linestyle="--", label="all seats"),
    ]
    style.legend(fig, handles)
    return fig


def _length_finding(traces: Mapping[str, Trace], time: TimeAxis) -> str:
    """Return which run ends first, and how far the last is behind."""
    sizes = {label: len(run.steps) if time == "step" else run.duration for label, run in traces.items()}
    first, last = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    soon, late = _length(traces[first], time), _length(traces[last], time)
    if sizes[first] == sizes[last]:
        return f"Each run takes {soon}" if len(sizes) > 1 else f"{first} takes {soon}"
    ratio = f", {sizes[last] / sizes[first]:.2f} times as long" if sizes[first] else ""
    return f"{first} is done after {soon}, {last} after {late}{ratio}"


def _occupancy_finding(traces: Mapping[str, Trace]) -> str:
    """Return how many rows do useful work on average, run by run."""
    means = {label: metrics.occupancy(trace) for label, trace in traces.items()}
    parts = [f"{label} {mean:.1f}" for label, mean in means.items() if mean is not None]
    return f"Useful rows on average: {', '.join(parts)}" if parts else "No step was run"


def _length(trace: Trace, time: TimeAxis) -> str:
    return text.steps(len(trace.steps)) if time == "step" else text.duration(trace.duration)


def busy_seats(trace: Trace, time: TimeAxis) -> str:
    """Return how many seats of a run were busy on average, and over how long."""
    mean = metrics.occupancy(trace)
    if mean is None:
        return "no step was run"
    seats = trace.scheduler.max_num_seqs
    return f"{mean:.1f} of {seats} seats busy on average over {_length(trace, time)}"


def _draw_stays(
    ax: Axes, stays: Sequence[SeatStay], run: Trace, clock: Clock, num_seats: int, colors: Mapping[str, int]
) -> set[str]:
    """Draw one run's seats; return which marks of the legend occur."""
    starts, ends = clock.edges(run)

    def box(left: float, right: float, seat: int) -> list[tuple[float, float]]:
        low, high = seat - _HALF_BAR, seat + _HALF_BAR
        return [(left, low), (right, low), (right, high), (left, high)]

    boxes: dict[str, list[Any]] = defaultdict(list)
    fills: dict[str, list[str]] = defaultdict(list)
    for stay in stays:
        for kind, first, end in stay.spans:
            boxes[kind].append(box(starts[first], ends[end - 1], stay.seat))
            fills[kind].append(REQUEST_COLORS[colors[stay.request_id]])
    # Between many seats, lines would cover the bars.
    width = 0.8 if num_seats <= 32 else 0.2
    looks: dict[str, dict[str, Any]] = {
        "frame": {"facecolor": "white", "edgecolor": style.FRAME_COLOR, "linewidth": width},
        "held": {"facecolor": fills["held"], **_HELD_LOOK},
        "padding": {**style.WASTE, "linewidth": 0.4},
        "served": {"facecolor": fills["served"], "edgecolor": "white", "linewidth": width},
    }
    if len(ends):
        boxes["frame"] = [box(clock.begin(run), float(ends[-1]), seat) for seat in range(num_seats)]
    for kind, look in looks.items():
        if boxes[kind]:
            ax.add_collection(PolyCollection(boxes[kind], **look, gid=kind))
    lost = [(float(ends[stay.end - 1]), stay.seat) for stay in stays if stay.outcome == "preempted"]
    if lost:
        ax.plot(*zip(*lost, strict=True), **_PREEMPTED_LOOK, zorder=4, gid="preempted")
    ax.set_ylim(num_seats - 0.4, -0.6)
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_ylabel("seat")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    is_full = sum(stay.end - stay.first for stay in stays) == num_seats * len(starts)
    found = {kind for kind in boxes if boxes[kind]}
    return found | ({"preempted"} if lost else set()) | (set() if is_full else {"empty"})


def _label_stays(
    ax: Axes, stays: Sequence[SeatStay], starts: Array, ends: Array, last: float, colors: Mapping[str, int]
) -> None:
    """Write the request's id into each bar that is wide enough for it."""
    # A digit is 0.64 of the type size wide, and the axis gets about 0.9 of the figure's width.
    per_letter = 0.64 * _LABEL_POINTS / 72 / (0.9 * style.figure_of(ax).get_size_inches()[0]) * last
    for stay in stays:
        served = [span for span in stay.spans if span.kind == "served"]
        if not served:
            continue
        span = max(served, key=lambda span: span.end - span.first)
        left, right = starts[span.first], ends[span.end - 1]
        label = text.visible(stay.request_id, lines=False)
        # The cross of a preemption covers the end of the bar.
        right -= (0.9 if stay.outcome == "preempted" else 0) * per_letter
        if (len(label) + 0.6) * per_letter <= right - left:
            ink = style.ink_on(REQUEST_COLORS[colors[stay.request_id]])
            look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": _LABEL_POINTS}
            ax.text((left + right) / 2, stay.seat, label, color=ink, clip_on=True, parse_math=False, **look)
