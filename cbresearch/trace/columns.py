"""The columns of a run: one number for each step or request, worked out for a whole decode run at once."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import nan
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cbresearch.step import SKIP_REASONS, DecodeRun, Plan, PoolState
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.steps import step_of

Columns = Mapping[str, npt.NDArray[Any]]
Part = StepRecord | DecodeRun


class TokenTimes(NamedTuple):
    """When output tokens came out, of all requests in one array.

    Attributes:
        times: Seconds since the start of the run, request after request; shape (output tokens,).
        offsets: Where each request's times begin, and the end of the last one's; shape (requests + 1,).
    """

    times: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.int64]


def step_columns(parts: Sequence[Part]) -> Columns:
    """Return one value a step in each column; units are in the names, and NaN is what was not measured."""
    counts: list[dict[str, int]] = []
    lengths: list[int] = []
    starts: list[float] = []
    durations: list[float] = []
    device_durations: list[float] = []
    taken: list[int] = []
    finished: list[int] = []
    for part in parts:
        first = len(starts)
        if isinstance(part, StepRecord):
            counts.append({**_counts(part), "is_short": 0})
            lengths.append(1)
            starts.append(part.start)
            durations.append(part.duration)
            device_durations.append(nan if part.device_duration is None else part.device_duration)
            finished += [first] * len(part.finished)
        else:
            for _, begin, end in part.bounds():
                counts.append({**_counts(step_of(part, begin)), "is_short": part.is_short})
                lengths.append(end - begin)
            starts += (part.start, *part.ends[:-1])
            durations += part.durations
            device_durations += [nan] * len(part)
            taken += [first + offset for offset in part.taken_in]
            finished += [first + offset for offset, ids in part.finished for _ in ids]
    number = len(starts)
    columns = {
        name: np.repeat(np.array([count[name] for count in counts], dtype=np.int64), lengths)
        for name in (*_COUNTS, "is_short")
    }
    # From step to step of a segment each row attends to one more token, and blocks are taken.
    begins = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    offsets = np.arange(number) - begins
    num_taken = np.cumsum(_number_of(taken, number))
    num_taken -= num_taken[begins]
    columns["step"] += offsets
    columns["num_context_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_tokens"] += offsets * columns["num_scheduled"]
    columns["num_held_blocks"] += num_taken
    columns["num_external_blocks"] -= num_taken * columns.pop("is_short")
    columns["num_finished"] = _number_of(finished, number)
    seconds = {"start_s": starts, "duration_s": durations, "device_duration_s": device_durations}
    return fixed({"step": columns.pop("step"), **seconds, **columns})


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


_COUNTS = tuple(_counts(StepRecord(0.0, 0.0, Plan(0, ()), (), PoolState(0, 0, 0, 0))))


def request_columns(records: Sequence[RequestRecord]) -> Columns:
    """Return one value a request in each column; undefined times are NaN, other undefined values None."""
    return fixed(
        {name: _array([read(record) for record in records], kind) for name, (read, kind) in _REQUEST.items()}
    )


_REQUEST: Mapping[str, tuple[Callable[[RequestRecord], Any], type]] = {
    **{name: (attrgetter(name), object) for name in ("id", "client")},
    **{
        f"{name}_s": (attrgetter(name), float)
        for name in (
            "arrival",
            "queued",
            "first_scheduled",
            "first_token",
            "finish",
            "ttft",
            "tpot",
            "latency",
        )
    },
    "num_prompt_tokens": (attrgetter("num_prompt_tokens"), int),
    "num_output_tokens": (lambda record: len(record.tokens), int),
    **{
        name: (attrgetter(name), int)
        for name in ("max_tokens", "num_preemptions", "num_cached_tokens", "num_recomputed_tokens")
    },
    **{name: (attrgetter(name), object) for name in ("finish_reason", "error")},
}


def _array(values: Sequence[Any], kind: type) -> npt.NDArray[Any]:
    return np.array(values, dtype=object if kind is int and None in values else kind)


def token_times(records: Sequence[RequestRecord]) -> TokenTimes:
    """Return when the output tokens of all requests came out."""
    numbers = [len(record.token_times) for record in records]
    times = chain.from_iterable(record.token_times for record in records)
    return TokenTimes(np.fromiter(times, np.float64, sum(numbers)), np.cumsum([0, *numbers]))


def _number_of(places: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Return how often each place is named."""
    return np.bincount(np.array(places, dtype=np.int64), minlength=length)


def fixed(columns: Mapping[str, Any]) -> Columns:
    """Return columns as arrays that cannot be written to: they are computed once and shared."""
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
