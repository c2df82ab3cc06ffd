"""The columns of a run: one value for each step or request, worked out for a whole decode run at once."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from cbresearch.step import SKIP_REASONS, Plan, PoolState
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.steps import Part, step_of

Columns = Mapping[str, npt.NDArray[Any]]

_TIMES = ("arrival", "queued", "first_scheduled", "first_token", "finish", "ttft", "tpot", "latency")
_TOKENS = ("num_prompt_tokens", "num_output_tokens", "max_tokens")
_COUNTS = ("num_preemptions", "num_cached_tokens", "num_recomputed_tokens")


def step_columns(parts: Sequence[Part]) -> Columns:
    """Return the steps as columns; units are in the names, and NaN is what was not measured."""
    segments: list[tuple[StepRecord, int, bool]] = []
    times: list[tuple[float, float, float | None]] = []
    taken: list[int] = []
    finished: list[int] = []
    for part in parts:
        place = len(times)
        if isinstance(part, StepRecord):
            segments.append((part, 1, False))
            times.append((part.start, part.duration, part.device_duration))
            finished += [place] * len(part.finished)
        else:
            segments += [
                (step_of(part, begin), end - begin, part.is_short) for _, begin, end in part.bounds()
            ]
            times += zip((part.start, *part.ends[:-1]), part.durations, repeat(None))
            taken += [place + offset for offset in part.taken_in]
            finished += [place + offset for offset, ids in part.finished for _ in ids]
    lengths = np.array([length for _, length, _ in segments], dtype=int)
    begins = np.repeat(lengths.cumsum() - lengths, lengths)
    counts = [_counts(record) for record, _, _ in segments]
    columns = {name: np.repeat([count[name] for count in counts], lengths) for name in _counts(_NO_STEP)}
    # From step to step of a segment each row has one token more, and blocks are taken.
    offsets = np.arange(len(times)) - begins
    num_taken = np.bincount(taken, minlength=len(times)).cumsum()
    num_taken -= num_taken[begins]
    columns["step"] += offsets
    columns["num_context_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_blocks"] += num_taken
    columns["num_external_blocks"] -= num_taken * np.repeat([short for _, _, short in segments], lengths)
    columns["num_finished"] = np.bincount(finished, minlength=len(times))
    names = ("start_s", "duration_s", "device_duration_s")
    seconds = dict(zip(names, np.array(times, dtype=float).reshape(-1, 3).T.copy(), strict=True))
    return fixed({"step": columns["step"], **seconds, **columns})


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
        **{f"num_skipped_for_{reason}": skipped[reason] for reason in SKIP_REASONS},
        "num_finished": len(record.finished),
        **record.pool._asdict(),
        "num_copied_blocks": plan.num_transfers("copy"),
        "num_swapped_out_blocks": plan.num_transfers("swap_out"),
        "num_swapped_in_blocks": plan.num_transfers("swap_in"),
    }


_NO_STEP = StepRecord(0.0, 0.0, Plan(0, ()), (), PoolState(0, 0, 0, 0))
