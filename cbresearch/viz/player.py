"""An interactive player: recorded runs side by side on one clock, as one self-contained piece of HTML."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cbresearch import metrics
from cbresearch.metrics import KpiRow
from cbresearch.trace import StepRecord, Trace
from cbresearch.viz import text
from cbresearch.viz.memory import BlockMap, BlockTable
from cbresearch.viz.style import REQUEST_COLORS, ink_on, policy_look
from cbresearch.viz.templates import asset, render, script_json
from cbresearch.viz.timeline import KINDS, SeatStay, busy_seats, excerpt, request_colors, seat_stays

OUTCOMES = ("finished", "preempted", "seated", "aborted")
TRANSFERS = ("copy", "swap_out", "swap_in")

# In this order: what a script defines is there for the ones behind it.
_SCRIPTS = ("base", "runs", "start", "execute", "blocks", "monitor", "complete", "main")
# Pools up to this size are drawn whole.
_SMALL_POOL = 96
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2")


class Bounds(NamedTuple):
    """How much of a run the player shows; what is beyond is counted in words.

    Attributes:
        steps: Steps of a run, from its first.
        requests: Requests that are listed by name beside those that get a seat in the steps shown.
        table_entries: Blocks in all tables of a run together, and cached blocks that no request refers to;
            those of later steps are left out.
        cells: Blocks of a pool that are drawn.
    """

    steps: int = 2000
    requests: int = 200
    table_entries: int = 20_000
    cells: int = 512


class _Numbers(dict[str, int]):
    """The number of each request in the player's data; a request gets one when it is first asked for."""

    def __missing__(self, request_id: str) -> int:
        self[request_id] = len(self)
        return self[request_id]


def player_html(
    traces: Mapping[str, Trace],
    element_id: str = "cbresearch-player",
    max_steps: int = 2000,
    *,
    predictions: Iterable[Sequence[Any]] = (),
    kpi: Sequence[KpiRow] | None = None,
) -> str:
    """Return the player as HTML with everything in it; the same traces give the same bytes.

    It tells one story under four tabs: Start (what each request wants), Execute (step by step), Monitor
    (gauges and lines up to the moment shown) and Complete (key figures). In a notebook,
    `IPython.display.HTML(player_html(traces))` shows it, with or without a kernel. Where scripts are removed,
    a sentence a run stands in; `viz.seats` draws the same runs as a figure.

    Args:
        traces: The runs by label; the others are compared with the static one or, without one, the first.
        element_id: Id of the outermost element; give each player on a page its own.
        max_steps: Show at most this many steps of a run; the player says what it leaves out.
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None), shown
            beside the measured speed-up.
        kpi: Rows of `metrics.kpi_table`, which makes them by default.

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
        data=script_json(player_data(traces, predictions, bounds, kpi)),
        findings=[f"{_name(key)}: {busy_seats(run, 'seconds')}." for key, run in traces.items() if run.steps],
        left_out=[sentence for label, trace in traces.items() for sentence in left_out(label, trace, bounds)],
        scripts=[asset(f"player_{name}.js") for name in _SCRIPTS],
        css=asset("player.css"),
    )


def player_data(
    traces: Mapping[str, Trace],
    predictions: Iterable[Sequence[Any]] = (),
    bounds: Bounds | None = None,
    kpi: Sequence[KpiRow] | None = None,
) -> dict[str, Any]:
    """Return what the player's scripts read, as plain values.

    Requests are numbers, indices into `ids`, `colors` and `requests`. Columns of one number a step are packed
    (see `packed`). A stay is its request, its seat, its first step, its outcome (index into `OUTCOMES`), its
    output tokens before and its computed tokens before, then pairs of what the seat did (index into `KINDS`)
    and for how many steps, and triples of its prefills: offset, tokens, whether a new token came of it. Of a
    run, `absent` are requests that it did not serve, and `outputs` the lengths that differ from `requests`;
    `prefixes` are blocks that hold a cached prefix which no request refers to.

    Args:
        traces: The runs by label.
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None).
        bounds: How much to show.
        kpi: Rows of `metrics.kpi_table`, which makes them by default.
    """
    bounds, begin = bounds or Bounds(), min((trace.begin for trace in traces.values()), default=0.0)
    served = {label: (trace.whole or trace).served for label, trace in traces.items()}
    numbers = _Numbers()
    for trace in traces.values():
        for record in trace.served[: bounds.requests]:
            numbers[record.id]
    stays = {label: seat_stays(excerpt(trace, bounds.steps)) for label, trace in traces.items()}
    runs = [_run(label, trace, stays[label], bounds, numbers, begin) for label, trace in traces.items()]
    # What a request wants is told once, as the first run that served it saw it.
    known = {record.id: record for records in reversed(served.values()) for record in records}
    for run, records in zip(runs, served.values(), strict=True):
        lengths = {record.id: len(record.tokens) for record in records}
        run["absent"] = [number for name, number in numbers.items() if name not in lengths]
        run["outputs"] = [
            [numbers[name], length]
            for name, length in lengths.items()
            if name in numbers and length != len(known[name].tokens)
        ]
    colors = request_colors(stays.values())
    rows = metrics.kpi_table(traces) if kpi is None else kpi
    return {
        "ids": [_name(name) for name in numbers],
        "colors": [colors.get(name, number % len(REQUEST_COLORS)) for name, number in numbers.items()],
        "fills": list(REQUEST_COLORS),
        "inks": [ink_on(color) for color in REQUEST_COLORS],
        "requests": [
            [_short(max(0.0, one.arrival - begin)), one.num_prompt_tokens, len(one.tokens), one.max_tokens]
            for one in map(known.__getitem__, numbers)
        ],
        "runs": runs,
        "workload": {
            "requests": len({record.id for trace in traces.values() for record in trace.served}),
            "output": sum(len(record.tokens) for record in known.values()),
            "is_shared": len({frozenset(r.id for r in trace.requests) for trace in traces.values()}) == 1,
            "is_served_by_all": len({frozenset(r.id for r in records) for records in served.values()}) == 1,
        },
        "kpi": [[row.name, row.unit, list(row.values), list(row.sizes)] for row in rows],
        "speedups": _speed_ups(traces),
        "predictions": [[_name(name), *texts] for name, *texts in map(prediction_cells, predictions)],
        "looks": [
            [policy_look(trace.policy).color, _DASHES[place % len(_DASHES)]]
            for place, trace in enumerate(traces.values())
        ],
    }


def packed(values: Sequence[int]) -> list[int] | list[list[int]]:
    """Return a column as it is or, where that is shorter, as one list of alternating values and counts."""
    pairs = [part for value, group in groupby(values) for part in (value, len(list(group)))]
    return [pairs] if len(pairs) < len(values) else list(values)


def left_out(label: str, trace: Trace, bounds: Bounds) -> list[str]:
    """Return sentences on what of a run the player does not show."""
    name, total, listed = _name(label), len(trace.steps), len(trace.served)
    if not total:
        return [f"{name}: no step was run, so there is nothing to play."]
    sentences = []
    if total > bounds.steps:
        rest = total - bounds.steps
        shown = f"the first {bounds.steps:,} of {total:,} steps are shown"
        sentences.append(f"{name}: {shown}; the other {rest:,} are left out.")
    if listed > bounds.requests:
        named = f"the first {bounds.requests:,} of {listed:,} requests are listed"
        sentences.append(f"{name}: {named}, beside those that get a seat in the steps shown.")
    return sentences


def _run(
    label: str, trace: Trace, stays: Sequence[SeatStay], bounds: Bounds, numbers: _Numbers, begin: float
) -> dict[str, Any]:
    part = excerpt(trace, bounds.steps)
    steps = part.steps
    rejected = [record for record in trace.requests if record.is_rejected]
    return {
        "label": _name(label),
        "policy": _name(trace.policy),
        "seats": trace.scheduler.max_num_seqs,
        "budget": trace.scheduler.max_num_batched_tokens,
        "blocks": trace.cache.num_blocks,
        "size": trace.cache.block_size,
        "host": trace.cache.num_host_blocks,
        "caching": trace.cache.prefix_caching,
        "window": trace.cache.sliding_window,
        "peak": int(trace.step_columns["num_held_blocks"].max(initial=0)),
        "steps": len(trace.steps),
        "duration": _short(trace.end - begin),
        "tokens": metrics.token_counts(trace).output,
        **_columns(trace, steps, begin),
        "stays": [_stay(numbers[stay.request_id], stay) for stay in stays],
        "aborted": [
            [step, *(numbers[name] for name in record.plan.aborted)]
            for step, record in enumerate(steps)
            if record.plan.aborted
        ],
        "ended": [
            [numbers[record.id], record.finish_reason]
            for record in trace.served
            if record.finish_reason not in (None, "length") and record.id in numbers
        ],
        "rejected": [[_name(one.id), _name(one.error or "")] for one in rejected[: bounds.requests]],
        "num_rejected": len(rejected),
        "reasons": _reasons(part),
        **_blocks(part, bounds, numbers),
    }


def _columns(trace: Trace, steps: Sequence[StepRecord], begin: float) -> dict[str, Any]:
    """Return the columns of one number a step."""
    failed = {record.id for record in (trace.whole or trace).requests if record.finish_reason == "error"}
    num_tokens, out = 0, []
    for record in steps:
        # The step that a request failed in brought it no token.
        num_tokens += sum([entry.samples for entry in record.plan.scheduled])
        num_tokens -= len(failed.intersection(record.finished))
        out.append(num_tokens)
    return {
        "start": _starts(steps, begin),
        "end": [_short(record.end - begin) for record in steps],
        "out": packed(out),
        "waiting": packed([record.num_waiting for record in steps]),
        "held": packed([record.num_held_blocks for record in steps]),
        "kv": packed([record.num_held_tokens for record in steps]),
        "cached": packed([record.num_cached_blocks for record in steps]),
        "swapped": packed([record.num_swapped for record in steps]),
        "hosted": packed([record.num_held_host_blocks for record in steps]),
    }


def _starts(steps: Sequence[StepRecord], begin: float) -> list[float | int]:
    """Return pairs of a step and its start, where no request ran between it and the one before.

    The moment that a host takes between two steps counts as the later one's.
    """
    pairs: list[float | int] = []
    before: StepRecord | None = None
    for step, record in enumerate(steps):
        start = _short(max(0.0, record.start - begin))
        if before is None or (start != _short(before.end - begin) and not before.num_staying):
            pairs += [step, start]
        before = record
    return pairs


def _stay(number: int, stay: SeatStay) -> list[Any]:
    spans = [part for kind, first, end in stay.spans for part in (KINDS.index(kind), end - first)]
    prefills = [
        part for step, size, samples in stay.prefills for part in (step - stay.first, size, int(samples))
    ]
    before = stay.num_tokens_before, stay.num_computed_before
    return [number, stay.seat, stay.first, OUTCOMES.index(stay.outcome), *before, spans, prefills]


def _reasons(trace: Trace) -> list[list[Any]]:
    """Return why requests were not served: a step, then {reason: how many} of the seated and of the others.

    A step for which nothing is said is like the one before.
    """
    told: list[list[Any]] = []
    seated: set[str] = set()
    for step, record in trace.steps_so_far():
        plan = record.plan
        seated = (seated - {*plan.preempted, *plan.aborted}) | {entry.request.id for entry in plan.admitted}
        unserved = seated - {entry.request_id for entry in plan.scheduled} if plan.skipped else set()
        idle = Counter(reason for name, reason in plan.skipped if name in unserved)
        waiting = record.num_skipped()
        waiting.subtract(idle)
        said = [dict(sorted(idle.items())), dict(sorted((+waiting).items()))]
        if step >= 0 and (not told or told[-1][1:] != said):
            told.append([step, *said])
        seated.difference_update(record.finished)
    return told


def _blocks(trace: Trace, bounds: Bounds, numbers: _Numbers) -> dict[str, Any]:
    """Return which request holds which block, until too many would have to be told."""
    blocks = BlockMap.of((record for _, record in trace.steps_so_far()), -trace.first_step)
    until = _blocks_until(blocks, len(trace.steps), bounds.table_entries)
    begun: dict[int, list[int]] = {}
    for block, first, end in blocks.cached:
        if first < until:
            begun.setdefault(first, [first]).extend((block, min(end, until) - first))
    used = [0, 0]
    for table in blocks.tables:
        used[table.on_host] = max([used[table.on_host], *(block + 1 for block in table.blocks)])
    return {
        "tables_until": until,
        "tables": [
            _table(numbers[table.request_id], table, until) for table in blocks.tables if table.first < until
        ],
        "prefixes": list(begun.values()),
        "transfers": [
            [step, *(part for kind, *pair in each.plan.transfers for part in (TRANSFERS.index(kind), *pair))]
            for step, each in enumerate(trace.steps[:until])
            if each.plan.transfers
        ],
        "cells_drawn": _drawn(trace.cache.num_blocks, used[False], bounds),
        "host_cells": _drawn(trace.cache.num_host_blocks, used[True], bounds),
    }


def _blocks_until(blocks: BlockMap, num_steps: int, most: int) -> int:
    """Return the first step whose blocks are left out since too many would have to be told."""
    new = Counter(step for table in blocks.tables for step in table.since)
    new.update(span.first for span in blocks.cached)
    total = 0
    for step in range(num_steps):
        total += new[step]
        if total > most:
            return step
    return num_steps


def _table(number: int, table: BlockTable, until: int) -> list[Any]:
    """Return a table: request, on the host or not, first step, end, blocks, growth, losses.

    Growth is pairs of an offset and the number of blocks that the table has from there on; losses likewise,
    of blocks that it does not hold any more.
    """
    since, lost = ([step for step in steps if step < until] for steps in (table.since, table.lost))
    growth, losses = (_growth(steps, table.first) for steps in (since, lost))
    return [number, int(table.on_host), table.first, table.end, table.blocks[: len(since)], growth, losses]


def _growth(steps: Sequence[int], first: int) -> list[int]:
    last = {step: count for count, step in enumerate(steps, start=1)}
    return [part for step, count in last.items() for part in (step - first, count)]


def _drawn(size: int, used: int, bounds: Bounds) -> list[int]:
    """Return how many blocks of a pool are drawn, and how many the steps shown use from its first on."""
    wanted = size if size <= _SMALL_POOL else max(used, _SMALL_POOL // 2)
    return [min(bounds.cells, size, wanted), used]


def _speed_ups(traces: Mapping[str, Trace]) -> list[list[str]]:
    """Return the runs' throughput over that of a static one, or of the first, with both labels."""
    first = next((label for label, trace in traces.items() if trace.policy == "static"), next(iter(traces)))
    ratios = {label: metrics.speed_up(traces[first], run) for label, run in traces.items() if label != first}
    return [
        [_name(label), _name(first), text.number(ratio)]
        for label, ratio in ratios.items()
        if ratio is not None
    ]


def prediction_cells(row: Sequence[Any]) -> list[str]:
    """Return a row of (quantity, predicted, measured, relative error) as texts; ValueError if it is none."""
    if len(row) != 4:
        raise ValueError(f"prediction {tuple(row)!r} must be (quantity, predicted, measured, relative error)")
    quantity, predicted, measured, error = row
    return [str(quantity), text.number(predicted), text.number(measured), text.percent(error)]


def _name(label: str) -> str:
    return text.visible(label, lines=False)


def _short(seconds: float) -> float | int:
    """Return a time rounded to nine digits, which tells all steps of a run apart and is short to write."""
    rounded = float(f"{seconds:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
