"""The report of a comparison: one HTML file with everything in it."""

import base64
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cbresearch import metrics
from cbresearch.metrics import KpiRow, Slo
from cbresearch.trace import Trace, write_whole
from cbresearch.viz import figures, words
from cbresearch.viz.dispatcher import questions
from cbresearch.viz.player import player_html
from cbresearch.viz.style import use_style
from cbresearch.viz.templates import asset, render

Answer = tuple[str, Mapping[str, str]]

# More bars than this are a blur, more refusals a wall.
_MAX_SEAT_STEPS = 600
_MAX_REFUSED = 50

_WAIT, _SPEED = "ttft_p99_s", "output_throughput_tokens_per_s"


class _Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class _Plan(NamedTuple):
    heading: str
    draw: Callable[[], Figure]
    form: str
    text: str
    table: _Table


class _Picture(NamedTuple):
    heading: str
    png: str
    alt: str
    caption: str
    table: _Table


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
    bytes_per_token: int | None = None,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> Path:
    """Write one HTML file that shows the runs: a dispatcher's three questions, tables, the player, figures.

    How much was carried, who waited longest and what it cost comes first; answers, refusals and the
    environment come last. The file needs nothing else: no network, no other file. It appears whole or not
    at all.

    Args:
        path: Where to write it.
        title: What was compared.
        traces: The runs by label.
        kpi: Rows of `metrics.kpi_table`, or (name, unit, value of each run in the order of `traces`).
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None).
        answers: Some prompts, each with the generated text by label.
        environment: What the runs ran on: names and values.
        note: A sentence below the title.
        bytes_per_token: KV bytes of one token; without it memory is given in tokens.
        slo: What was promised to the clients; without it there is no goodput.
        price_per_hour: What an hour of the machine costs; without it the cost of tokens is given in hours.
        currency: Of the price.

    Raises:
        ValueError: There is no run, a row has the wrong number of values, or the price is below 0.
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
        questions=questions(
            traces,
            bytes_per_token=bytes_per_token,
            slo=slo,
            price_per_hour=price_per_hour,
            currency=currency,
        ),
        kpi=key_figures,
        predictions=compared,
        pictures=_pictures(traces),
        player=player_html(traces, predictions=compared, strip=False),
        answers=[(prompt, _grouped(texts)) for prompt, texts in answers],
        refused=_errors(traces, are_refused=True),
        failed=_errors(traces, are_refused=False),
        max_refused=_MAX_REFUSED,
        environment=dict(environment or {}),
    )
    # A lone surrogate in an id would make the file unwritable.
    write_whole(Path(path), html.encode("utf-8", "replace").decode("utf-8"))
    return Path(path)


def first_section(
    traces: Mapping[str, Trace],
    *,
    bytes_per_token: int | None = None,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> str:
    """Return the report's first section alone, a dispatcher's three questions, as HTML for a notebook.

    Args:
        traces: The runs by label.
        bytes_per_token: KV bytes of one token; without it memory is given in tokens.
        slo: What was promised to the clients; without it there is no goodput.
        price_per_hour: What an hour of the machine costs; without it the cost of tokens is given in hours.
        currency: Of the price.

    Raises:
        ValueError: There is no run, or the price is below 0.
    """
    if not traces:
        raise ValueError("there is no run to report; give at least one trace")
    return render(
        "questions.html.jinja",
        css=asset("report.css"),
        labels=list(traces),
        questions=questions(
            traces,
            bytes_per_token=bytes_per_token,
            slo=slo,
            price_per_hour=price_per_hour,
            currency=currency,
        ),
    )


def _pictures(traces: Mapping[str, Trace]) -> list[_Picture]:
    """Draw the figures in the package's own style, whatever the caller's is."""
    pictures = []
    with plt.rc_context(), warnings.catch_warnings():
        # An id may be in a script that the font lacks; it is shown in full elsewhere in the report.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        plt.style.use("default")
        use_style()
        for plan in _plans(traces):
            alt = f"{plan.form}. {plan.text}"
            pictures.append(_Picture(plan.heading, _png(plan.draw()), alt, plan.text, plan.table))
    return pictures


def _plans(traces: Mapping[str, Trace]) -> list[_Plan]:
    """Return what to draw, and beside each figure its finding and its numbers."""
    caption = f"{words.length_finding(traces)}."
    if any(len(trace.steps) > _MAX_SEAT_STEPS for trace in traces.values()):
        caption += f" At most {_MAX_SEAT_STEPS:,} steps of each run are drawn."
    found = {label: metrics.summary(trace) for label, trace in traces.items()}

    def table(**columns: Callable[[Mapping[str, Any]], str]) -> _Table:
        names = [name.replace("_", " ") for name in columns]
        return _Table(
            ["run", *names],
            [[label, *(show(run) for show in columns.values())] for label, run in found.items()],
        )

    def percent(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda run: words.NOTHING if run[key] is None else f"{100 * run[key]:.1f} %"

    def number(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda run: words.number(run[key])

    def seconds(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda run: words.duration(run[key])

    plans = [
        _Plan(
            "Who sits where",
            lambda: figures.seats_side_by_side(traces, max_steps=_MAX_SEAT_STEPS),
            "Bars over time, one row a seat and one panel a run",
            f"{caption} Each bar is a request in its seat; a hatched one is the row of a finished request "
            "that the batch goes on computing.",
            table(
                steps=number("num_steps"),
                first_arrival_to_last_token=seconds("makespan_s"),
                preemptions=number("num_preemptions"),
            ),
        ),
        _Plan(
            "How full the batch is",
            lambda: figures.occupancy(traces),
            "Step lines over time, one panel a run: rows of the batch that do useful work",
            f"{words.occupancy_finding(traces)}.",
            table(
                useful_rows=number("occupancy_rows"),
                of_all_seats=percent("utilization"),
                rows_computed_for_nothing=percent("wasted_row_share"),
            ),
        ),
        _Plan(
            "KV memory",
            lambda: figures.kv_categories(traces),
            "Stacked areas over time, one panel a run: what each slot of the KV pool is used for",
            f"{words.categories_findings(traces)}.",
            table(
                in_use=percent("kv_token_states_share"),
                reserved=percent("kv_reserved_share"),
                never_filled=percent("kv_internal_share"),
                out_of_reach=percent("kv_external_share"),
                cached=percent("kv_cached_share"),
                free=percent("kv_free_share"),
            ),
        ),
        _Plan(
            "Latency",
            lambda: figures.latency_cdfs(traces),
            "Two cumulative distributions, a line per run: time to first token and time per output token",
            f"{words.latency_finding(traces)}. Markers stand at the median and at the 99th percentile.",
            table(
                TTFT_p50=seconds("ttft_p50_s"),
                TTFT_p99=seconds("ttft_p99_s"),
                TPOT_p50=seconds("tpot_p50_s"),
                TPOT_p99=seconds("tpot_p99_s"),
                requests=number("ttft_n"),
            ),
        ),
    ]
    defined = [label for label, run in found.items() if None not in (run[_WAIT], run[_SPEED])]
    if len(defined) > 1:
        front = figures.front(found)
        plans.append(
            _Plan(
                "Which policy is a choice",
                lambda: figures.pareto(traces),
                "A dot per run: time to first token at the 99th percentile, and output throughput",
                f"{words.pareto_finding(front, len(defined))}. Joined are those that no other beats in both.",
                _Table(
                    ["run", "TTFT p99", "output throughput", "verdict"],
                    [
                        [
                            label,
                            words.duration(run[_WAIT]),
                            words.NOTHING if run[_SPEED] is None else f"{words.number(run[_SPEED])} tokens/s",
                            words.NOTHING
                            if label not in defined
                            else "a choice"
                            if label in front
                            else "beaten",
                        ]
                        for label, run in found.items()
                    ],
                ),
            )
        )
    return plans


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


def _errors(traces: Mapping[str, Trace], are_refused: bool) -> list[tuple[str, str, list[str]]]:
    """Return who was refused, or failed while it was served, and why, with the labels of the runs."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, trace in traces.items():
        for request in trace.requests:
            if request.error is not None and request.is_refused is are_refused:
                found.setdefault((request.id, request.error), []).append(label)
    return [(request_id, error, labels) for (request_id, error), labels in found.items()]
