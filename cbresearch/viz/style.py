"""One look for every figure: colours and markers that stay with a policy, and what the figures share."""

import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from cbresearch.trace import Trace
from cbresearch.viz import text

TimeAxis = Literal["step", "seconds"]
Array = npt.NDArray[np.float64]

REQUEST_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Fills for requests: Okabe and Ito's colours, neighbours in the list as unlike as they get."""

PADDING_COLOR, HATCH_COLOR, FRAME_COLOR, INK, GRAY = "#E4E4E4", "#7A7A7A", "#CFCFCF", "#222222", "#9A9A9A"
WASTE: Mapping[str, Any] = MappingProxyType(
    {"facecolor": PADDING_COLOR, "edgecolor": HATCH_COLOR, "hatch": "////"}
)
"""The look of work or memory for nothing."""

_MAX_LABEL = 32
# More intervals than this are averaged: a pixel cannot show them, and to draw them takes seconds.
_MAX_INTERVALS = 1500


class PolicyLook(NamedTuple):
    """How a policy looks in every figure.

    Attributes:
        color: Hex colour, of a palette made for colour blindness.
        marker: Matplotlib marker.
        linestyle: Matplotlib line style.
    """

    color: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]


# Paul Tol's muted scheme, less what resembles a colour of a baseline; and markers that no baseline has.
_COLORS = ("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC")
_MARKERS = ("P", "X", "*", "<", ">", "h", "p", "d")
_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))

# Those of a family follow one another, so that they differ in colour: they are compared most.
_POLICIES = (
    *("orca", "vllm_v0", "vllm_v1", "sarathi", "splitfuse"),
    *("srpt", "mlfq", "rank", "trail", "hrrn"),
    *("mc_sf", "no_evict", "max_utilization", "past_future", "new_token_ratio"),
    *("vtc", "dlpm", "lpm"),
    *("priority", "edf", "least_slack", "andes"),
)

_KNOWN: Mapping[str, PolicyLook] = MappingProxyType(
    {
        "static": PolicyLook("#D55E00", "s", "-"),
        "static:release": PolicyLook("#E69F00", "D", "--"),
        "fcfs": PolicyLook("#0072B2", "o", "-"),
        "prefill_first": PolicyLook("#009E73", "^", "-."),
        "sjf": PolicyLook("#CC79A7", "v", (0, (1, 1))),
        # No pair of colour and marker comes twice before the least common multiple of 7 and 8.
        **{
            name: PolicyLook(
                _COLORS[n % len(_COLORS)], _MARKERS[n % len(_MARKERS)], _LINES[n // len(_COLORS)]
            )
            for n, name in enumerate(_POLICIES)
        },
    }
)
_TAKEN = frozenset(_KNOWN.values())
_SPARE = tuple(
    look
    for line in _LINES
    for marker in _MARKERS
    for color in _COLORS
    if (look := PolicyLook(color, marker, line)) not in _TAKEN
)


STYLE = Path(__file__).with_name("cbresearch.mplstyle")
"""Matplotlib's style file of the package, complete by itself."""


def use_style() -> None:
    """Give all later figures of this process the package's look: seaborn's theme, then our style file."""
    import seaborn as sns

    sns.set_theme(context="notebook", style="ticks")
    plt.style.use(STYLE)


def policy_look(name: str) -> PolicyLook:
    """Return a policy's colour, marker and line style: the same in every figure, run and process.

    Those of the package's policies all differ. Any other name gets a look computed from its letters, and none
    of theirs.

    Args:
        name: Policy name, options included.
    """
    # Not `hash`, which differs from process to process.
    return _KNOWN.get(name) or _SPARE[zlib.crc32(name.encode("utf-8", "backslashreplace")) % len(_SPARE)]


def looks(policies: Mapping[str, str]) -> dict[str, PolicyLook]:
    """Return a look per run, no two of them alike: its policy's, unless two runs share the policy.

    Args:
        policies: Policy names by label.
    """
    names = list(policies.values())
    own = {label: label if names.count(name) > 1 else name for label, name in policies.items()}
    found = {label: _KNOWN[name] for label, name in own.items() if name in _KNOWN}
    for label, name in own.items():
        if label not in found:
            place = _SPARE.index(policy_look(name))
            free = [look for look in _SPARE[place:] + _SPARE[:place] if look not in found.values()]
            colors = {look.color for look in found.values()}
            # Of another colour as long as there is one.
            found[label] = next((look for look in free if look.color not in colors), free[0])
    return {label: found[label] for label in policies}


def ink_on(color: str) -> str:
    """Return black or white, whichever reads better on a fill given as "#rrggbb" (WCAG contrast)."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def labelled(traces: Trace | Mapping[str, Trace]) -> dict[str, Trace]:
    """Return runs under labels that a figure has room for, still distinct.

    Args:
        traces: One run, which is labelled by its policy, or runs by label.
    """
    given = {traces.policy: traces} if isinstance(traces, Trace) else traces
    found: dict[str, Trace] = {}
    for place, (label, trace) in enumerate(given.items(), 1):
        name = text.visible(" ".join(label.split()))
        name = name if len(name) <= _MAX_LABEL else f"{name[: _MAX_LABEL - 1]}…"
        while name in found:
            name = f"{name} ({place})"
        found[name] = trace
    return found


class Clock(NamedTuple):
    """The time axis that the runs of one figure share.

    Attributes:
        time: Whether it counts steps or seconds.
        factor: What seconds are multiplied by.
        unit: Unit of the axis.
        last: Where the longest run ends, in that unit.
        first: Where the first run begins: 0, or where the window of a run does.
    """

    time: TimeAxis
    factor: float
    unit: str
    last: float
    first: float = 0.0

    @classmethod
    def of(cls, traces: Mapping[str, Trace], time: TimeAxis) -> "Clock":
        """Return the axis for the runs given.

        Raises:
            ValueError: `time` is neither "step" nor "seconds".
        """
        if time == "step":
            return cls(time, 1.0, "steps", float(max((len(run.steps) for run in traces.values()), default=0)))
        if time != "seconds":
            raise ValueError(f"time is {time!r}; it must be 'step' or 'seconds'")
        seconds = max((run.end for run in traces.values()), default=0.0)
        factor, unit = text.time_scale(seconds)
        first = min((run.begin for run in traces.values()), default=0.0)
        return cls(time, factor, unit, seconds * factor, first * factor)

    def edges(self, trace: Trace) -> tuple[Array, Array]:
        """Return where each step of a run starts and ends on the axis."""
        if self.time == "step":
            steps = np.arange(len(trace.steps), dtype=float)
            return steps, steps + 1
        columns = trace.step_columns
        return columns["start_s"] * self.factor, (columns["start_s"] + columns["duration_s"]) * self.factor

    def begin(self, trace: Trace) -> float:
        """Return where a run begins on the axis."""
        return 0.0 if self.time == "step" else trace.begin * self.factor

    def stairs(self, trace: Trace, values: Array) -> tuple[Array, Array]:
        """Return values per interval and the intervals' edges; 0 where no request ran.

        Args:
            trace: The run.
            values: (steps,) or (steps, quantities).

        Returns:
            Values per interval, averages of intervals where there are too many to draw, and one edge more.
        """
        starts, ends = self.edges(trace)
        columns = trace.step_columns
        # A host that takes a moment between two steps does not end the stay of the requests with a seat.
        is_empty = np.append(True, columns["num_running"] <= columns["num_finished"])[:-1]
        begin = self.begin(trace)
        idle = np.flatnonzero((starts > np.append(begin, ends)[:-1]) & is_empty)
        heights = np.insert(values, idle, 0, axis=0)
        edges = np.append(begin, np.insert(ends, idle, starts[idle]))
        if len(heights) <= _MAX_INTERVALS or not edges[-1] > edges[0]:
            return heights, edges
        widths = np.diff(edges).reshape(-1, *[1] * (values.ndim - 1))
        sums = np.cumsum(np.insert(heights * widths, 0, 0, axis=0), axis=0).reshape(len(edges), -1)
        coarse = np.linspace(edges[0], edges[-1], _MAX_INTERVALS + 1)
        parts = np.stack([np.interp(coarse, edges, column) for column in sums.T], axis=1)
        means = np.diff(parts, axis=0) / np.diff(coarse)[:, None]
        return means.reshape(_MAX_INTERVALS, *values.shape[1:]), coarse

    def label(self, ax: Axes) -> None:
        """Name the axis and its unit, and give it the length of the longest run."""
        ax.set_xlabel(f"time ({self.unit})")
        ax.set_xlim(self.first, self.last if self.last > self.first else self.first + 1)


def panels(num_panels: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels on one time axis, one below the other.

    Args:
        num_panels: Number of panels.
        height: Height of one panel in inches.
        **options: As `plt.subplots` takes them.
    """
    size = (9.5, 1.5 + height * num_panels)
    fig, axs = plt.subplots(num_panels, 1, sharex=True, squeeze=False, **{"figsize": size} | options)
    return fig, list(axs[:, 0])


def title(ax: Axes, words: str, size: float = 13, weight: str = "bold") -> None:
    """Set an axis's title, wrapped to the figure's width."""
    # The axes begin about an inch from the figure's edge.
    letters = round((figure_of(ax).get_size_inches()[0] - 1) * 9.2 * 13 / size)
    plain([ax.set_title(_wrapped(words, letters), loc="left", fontsize=size, fontweight=weight)])


def suptitle(fig: Figure, words: str) -> None:
    """Set a figure's title, wrapped to its width."""
    letters = round(fig.get_size_inches()[0] * 8.4)
    plain([fig.suptitle(_wrapped(words, letters), x=0.01, ha="left", fontsize=14, fontweight="bold")])


def _wrapped(words: str, letters: int) -> str:
    """Return a text in lines of at most so many letters, a number and its unit on one."""
    units = r"(?<=\d) (?=(?:%|s|ms|µs|steps?|times|tokens?/s)(?:\W|$))"
    joined = re.sub(units, "\0", text.visible(words, lines=False))
    return textwrap.fill(joined, letters).replace("\0", " ")


def headings(
    fig: Figure, axs: Sequence[Axes], findings: Mapping[str, str], given: str | None, other: str
) -> None:
    """Title each panel by its run and finding, and the figure; a single panel has the figure's title.

    Args:
        fig: The figure.
        axs: Its panels.
        findings: What each panel shows, by the run's label.
        given: The figure's title, if there is one.
        other: What the figure of several panels shows otherwise.
    """
    lines = [f"{label}: {finding}" for label, finding in findings.items()]
    if len(axs) == 1:
        title(axs[0], given or lines[0])
        return
    for ax, words in zip(axs, lines, strict=True):
        title(ax, words, size=12, weight="normal")
    suptitle(fig, given or other)


def figure_of(ax: Axes) -> Figure:
    """Return the whole figure that an axis is in."""
    fig = ax.get_figure(root=True)
    assert fig is not None, "the axis was taken out of its figure"
    return fig


def plain(texts: Sequence[Text]) -> None:
    """Show texts as they are: an id or a label with dollar signs is not a formula."""
    for one in texts:
        one.set_parse_math(False)


def note(
    ax: Axes,
    words: str,
    at: tuple[float, float],
    coords: tuple[str, str],
    shift: tuple[int, int],
    **look: Any,
) -> None:
    """Write a note beside a line.

    Args:
        ax: Where the line is.
        words: The note.
        at: Where to write, in `coords`.
        coords: What each coordinate is of: "data" or "axes fraction".
        shift: Points to the right and up from there.
        **look: As `Axes.annotate` takes it.
    """
    options: dict[str, Any] = {"color": INK, "va": "center", "annotation_clip": False} | look
    ax.annotate(words, at, xycoords=coords, xytext=shift, textcoords="offset points", **options)


def end_label(ax: Axes, height: float, words: str, weight: str = "normal") -> None:
    """Write what a horizontal line means beside its right end."""
    note(ax, words, (1, height), ("axes fraction", "data"), (6, 0), weight=weight)


def legend(fig: Figure, handles: Sequence[Any], **options: Any) -> None:
    """Explain, below a figure, what occurs in it."""
    if handles:
        options.setdefault("ncols", 4)
        plain(fig.legend(handles=handles, loc="outside lower left", **options).get_texts())


def waste_patch(label: str) -> Patch:
    """Return the legend's mark for work or memory for nothing."""
    return Patch(**WASTE, linewidth=0.4, label=label)


# Not `Axes.stairs`: it walks each edge in Python, which takes seconds for a long run.
def area(ax: Axes, edges: Array, low: Array | int, high: Array, **look: Any) -> None:
    """Fill the steps between two values per interval.

    Args:
        ax: Where to draw.
        edges: Edges of the intervals, one more than these.
        low: Lower value per interval, or one for all.
        high: Upper value per interval.
        **look: As `Axes.fill_between` takes it.
    """
    if len(high):
        bottom = np.broadcast_to(low, high.shape)
        look.setdefault("linewidth", 0)
        ax.fill_between(edges, np.append(high, high[-1]), np.append(bottom, bottom[-1]), step="post", **look)


def line(ax: Axes, edges: Array, values: Array, **look: Any) -> None:
    """Draw a value per interval as a line in steps, under the lines that mark a limit or a mean."""
    if len(values):
        look["solid_joinstyle"], look["solid_capstyle"] = "miter", "butt"
        ax.plot(edges, np.append(values, values[-1]), drawstyle="steps-post", linewidth=1.7, zorder=1, **look)
