"""The steps of a run, with each decode run kept as one part."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from cbresearch.step import DecodeRun
from cbresearch.trace.records import StepRecord

__all__ = ["Part", "Steps", "step_of"]

Part = StepRecord | DecodeRun


class Steps(Sequence[StepRecord]):
    """Step records in order; those of a decode run are made when they are asked for.

    It equals a tuple of the same records; a slice of it is a tuple.

    Args:
        parts: Step records and decode runs in order.
        places: Numbers of the steps among those of all parts; by default all are in it.
    """

    __slots__ = ("_ends", "_places", "parts")

    def __init__(self, parts: Iterable[Part], places: range | None = None) -> None:
        self.parts = tuple(parts)
        lengths = (len(part) if isinstance(part, DecodeRun) else 1 for part in self.parts)
        self._ends = tuple(accumulate(lengths, initial=0))
        self._places = range(self._ends[-1]) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        places = self._places[index]
        if isinstance(places, range):
            return tuple(Steps(self.parts, places))
        number = bisect_right(self._ends, places) - 1
        part = self.parts[number]
        return part if isinstance(part, StepRecord) else step_of(part, places - self._ends[number])

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
    times, state = (run.start_of(offset), run.durations[offset]), (run.pool(offset), run.events_of(offset))
    return StepRecord(*times, run.plan(offset), run.finished_in(offset), *state)
