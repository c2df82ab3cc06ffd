"""Consecutive steps in which everyone who runs decodes: what they share is kept once."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import NamedTuple

from cbresearch.plan import Padding, Plan, Scheduled, Skipped
from cbresearch.step import NO_EVENTS, DecodeRun, PoolState, Segment


class Level(NamedTuple):
    """What holds from one step of a leap until the next level.

    Attributes:
        offset: Number of the leap's step, from 0.
        num_rows: Requests that each step serves.
        closed: As in `Plan`.
        num_held_tokens: As in `Committed`, in this step; each later one has `num_rows` more.
        num_held_blocks: As in `Committed`, but without those that are taken in this step or later.
        num_cached_blocks: As in `Committed`.
        num_external_blocks: As in `Committed`; None where it is whatever is neither held nor cached.
        num_shared_blocks: As in `Committed`.
    """

    offset: int
    num_rows: int
    closed: str | None
    num_held_tokens: int
    num_held_blocks: int
    num_cached_blocks: int
    num_external_blocks: int | None
    num_shared_blocks: int


class StepState(NamedTuple):
    """What the scheduler holds in one step of a leap; the fields are those of `Committed`."""

    num_running: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int
    num_external_blocks: int
    num_shared_blocks: int


@dataclass(frozen=True, slots=True)
class Leap:
    """Steps taken at once, each of which decodes everyone who runs and seats nobody.

    Attributes:
        first_step: Index of the first step.
        start: Seconds since the start of the run at which it began.
        durations: Seconds of each step.
        ends: Seconds since the start of the run at which each step ended.
        request_ids: Whom the first step serves, in the policy's order.
        seats: Their rows in the batch.
        starts: Tokens of each whose KV was computed before the leap.
        num_steps: Steps that serve each; whoever is finished leaves.
        taken_in: Offset of the step before which each of `blocks` is taken, ascending.
        taken_by: Who takes it: its place in `request_ids`, ascending within a step.
        blocks: Physical ids of the blocks taken.
        levels: What holds from which step on, the first from step 0.
        finished: Ids of the requests that a step finished, by its offset.
        padding: Rows computed for nothing in every step.
        skipped: Who was refused in every step.
        num_waiting: Requests without a seat, swapped ones included.
        num_swapped: Requests whose KV lies in the host's pool.
        num_held_host_blocks: Blocks that they hold there.
        num_blocks: Blocks of the pool.
    """

    first_step: int
    start: float
    durations: tuple[float, ...]
    ends: tuple[float, ...]
    request_ids: tuple[str, ...]
    seats: tuple[int, ...]
    starts: tuple[int, ...]
    num_steps: tuple[int, ...]
    taken_in: tuple[int, ...]
    taken_by: tuple[int, ...]
    blocks: tuple[int, ...]
    levels: tuple[Level, ...]
    finished: tuple[tuple[int, tuple[str, ...]], ...]
    padding: tuple[Padding, ...]
    skipped: tuple[Skipped, ...]
    num_waiting: int
    num_swapped: int
    num_held_host_blocks: int
    num_blocks: int

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.ends)

    def start_of(self, offset: int) -> float:
        """Return the seconds since the start of the run at which a step began."""
        return self.ends[offset - 1] if offset else self.start

    def finished_in(self, offset: int) -> tuple[str, ...]:
        """Return the ids of the requests that a step finished."""
        return dict(self.finished).get(offset, ())

    def plan(self, offset: int) -> Plan:
        """Return a step's plan.

        Args:
            offset: Number of the leap's step, from 0.
        """
        first, last = bisect_left(self.taken_in, offset), bisect_right(self.taken_in, offset)
        blocks = {self.taken_by[number]: (self.blocks[number],) for number in range(first, last)}
        return Plan(
            step=self.first_step + offset,
            scheduled=tuple(
                Scheduled(request_id, seat, start + offset, 1, False, True, blocks.get(place, ()))
                for place, (request_id, seat, start, num_steps) in enumerate(
                    zip(self.request_ids, self.seats, self.starts, self.num_steps, strict=True)
                )
                if offset < num_steps
            ),
            padding=self.padding,
            skipped=self.skipped,
            closed=self.level(offset).closed,
        )

    def level(self, offset: int) -> Level:
        """Return the level that a step is on."""
        return self.levels[bisect_right(self.levels, offset, key=lambda level: level.offset) - 1]

    def num_rows(self) -> Iterator[int]:
        """Yield how many requests each step serves."""
        bounds = [*(level.offset for level in self.levels), len(self)]
        for level, (begin, end) in zip(self.levels, pairwise(bounds), strict=True):
            yield from repeat(level.num_rows, end - begin)

    def state(self, offset: int) -> StepState:
        """Return what the scheduler holds in one step."""
        level = self.level(offset)
        begin = bisect_left(self.taken_in, level.offset)
        return self._state(level, offset, bisect_right(self.taken_in, offset, lo=begin) - begin)

    def states(self) -> Iterator[StepState]:
        """Yield what the scheduler holds, a step at a time."""
        place = 0
        bounds = [*(level.offset for level in self.levels), len(self)]
        for level, (begin, end) in zip(self.levels, pairwise(bounds), strict=True):
            taken = place = bisect_left(self.taken_in, begin, lo=place)
            for offset in range(begin, end):
                place = bisect_right(self.taken_in, offset, lo=place)
                yield self._state(level, offset, place - taken)

    def _state(self, level: Level, offset: int, num_taken: int) -> StepState:
        held, external = level.num_held_blocks + num_taken, level.num_external_blocks
        return StepState(
            level.num_rows,
            held,
            level.num_held_tokens + (offset - level.offset) * level.num_rows,
            level.num_cached_blocks,
            self.num_blocks - held - level.num_cached_blocks if external is None else external,
            level.num_shared_blocks,
        )


def run_of(leap: Leap) -> DecodeRun:
    """Return the decode run that a leap is."""
    return DecodeRun(
        leap.first_step,
        leap.start,
        leap.durations,
        leap.ends,
        leap.request_ids,
        leap.seats,
        leap.starts,
        leap.num_steps,
        leap.taken_in,
        leap.taken_by,
        leap.blocks,
        tuple(
            Segment(
                level.offset,
                level.num_rows,
                level.closed,
                PoolState(
                    level.num_rows,
                    leap.num_waiting,
                    level.num_held_blocks,
                    level.num_held_tokens,
                    level.num_cached_blocks,
                    leap.num_blocks - level.num_held_blocks - level.num_cached_blocks
                    if level.num_external_blocks is None
                    else level.num_external_blocks,
                    level.num_shared_blocks,
                    leap.num_swapped,
                    leap.num_held_host_blocks,
                ),
            )
            for level in leap.levels
        ),
        leap.finished,
        (),
        NO_EVENTS,
        leap.padding,
        leap.skipped,
        any(level.num_external_blocks is None for level in leap.levels),
    )
