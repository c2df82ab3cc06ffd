"""The report of a comparison: one HTML file with everything in it."""

import base64
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cbresearch.metrics import KpiRow
from cbresearch.trace import Trace, write_whole
from cbresearch.viz import figures, words
from cbresearch.viz.player import player_html
from cbresearch.viz.style import use_style
from cbresearch.viz.templates import asset, render

Answer = tuple[str, Mapping[str, str]]

# More bars than this are a blur, more refusals a wall.
_MAX_SEAT_STEPS = 600
_MAX_REFUSED = 50


class _Picture(NamedTuple):
    heading: str
    png: str
    alt: str
    caption: str


def write_report(
    path: str | Path,
    *,
    title: str,
    traces: Mapping[str, Trace],
    kpi: Iterable[KpiRow | Sequence[Any]] = (),
    predictions: Iterable[Sequence[Any]] = (),
    answers: Iterable[Answer] = (),
    environment: Mapping[str, str] | None = None,
    note: str = "",
) -> Path:
    """Write one HTML file that shows the runs: tables, figures, the player, answers, the environment.

    The file needs nothing else: no network, no other file. It appears whole or not at all.

    Args:
        path: Where to write it.
        title: What was compared.
        traces: The runs by label.
        kpi: Rows of `metrics.kpi_table`, or (name, unit, value of each run in the order of `traces`).
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None).
        answers: Some prompts, each with the generated text by label.
        environment: What the runs ran on: names and values.
        note: A sentence below the title.

    Raises:
        ValueError: There is no run, or a row has the wrong number of values.
    """
    if not traces:
        raise ValueError("there is no run to report; give at least one trace")
    key_figures = [_kpi_row(row, len(traces)) for row in kpi]
    compared = [_prediction(row) for row in predictions]
    html = render(
        "report.html.jinja",
        title=title,
        note=note,
        css=asset("report.css"),
        labels=list(traces),
        kpi=key_figures,
        predictions=compared,
        pictures=_pictures(traces),
        player=player_html(traces, predictions=compared, strip=False),
        answers=[(prompt, _grouped(texts)) for prompt, texts in answers],
        refused=_refused(traces),
        max_refused=_MAX_REFUSED,
        environment=dict(environment or {}),
    )
    # A lone surrogate in an id would make the file unwritable.
    write_whole(Path(path), html.encode("utf-8", "replace").decode("utf-8"))
    return Path(path)


def _pictures(traces: Mapping[str, Trace]) -> list[_Picture]:
    """Draw the figures in the package's own style, whatever the caller's is."""
    caption = f"{words.length_finding(traces)}."
    if any(len(trace.steps) > _MAX_SEAT_STEPS for trace in traces.values()):
        caption += f" At most {_MAX_SEAT_STEPS:,} steps of each run are drawn."
    plans: list[tuple[str, Callable[[], Figure], str, str]] = [
        (
            "Who sits where",
            lambda: figures.seats_side_by_side(traces, max_steps=_MAX_SEAT_STEPS),
            "Bars over time, one row a seat and one panel a run",
            f"{caption} Each bar is a request in its seat; a hatched one is the row of a finished request "
            "that the batch goes on computing.",
        ),
        (
            "How full the batch is",
            lambda: figures.occupancy(traces),
            "Step lines over time, one panel a run: rows of the batch that do useful work",
            f"{words.occupancy_finding(traces)}.",
        ),
        (
            "KV memory",
            lambda: figures.kv_memory_side_by_side(traces),
            "Areas over time, one panel a run: KV blocks held, and the tokens in use in them",
            f"{words.kv_findings(traces)}. Hatched is memory held without a token that is still needed.",
        ),
        (
            "Latency",
            lambda: figures.latency_cdfs(traces),
            "Two cumulative distributions, a line per run: time to first token and time per output token",
            f"{words.latency_finding(traces)}. Markers stand at the median and at the 99th percentile.",
        ),
    ]
    pictures = []
    with plt.rc_context(), warnings.catch_warnings():
        # An id may be in a script that the font lacks; it is shown in full elsewhere in the report.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        plt.style.use("default")
        use_style()
        for heading, draw, form, text in plans:
            pictures.append(_Picture(heading, _png(draw()), f"{form}. {text}", text))
    return pictures


def _png(fig: Figure) -> str:
    """Return a figure as base64 PNG and close it, lest a notebook show it as well."""
    buffer = io.BytesIO()
    try:
        # Without the name and version of the software, the same figure gives the same bytes.
        fig.savefig(buffer, format="png", metadata={"Software": None})
    finally:
        plt.close(fig)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _kpi_row(row: KpiRow | Sequence[Any], num_runs: int) -> dict[str, Any]:
    sizes: Sequence[str] = ()
    values: Sequence[Any]
    if isinstance(row, KpiRow):
        name, unit, values, sizes = row
    else:
        name, unit, *values = row
    if len(values) != num_runs:
        raise ValueError(f"KPI row {name!r} has {len(values)} values for {num_runs} runs")
    cells = [(words.number(value), sizes[place] if sizes else "") for place, value in enumerate(values)]
    return {"name": name, "unit": unit, "cells": cells}


def _prediction(row: Sequence[Any]) -> tuple[Any, ...]:
    if len(row) != 4:
        raise ValueError(f"prediction {tuple(row)!r} must be (quantity, predicted, measured, relative error)")
    return tuple(row)


def _grouped(texts: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Return each distinct text once, with the labels of the runs that gave it."""
    groups: dict[str, list[str]] = {}
    for label, text in texts.items():
        groups.setdefault(text, []).append(label)
    return [(labels, text) for text, labels in groups.items()]


def _refused(traces: Mapping[str, Trace]) -> list[tuple[str, str, list[str]]]:
    """Return who was refused and why, with the labels of the runs that refused it."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, trace in traces.items():
        for request in trace.requests:
            if request.error is not None:
                found.setdefault((request.id, request.error), []).append(label)
    return [(request_id, error, labels) for (request_id, error), labels in found.items()]
