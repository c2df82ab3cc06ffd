"""A run as a Chrome trace, which Perfetto and chrome://tracing open."""

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from cbresearch.trace import StepRecord, Trace, write_whole

Event = dict[str, Any]
# A step that computed a request's row, what for, and how many tokens.
_Row = tuple[int, str, int]

_SEATS, _STEPS = 0, 1
"""Processes of the trace: a thread a seat, and a thread for the steps beside the counters."""

_USED = ("num_requests_running", "kv_cache_usage_perc", "held KV blocks", "held KV tokens")
"""Counters of what only requests with a seat use."""

_CACHED = "cached KV blocks"


class Stay(NamedTuple):
    """A request's uninterrupted stay in a seat.

    Attributes:
        request_id: Id of the request.
        seat: Its row in the batch.
        first_step: Index of the first step of the stay, in `Trace.steps`.
        last_step: Index of the last one.
        num_padding_steps: Steps at the end of the stay in which the row was computed for nothing.
    """

    request_id: str
    seat: int
    first_step: int
    last_step: int
    num_padding_steps: int


def to_perfetto(trace: Trace, path: str | Path) -> Path:
    """Write a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    A track a seat shows which request had it, and in each stay when its row was prefilled, decoded or
    computed for nothing; one more track shows the steps. Counters tell of requests and KV blocks in each
    step, named as vLLM names them where they mean the same; marks tell of preemptions and rejections.

    Args:
        trace: The run.
        path: Where to write it; with the ending ".gz" it is compressed.

    Returns:
        The path.
    """
    path = Path(path)
    text = json.dumps(to_chrome(trace), separators=(",", ":"), allow_nan=False)
    # No time and no name inside, so that the same run gives the same bytes.
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    return path


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Return a run in the Chrome trace event format; times are in microseconds, of whole nanoseconds."""
    rejections = [
        _event("i", _STEPS, record.arrival, f"reject {record.id}", {"error": record.error}, s="p")
        for record in trace.requests
        if record.is_rejected
    ]
    events = [*_names(trace), *_stays(trace), *_steps(trace), *rejections]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"policy": trace.policy}}


def stays_of(trace: Trace) -> Iterator[Stay]:
    """Yield each stay of a request in a seat: those that a preemption ended first, in no other order.

    Of a window of a run these are the stays in its steps, each cut at its first one.
    """
    return (stay for stay, _ in _stays_of(trace))


def _stays_of(trace: Trace) -> Iterator[tuple[Stay, list[_Row]]]:
    """Yield each stay with the rows that were computed in it."""
    found: dict[str, tuple[int, int, list[_Row]]] = {}

    def ended(request_ids: Iterable[str]) -> Iterator[tuple[Stay, list[_Row]]]:
        for request_id in request_ids:
            seat, first, rows = found.pop(request_id)
            if rows:
                num_padding = sum(kind == "padding" for _, kind, _ in rows)
                yield Stay(request_id, seat, first, rows[-1][0], num_padding), rows

    for step, record in trace.steps_so_far():
        plan = record.plan
        for request, seat, _ in plan.admitted:
            found[request.id] = seat, max(step, 0), []
        yield from ended(plan.preempted)
        if step >= 0:
            for entry in plan.scheduled:
                kind = "prefill" if entry.is_prefill else "decode"
                found[entry.request_id][2].append((step, kind, entry.num_tokens))
            for row in plan.padding:
                found[row.request_id][2].append((step, "padding", 1))
    yield from ended(list(found))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _event(phase: str, pid: int, seconds: float, name: str, args: Event, **more: Any) -> Event:
    where = {"ph": phase, "pid": pid, "tid": 0, "ts": _nanoseconds(seconds) / 1000}
    return {**where, "name": name, "args": args, **more}


def _slice(pid: int, tid: int, name: str, start: float, end: float, category: str, args: Event) -> Event:
    # Both ends are rounded alike, so that slices that touch neither overlap nor leave a gap.
    length = (_nanoseconds(end) - _nanoseconds(start)) / 1000
    return _event("X", pid, start, name, args, tid=tid, cat=category, dur=length)


def _names(trace: Trace) -> Iterator[Event]:
    for pid, name in ((_SEATS, "seats"), (_STEPS, "steps")):
        yield _event("M", pid, 0.0, "process_name", {"name": name})
    for seat in range(trace.scheduler.max_num_seqs):
        yield _event("M", _SEATS, 0.0, "thread_name", {"name": f"seat {seat}"}, tid=seat)
        yield _event("M", _SEATS, 0.0, "thread_sort_index", {"sort_index": seat}, tid=seat)
    yield _event("M", _STEPS, 0.0, "thread_name", {"name": "steps"})


def _stays(trace: Trace) -> Iterator[Event]:
    """Yield a slice a stay in a seat, and in it one for what the seat did: prefill, decode, padding."""
    steps = trace.steps
    for stay, rows in _stays_of(trace):
        args = {"num_padding_steps": stay.num_padding_steps}
        start, end = steps[stay.first_step].start, steps[stay.last_step].end
        yield _slice(_SEATS, stay.seat, stay.request_id, start, end, "stay", args)
        # Steps in which the seat was held without service part what is before from what is after.
        for (kind, _), group in groupby(enumerate(rows), lambda pair: (pair[1][1], pair[1][0] - pair[0])):
            numbers, _, sizes = zip(*(row for _, row in group), strict=True)
            start, end = steps[numbers[0]].start, steps[numbers[-1]].end
            args = {"num_steps": len(numbers), "num_tokens": sum(sizes)}
            yield _slice(_SEATS, stay.seat, kind, start, end, "phase", args)


def _steps(trace: Trace) -> Iterator[Event]:
    """Yield a slice a step and the counters, named as vLLM names them where they mean the same."""
    before: StepRecord | None = None
    for record in trace.steps:
        plan = record.plan
        # A moment of the host between two steps is no gap: the requests keep their seats.
        if before and not before.num_staying and _nanoseconds(before.end) < _nanoseconds(record.start):
            for name in _USED:
                yield _event("C", _STEPS, before.end, name, {"value": 0})
        before = record
        names = ("num_prefill_tokens", "num_decode_tokens", "num_context_tokens")
        args = {name: getattr(plan, name) for name in names}
        args |= {"num_padding_rows": len(plan.padding), "closed": plan.closed or ""}
        yield _slice(_STEPS, 0, f"step {plan.step}", record.start, record.end, "step", args)
        for name, value in _counters(trace, record).items():
            yield _event("C", _STEPS, record.start, name, {"value": value})
        for name in plan.preempted:
            kind = "swap out" if name in plan.swapped else "preempt"
            yield _event("i", _STEPS, record.start, f"{kind} {name}", {}, s="p")
    # What the last step held is given back with its end; what is cached stays.
    for name in [name for name in _counters(trace, before) if name != _CACHED] if before else ():
        yield _event("C", _STEPS, before.end if before else 0.0, name, {"value": 0})


def _counters(trace: Trace, record: StepRecord) -> dict[str, float]:
    share = record.num_held_blocks / trace.cache.num_blocks
    used = record.num_running, share, record.num_held_blocks, record.num_held_tokens
    found = dict(zip(_USED, used, strict=True)) | {"num_requests_waiting": record.num_waiting}
    if trace.cache.prefix_caching:
        found[_CACHED] = record.num_cached_blocks
    if trace.cache.num_host_blocks:
        found |= {"num_requests_swapped": record.num_swapped, "held host blocks": record.num_held_host_blocks}
    return found
