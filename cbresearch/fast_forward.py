"""Runs of equal decode steps, taken at once over the scheduler's public methods.

A run begins where the next step decodes every running request and a policy promises that the steps behind it
do the same (`Policy.fast_forward`). It ends where a request arrives or finds no block, or, if requests wait,
finishes. The trace and the scheduler's state are those of stepping, bit for bit.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Protocol

from cbresearch.policies.base import may_fast_forward
from cbresearch.request import RequestState, take_decode_steps
from cbresearch.scheduler import DecodeBatch, Scheduler
from cbresearch.step import NO_EVENTS, DecodeRun, PoolCounts

_MAX_STEPS = 4096


class Outlook(Protocol):
    """What an executor has to know beforehand so that steps can be taken at once."""

    def num_left(self, states: Sequence[RequestState]) -> list[int]:
        """Return how many output tokens requests still get."""

    def finish_reason(self, state: RequestState) -> str:
        """Return the reason for which a request ends that has all its output tokens."""

    def tokens(self, number: int) -> Sequence[int]:
        """Return so many output tokens; they are the same for every request."""

    def durations(self, num_tokens: int, num_context_tokens: range) -> Sequence[float]:
        """Return the seconds of consecutive steps that copy nothing.

        Args:
            num_tokens: Tokens that each computes, padding included.
            num_context_tokens: Context tokens of each.
        """

    def finished(self, request_id: str) -> None:
        """Take note that a request is finished."""


def allows(scheduler: Scheduler) -> bool:
    """Return whether steps of a scheduler may ever be taken at once."""
    return (
        type(scheduler).schedule is Scheduler.schedule
        and type(scheduler).commit is Scheduler.commit
        and scheduler.kv.config.sliding_window is None
        and may_fast_forward(scheduler.policy)
    )


def fast_forward(
    scheduler: Scheduler, outlook: Outlook, now: float, until: float, passes_finishes: bool
) -> tuple[DecodeRun, tuple[RequestState, ...]] | None:
    """Take as many steps at once as differ in nothing but their counters.

    The scheduler, its blocks and the requests are then as after so many calls of `schedule` and `commit`.

    Args:
        scheduler: A scheduler that `allows` it.
        outlook: What its executor knows.
        now: Seconds since the start of the run.
        until: Seconds at which a request arrives: the first step that ends no earlier is the last one.
        passes_finishes: Whether to go on behind a step that finished a request, if none waits.

    Returns:
        The steps and the states of the requests that they finished, in order; or None if the next step has to
        be taken by itself; then nothing has changed.
    """
    # With prefix caching, each block of known tokens that fills up would change what requests can share.
    is_caching = scheduler.kv.config.prefix_caching
    if is_caching and scheduler.kv.num_cached_blocks:
        return None
    batch = scheduler.decode_batch(now)
    if batch is None or (is_caching and any([isinstance(state.prompt, tuple) for state in batch.order])):
        return None
    passes_finishes = passes_finishes and not batch.is_waiting and not scheduler.policy.pads_finished_rows
    return _Run(scheduler, outlook, batch, now).take(until, passes_finishes)


class _Run:
    """The steps under way; each request's state catches up when it finishes, or at the end."""

    def __init__(self, scheduler: Scheduler, outlook: Outlook, batch: DecodeBatch, now: float) -> None:
        self.scheduler, self.outlook, self.batch, self.start = scheduler, outlook, batch, now
        self.kv, self.block_size = scheduler.kv, scheduler.kv.config.block_size
        self.notify = scheduler.on_scheduled
        self.first_step = scheduler.step
        order = batch.order
        self.request_ids = [state.id for state in order]
        self.seats: list[int] = [state.seat for state in order]  # type: ignore[misc]
        self.starts = [state.num_computed_tokens for state in order]
        # Steps until the end of each row.
        self.lasts = outlook.num_left(order)
        self.active = list(range(len(order)))
        self.ends: list[float] = []
        # The blocks to take in their order: the step before which, times the number of rows, plus the row.
        self.takes: list[int] = []
        self.blocks: list[int] = []
        self.segments: list[tuple[int, int, str | None, PoolCounts]] = []
        self.finished: list[tuple[int, tuple[str, ...]]] = []
        self.freed: list[tuple[int, tuple[int, ...]]] = []
        self.events = NO_EVENTS
        self.done: list[RequestState] = []

    def take(self, until: float, passes_finishes: bool) -> tuple[DecodeRun, tuple[RequestState, ...]] | None:
        """Take the steps."""
        batch = self.batch
        durations, self.ends, stretches = _forecast(
            self.outlook.durations,
            self.starts,
            self.lasts,
            [row.context_length for row in batch.padding],
            self.start,
            until,
            passes_finishes,
            (self.kv.num_free_blocks // len(batch.order) + 2) * self.block_size,
        )
        num_steps, closed, width, most = 0, batch.closed, len(self.active), len(self.ends)
        spaces = zip(self.active, self.kv.capacities(self.request_ids), self.starts, self.lasts, strict=True)
        self.takes = sorted(
            [
                step * width + place
                for place, capacity, start, last in spaces
                for step in range(capacity - start, min(last, most), self.block_size)
            ]
        )
        for end, finishing in stretches:
            num_steps = self._take_blocks(num_steps, end, closed)
            if num_steps < end:
                break
            if finishing:
                self._finish(finishing, end)
                # The seats of the finished requests are free, where none waits for them.
                closed = batch.closed if batch.is_waiting else None
        if not num_steps:
            return None
        del self.ends[num_steps:], durations[num_steps:]
        self._catch_up([batch.order[place] for place in self.active], num_steps)
        taken = self.takes[: len(self.blocks)]
        run = DecodeRun(
            self.first_step,
            self.start,
            tuple(durations),
            tuple(self.ends),
            tuple(self.request_ids),
            tuple(self.seats),
            tuple(self.starts),
            tuple([min(last, num_steps) for last in self.lasts]),
            tuple([take // width for take in taken]),
            tuple([take % width for take in taken]),
            tuple(self.blocks),
            tuple(self.segments),
            tuple(self.finished),
            tuple(self.freed),
            self.events,
            batch.padding,
            batch.skipped,
            batch.is_short,
        )
        return run, tuple(self.done)

    def _take_blocks(self, offset: int, end: int, closed: str | None) -> int:
        """Give the rows the blocks that they need in some steps; return to which step these suffice."""
        kv, takes, begin, width = self.kv, self.takes, len(self.blocks), len(self.starts)
        stop = bisect_left(takes, end * width, begin)
        if stop - begin > kv.num_free_blocks:
            end = takes[begin + kv.num_free_blocks] // width
            stop = bisect_left(takes, end * width, begin)
        if end == offset:
            return end
        events = kv.take_events()
        if offset:
            self.freed.append((offset, events.freed))
        else:
            self.events = events
        num_rows = len(self.active)
        self.segments.append((offset, num_rows, closed, self.scheduler.pool_counts(num_rows)))
        if stop > begin:
            self.blocks += kv.append_blocks([self.request_ids[take % width] for take in takes[begin:stop]])
        self.scheduler.advance(end - offset, num_rows * (end - offset))
        return end

    def _finish(self, places: Sequence[int], end: int) -> None:
        """End requests with the step before `end`."""
        states = [self.batch.order[place] for place in places]
        self._catch_up(states, end, are_finished=True)
        self.finished.append((end - 1, tuple([state.id for state in states])))
        self.done += states
        self.scheduler.finish(states)
        self.active = [place for place in self.active if self.lasts[place] > end]

    def _catch_up(self, states: Sequence[RequestState], num_steps: int, are_finished: bool = False) -> None:
        """Bring the states of requests to where they are behind the first `num_steps` steps."""
        times = self.ends if num_steps == len(self.ends) else self.ends[:num_steps]
        take_decode_steps(states, self.outlook.tokens(num_steps), times, self.first_step + num_steps - 1)
        for state in states if are_finished or self.notify is not None else ():
            if are_finished:
                state.finish_reason = self.outlook.finish_reason(state)
                self.outlook.finished(state.id)
            if self.notify is not None:
                self.notify(state, num_steps)


def _forecast(
    price: Callable[[int, range], Sequence[float]],
    starts: Sequence[int],
    lasts: Sequence[int],
    padding: Sequence[int],
    now: float,
    until: float,
    passes_finishes: bool,
    most: int,
) -> tuple[list[float], list[float], list[tuple[int, list[int]]]]:
    """Return how long steps take until a request arrives, or none is left, or there are enough.

    Args:
        price: Returns the seconds of steps of so many tokens, by their context tokens.
        starts: Tokens of each row that are computed.
        lasts: Steps until each row is done.
        padding: Context tokens of the rows that are computed for nothing.
        now: Seconds since the start of the run.
        until: Seconds at which a request arrives: the first step that ends no earlier is the last one.
        passes_finishes: Whether to go on when a row is done.
        most: Steps that are enough.

    Returns:
        Seconds of each step, seconds since the start of the run at which each ends, and stretches of the
        same rows: the number of steps to the end of each, and the rows that finish with its last.
    """
    order = sorted(range(len(lasts)), key=lasts.__getitem__)
    num_rows, num_padding = len(order), len(padding)
    most = min(most, _MAX_STEPS)
    computed = sum(starts) + sum(padding)
    durations: list[float] = []
    ends: list[float] = []
    stretches: list[tuple[int, list[int]]] = []
    offset, number, clock = 0, 0, now
    while num_rows and offset < most and clock < until:
        num_steps = min(lasts[order[number]], most) - offset
        context = computed + num_rows * (offset + 1)
        if num_steps > 8 and until < inf:
            guess = (
                durations[-1] if durations else price(num_rows + num_padding, range(context, context + 1))[0]
            )
            # So that not too many are priced; if it falls short there is another round.
            if guess > 0 and (until - clock) / guess < num_steps:
                num_steps = min(num_steps, int((until - clock) / guess) + 2)
        seconds = price(num_rows + num_padding, range(context, context + num_steps * num_rows, num_rows))
        more = list(accumulate(seconds, initial=clock))
        clock = more[-1]
        if not min(seconds) >= 0 or not clock < inf:
            # A step that takes no sensible time is rejected when it is taken by itself.
            break
        if clock >= until:
            # One less than the place among those with the beginning in front, which is before `until`.
            num_steps = bisect_left(more, until)
            seconds = seconds[:num_steps]
        durations += seconds
        ends += more[1 : num_steps + 1]
        offset += num_steps
        finishing: list[int] = []
        while number < len(order) and lasts[order[number]] == offset:
            finishing.append(order[number])
            computed -= starts[order[number]]
            number += 1
        stretches.append((offset, finishing))
        num_rows -= len(finishing)
        if finishing and not passes_finishes:
            break
    return durations, ends, stretches
