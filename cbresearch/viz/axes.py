"""What the figures share: the time axis, plain titles, labels at the end of a line."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from cbresearch.trace import Trace
from cbresearch.viz import style, words
from cbresearch.viz.style import PolicyLook, policy_look
from cbresearch.viz.words import TimeAxis

_MAX_LABEL = 32

PADDING = "finished, still computed (padding)"


class Clock(NamedTuple):
    """The time axis that the runs of one figure share.

    Attributes:
        time: Whether it counts steps or seconds.
        factor: What seconds are multiplied by.
        unit: Unit of the axis.
        last: Where the longest run ends, in that unit.
    """

    time: TimeAxis
    factor: float
    unit: str
    last: float

    @classmethod
    def of(cls, traces: Iterable[Trace], time: TimeAxis) -> "Clock":
        """Return the axis for the runs given.

        Raises:
            ValueError: `time` is neither "step" nor "seconds".
        """
        traces = list(traces)
        if time == "step":
            return cls(time, 1.0, "steps", float(max((len(trace.steps) for trace in traces), default=0)))
        if time != "seconds":
            raise ValueError(f"time is {time!r}; it must be 'step' or 'seconds'")
        seconds = max((trace.duration for trace in traces), default=0.0)
        factor, unit = words.time_scale(seconds)
        return cls(time, factor, unit, seconds * factor)

    def edges(self, trace: Trace) -> tuple[np.ndarray, np.ndarray]:
        """Return where each step of a run starts and ends on the axis."""
        if self.time == "step":
            steps = np.arange(len(trace.steps), dtype=float)
            return steps, steps + 1
        # In one pass, for each spells out the steps that were taken at once.
        times = np.array([(record.start, record.end) for record in trace.steps], dtype=float).reshape(-1, 2)
        return times[:, 0] * self.factor, times[:, 1] * self.factor

    def stairs(
        self, trace: Trace, values: Sequence[float] | Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a value per interval and the intervals' edges, with 0 where nobody ran.

        Args:
            trace: The run.
            values: One value a step, or one row of several.
        """
        starts, ends = self.edges(trace)
        gaps = np.flatnonzero(starts > np.append(0.0, ends)[:-1]).tolist()
        # A host that takes a moment between two steps does not end the stay of those who are seated.
        idle = [step for step in gaps if not step or not trace.steps[step - 1].num_staying]
        heights = np.insert(np.array(values, dtype=int), idle, 0, axis=0)
        return heights, np.append(0.0, np.insert(ends, idle, starts[idle]))

    def label(self, ax: Axes) -> None:
        """Name the axis and its unit, and give it the length of the longest run."""
        ax.set_xlabel(f"time ({self.unit})")
        ax.set_xlim(0, self.last or 1)


def shortened(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """Return the runs under labels that a figure has room for, still distinct.

    Args:
        traces: The runs by label.
    """
    found: dict[str, Trace] = {}
    for place, (label, trace) in enumerate(traces.items(), 1):
        name = words.visible(" ".join(label.split()))
        name = name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 1]}…"
        while name in found:
            name = f"{name} ({place})"
        found[name] = trace
    return found


def looks(traces: Mapping[str, Trace]) -> dict[str, PolicyLook]:
    """Return a look per run: its policy's, unless two runs share the policy.

    Args:
        traces: The runs by label.
    """
    policies = [trace.policy for trace in traces.values()]
    return looks_of(
        {
            label: label if policies.count(trace.policy) > 1 else trace.policy
            for label, trace in traces.items()
        }
    )


def looks_of(policies: Mapping[str, str]) -> dict[str, PolicyLook]:
    """Return a look per label: its policy's, or for names that the package does not know one like no other.

    Args:
        policies: Policy names by label.
    """
    found = {label: policy_look(name) for label, name in policies.items() if style.is_known(name)}
    for label, name in policies.items():
        look, attempt = policy_look(name), 1
        colors = {other.color for other in found.values()}
        while label not in found and attempt < 40:
            # Of another colour as long as there is one, or at least of another shape.
            if look not in found.values() and (look.color not in colors or attempt > 20):
                break
            attempt += 1
            look = policy_look(f"{name} {attempt}")
        found.setdefault(label, look)
    return {label: found[label] for label in policies}


def axes(ax: Axes | None, height: float) -> tuple[Figure, Axes]:
    """Return the axis given and its figure, or new ones.

    Args:
        ax: Where to draw, or None.
        height: Height of a new figure in inches.
    """
    if ax is None:
        fig, ax = plt.subplots(figsize=(9, height))
        return fig, ax
    return figure_of(ax), ax


def figure_of(ax: Axes) -> Figure:
    """Return the whole figure that an axis is in."""
    fig = ax.get_figure(root=True)
    assert fig is not None, "the axis was taken out of its figure"
    return fig


def title(ax: Axes, text: str, size: float = 13, weight: str = "bold") -> None:
    """Set an axis's title, wrapped to the figure's width."""
    # The axes begin about an inch from the figure's edge.
    letters = round((figure_of(ax).get_size_inches()[0] - 1) * 9.2 * 13 / size)
    plain([ax.set_title(_wrapped(text, letters), loc="left", fontsize=size, fontweight=weight)])


def suptitle(fig: Figure, text: str) -> None:
    """Set a figure's title, wrapped to its width."""
    letters = round(fig.get_size_inches()[0] * 8.4)
    plain([fig.suptitle(_wrapped(text, letters), x=0.01, ha="left", fontsize=14, fontweight="bold")])


def _wrapped(text: str, letters: int) -> str:
    """Return a text in lines of at most so many letters, a number and its unit on one."""
    joined = re.sub(r"(?<=\d) (?=(?:%|s|ms|µs|steps?|times|tokens?/s)(?:\W|$))", "\0", text)
    return textwrap.fill(joined, letters).replace("\0", " ")


def plain(texts: Sequence[Text]) -> None:
    """Show texts as they are: an id or a label with dollar signs is not a formula."""
    for text in texts:
        text.set_parse_math(False)


def end_label(ax: Axes, height: float, text: str, color: str, weight: str = "normal") -> None:
    """Write what a horizontal line means beside its right end.

    Args:
        ax: Where the line is.
        height: The line's value.
        text: What to write.
        color: The line's colour.
        weight: Font weight.
    """
    ax.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        color=color,
        weight=weight,
        va="center",
        annotation_clip=False,
    )


def padding_patch() -> Patch:
    """Return the legend's mark for rows computed for nothing."""
    return Patch(
        facecolor=style.PADDING_COLOR,
        edgecolor=style.HATCH_COLOR,
        hatch=style.PADDING_HATCH,
        linewidth=0.4,
        label=PADDING,
    )


# Not `Axes.stairs`: it walks each edge in Python, which takes seconds for a long run.
def area(ax: Axes, edges: np.ndarray, low: np.ndarray | int, high: np.ndarray, **look: Any) -> None:
    """Fill the steps between two values per interval.

    Args:
        ax: Where to draw.
        edges: Edges of the intervals, one more than these.
        low: Lower value per interval, or one for all.
        high: Upper value per interval.
        **look: As `Axes.fill_between` takes it.
    """
    if len(high):
        low = np.broadcast_to(low, high.shape)
        ax.fill_between(edges, _to_last_edge(high), _to_last_edge(low), step="post", **look)


def line(ax: Axes, edges: np.ndarray, values: np.ndarray, **look: Any) -> None:
    """Draw a value per interval as a line in steps, under the lines that mark a limit or a mean.

    Args:
        ax: Where to draw.
        edges: Edges of the intervals, one more than these.
        values: A value per interval.
        **look: As `Axes.plot` takes it.
    """
    if len(values):
        look |= {"solid_joinstyle": "miter", "solid_capstyle": "butt"}
        ax.plot(edges, _to_last_edge(values), drawstyle="steps-post", zorder=1, **look)


def _to_last_edge(values: np.ndarray) -> np.ndarray:
    return np.append(values, values[-1])


def waste() -> dict[str, Any]:
    """Return the look of an area that stands for work or memory for nothing."""
    return {
        "facecolor": style.PADDING_COLOR,
        "edgecolor": style.HATCH_COLOR,
        "hatch": style.PADDING_HATCH,
        "linewidth": 0,
    }
