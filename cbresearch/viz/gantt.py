"""Draw one run's seats into an axis: bars for who sits where, hatched where a row is computed for nothing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cbresearch.trace import Trace
from cbresearch.viz import style, words
from cbresearch.viz.axes import PADDING, Clock, figure_of, padding_patch
from cbresearch.viz.seating import Sitting, sittings

_HALF_BAR = 0.4
_LABEL_POINTS = 9
_MEANINGS = {
    "served": "served (a colour per request)",
    "padding": PADDING,
    "held": "seated, not served",
    "empty": "empty seat",
    "preempted": "preempted",
}


def draw_seats(
    ax: Axes, trace: Trace, clock: Clock, colors: Mapping[str, int], max_requests_labelled: int
) -> set[str]:
    """Draw one run's seats; return which entries of the legend occur.

    Args:
        ax: Where to draw.
        trace: The run.
        clock: The time axis.
        colors: Index into `style.REQUEST_COLORS` by request id.
        max_requests_labelled: Write ids into the bars only up to this many requests.
    """
    starts, ends = clock.edges(trace)
    seats = trace.scheduler.max_num_seqs
    stays = sittings(trace.steps)
    boxes: dict[str, list[Any]] = defaultdict(list)
    fills: dict[str, list[str]] = defaultdict(list)
    lost: list[tuple[float, int]] = []
    for stay in stays:
        for span in stay.spans:
            boxes[span.kind].append(_box(starts[span.first], ends[span.end - 1], stay.seat))
            fills[span.kind].append(style.REQUEST_COLORS[colors[stay.request_id]])
        if stay.outcome == "preempted":
            lost.append((float(ends[stay.end - 1]), stay.seat))
    last = float(ends.max(initial=0.0))
    # Between many seats, lines would cover the bars.
    line = 0.8 if seats <= 32 else 0.2
    if last:
        frames = [_box(0.0, last, seat) for seat in range(seats)]
        ax.add_collection(
            PolyCollection(
                frames, facecolor="white", edgecolor=style.FRAME_COLOR, linewidth=line, gid="frame"
            )
        )
    looks: dict[str, dict[str, Any]] = {
        "held": {"facecolor": fills["held"], "alpha": 0.4, **_hatched("..")},
        "padding": {"facecolor": style.PADDING_COLOR, **_hatched(style.PADDING_HATCH)},
        "served": {"facecolor": fills["served"], "edgecolor": "white", "linewidth": line},
    }
    for kind, look in looks.items():
        if boxes[kind]:
            ax.add_collection(PolyCollection(boxes[kind], **look, gid=kind))
    if lost:
        ax.plot(*zip(*lost, strict=True), **_preempted_mark(), zorder=4, gid="preempted")
    ax.set_ylim(seats - 0.4, -0.6)
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.set_ylabel("seat")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if len({stay.request_id for stay in stays}) <= max_requests_labelled:
        _label_stays(ax, stays, starts, ends, clock.last, colors)
    taken = sum(stay.end - stay.first for stay in stays)
    drawn = {kind for kind in looks if boxes[kind]}
    if lost:
        drawn.add("preempted")
    if taken < seats * len(starts):
        drawn.add("empty")
    return drawn


def seat_legend(fig: Figure, drawn: set[str]) -> None:
    """Explain, below the figure, the marks that occur in it.

    Args:
        fig: The figure.
        drawn: What `draw_seats` returned.
    """
    marks = {
        "served": Patch(facecolor=style.REQUEST_COLORS[0]),
        "padding": padding_patch(),
        "held": Patch(alpha=0.4, facecolor=style.REQUEST_COLORS[0], **_hatched("..")),
        "empty": Patch(facecolor="white", edgecolor="#9A9A9A"),
        "preempted": Line2D([], [], **_preempted_mark()),
    }
    shown = [kind for kind in marks if kind in drawn]
    if shown:
        fig.legend(
            [marks[kind] for kind in shown],
            [_MEANINGS[kind] for kind in shown],
            loc="outside lower left",
            ncols=4 if len(shown) < 5 else 3,
            columnspacing=1.4,
        )


def _label_stays(
    ax: Axes,
    stays: Sequence[Sitting],
    starts: np.ndarray,
    ends: np.ndarray,
    last: float,
    colors: Mapping[str, int],
) -> None:
    """Write the request's id into each bar that is wide enough for it."""
    # A digit is 0.64 of the type size wide, and the axis gets about 0.9 of the figure's width.
    width = 0.9 * figure_of(ax).get_size_inches()[0]
    if (place := ax.get_subplotspec()) is not None:
        width *= len(place.colspan) / place.get_gridspec().ncols
    per_letter = 0.64 * _LABEL_POINTS / 72 / width * last
    for stay in stays:
        served = [span for span in stay.spans if span.kind == "served"]
        if not served:
            continue
        span = max(served, key=lambda span: span.end - span.first)
        left, right = starts[span.first], ends[span.end - 1]
        label = words.visible(stay.request_id, lines=False)
        # The cross of a preemption covers the end of the bar.
        right -= (0.9 if stay.outcome == "preempted" else 0) * per_letter
        if (len(label) + 0.6) * per_letter <= right - left:
            ax.text(
                (left + right) / 2,
                stay.seat,
                label,
                ha="center",
                va="center_baseline",
                fontsize=_LABEL_POINTS,
                color=style.ink_on(style.REQUEST_COLORS[colors[stay.request_id]]),
                clip_on=True,
                parse_math=False,
            )


def _box(left: float, right: float, seat: int) -> list[tuple[float, float]]:
    low, high = seat - _HALF_BAR, seat + _HALF_BAR
    return [(left, low), (right, low), (right, high), (left, high)]


def _hatched(hatch: str) -> dict[str, Any]:
    return {"hatch": hatch, "edgecolor": style.HATCH_COLOR, "linewidth": 0.4}


def _preempted_mark() -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": "X",
        "markersize": 9,
        "color": style.INK,
        "markeredgecolor": "white",
    }
