"""The steps of a run, with each decode run kept as one part."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

from cbresearch.step import DecodeRun
from cbresearch.trace.records import StepRecord


class Steps(Sequence[StepRecord]):
    """Step records in order; those of a decode run are made when they are asked for.

    It equals any sequence of the same records, a tuple included.

    Args:
        parts: Step records and decode runs in order.
    """

    __slots__ = ("_ends", "parts")

    def __init__(self, parts: Iterable[StepRecord | DecodeRun]) -> None:
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(len(part) if isinstance(part, DecodeRun) else 1 for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        place = range(len(self))[index]
        number = bisect_right(self._ends, place)
        part = self.parts[number]
        if isinstance(part, StepRecord):
            return part
        return step_of(part, place - (self._ends[number - 1] if number else 0))

    def __iter__(self) -> Iterator[StepRecord]:
        for part in self.parts:
            if isinstance(part, StepRecord):
                yield part
            else:
                yield from (step_of(part, offset) for offset in range(len(part)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Steps | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Steps({len(self)} steps in {len(self.parts)} parts)"


def step_of(run: DecodeRun, offset: int) -> StepRecord:
    """Return the record of a decode run's step.

    Args:
        run: The decode run.
        offset: Number of its step, from 0.
    """
    return StepRecord(
        run.start_of(offset),
        run.durations[offset],
        run.plan(offset),
        run.finished_in(offset),
        run.pool(offset),
        run.events_of(offset),
    )
