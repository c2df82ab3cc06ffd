"""The columns of a run: one value for each step or request, worked out for a whole decode run at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cbresearch.step import SKIP_REASONS, DecodeRun, Plan, PoolState, Segment
from cbresearch.trace.records import RequestRecord, StepRecord, count_skipped
from cbresearch.trace.steps import Part

__all__ = ["Columns"]

Columns = Mapping[str, npt.NDArray[Any]]

_TIMES = ("arrival", "queued", "first_scheduled", "first_token", "finish", "ttft", "tpot", "latency")
_TOKENS = ("num_prompt_tokens", "num_output_tokens", "max_tokens")
_SKIPPED = tuple((reason, f"num_skipped_for_{reason}") for reason in SKIP_REASONS)
_COUNTS = ("num_preemptions", "num_cached_tokens", "num_recomputed_tokens")


def step_columns(parts: Sequence[Part]) -> Columns:
    """Return the steps as columns; units are in the names, and NaN is what was not measured."""
    # Flat lists of plain numbers: what is made on the way is gone before the next part.
    counts: list[int] = []
    lengths: list[int] = []
    starts: list[float] = []
    durations: list[float] = []
    device_durations: list[float | None] = []
    taken: list[int] = []
    finished: list[int] = []
    for part in parts:
        place = len(starts)
        if isinstance(part, StepRecord):
            counts += (*_counts(part).values(), 0)
            lengths.append(1)
            starts.append(part.start)
            durations.append(part.duration)
            device_durations.append(part.device_duration)
            finished += [place] * len(part.finished)
            continue
        for segment, begin, end in part.bounds():
            counts += (*_segment_counts(part, segment).values(), part.is_short)
            lengths.append(end - begin)
        starts += (part.start, *part.ends[:-1])
        durations += part.durations
        device_durations += [None] * len(part)
        taken += [place + offset for offset in part.taken_in]
        finished += [place + offset for offset, ids in part.finished for _ in ids]
    names = (*_ZEROS, "is_short")
    table = np.array(counts, dtype=np.int64).reshape(-1, len(names)).T
    columns = {name: np.repeat(values, lengths) for name, values in zip(names, table, strict=True)}
    # From step to step of a segment each row has one token more, and blocks are taken.
    begins = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    offsets = np.arange(len(starts)) - begins
    num_new = np.bincount(taken, minlength=len(starts))
    num_taken = num_new.cumsum() - (num_new.cumsum() - num_new)[begins]
    columns["step"] += offsets
    columns["num_context_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_blocks"] += num_taken
    columns["num_external_blocks"] -= num_taken * columns.pop("is_short")
    columns["num_finished"] = np.bincount(finished, minlength=len(starts))
    seconds = {"start_s": starts, "duration_s": durations, "device_duration_s": device_durations}
    times = {name: np.array(values, dtype=np.float64) for name, values in seconds.items()}
    return fixed({"step": columns["step"], **times, **columns})


def request_columns(records: Sequence[RequestRecord]) -> Columns:
    """Return the requests as columns; an undefined time is NaN, another undefined value None."""

    def column(name: str, kind: type) -> npt.NDArray[Any]:
        values = [getattr(record, name) for record in records]
        return np.array(values, dtype=object if kind is int and None in values else kind)

    return fixed(
        {
            **{name: column(name, object) for name in ("id", "client")},
            **{f"{name}_s": column(name, float) for name in _TIMES},
            **{name: column(name, int) for name in _TOKENS + _COUNTS},
            **{name: column(name, object) for name in ("finish_reason", "error")},
        }
    )


def fixed(columns: Columns) -> Columns:
    """Return columns that cannot be written to, since all readers share them."""
    for values in columns.values():
        values.flags.writeable = False
    return columns


def _counts(record: StepRecord) -> dict[str, int]:
    plan, skipped = record.plan, record.num_skipped()
    return {
        "step": plan.step,
        "num_scheduled": len(plan.scheduled),
        "num_tokens": plan.num_tokens,
        "num_prefill_tokens": plan.num_prefill_tokens,
        "num_decode_tokens": plan.num_decode_tokens,
        "num_padding_rows": len(plan.padding),
        "num_context_tokens": plan.num_context_tokens,
        "num_sampled_tokens": sum([entry.samples for entry in plan.scheduled]),
        "num_admitted": len(plan.admitted),
        "num_preempted": len(plan.preempted),
        **{name: skipped.get(reason, 0) for reason, name in _SKIPPED},
        "num_finished": len(record.finished),
        **record.pool._asdict(),
        "num_copied_blocks": plan.num_transfers("copy"),
        "num_swapped_out_blocks": plan.num_transfers("swap_out"),
        "num_swapped_in_blocks": plan.num_transfers("swap_in"),
    }


def _segment_counts(run: DecodeRun, segment: Segment) -> dict[str, int]:
    """Return the counts of a segment's first step, but for the blocks taken before it."""
    num_rows, pool = segment.num_rows, PoolState(*segment.pool)
    rows = zip(run.starts, run.num_steps, strict=True)
    skipped = count_skipped([reason for _, reason in run.skipped], segment.closed, pool.num_waiting)
    context = num_rows * (segment.offset + 1) + sum([row.context_length for row in run.padding])
    return {
        **_ZEROS,
        "step": run.first_step + segment.offset,
        "num_scheduled": num_rows,
        "num_tokens": num_rows + len(run.padding),
        "num_decode_tokens": num_rows,
        "num_padding_rows": len(run.padding),
        "num_context_tokens": context + sum([start for start, last in rows if last > segment.offset]),
        "num_sampled_tokens": num_rows,
        **{name: skipped.get(reason, 0) for reason, name in _SKIPPED},
        **pool._asdict(),
    }


_ZEROS = dict.fromkeys(_counts(StepRecord(0.0, 0.0, Plan(0, ()), (), PoolState(0, 0, 0, 0))), 0)
