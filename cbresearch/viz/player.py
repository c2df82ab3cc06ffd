"""An interactive player: recorded runs side by side on one clock, as one self-contained piece of HTML."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cbresearch.trace import Trace
from cbresearch.viz.seating import request_colors, sittings
from cbresearch.viz.style import REQUEST_COLORS, ink_on
from cbresearch.viz.templates import asset, render, script_json

_KINDS = ("served", "held", "padding")
_OUTCOMES = ("finished", "preempted", "seated")


def player_html(
    traces: Mapping[str, Trace], element_id: str = "cbresearch-player", max_steps: int = 2000
) -> str:
    """Return the player as HTML with everything in it; the same traces give the same bytes.

    In a notebook, `IPython.display.HTML(player_html(traces))` shows it, with or without a kernel.

    Args:
        traces: The runs by label.
        element_id: Id of the outermost element; give each player on a page its own.
        max_steps: Show at most this many steps of a run; the player says what it leaves out.

    Raises:
        ValueError: There is no run, no step to show, or the id is not a plain one.
    """
    if not traces:
        raise ValueError("there is no run to play; give at least one trace")
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps!r}; it must be at least 1")
    if not re.fullmatch(r"[A-Za-z][\w-]*", element_id, re.ASCII):
        raise ValueError(f"element_id is {element_id!r}; use letters, digits, '-' and '_', a letter first")
    return render(
        "player.html.jinja",
        element_id=element_id,
        data=script_json(player_data(traces, max_steps)),
        left_out=[_left_out(label, trace, max_steps) for label, trace in traces.items()],
        script=asset("player.js"),
        css=asset("player.css"),
        has_padding=any(record.plan.padding for trace in traces.values() for record in trace.steps),
    )


def player_data(traces: Mapping[str, Trace], max_steps: int) -> dict[str, Any]:
    """Return what the player's script reads, as plain values.

    Requests are numbers, indices into `ids` and `colors`. A stay is its request, its seat, its first step,
    its outcome (0 finished, 1 preempted, 2 still seated at the end) and then pairs of what the seat did
    (0 served, 1 held, 2 padding) and for how many steps.

    Args:
        traces: The runs by label.
        max_steps: Number of steps of a run to keep, from its first.
    """
    places: dict[str, int] = {}
    runs = [_run(label, trace, max_steps, places) for label, trace in traces.items()]
    colors = request_colors(replace(trace, steps=trace.steps[:max_steps]) for trace in traces.values())
    return {
        "ids": list(places),
        "colors": [colors[request_id] for request_id in places],
        "fills": list(REQUEST_COLORS),
        "inks": [ink_on(color) for color in REQUEST_COLORS],
        "runs": runs,
    }


def _run(label: str, trace: Trace, max_steps: int, places: dict[str, int]) -> dict[str, Any]:
    steps = trace.steps[:max_steps]
    stays = []
    for sitting in sittings(steps):
        stay = [
            places.setdefault(sitting.request_id, len(places)),
            sitting.seat,
            sitting.first,
            _OUTCOMES.index(sitting.outcome),
        ]
        for span in sitting.spans:
            stay += [_KINDS.index(span.kind), span.end - span.first]
        stays.append(stay)
    num_tokens, tokens = 0, []
    for record in steps:
        num_tokens += sum(entry.samples for entry in record.plan.scheduled)
        tokens.append(num_tokens)
    return {
        "label": label,
        "policy": trace.policy,
        "seats": trace.scheduler.max_num_seqs,
        "blocks": trace.cache.num_blocks,
        "peak": max((record.num_held_blocks for record in trace.steps), default=0),
        "steps": len(trace.steps),
        "tokens": sum(len(request.tokens) for request in trace.requests),
        "start": [_short(record.start) for record in steps],
        "end": [_short(record.end) for record in steps],
        "out": tokens,
        "waiting": [record.num_waiting for record in steps],
        "held": [record.num_held_blocks for record in steps],
        "stays": stays,
    }


def _short(seconds: float) -> float | int:
    """Return a time rounded to nine digits, which tells all steps of a run apart and is short to write."""
    rounded = float(f"{seconds:.9g}")
    return int(rounded) if rounded.is_integer() else rounded


def _left_out(label: str, trace: Trace, max_steps: int) -> str:
    total = len(trace.steps)
    if not total:
        return f"{label}: no step was run, so there is nothing to play."
    if total <= max_steps:
        return ""
    rest = total - max_steps
    return f"{label}: the first {max_steps:,} of {total:,} steps are shown; the other {rest:,} are left out."
