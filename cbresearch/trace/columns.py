"""The columns of a run: one value for each step or request, worked out for a whole decode run at once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cbresearch.step import SKIP_REASONS, DecodeRun, PoolState
from cbresearch.trace.records import RequestRecord, StepRecord, count_skipped
from cbresearch.trace.steps import Part

__all__ = ["Columns"]

Columns = Mapping[str, npt.NDArray[Any]]

_TIMES = ("arrival", "queued", "first_scheduled", "first_token", "finish", "ttft", "tpot", "latency")
_TOKENS = ("num_prompt_tokens", "num_output_tokens", "max_tokens")
_TRANSFERS = ("copy", "swap_out", "swap_in")
_COUNTS = ("num_preemptions", "num_cached_tokens", "num_recomputed_tokens")
_NAMES = (
    *("step", "num_scheduled", "num_tokens", "num_prefill_tokens", "num_decode_tokens", "num_padding_rows"),
    *("num_context_tokens", "num_sampled_tokens", "num_admitted", "num_preempted"),
    *(f"num_skipped_for_{reason}" for reason in SKIP_REASONS),
    "num_finished",
    *PoolState._fields,
    *("num_copied_blocks", "num_swapped_out_blocks", "num_swapped_in_blocks", "is_short"),
)


def step_columns(parts: Sequence[Part]) -> Columns:
    """Return the steps as columns; units are in the names, and NaN is what was not measured."""
    # Flat lists of plain numbers: what is made on the way is gone before the next part.
    counts: list[int] = []
    lengths: list[int] = []
    starts: list[float] = []
    durations: list[float] = []
    device_durations: list[float] = []
    taken: list[int] = []
    finished: list[int] = []
    for part in parts:
        place = len(starts)
        if isinstance(part, StepRecord):
            counts += _counts(part)
            lengths.append(1)
            starts.append(part.start)
            durations.append(part.duration)
            device_durations.append(np.nan if part.device_duration is None else part.device_duration)
            finished += [place] * len(part.finished)
            continue
        for length, first in _segment_counts(part):
            counts += first
            lengths.append(length)
        starts += (part.start, *part.ends[:-1])
        durations += part.durations
        device_durations += [np.nan] * len(part)
        taken += [place + offset for offset in part.taken_in]
        finished += [place + offset for offset, ids in part.finished for _ in ids]
    table = np.array(counts, dtype=np.int64).reshape(-1, len(_NAMES)).T
    # A column that never changes, as most are, is one value.
    columns = {
        name: np.repeat(values, lengths)
        if np.any(np.diff(values))
        else np.broadcast_to(values[:1], len(starts))
        for name, values in zip(_NAMES, table, strict=True)
    }
    # From step to step of a segment each row has one token more, and blocks are taken.
    begins = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    offsets = np.arange(len(starts)) - begins
    num_new = np.bincount(taken, minlength=len(starts))
    num_taken = num_new.cumsum() - (num_new.cumsum() - num_new)[begins]
    num_decoded = offsets * columns["num_scheduled"]
    grown = {"step": offsets, "num_context_tokens": num_decoded, "num_held_tokens": num_decoded}
    grown |= {"num_held_blocks": num_taken, "num_external_blocks": -num_taken * columns.pop("is_short")}
    columns |= {name: columns[name] + values for name, values in grown.items()}
    columns["num_finished"] = np.bincount(finished, minlength=len(starts))
    seconds = {"start_s": starts, "duration_s": durations, "device_duration_s": device_durations}
    times = {name: np.array(values, dtype=np.float64) for name, values in seconds.items()}
    return fixed({"step": columns["step"], **times, **columns})


def cut_steps(columns: Columns, begin: float, end: float) -> Columns:
    """Return the columns of steps with times cut to a window, and the `share` of each step that is inside."""
    seconds, starts = columns["duration_s"], np.clip(columns["start_s"], begin, end)
    inside = np.clip(columns["start_s"] + seconds, begin, end) - starts
    is_cut = (columns["start_s"] < begin) | (columns["start_s"] + seconds > end)
    share = np.divide(inside, seconds, out=np.ones(len(seconds)), where=is_cut & (seconds > 0))
    times = {name: columns[name] * share for name in ("duration_s", "device_duration_s")}
    return fixed({**columns, "start_s": starts, **times, "share": share})


def request_columns(records: Sequence[RequestRecord]) -> Columns:
    """Return the requests as columns; an undefined time is NaN, another undefined value None."""

    def column(name: str, kind: type) -> npt.NDArray[Any]:
        values = [getattr(record, name) for record in records]
        try:
            return np.array(values, dtype=kind)
        except (OverflowError, TypeError):
            # A count may be None, and what a rejected request asks for has no limit.
            return np.array(values, dtype=object)

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


def _counts(record: StepRecord) -> tuple[int, ...]:
    """Return the counts of a step, in the order of `_NAMES`."""
    plan = record.plan
    num_prefill = num_context = num_decode = num_sampled = 0
    for _, _, start, num_tokens, is_prefill, samples, _ in plan.rows:
        num_prefill += num_tokens if is_prefill else 0
        num_decode += not is_prefill
        num_context += start + num_tokens
        num_sampled += samples
    num_padding = len(plan.padding)
    return (
        *(plan.step, len(plan.scheduled), num_prefill + num_decode + num_padding, num_prefill, num_decode),
        *(num_padding, num_context + sum([row.context_length for row in plan.padding]), num_sampled),
        *(len(plan.admitted), len(plan.preempted)),
        *record.skip_counts(),
        len(record.finished),
        *record.pool,
        *(map(plan.num_transfers, _TRANSFERS) if plan.transfers else (0, 0, 0)),
        0,
    )


def _segment_counts(run: DecodeRun) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each segment's length and the counts of its first step, but for the blocks taken before it."""
    reasons = [reason for _, reason in run.skipped]
    num_padding, padding_context = len(run.padding), sum([row.context_length for row in run.padding])
    for segment, begin, end in run.bounds():
        _, num_rows, closed, pool = segment
        starts = [start for start, last in zip(run.starts, run.num_steps, strict=True) if last > begin]
        context = sum(starts) + num_rows * (begin + 1) + padding_context
        yield (
            end - begin,
            (
                *(run.first_step + begin, num_rows, num_rows + num_padding, 0, num_rows),
                *(num_padding, context, num_rows, 0, 0),
                *count_skipped(reasons, closed, pool[1]),
                0,
                *pool,
                *(0, 0, 0, run.is_short),
            ),
        )
