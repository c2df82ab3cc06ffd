"""Consecutive steps under way, and what they do to requests and blocks."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cbresearch.blocks import BlockManager
from cbresearch.leap import Leap, Level
from cbresearch.plan import Skipped
from cbresearch.request import RequestState
from cbresearch.scheduler.draft import padding_of
from cbresearch.scheduler.forecast import forecast

if TYPE_CHECKING:
    from cbresearch.scheduler.core import Scheduler

_NEVER = 1 << 62


class Foresight(Protocol):
    """What an executor has to know beforehand so that steps can be taken at once."""

    def num_left(self, states: Sequence[RequestState]) -> list[int]:
        """Return how many output tokens requests still get."""

    def reason(self, state: RequestState) -> str:
        """Return the reason for which a request ends that has all its output tokens."""

    def tokens(self, number: int) -> Sequence[int]:
        """Return so many output tokens; they are the same for everyone."""

    def durations(self, num_tokens: int, num_context_tokens: range) -> Sequence[float]:
        """Return the seconds of consecutive steps that copy nothing.

        Args:
            num_tokens: Tokens that each computes, padding included.
            num_context_tokens: Context tokens of each.
        """

    def leave(self, request_id: str) -> None:
        """Take note that a request is finished."""


class Ahead(NamedTuple):
    """Steps taken at once.

    Attributes:
        leap: The steps.
        finished: States of the requests that they finished, in order.
    """

    leap: Leap
    finished: tuple[RequestState, ...]


class Stride:
    """The steps under way; each request's state catches up when it is needed."""

    def __init__(
        self,
        scheduler: "Scheduler",
        foresight: Foresight,
        order: Sequence[RequestState],
        now: float,
        waits: bool,
    ) -> None:
        self.scheduler, self.foresight, self.order, self.waits = scheduler, foresight, order, waits
        self.blocks, self.memory = scheduler.blocks, scheduler._memory
        self.start = now
        self.first_step = scheduler._step
        cache = self.blocks.config
        self.size = cache.block_size
        self.request_ids = [state.id for state in order]
        self.starts = [state.num_computed_tokens for state in order]
        self.seats: list[int] = [state.seat for state in order]  # type: ignore[misc]
        # Steps until the end of each.
        self.lasts = foresight.num_left(order)
        self.synced = [0] * len(order)
        self.active = list(range(len(order)))
        blocks = self.blocks
        # The step before which each needs a block; what is reserved is there from the beginning.
        self.needs = (
            list(map(sub, blocks.rooms(self.request_ids), self.starts))
            if isinstance(blocks, BlockManager)
            else []
        )
        self.enters = (
            [place for place, state in enumerate(order) if type(state.request.prompt) is tuple]
            if cache.prefix_caching
            else []
        )
        self.is_careful = bool(self.enters) or cache.sliding_window is not None
        # Who takes a block next, and when: each comes again a block's size of steps later, behind all others.
        self.queue = deque(sorted(zip(self.needs, self.active, strict=False)))
        kept, budget = scheduler._kept, scheduler._plan.budget - len(order)
        self.padding = padding_of(kept[:budget]) if kept else ()
        self.num_held_tokens = self.memory.num_held_tokens(scheduler._running, are_all=not kept)
        self.ends: list[float] = []
        self.taken_in: list[int] = []
        self.taken_by: list[int] = []
        self.taken: list[int] = []
        self.levels: list[Level] = []
        self.finished: list[tuple[int, tuple[str, ...]]] = []
        self.done: list[RequestState] = []

    def run(self, until: float, passes_finishes: bool) -> Ahead | None:
        """Take the steps."""
        scheduler, blocks = self.scheduler, self.blocks
        most = (blocks.num_free_blocks // len(self.order) + 2) * self.size if self.needs else _NEVER
        durations, ends, segments = forecast(
            self.foresight.durations,
            self.starts,
            self.lasts,
            [row.context_length for row in self.padding] if self.padding else (),
            self.start,
            until,
            passes_finishes,
            most,
        )
        self.ends = ends
        closed, skipped = self._refusals()
        take = self._take_carefully if self.is_careful else self._take
        total = 0
        for end, leaving in segments:
            total += take(total, end, closed)
            if total < end:
                break
            if leaving:
                self._finish(leaving, end)
                if self.active:
                    closed, skipped = self._refusals()
        if total < len(ends):
            del ends[total:], durations[total:]
        if not total:
            return None
        self._catch_up_all(total)
        scheduler._step += total
        if not self.waits:
            scheduler._was_refused = False
        leap = Leap(
            self.first_step,
            self.start,
            tuple(durations),
            tuple(ends),
            tuple(self.request_ids),
            tuple(self.seats),
            tuple(self.starts),
            tuple([last if last < total else total for last in self.lasts]),
            tuple(self.taken_in),
            tuple(self.taken_by),
            tuple(self.taken),
            tuple(self.levels),
            tuple(self.finished),
            self.padding,
            skipped,
            len(scheduler._waiting) + len(scheduler._swapped),
            len(scheduler._swapped),
            blocks.num_held_host_blocks,
            blocks.num_blocks,
        )
        return Ahead(leap, tuple(self.done))

    def _refusals(self) -> tuple[str | None, tuple[Skipped, ...]]:
        """Return why nobody can join, and who was refused."""
        scheduler = self.scheduler
        if self.waits:
            plan = scheduler._last[1]
            assert plan is not None
            return plan.closed, plan.skipped
        if len(self.active) == scheduler._plan.budget:
            return "budget", ()
        return None if scheduler._free_seats else "seats", ()

    def _takings(self, end: int) -> tuple[list[int], list[int]]:
        """Return the steps before which rows need blocks, up to `end`, in order, and the rows."""
        queue, lasts, size = self.queue, self.lasts, self.size
        steps: list[int] = []
        places: list[int] = []
        while queue and queue[0][0] < end:
            step, place = queue.popleft()
            if step < lasts[place]:
                steps.append(step)
                places.append(place)
                queue.append((step + size, place))
        return steps, places

    def _take(self, offset: int, end: int, closed: str | None) -> int:
        """Give the rows the blocks that they need in some steps; return for how many steps they suffice."""
        blocks, (steps, places) = self.blocks, self._takings(end)
        if steps:
            num_spare = blocks.num_free_blocks - (blocks.num_cached_blocks if self.waits else 0)
            if len(steps) > num_spare:
                end = steps[num_spare]
                num_spare = bisect_left(steps, end)
                del steps[num_spare:], places[num_spare:]
        if end == offset:
            return 0
        level = self._level(offset, 0, closed)
        self.levels.append(level)
        if steps:
            assert isinstance(blocks, BlockManager)
            self.taken_in += steps
            self.taken_by += places
            if len(steps) <= blocks.num_free_blocks - level.num_cached_blocks:
                ids = self.request_ids
                self.taken += blocks.append_each([ids[place] for place in places])
            else:
                self._evict_and_take(level, steps, places)
        num_new = len(self.active) * (end - offset)
        self.memory.num_referred_tokens += num_new
        self.num_held_tokens += num_new
        return end - offset

    def _evict_and_take(self, level: Level, steps: Sequence[int], places: Sequence[int]) -> None:
        """Take blocks, some of which hold cached prefixes until then."""
        blocks = self.blocks
        assert isinstance(blocks, BlockManager)
        num_cached, num_before, current = level.num_cached_blocks, 0, -1
        for number, (step, place) in enumerate(zip(steps, places, strict=True)):
            if step != current:
                num_before, current = number, step
            self.taken += blocks.append_each((self.request_ids[place],))
            if blocks.num_cached_blocks != num_cached:
                num_cached = blocks.num_cached_blocks
                changed = self._level(step, number + 1 - num_before, level.closed)
                changed = changed._replace(
                    num_held_tokens=level.num_held_tokens + (step - level.offset) * level.num_rows
                )
                self._enter_level(changed)

    def _enter_level(self, level: Level) -> None:
        """Note what holds from a step on, in the place of what was noted for it before."""
        if self.levels[-1].offset == level.offset:
            self.levels.pop()
        self.levels.append(level)

    def _take_carefully(self, offset: int, end: int, closed: str | None) -> int:
        """Give the rows their blocks, and let blocks be cached and forgotten, each when its turn comes."""
        blocks, scheduler = self.blocks, self.scheduler
        assert isinstance(blocks, BlockManager)
        at_once, num_rows = scheduler.policy.hits_at_once, len(self.active)
        growing = self._events(end, self.needs, self.active)
        entering = self._events(end, self._entries(offset), [p for p in self.active if p in self.enters])
        forgetting = self._events(end, self._losses(offset), self.active)
        are_all = not scheduler._kept
        counted = offset
        self.levels.append(self._level(offset, 0, closed))
        for step in sorted({*growing, *entering, *forgetting}):
            takers, enters = growing.get(step, ()), entering.get(step, ())
            num_spare = blocks.num_free_blocks - (blocks.num_cached_blocks if self.waits else 0)
            # What changes in the prefix cache may be what somebody who waits was waiting for.
            if len(takers) > num_spare or (self.waits and enters):
                end = step
                break
            for place in sorted({*takers, *enters}) if at_once else takers:
                if place in takers:
                    self._append(step, place)
                if at_once and place in enters:
                    self._catch_up(place, step)
                    self.memory.enter(self.order[place], self.starts[place] + step + 1)
            self.memory.num_referred_tokens += num_rows * (step + 1 - counted)
            counted = step + 1
            for place in sorted({*enters, *forgetting.get(step, ())}):
                self._catch_up(place, step)
                state = self.order[place]
                state.num_computed_tokens += 1
                self.memory.settle(state, state.num_computed_tokens - 1)
                # It is counted already, with those of the other rows.
                self.memory.num_referred_tokens -= 1
                state.num_computed_tokens -= 1
            level = self._level(step, len(takers), closed)
            held = self.num_held_tokens + num_rows * (step + 1 - offset)
            if are_all:
                held = self.memory.num_held_tokens((), are_all=True)
            level = level._replace(num_held_tokens=held)
            self._enter_level(level)
        if end == offset:
            self.levels.pop()
            return 0
        self.memory.num_referred_tokens += num_rows * (end - counted)
        self.num_held_tokens = (
            self.memory.num_held_tokens((), are_all=True)
            if are_all
            else self.num_held_tokens + num_rows * (end - offset)
        )
        return end - offset

    def _events(self, end: int, first: Sequence[int], places: Sequence[int]) -> dict[int, list[int]]:
        """Return the places of rows by step, from the first step of each on, every block size steps."""
        events: dict[int, list[int]] = {}
        for place in places:
            for step in range(first[place], end, self.size):
                events.setdefault(step, []).append(place)
        return events

    def _entries(self, offset: int) -> list[int]:
        """Return the step with which each row's next block is full."""
        return [offset + -(start + offset + 1) % self.size for start in self.starts]

    def _losses(self, offset: int) -> list[int]:
        """Return the step behind which each row next gives back a block that is out of sight."""
        window = self.blocks.config.sliding_window
        if window is None:
            return [_NEVER] * len(self.starts)
        seen = window - 1 + self.memory.num_repeated
        # One is lost with each token count that is a positive multiple of the block size beyond what is seen.
        counts = [max(start + offset + 1 - seen, 1) for start in self.starts]
        return [
            -(-count // self.size) * self.size + seen - start - 1
            for count, start in zip(counts, self.starts, strict=True)
        ]

    def _append(self, step: int, place: int) -> None:
        blocks = self.blocks
        assert isinstance(blocks, BlockManager)
        self.needs[place] = step + self.size
        self.taken_in.append(step)
        self.taken_by.append(place)
        self.taken += blocks.append_each((self.request_ids[place],))

    def _level(self, offset: int, num_taken: int, closed: str | None) -> Level:
        blocks, num_rows = self.blocks, len(self.active)
        is_short = self.waits and self.scheduler._was_refused
        return Level(
            offset,
            num_rows,
            closed,
            self.num_held_tokens + num_rows,
            blocks.num_held_blocks - num_taken,
            blocks.num_cached_blocks,
            None if is_short else blocks.num_unusable_blocks,
            blocks.num_shared_blocks,
        )

    def _catch_up(self, place: int, step: int, is_last: bool = False) -> None:
        """Bring a request to where it is before a step, which may be its end."""
        begun = self.synced[place]
        number = step - begun
        if not number:
            return
        self.synced[place] = step
        state = self.order[place]
        start = state.num_computed_tokens
        end = state.num_computed_tokens = start + number
        covered = state.num_covered_tokens
        if start < covered:
            state.num_recomputed_tokens += min(end, covered) - start
        if end > covered:
            state.num_covered_tokens = end
        state.num_tokens += number
        state.scheduled_step = self.first_step + step - 1
        state.output_token_ids += self.foresight.tokens(number)
        state.token_times += self.ends[begun:step] if number < len(self.ends) else self.ends
        if is_last:
            state.finish_reason = self.foresight.reason(state)
        if self.scheduler._served is not None:
            self.scheduler._served(state, number)

    def _catch_up_all(self, total: int) -> None:
        """Bring everyone who still runs to the end."""
        ends, synced, order, last = self.ends, self.synced, self.order, self.first_step + total - 1
        tokens, is_told = self.foresight.tokens(total), self.scheduler._served is not None
        for place in self.active:
            state = order[place]
            start = state.num_computed_tokens
            if synced[place] or is_told or start < state.num_covered_tokens:
                self._catch_up(place, total)
                continue
            # Most are as they were at the beginning: what they gain is the same for all.
            state.num_computed_tokens = state.num_covered_tokens = start + total
            state.num_tokens += total
            state.scheduled_step = last
            state.output_token_ids.extend(tokens)
            state.token_times.extend(ends)

    def _finish(self, leaving: Sequence[int], end: int) -> None:
        """End requests with the step before `end`."""
        states = [self.order[place] for place in leaving]
        for place in leaving:
            self._catch_up(place, end, is_last=True)
            self.foresight.leave(self.request_ids[place])
        self.finished.append((end - 1, tuple([self.request_ids[place] for place in leaving])))
        self.done += states
        self.scheduler._finish(states)
        self.active = [place for place in self.active if self.lasts[place] > end]
        self.num_held_tokens = self.memory.num_held_tokens((), are_all=True)
