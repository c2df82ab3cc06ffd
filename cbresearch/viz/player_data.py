"""What the player's scripts read: recorded runs as plain values, compact and bounded."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cbresearch.metrics import kpi_table, speed_up
from cbresearch.trace import RequestRecord, StepRecord, Trace
from cbresearch.viz import words
from cbresearch.viz.blockmap import BlockMap, BlockTable, CachedBlock
from cbresearch.viz.seating import Sitting, request_colors, sittings
from cbresearch.viz.style import REQUEST_COLORS, ink_on, policy_look

KINDS = ("served", "held", "padding")
OUTCOMES = ("finished", "preempted", "seated", "aborted")
TRANSFERS = ("copy", "swap_out", "swap_in")

# Pools up to this size are drawn whole.
_SMALL_POOL = 96
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2")


class Bounds(NamedTuple):
    """How much of a run the player shows; what is beyond is counted in words.

    Attributes:
        steps: Steps of a run, from its first.
        requests: Requests that are listed by name beside those that get a seat in the steps shown.
        table_entries: Blocks in all tables of a run together, and those that are cached for nobody; those of
            later steps are left out.
        cells: Blocks of a pool that are drawn.
    """

    steps: int = 2000
    requests: int = 200
    table_entries: int = 20_000
    cells: int = 512


def player_data(
    traces: Mapping[str, Trace],
    predictions: Iterable[Sequence[Any]] = (),
    bounds: Bounds | None = None,
) -> dict[str, Any]:
    """Return what the player's scripts read, as plain values.

    Requests are numbers, indices into `ids`, `colors` and `requests`. Columns of one number a step are packed
    (see `packed`). A stay is its request, its seat, its first step, its outcome (index into `OUTCOMES`), its
    output tokens before and its computed tokens before, then pairs of what the seat did (index into `KINDS`)
    and for how many steps, and triples of its prefills: offset, tokens, whether a new token came of it. Of a
    run, `absent` are requests that it did not serve, and `outputs` the lengths that differ from `requests`;
    `prefixes` are blocks that hold a cached prefix which nobody refers to.

    Args:
        traces: The runs by label.
        predictions: Rows of (quantity, predicted, measured, relative error as a fraction or None).
        bounds: How much to show.
    """
    bounds = bounds or Bounds()
    places: dict[str, int] = {}
    for trace in traces.values():
        for record in trace.served[: bounds.requests]:
            places.setdefault(record.id, len(places))
    cut = {label: replace(trace, steps=trace.steps[: bounds.steps]) for label, trace in traces.items()}
    runs = [_run(label, traces[label], part, bounds, places) for label, part in cut.items()]
    looks = request_colors(cut.values())
    records = {record.id: record for trace in reversed(list(traces.values())) for record in trace.served}
    for run, trace in zip(runs, traces.values(), strict=True):
        served = {record.id: len(record.tokens) for record in trace.served}
        run["absent"] = [place for request_id, place in places.items() if request_id not in served]
        run["outputs"] = [
            [places[request_id], number]
            for request_id, number in served.items()
            if request_id in places and number != len(records[request_id].tokens)
        ]
    return {
        "ids": [_name(request_id) for request_id in places],
        "colors": [
            looks.get(request_id, place % len(REQUEST_COLORS)) for request_id, place in places.items()
        ],
        "fills": list(REQUEST_COLORS),
        "inks": [ink_on(color) for color in REQUEST_COLORS],
        "requests": [_request(records[request_id]) for request_id in places],
        "runs": runs,
        "workload": _workload(list(traces.values()), records.values()),
        "kpi": [[row.name, row.unit, list(row.values), list(row.sizes)] for row in kpi_table(traces)],
        "speedups": _speed_ups(traces),
        "predictions": [_prediction(row) for row in predictions],
        "looks": [
            [policy_look(trace.policy).color, _DASHES[place % len(_DASHES)]]
            for place, trace in enumerate(traces.values())
        ],
    }


def packed(values: Sequence[int]) -> list[int] | list[list[int]]:
    """Return a column as it is or, where that is shorter, as one list of alternating values and counts."""
    pairs: list[int] = []
    for value in values:
        if pairs and pairs[-2] == value:
            pairs[-1] += 1
        else:
            pairs += [value, 1]
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


def _name(text: str) -> str:
    return words.visible(text, lines=False)


def _run(label: str, trace: Trace, cut: Trace, bounds: Bounds, places: dict[str, int]) -> dict[str, Any]:
    def number(request_id: str) -> int:
        return places.setdefault(request_id, len(places))

    steps = cut.steps
    stays = [_stay(number(sitting.request_id), sitting) for sitting in sittings(steps)]
    failed = {record.id for record in trace.requests if record.finish_reason == "error"}
    blocks = BlockMap.of(trace, bounds.steps)
    until = _blocks_until(blocks, bounds.table_entries)
    num_tokens, out = 0, []
    for record in steps:
        # The step that a request failed in brought it no token.
        num_failed = sum(request_id in failed for request_id in record.finished)
        num_tokens += sum(entry.samples for entry in record.plan.scheduled) - num_failed
        out.append(num_tokens)
    run = {
        "label": _name(label),
        "policy": _name(trace.policy),
        "seats": trace.scheduler.max_num_seqs,
        "budget": trace.scheduler.max_num_batched_tokens,
        "blocks": trace.cache.num_blocks,
        "size": trace.cache.block_size,
        "host": trace.cache.num_host_blocks,
        "caching": trace.cache.prefix_caching,
        "window": trace.cache.sliding_window,
        "peak": max((record.num_held_blocks for record in trace.steps), default=0),
        "steps": len(trace.steps),
        "duration": _short(trace.duration),
        "tokens": sum(len(request.tokens) for request in trace.requests),
        "start": _starts(steps),
        "end": [_short(record.end) for record in steps],
        "out": packed(out),
        "waiting": packed([record.num_waiting for record in steps]),
        "held": packed([record.num_held_blocks for record in steps]),
        "kv": packed([record.num_held_tokens for record in steps]),
        "cached": packed([record.num_cached_blocks for record in steps]),
        "swapped": packed([record.num_swapped for record in steps]),
        "hosted": packed([record.num_held_host_blocks for record in steps]),
        "stays": stays,
        "aborted": [
            [step, *map(number, record.plan.aborted)]
            for step, record in enumerate(steps)
            if record.plan.aborted
        ],
        "ended": [
            [number(record.id), record.finish_reason]
            for record in trace.served
            if record.finish_reason not in (None, "length") and record.id in places
        ],
        "refused": [
            [_name(record.id), _name(record.error or "")] for record in trace.requests if record.is_refused
        ][: bounds.requests],
        "num_refused": sum(record.is_refused for record in trace.requests),
        "reasons": _reasons(steps),
        "tables_until": until,
        "tables": [
            _table(number(table.request_id), table, until) for table in blocks.tables if table.first < until
        ],
        "prefixes": _prefixes(blocks.cached, until),
        "transfers": [
            [
                step,
                *(
                    part
                    for kind, source, target in record.plan.transfers
                    for part in (TRANSFERS.index(kind), source, target)
                ),
            ]
            for step, record in enumerate(steps[:until])
            if record.plan.transfers
        ],
    }
    for name, on_host, size in (("cells_drawn", False, run["blocks"]), ("host_cells", True, run["host"])):
        used = max(
            (block + 1 for table in blocks.tables if table.on_host is on_host for block in table.blocks),
            default=0,
        )
        drawn = size if size <= _SMALL_POOL else max(used, _SMALL_POOL // 2)
        run[name] = [min(bounds.cells, size, drawn), used]
    return run


def _stay(request: int, sitting: Sitting) -> list[int | list[int]]:
    spans: list[int] = []
    for span in sitting.spans:
        spans += [KINDS.index(span.kind), span.end - span.first]
    prefills: list[int] = []
    for prefill in sitting.prefills:
        prefills += [prefill.step - sitting.first, prefill.num_tokens, int(prefill.samples)]
    return [
        request,
        sitting.seat,
        sitting.first,
        OUTCOMES.index(sitting.outcome),
        sitting.num_tokens_before,
        sitting.num_computed_before,
        spans,
        prefills,
    ]


def _table(request: int, table: BlockTable, until: int) -> list[Any]:
    """Return a table: request, on the host or not, first step, end, blocks, growth, losses.

    Growth is pairs of an offset and the number of blocks that the table has from there on; losses likewise,
    of blocks out of sight.
    """
    known = [step < until for step in table.since]
    blocks = [block for block, is_known in zip(table.blocks, known, strict=True) if is_known]
    growth = _growth(table.since[: len(blocks)], table.first)
    losses = _growth([step for step in table.lost if step < until], table.first)
    return [request, int(table.on_host), table.first, table.end, blocks, growth, losses]


def _prefixes(cached: Iterable[CachedBlock], until: int) -> list[list[int]]:
    """Return lists of a step, then pairs of a block that is cached for nobody from there on, and how long."""
    begun: dict[int, list[int]] = {}
    for block, first, end in cached:
        if first < until:
            begun.setdefault(first, [first]).extend((block, min(end, until) - first))
    return list(begun.values())


def _growth(steps: Sequence[int], first: int) -> list[int]:
    pairs: list[int] = []
    for number, step in enumerate(steps, start=1):
        if pairs and pairs[-2] == step - first:
            pairs[-1] = number
        else:
            pairs += [step - first, number]
    return pairs


def _blocks_until(blocks: BlockMap, most: int) -> int:
    """Return the first step whose blocks are left out since too many would have to be told."""
    new = Counter(step for table in blocks.tables for step in table.since)
    new.update(kept.first for kept in blocks.cached)
    total = 0
    for step in range(blocks.num_steps):
        total += new[step]
        if total > most:
            return step
    return blocks.num_steps


def _starts(steps: Sequence[StepRecord]) -> list[float | int]:
    """Return pairs of a step and its start, where nobody ran between it and the one before.

    The moment that a host takes between two steps counts as the later one's.
    """
    pairs: list[float | int] = []
    before: StepRecord | None = None
    for step, record in enumerate(steps):
        start = _short(record.start)
        if before is None or (start != _short(before.end) and not before.num_staying):
            pairs += [step, start]
        before = record
    return pairs


def _reasons(steps: Sequence[StepRecord]) -> list[list[Any]]:
    """Return why requests were not served: a step, then {reason: how many} of the seated and of the others.

    A step for which nothing is said is like the one before.
    """
    told: list[list[Any]] = []
    seated: set[str] = set()
    for step, record in enumerate(steps):
        plan = record.plan
        seated = (seated - {*plan.preempted, *plan.aborted}) | {entry.request.id for entry in plan.admitted}
        served = {entry.request_id for entry in plan.scheduled}
        idle = Counter(why for name, why in plan.skipped if name in seated and name not in served)
        waiting = record.num_skipped()
        waiting.subtract(idle)
        said = [dict(sorted(idle.items())), dict(sorted((+waiting).items()))]
        if not told or told[-1][1:] != said:
            told.append([step, *said])
        seated.difference_update(record.finished)
    return told


def _request(record: RequestRecord) -> list[Any]:
    return [
        _short(record.arrival),
        record.num_prompt_tokens,
        len(record.tokens),
        record.max_tokens,
    ]


def _workload(traces: Sequence[Trace], served: Collection[RequestRecord]) -> dict[str, int | bool]:
    """Return how many requests some run serves, what they want, and whether the runs share them."""

    def is_common(names: Sequence[set[str]]) -> bool:
        return all(one == names[0] for one in names)

    return {
        "requests": len(served),
        "output": sum(len(record.tokens) for record in served),
        "is_shared": is_common([{record.id for record in trace.requests} for trace in traces]),
        "is_served_by_all": is_common([{record.id for record in trace.served} for trace in traces]),
    }


def _speed_ups(traces: Mapping[str, Trace]) -> list[list[Any]]:
    """Return the runs' throughput over that of a static one, or of the first, with both labels."""
    first = next((label for label, trace in traces.items() if trace.policy == "static"), next(iter(traces)))
    found = []
    for label, trace in traces.items():
        ratio = speed_up(traces[first], trace)
        if ratio is not None and label != first:
            found.append([_name(label), _name(first), words.number(ratio)])
    return found


def _prediction(row: Sequence[Any]) -> list[str]:
    if len(row) != 4:
        raise ValueError(f"prediction {tuple(row)!r} must be (quantity, predicted, measured, relative error)")
    quantity, predicted, measured, error = row
    return [_name(str(quantity)), words.number(predicted), words.number(measured), words.percent(error)]


def _short(seconds: float) -> float | int:
    """Return a time rounded to nine digits, which tells all steps of a run apart and is short to write."""
    rounded = float(f"{seconds:.9g}")
    return int(rounded) if rounded.is_integer() else rounded
