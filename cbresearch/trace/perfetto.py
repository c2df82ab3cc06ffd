"""A run as a Chrome trace, which Perfetto and chrome://tracing open."""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbresearch.trace.files import write_whole
from cbresearch.trace.records import StepRecord

if TYPE_CHECKING:
    from cbresearch.trace.run import Trace

Event = dict[str, Any]

_SEATS, _STEPS = 0, 1
"""Processes of the trace: a thread a seat, and a thread for the steps beside the counters."""

_USED = ("num_requests_running", "kv_cache_usage_perc", "held KV blocks", "held KV tokens")
"""Counters of what only requests with a seat use."""

_CACHED = "cached KV blocks"


def chrome_trace(trace: "Trace") -> dict[str, Any]:
    """Return the run in the Chrome trace event format; times are in microseconds, of whole nanoseconds."""
    events = [*_names(trace), *_stays(trace), *_steps(trace), *_refusals(trace)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"policy": trace.policy}}


def write_perfetto(trace: "Trace", path: str | Path) -> Path:
    """Write the run so that Perfetto opens it; see `Trace.to_perfetto`."""
    path = Path(path)
    text = json.dumps(chrome_trace(trace), separators=(",", ":"), allow_nan=False)
    # No time and no name inside, so that the same run gives the same bytes.
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    return path


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _is_gap(start: float, end: float) -> bool:
    return _nanoseconds(start) < _nanoseconds(end)


def _slice(pid: int, tid: int, name: str, start: float, end: float, category: str, args: Event) -> Event:
    # Both ends are rounded alike, so that slices that touch neither overlap nor leave a gap.
    first, last = _nanoseconds(start), _nanoseconds(end)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": first / 1000,
        "dur": (last - first) / 1000,
        "args": args,
    }


def _names(trace: "Trace") -> Iterator[Event]:
    for pid, name in ((_SEATS, "seats"), (_STEPS, "steps")):
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
    for seat in range(trace.scheduler.max_num_seqs):
        for kind, args in (
            ("thread_name", {"name": f"seat {seat}"}),
            ("thread_sort_index", {"sort_index": seat}),
        ):
            yield {"ph": "M", "pid": _SEATS, "tid": seat, "name": kind, "args": args}
    yield {"ph": "M", "pid": _STEPS, "tid": 0, "name": "thread_name", "args": {"name": "steps"}}


def _stays(trace: "Trace") -> Iterator[Event]:
    """Yield a slice a stay in a seat, and in it one for what the seat did: prefill, decode, padding."""
    phases = _phases(trace)
    for stay in trace.stays():
        first, last = trace.steps[stay.first_step], trace.steps[stay.last_step]
        args = {"num_padding_steps": stay.num_padding_steps}
        yield _slice(_SEATS, stay.seat, stay.request_id, first.start, last.end, "stay", args)
        done = phases[stay.request_id]
        # Stays of one request come in order.
        number = bisect_right(done, stay.last_step, key=lambda phase: phase[0])
        inside, phases[stay.request_id] = done[:number], done[number:]
        # Steps in which the seat was held without service part what is before from what is after.
        runs = groupby(enumerate(inside), key=lambda item: (item[1][1], item[1][0] - item[0]))
        for (kind, _), group in runs:
            parts = [phase for _, phase in group]
            begun, ended = trace.steps[parts[0][0]], trace.steps[parts[-1][0]]
            yield _slice(
                _SEATS,
                stay.seat,
                kind,
                begun.start,
                ended.end,
                "phase",
                {"num_steps": len(parts), "num_tokens": sum(part[2] for part in parts)},
            )


def _phases(trace: "Trace") -> dict[str, list[tuple[int, str, int]]]:
    """Return for each request the steps in which its row was computed, with what for and how many tokens."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    for record in trace.steps:
        step = record.plan.step
        for entry in record.plan.scheduled:
            kind = "prefill" if entry.is_prefill else "decode"
            found.setdefault(entry.request_id, []).append((step, kind, entry.num_tokens))
        for row in record.plan.padding:
            found.setdefault(row.request_id, []).append((step, "padding", 1))
    return found


def _steps(trace: "Trace") -> Iterator[Event]:
    """Yield a slice a step and the counters, named as vLLM names them where they mean the same."""
    before: StepRecord | None = None
    for record in trace.steps:
        plan = record.plan
        if before is not None and not before.num_staying and _is_gap(before.end, record.start):
            # Nobody runs in between; who waits for the policy to gather a batch goes on waiting.
            for name in _USED:
                yield _counter(before.end, name, 0)
        before = record
        yield _slice(
            _STEPS,
            0,
            f"step {plan.step}",
            record.start,
            record.end,
            "step",
            {
                "num_prefill_tokens": plan.num_prefill_tokens,
                "num_decode_tokens": plan.num_decode_tokens,
                "num_padding_rows": len(plan.padding),
                "num_context_tokens": plan.num_context_tokens,
                "closed": plan.closed or "",
            },
        )
        for name, value in _counters(trace, record):
            yield _counter(record.start, name, value)
        for request_id in plan.preempted:
            name = f"{'swap out' if request_id in plan.swapped else 'preempt'} {request_id}"
            yield _at(record.start, {"ph": "i", "s": "p", "pid": _STEPS, "tid": 0, "name": name})
    if before is not None:
        # What the last step held is given back with its end; what is cached stays.
        for name, _ in _counters(trace, before):
            if name != _CACHED:
                yield _counter(before.end, name, 0)


def _counter(seconds: float, name: str, value: float) -> Event:
    return _at(seconds, {"ph": "C", "pid": _STEPS, "name": name, "args": {"value": value}})


def _counters(trace: "Trace", record: StepRecord) -> list[tuple[str, float]]:
    values: list[tuple[str, float]] = [
        ("num_requests_running", record.num_running),
        ("num_requests_waiting", record.num_waiting),
        ("kv_cache_usage_perc", record.num_held_blocks / trace.cache.num_blocks),
        ("held KV blocks", record.num_held_blocks),
        ("held KV tokens", record.num_held_tokens),
    ]
    if trace.cache.prefix_caching:
        values.append((_CACHED, record.num_cached_blocks))
    if trace.cache.num_host_blocks:
        values += [
            ("num_requests_swapped", record.num_swapped),
            ("held host blocks", record.num_held_host_blocks),
        ]
    return values


def _refusals(trace: "Trace") -> Iterator[Event]:
    for record in trace.requests:
        if record.is_refused:
            event = {"ph": "i", "s": "p", "pid": _STEPS, "tid": 0, "name": f"refuse {record.id}"}
            yield _at(record.arrival, {**event, "args": {"error": record.error}})


def _at(seconds: float, event: Event) -> Event:
    return {**event, "ts": _nanoseconds(seconds) / 1000}
