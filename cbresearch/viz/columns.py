"""Columns of a run as arrays, one number a step or a request."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cbresearch.trace import MemoryUse, StepRecord, Trace


class BlockEvents(NamedTuple):
    """What the KV manager did since the last step's record, each a tuple of physical blocks unless said."""

    cached: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    released: tuple[tuple[str, int], ...] = ()
    host_held: tuple[tuple[str, int], ...] = ()
    host_freed: tuple[int, ...] = ()


def events_of(record: StepRecord) -> BlockEvents:
    """Return a record's block events."""
    found: BlockEvents = getattr(record, "events", BlockEvents())
    return found


def memory_columns(trace: Trace) -> Mapping[str, np.ndarray]:
    """Return one array a category of `trace.MemoryUse`, in tokens a step."""
    uses = np.array(list(trace.memory()), dtype=float).reshape(-1, len(MemoryUse._fields))
    return dict(zip(MemoryUse._fields, uses.T, strict=True))


def step_columns(trace: Trace) -> Mapping[str, np.ndarray]:
    """Return one array a quantity, with one number a step."""
    names = (
        *("start_s", "duration_s", "num_scheduled", "num_padding_rows", "num_preempted", "num_finished"),
        *("num_running", "num_waiting", "num_held_blocks", "num_held_tokens"),
    )
    rows = [
        (
            record.start,
            record.duration,
            len(record.plan.scheduled),
            len(record.plan.padding),
            len(record.plan.preempted),
            len(record.finished),
            record.num_running,
            record.num_waiting,
            record.num_held_blocks,
            record.num_held_tokens,
        )
        for record in trace.steps
    ]
    return dict(zip(names, np.array(rows, dtype=float).reshape(-1, len(names)).T, strict=True))


def request_columns(trace: Trace) -> Mapping[str, np.ndarray]:
    """Return one array a quantity, with one number a request; NaN where it is not defined."""
    names = ("arrival_s", "ttft_s", "tpot_s")
    rows = [(record.arrival, record.ttft, record.tpot) for record in trace.requests]
    return dict(zip(names, np.array(rows, dtype=float).reshape(-1, len(names)).T, strict=True))
