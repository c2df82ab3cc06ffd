"""An interactive player: recorded runs side by side on one clock, as one self-contained piece of HTML."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cbresearch.trace import Trace
from cbresearch.viz import words
from cbresearch.viz.player_data import Bounds, left_out, player_data
from cbresearch.viz.player_strip import strip_png
from cbresearch.viz.seating import request_colors
from cbresearch.viz.templates import asset, render, script_json

# In this order: what a script defines is there for the ones behind it.
_SCRIPTS = ("base", "runs", "start", "execute", "blocks", "monitor", "complete", "main")


def player_html(
    traces: Mapping[str, Trace],
    element_id: str = "cbresearch-player",
    max_steps: int = 2000,
    *,
    predictions: Iterable[Sequence[Any]] = (),
    strip: bool = True,
) -> str:
    """Return the player as HTML with everything in it; the same traces give the same bytes.

    It tells one story under four tabs: Start (who wants what), Execute (step by step), Monitor (gauges and
    lines up to the moment shown) and Complete (key figures). In a notebook,
    `IPython.display.HTML(player_html(traces))` shows it, with or without a kernel.

    Args:
        traces: The runs by label; the others are compared with the static one or, without one, the first.
        element_id: Id of the outermost element; give each player on a page its own.
        max_steps: Show at most this many steps of a run; the player says what it leaves out.
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None), shown
            beside the measured speed-up.
        strip: Whether a picture of the seats stands in where scripts are removed.

    Raises:
        ValueError: There is no run, no step to show, the id is not a plain one, or a prediction has the wrong
            number of values.
    """
    if not traces:
        raise ValueError("there is no run to play; give at least one trace")
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps!r}; it must be at least 1")
    if not re.fullmatch(r"[A-Za-z][\w-]*", element_id, re.ASCII):
        raise ValueError(f"element_id is {element_id!r}; use letters, digits, '-' and '_', a letter first")
    bounds = Bounds(steps=max_steps)
    return render(
        "player.html.jinja",
        element_id=element_id,
        data=script_json(player_data(traces, predictions, bounds)),
        left_out=[sentence for label, trace in traces.items() for sentence in left_out(label, trace, bounds)],
        scripts=[asset(f"player_{name}.js") for name in _SCRIPTS],
        css=asset("player.css"),
        strips=_strips(traces, max_steps) if strip else [],
    )


def _strips(traces: Mapping[str, Trace], max_steps: int) -> list[tuple[str, str, str]]:
    """Return each run's label, its picture as a data URI, and what the picture shows."""
    cut = {label: replace(trace, steps=trace.steps[:max_steps]) for label, trace in traces.items()}
    colors = request_colors(cut.values())
    longest = max(trace.duration for trace in cut.values())
    return [
        (
            name,
            strip_png(trace.steps, trace.scheduler.max_num_seqs, longest, colors),
            f"{words.seats_finding(trace, name)}, {words.duration(trace.duration)}.",
        )
        for name, trace in ((words.visible(label, lines=False), trace) for label, trace in cut.items())
        if trace.steps
    ]
