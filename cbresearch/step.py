"""The records of one step: its plan, its result, the pool behind it; and equal decode steps as one run."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from cbresearch.request import Request, TokenLogprobs

T = TypeVar("T")


class Admission(NamedTuple):
    """A request that takes a seat in this step, new or resumed.

    Attributes:
        request: The request.
        seat: Its row in the batch until it leaves.
        output_token_ids: Tokens that it generated before a preemption; empty the first time.
    """

    request: Request
    seat: int
    output_token_ids: tuple[int, ...]


class Rows(tuple[T, ...]):
    """Named tuples of one kind, kept as plain tuples until they are read.

    The garbage collector gives up plain tuples of numbers and texts, and walks named ones as long as they are
    there: a run keeps millions.
    """

    __slots__ = ()
    kind: ClassVar[type[Any]]

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Self:
        """Keep the values of some named tuples."""
        return cls(rows)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        return map(partial(tuple.__new__, self.kind), super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        rows = super().__getitem__(index)
        return type(self)(rows) if isinstance(index, slice) else tuple.__new__(self.kind, rows)

    def __repr__(self) -> str:
        return repr(tuple(self))


class Scheduled(NamedTuple):
    """The part of a step that computes one request's tokens.

    Attributes:
        request_id: Id of the request.
        seat: Its row in the batch.
        start: Tokens of the request whose KV was computed before this step.
        num_tokens: Tokens to compute in this step, at positions `start` to `start + num_tokens - 1`.
        is_prefill: Whether known tokens are computed; otherwise the newest token, to decode the next.
        samples: Whether the last of these tokens yields a new token.
        new_block_ids: Physical blocks to append to the request's block table before the step; for a request
            that is admitted, its whole table.
    """

    request_id: str
    seat: int
    start: int
    num_tokens: int
    is_prefill: bool
    samples: bool
    new_block_ids: tuple[int, ...]

    @property
    def context_length(self) -> int:
        """Return the tokens that the last query of this step attends to, itself included."""
        return self.start + self.num_tokens


class ScheduledRows(Rows[Scheduled]):
    """Entries of a plan."""

    __slots__ = ()
    kind = Scheduled


class Transfer(NamedTuple):
    """One block that is copied before the step computes.

    Attributes:
        kind: "copy" within the device's pool (copy on write), "swap_out" from there to the host's pool, or
            "swap_in" back.
        source: Physical block id in the pool that is read.
        target: Physical block id in the pool that is written.
    """

    kind: str
    source: int
    target: int


SKIP_REASONS = ("budget", "seats", "blocks", "sibling", "chunk", "policy")
"""Why a request is not scheduled in a step; see `Skipped`."""


class Skipped(NamedTuple):
    """A request that was proposed or runs, and is not scheduled in this step.

    Attributes:
        request_id: Id of the request.
        reason: "budget": the step has no tokens left. "seats": none is free. "blocks": the KV pool has no
            room. "sibling": a parallel sample is computing the prompt. "chunk": the whole prompt does not fit
            what is left of the budget. "policy": it was not proposed.
    """

    request_id: str
    reason: str


class SkippedRows(Rows[Skipped]):
    """Requests that a plan skips."""

    __slots__ = ()
    kind = Skipped


class Padding(NamedTuple):
    """The row of a finished request that a static batch goes on computing for nothing.

    Attributes:
        request_id: Id of the finished request.
        seat: The row.
        context_length: Tokens that the row attends to; its last position is computed again.
    """

    request_id: str
    seat: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes (vLLM: `SchedulerOutput`).

    Attributes:
        step: Index of the step, from 0.
        scheduled: The requests that it serves, in the policy's order.
        admitted: The requests that take a seat before it.
        preempted: Ids of requests that lost their seat before it, the first in line to come back first.
        padding: Rows computed for nothing.
        aborted: Ids of requests that were ended from outside since the step before.
        swapped: Ids of those among the preempted whose KV went to the host's pool.
        transfers: Blocks to copy before anything is computed, one after the other in this order: a later
            one may read or overwrite what an earlier one wrote.
        skipped: Requests that were proposed and not admitted, and running requests that are not served.
        closed: Why no other waiting request could join: "budget", "seats", "blocks" or "chunk"; None if the
            policy left out those that wait. Without this, a long queue would be listed in every step.
    """

    step: int
    scheduled: tuple[Scheduled, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[str, ...] = ()
    padding: tuple[Padding, ...] = ()
    aborted: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    closed: str | None = None

    @property
    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Return the values of each entry of `scheduled`, for loops that take time."""
        return tuple.__iter__(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Return the tokens computed in the step, padding included."""
        num_tokens: int = sum([row[3] for row in self.rows])
        return num_tokens + len(self.padding)

    @property
    def num_prefill_tokens(self) -> int:
        """Return the prompt tokens (and, after a preemption, output tokens) computed in the step."""
        return sum([num_tokens for _, _, _, num_tokens, is_prefill, _, _ in self.rows if is_prefill])

    @property
    def num_decode_tokens(self) -> int:
        """Return the decoding requests in the step, one token each."""
        return sum([not is_prefill for _, _, _, _, is_prefill, _, _ in self.rows])

    @property
    def num_context_tokens(self) -> int:
        """Return the context lengths summed over all rows: the KV entries that attention reads."""
        useful: int = sum([start + num_tokens for _, _, start, num_tokens, _, _, _ in self.rows])
        return useful + sum([row.context_length for row in self.padding])

    def num_transfers(self, kind: str) -> int:
        """Return the blocks that the step copies by way of "copy", "swap_out" or "swap_in"."""
        return sum(transfer.kind == kind for transfer in self.transfers)


class StepResult(NamedTuple):
    """What came of a plan (vLLM: `ModelRunnerOutput`).

    Attributes:
        duration: Seconds that the step took, until its tokens were there.
        tokens: New token id by request id, for every entry of the plan that samples and has not failed.
        stopped: Ids of requests whose new token ends their output (end of sequence, or a stop).
        failed: Error message by request id; a request that fails ends, and the others go on.
        logprobs: Those of the new token by request id, where they were asked for.
        device_duration: Seconds of `duration` in which the device computed, or None where that was not
            measured; the rest is the host's time.
    """

    duration: float
    tokens: Mapping[str, int]
    stopped: frozenset[str] = frozenset()
    failed: Mapping[str, str] = MappingProxyType({})
    logprobs: Mapping[str, TokenLogprobs] = MappingProxyType({})
    device_duration: float | None = None


class PoolState(NamedTuple):
    """Queues and blocks while a step ran, taken before its finished requests give back their blocks.

    Attributes:
        num_running: Unfinished requests with a seat.
        num_waiting: Requests without a seat, swapped ones included.
        num_held_blocks: KV blocks held.
        num_held_tokens: Tokens of unfinished requests whose KV lies in those blocks at the end of the step,
            shared ones counted once.
        num_cached_blocks: KV blocks that hold a cached prefix and have no reference.
        num_external_blocks: KV blocks that are not held and yet could not be had: lost to an allocator's
            rounding, or free while a request was rejected or preempted for lack of memory.
        num_shared_blocks: References to held blocks beyond the first of each.
        num_swapped: Requests whose KV lies in the host's pool.
        num_held_host_blocks: Blocks that they hold there.
    """

    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int = 0
    num_external_blocks: int = 0
    num_shared_blocks: int = 0
    num_swapped: int = 0
    num_held_host_blocks: int = 0


PoolCounts = tuple[int, int, int, int, int, int, int, int, int]
"""The values of a `PoolState`."""


class BlockEvents(NamedTuple):
    """What became of physical blocks since the record of the step before, beside what the plan says.

    Within one step a block may be freed, taken and freed again; each list is in the order of events.

    Attributes:
        cached: Blocks that became findable in the prefix cache.
        evicted: Blocks that are no longer findable: evicted for their room, or taken out.
        freed: Blocks that lost their last reference; each is cached if it is findable, else free.
        released: (request id, block) pairs that a seated request gave back since they fell out of its window.
        host_held: (request id, host block) pairs to which swapped requests refer from now on.
        host_freed: Host blocks that lost their last reference.
    """

    cached: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    released: tuple[tuple[str, int], ...] = ()
    host_held: tuple[tuple[str, int], ...] = ()
    host_freed: tuple[int, ...] = ()


NO_EVENTS = BlockEvents()


class Segment(NamedTuple):
    """Steps of a decode run with the same batch.

    Attributes:
        offset: Number of its first step in the run, from 0.
        num_rows: Requests that each of its steps serves.
        closed: As in `Plan`.
        pool: Values of the `PoolState` in its first step, but without the blocks that are taken in this step
            or later. Each later step has `num_rows` more held tokens.
    """

    offset: int
    num_rows: int
    closed: str | None
    pool: PoolCounts


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Consecutive steps that each decode all running requests and admit none, kept as one.

    Attributes:
        first_step: Index of the first step.
        start: Seconds since the start of the run at which the first step began.
        durations: Seconds of each step.
        ends: Seconds since the start of the run at which each step ended.
        request_ids: The requests that the first step serves, in the policy's order.
        seats: Their rows in the batch.
        starts: Tokens of each whose KV was computed before the run.
        num_steps: Steps that serve each; a request that is finished leaves.
        taken_in: Offset of the step before which each of `blocks` is taken, ascending.
        taken_by: The request that takes it: its place in `request_ids`, ascending within a step.
        blocks: Physical ids of the blocks taken.
        segments: Steps with the same batch, the first from offset 0: the values of a `Segment` each.
        finished: Ids of the requests that a step finished, by its offset.
        freed: Blocks that finished requests gave back, by the offset of the step before which they did.
        events: Block events before the first step.
        padding: Rows computed for nothing in every step.
        skipped: As in `Plan`, the same in every step.
        is_short: Whether requests wait for memory, so that all free blocks are external.
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
    segments: tuple[tuple[int, int, str | None, PoolCounts], ...]
    finished: tuple[tuple[int, tuple[str, ...]], ...]
    freed: tuple[tuple[int, tuple[int, ...]], ...]
    events: BlockEvents
    padding: tuple[Padding, ...]
    skipped: tuple[Skipped, ...]
    is_short: bool

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.ends)

    def start_of(self, offset: int) -> float:
        """Return the seconds since the start of the run at which a step began."""
        return self.ends[offset - 1] if offset else self.start

    def bounds(self) -> Iterator[tuple[Segment, int, int]]:
        """Yield each segment with the offset of its first step and the offset behind its last."""
        offsets = [*(offset for offset, *_ in self.segments), len(self)]
        for segment, (begin, end) in zip(self.segments, pairwise(offsets), strict=True):
            yield Segment(*segment), begin, end

    def plan(self, offset: int) -> Plan:
        """Return the plan of the step at an offset from 0."""
        first, last = bisect_left(self.taken_in, offset), bisect_right(self.taken_in, offset)
        blocks = {self.taken_by[number]: (self.blocks[number],) for number in range(first, last)}
        rows = zip(self.request_ids, self.seats, self.starts, self.num_steps, strict=True)
        return Plan(
            step=self.first_step + offset,
            scheduled=ScheduledRows.of(
                (request_id, seat, start + offset, 1, False, True, blocks.get(place, ()))
                for place, (request_id, seat, start, num_steps) in enumerate(rows)
                if offset < num_steps
            ),
            padding=self.padding,
            skipped=self.skipped,
            closed=self._segment(offset).closed,
        )

    def pool(self, offset: int) -> PoolState:
        """Return the queues and blocks in the step at an offset from 0."""
        segment = self._segment(offset)
        begin = bisect_left(self.taken_in, segment.offset)
        num_taken = bisect_right(self.taken_in, offset, lo=begin) - begin
        pool = PoolState(*segment.pool)
        return pool._replace(
            num_held_blocks=pool.num_held_blocks + num_taken,
            num_held_tokens=pool.num_held_tokens + (offset - segment.offset) * segment.num_rows,
            num_external_blocks=pool.num_external_blocks - (num_taken if self.is_short else 0),
        )

    def finished_in(self, offset: int) -> tuple[str, ...]:
        """Return the ids of the requests that the step at an offset finished."""
        return dict(self.finished).get(offset, ())

    def events_of(self, offset: int) -> BlockEvents:
        """Return the block events between the step before and the one at an offset."""
        if not offset:
            return self.events
        return NO_EVENTS._replace(freed=dict(self.freed).get(offset, ()))

    def _segment(self, offset: int) -> Segment:
        return Segment(*self.segments[bisect_right(self.segments, offset, key=itemgetter(0)) - 1])
