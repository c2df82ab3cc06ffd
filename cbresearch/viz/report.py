"""The report of a comparison: one HTML file with everything in it."""

import base64
import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from cbresearch import metrics
from cbresearch.metrics import KpiRow
from cbresearch.metrics.reporting import Reporting
from cbresearch.trace import RequestRecord, Trace, write_whole
from cbresearch.viz import charts, memory, style, text, timeline
from cbresearch.viz.player import player_html, prediction_cells
from cbresearch.viz.templates import asset, render

Answer = tuple[str, Mapping[str, str]]
Picture = tuple[str, str, str, Callable[[], Figure]]

# More bars than this are a blur, more rejections a wall, fewer dots than this no picture.
_MAX_SEAT_STEPS = 600
_MAX_ERRORS = 50
_MIN_DOTS = 3


def write_report(
    path: str | Path,
    *,
    title: str,
    traces: Mapping[str, Trace],
    kpi: Iterable[KpiRow] | None = None,
    predictions: Iterable[Sequence[Any]] = (),
    answers: Iterable[Answer] = (),
    environment: Mapping[str, str] | None = None,
    note: str = "",
    bytes_per_token: int | None = None,
    reporting: Reporting | None = None,
) -> Path:
    """Write one HTML file that shows the runs: a summary, tables, the player, figures, answers and errors.

    The summary answers how much was served, which request waited longest and what it cost. The file needs
    nothing else: no network, no other file. It appears whole or not at all.

    Args:
        path: Where to write it.
        title: What was compared.
        traces: The runs by label.
        kpi: Rows of `metrics.kpi_table`, which makes them by default.
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None).
        answers: Some prompts, each with the generated text by label.
        environment: What the runs ran on: names and values.
        note: A sentence below the title.
        bytes_per_token: KV bytes of one token; without it memory is given in tokens.
        reporting: The SLO, for goodput, and the price of an hour, without which tokens cost hours.

    Raises:
        ValueError: There is no run, or a row has the wrong number of values.
    """
    terms, compared = reporting or Reporting(), list(predictions)
    rows = metrics.kpi_table(traces, bytes_per_token, terms) if kpi is None else list(kpi)
    # First, for it refuses to play no run, and rows of the wrong length.
    player = player_html(traces, predictions=compared, kpi=rows)
    html = render(
        "report.html.jinja",
        title=title,
        note=note,
        css=asset("report.css"),
        summary=summary_of(traces, terms),
        kpi=_cells(rows, traces),
        labels=list(traces),
        predictions=[prediction_cells(row) for row in compared],
        pictures=_drawn(_pictures(traces)),
        player=player,
        answers=[(prompt, _grouped(texts)) for prompt, texts in answers],
        errors=[
            ("Rejected requests", "rejected", _errors(traces, are_rejected=True)),
            ("Failed requests", "failed while they were served", _errors(traces, are_rejected=False)),
        ],
        max_errors=_MAX_ERRORS,
        environment=dict(environment or {}),
    )
    # A lone surrogate in an id would make the file unwritable.
    write_whole(Path(path), html.encode("utf-8", "replace").decode("utf-8"))
    return Path(path)


def first_section(
    traces: Mapping[str, Trace], *, bytes_per_token: int | None = None, reporting: Reporting | None = None
) -> str:
    """Return the report's summary and key figures alone, as HTML for a notebook.

    Args:
        traces: The runs by label.
        bytes_per_token: KV bytes of one token; without it memory is given in tokens.
        reporting: The SLO, for goodput, and the price of an hour, without which tokens cost hours.

    Raises:
        ValueError: There is no run.
    """
    if not traces:
        raise ValueError("there is no run to report; give at least one trace")
    terms = reporting or Reporting()
    return render(
        "first_section.html.jinja",
        css=asset("report.css"),
        summary=summary_of(traces, terms),
        kpi=_cells(metrics.kpi_table(traces, bytes_per_token, terms), traces),
        labels=list(traces),
    )


def summary_of(traces: Mapping[str, Trace], reporting: Reporting) -> list[tuple[str, str]]:
    """Return what a reader asks first of some runs, and the answers, the best run first.

    Args:
        traces: The runs by label.
        reporting: The SLO and the price.
    """
    has_tokens = any(record.tokens for trace in traces.values() for record in trace.served)
    nothing = "The runs took no time." if has_tokens else "No request got a token."
    speeds = {label: metrics.output_throughput(trace) for label, trace in traces.items()}
    given = reporting.price_per_hour
    price, unit = (1.0, "Hours of the machine") if given is None else (given, reporting.currency)
    costs = {label: metrics.cost_per_million_tokens(trace, price) for label, trace in traces.items()}
    cost = _ranked(f"{unit} for a million output tokens", costs, largest=False) or nothing
    cost += "" if given is not None else " No price of an hour was given."
    if (slo := reporting.slo) is not None:
        demands = ((slo.ttft, "TTFT"), (slo.tpot, "TPOT"), (slo.latency, "latency"))
        promise = " and ".join(f"{name} within {text.duration(most)}" for most, name in demands if most)
        kept = {label: metrics.goodput(trace, slo) for label, trace in traces.items()}
        cost += " " + _ranked(f"Requests a second with {promise}", kept, largest=True)
    return [
        ("How much was served?", _ranked("Output tokens a second", speeds, largest=True) or nothing),
        ("Which request waited longest?", _longest_waits(traces)),
        ("What did it cost?", cost),
    ]


def _ranked(quantity: str, values: Mapping[str, float | None], *, largest: bool) -> str:
    """Return a quantity of some runs, the best first; what all share is said once."""
    known = {label: value for label, value in values.items() if value is not None}
    order = sorted(known, key=known.__getitem__, reverse=largest)
    shown = [text.number(known[label], 3) for label in order]
    if len(known) == len(values) > 1 and len(set(shown)) == 1:
        return f"{quantity}: {shown[0]} in every run."
    parts = [f"{label} {value}" for label, value in zip(order, shown, strict=True)]
    return f"{quantity}: {', '.join(parts)}." if parts else ""


def _longest_waits(traces: Mapping[str, Trace]) -> str:
    """Return the longest wait for a first token in each run, the longest of all first."""
    waits: list[tuple[float, str, RequestRecord]] = []
    for label, trace in traces.items():
        # Without a token an unfinished request has waited until the end of the run.
        found = [
            (trace.duration - record.arrival if record.ttft is None else record.ttft, label, record)
            for record in trace.served
            if record.ttft is not None or record.finish_reason is None
        ]
        waits += [max(found, key=lambda wait: wait[0])] if found else []
    parts = [
        f"{text.duration(seconds)} ({label}, request {record.id}{'' if record.tokens else ', no token'})"
        for seconds, label, record in sorted(waits, key=lambda wait: -wait[0])
    ]
    return f"Longest wait for a first token: {', '.join(parts)}." if parts else "No request was served."


def _pictures(traces: Mapping[str, Trace]) -> list[Picture]:
    """Return heading, form, a note and drawing of each figure."""
    is_cut = any(len(trace.steps) > _MAX_SEAT_STEPS for trace in traces.values())
    cut = f" The first {_MAX_SEAT_STEPS} steps of each run are drawn." if is_cut else ""
    pictures: list[Picture] = [
        (
            "Which request has which seat",
            "Bars over time, one row a seat and one panel a run",
            f"A hatched bar is the row of a finished request that the batch goes on computing.{cut}",
            lambda: timeline.seats(traces, max_steps=_MAX_SEAT_STEPS),
        ),
        (
            "How full the batch is",
            "Step lines over time, one panel a run: rows of the batch that do useful work",
            "The dotted line is the mean of all steps.",
            lambda: timeline.occupancy(traces),
        ),
        (
            "KV memory",
            "Stacked areas over time, one panel a run: what each slot of the KV pool is used for",
            "Shares are means over time.",
            lambda: memory.kv_categories(traces),
        ),
        (
            "Latency",
            "Two cumulative distributions, a line per run: time to first token and time per output token",
            "Markers stand at the median and at the 99th percentile.",
            lambda: charts.latency_cdfs(traces),
        ),
    ]
    if len(traces) >= _MIN_DOTS:
        pictures.append(
            (
                "Throughput and wait",
                "A dot per run: time to first token at the 99th percentile, and output throughput",
                "Joined are the runs on the frontier: no other run is better in both.",
                lambda: charts.pareto(traces),
            )
        )
    return pictures


def _drawn(pictures: Iterable[Picture]) -> list[dict[str, str]]:
    """Draw figures in the package's own style, and say their titles in words too."""
    drawn = []
    with plt.rc_context(), warnings.catch_warnings():
        # An id may be in a script that the font lacks; it is shown in full elsewhere in the report.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        plt.style.use("default")
        plt.style.use(style.STYLE)
        for heading, form, note, draw in pictures:
            fig = draw()
            titles = [fig.get_suptitle(), *(ax.get_title("left") for ax in fig.axes)]
            findings = [" ".join(title.split()) for title in titles if title]
            words = {"alt": f"{form}. {'. '.join(findings)}.", "caption": f"{findings[0]}. {note}"}
            drawn.append({"heading": heading, "png": _png(fig), **words})
    return drawn


def _png(fig: Figure) -> str:
    """Return a figure as base64 PNG and close it, lest a notebook show it as well."""
    buffer = io.BytesIO()
    try:
        # Without the name and version of the software, the same figure gives the same bytes.
        fig.savefig(buffer, format="png", metadata={"Software": None})
    finally:
        plt.close(fig)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _cells(rows: Iterable[KpiRow], traces: Mapping[str, Trace]) -> list[list[Any]]:
    """Return key figures as rows of cells, a value with the sample size behind it where there is one."""
    found = []
    for row in rows:
        if len(row.values) != len(traces):
            raise ValueError(f"KPI row {row.name!r} has {len(row.values)} values for {len(traces)} runs")
        sizes = row.sizes or [""] * len(row.values)
        found.append([row.name, row.unit, *zip(row.values, sizes, strict=True)])
    return found


def _grouped(texts: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """Return each distinct text once, with the labels of the runs that gave it."""
    groups: dict[str, list[str]] = {}
    for label, words in texts.items():
        groups.setdefault(words, []).append(label)
    return [(labels, words) for words, labels in groups.items()]


def _errors(traces: Mapping[str, Trace], *, are_rejected: bool) -> list[list[str]]:
    """Return the requests that were rejected, or failed while they were served, why, and in which runs."""
    found: dict[tuple[str, str], list[str]] = {}
    for label, trace in traces.items():
        for record in trace.requests:
            if record.error is not None and record.is_rejected is are_rejected:
                found.setdefault((record.id, record.error), []).append(label)
    return [[request_id, error, ", ".join(labels)] for (request_id, error), labels in found.items()]
