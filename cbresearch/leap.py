"""Consecutive steps in which everyone who runs decodes: what they share is kept once."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cbresearch.plan import Padding, Plan, Scheduled, Skipped


class Row(NamedTuple):
    """A request that decodes from the first step of a leap on.

    Attributes:
        request_id: Whose tokens.
        seat: Its row in the batch.
        start: Tokens of the request whose KV was computed before the leap.
        num_steps: Steps of the leap that serve it; it leaves then, or the leap ends.
    """

    request_id: str
    seat: int
    start: int
    num_steps: int


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


class Taken(NamedTuple):
    """A block that a row takes before a step.

    Attributes:
        offset: Number of the leap's step, from 0.
        place: Place of the row.
        block: Physical block id.
    """

    offset: int
    place: int
    block: int


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
        rows: Whom the first step serves, in the policy's order.
        taken: Blocks taken, in their order.
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
    rows: tuple[Row, ...]
    taken: tuple[Taken, ...]
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
        first = bisect_right(self.taken, (offset - 1, len(self.rows), -1))
        blocks: dict[int, tuple[int, ...]] = {}
        for taken in self.taken[first:]:
            if taken.offset > offset:
                break
            blocks[taken.place] = (taken.block,)
        return Plan(
            step=self.first_step + offset,
            scheduled=tuple(
                Scheduled(
                    row.request_id, row.seat, row.start + offset, 1, False, True, blocks.get(place, ())
                )
                for place, row in enumerate(self.rows)
                if offset < row.num_steps
            ),
            padding=self.padding,
            skipped=self.skipped,
            closed=self.level(offset).closed,
        )

    def level(self, offset: int) -> Level:
        """Return the level that a step is on."""
        return self.levels[bisect_right(self.levels, offset, key=lambda level: level.offset) - 1]

    def states(self) -> Iterator[StepState]:
        """Yield what the scheduler holds, a step at a time."""
        number, place = 0, -1
        taken = iter((*self.taken, Taken(len(self), 0, 0)))
        following = next(taken)
        level = self.levels[0]
        for offset in range(len(self)):
            while place + 1 < len(self.levels) and self.levels[place + 1].offset <= offset:
                place, number = place + 1, 0
                level = self.levels[place]
            while following.offset <= offset:
                number += 1
                following = next(taken)
            held, external = level.num_held_blocks + number, level.num_external_blocks
            yield StepState(
                level.num_rows,
                held,
                level.num_held_tokens + (offset - level.offset) * level.num_rows,
                level.num_cached_blocks,
                self.num_blocks - held - level.num_cached_blocks if external is None else external,
                level.num_shared_blocks,
            )
