"""The steps of a run, those that were taken at once kept as such."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from typing import overload

from cbresearch.leap import Leap, StepState
from cbresearch.trace.records import StepRecord


class Steps(Sequence[StepRecord]):
    """Step records in order; what a leap holds is spelled out when it is asked for.

    It equals any sequence of the same records, a tuple included.

    Args:
        parts: Records and leaps in order.
    """

    __slots__ = ("_ends", "parts")

    def __init__(self, parts: Iterable[StepRecord | Leap]) -> None:
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(len(part) if isinstance(part, Leap) else 1 for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(index, slice):
            wanted = range(*index.indices(len(self)))
            if wanted.step == 1:
                return tuple(self._between(wanted.start, wanted.stop))
            return tuple(self[place] for place in wanted)
        place = range(len(self))[index]
        number = bisect_right(self._ends, place)
        part = self.parts[number]
        if not isinstance(part, Leap):
            return part
        offset = place - (self._ends[number - 1] if number else 0)
        return _record(part, offset, part.state(offset))

    def __iter__(self) -> Iterator[StepRecord]:
        for part in self.parts:
            if isinstance(part, Leap):
                yield from expand(part)
            else:
                yield part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Steps | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Steps({len(self)} steps in {len(self.parts)} parts)"

    def _between(self, first: int, last: int) -> Iterator[StepRecord]:
        number = bisect_right(self._ends, first)
        begin = self._ends[number - 1] if number else 0
        for part in self.parts[number:]:
            if begin >= last:
                return
            if isinstance(part, Leap):
                yield from islice(expand(part), max(0, first - begin), last - begin)
                begin += len(part)
            else:
                yield part
                begin += 1


def column(steps: Iterable[StepRecord], name: str) -> list[float]:
    """Return one number a step, the same that the records give, without spelling out the steps of leaps.

    Args:
        steps: Step records, `Steps` or any other.
        name: "duration", "num_scheduled", "num_padding", "num_prefill_tokens", "num_decode_tokens",
            "num_held_blocks", "num_held_tokens", or a kind of transfer: "copy", "swap_out", "swap_in".
    """
    of_record, of_leap = _COLUMNS[name]
    values: list[float] = []
    for part in steps.parts if isinstance(steps, Steps) else steps:
        if isinstance(part, Leap):
            values += of_leap(part)
        else:
            values.append(of_record(part))
    return values


def _num_transfers(kind: str, step: StepRecord) -> int:
    return step.plan.num_transfers(kind)


_Column = tuple[Callable[[StepRecord], float], Callable[[Leap], Iterable[float]]]

_COLUMNS: Mapping[str, _Column] = {
    "duration": (lambda step: step.duration, lambda leap: leap.durations),
    "num_scheduled": (lambda step: len(step.plan.scheduled), lambda leap: leap.num_rows()),
    "num_padding": (
        lambda step: len(step.plan.padding),
        lambda leap: repeat(len(leap.padding), len(leap)),
    ),
    "num_prefill_tokens": (lambda step: step.plan.num_prefill_tokens, lambda leap: repeat(0, len(leap))),
    "num_decode_tokens": (lambda step: step.plan.num_decode_tokens, lambda leap: leap.num_rows()),
    "num_held_blocks": (
        lambda step: step.num_held_blocks,
        lambda leap: (state.num_held_blocks for state in leap.states()),
    ),
    "num_held_tokens": (
        lambda step: step.num_held_tokens,
        lambda leap: (state.num_held_tokens for state in leap.states()),
    ),
    **{
        kind: (partial(_num_transfers, kind), lambda leap: repeat(0, len(leap)))
        for kind in ("copy", "swap_out", "swap_in")
    },
}


def expand(leap: Leap) -> Iterator[StepRecord]:
    """Yield the records of a leap's steps."""
    for offset, state in enumerate(leap.states()):
        yield _record(leap, offset, state)


def _record(leap: Leap, offset: int, state: StepState) -> StepRecord:
    return StepRecord(
        leap.start_of(offset),
        leap.durations[offset],
        leap.plan(offset),
        leap.finished_in(offset),
        state.num_running,
        leap.num_waiting,
        state.num_held_blocks,
        state.num_held_tokens,
        state.num_cached_blocks,
        state.num_external_blocks,
        state.num_shared_blocks,
        leap.num_swapped,
        leap.num_held_host_blocks,
    )
