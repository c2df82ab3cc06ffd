"""The mechanism: turn a policy's proposals into a plan that fits seats, token budget and blocks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from cbresearch.blocks import BlockManager, Extra
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.plan import Admission, Padding, Plan, Scheduled, StepResult
from cbresearch.policies import Policy
from cbresearch.request import Request, RequestState, RequestStatus


class Committed(NamedTuple):
    """The state that a step leaves behind, taken before the finished requests give back their blocks.

    Attributes:
        finished: States of the requests that the step finished.
        num_running: Unfinished requests with a seat while the step ran.
        num_waiting: Requests without a seat while the step ran.
        num_held_blocks: Blocks held while the step ran.
        num_held_tokens: Tokens of unfinished requests whose KV lies in those blocks, shared ones once.
        num_cached_blocks: Blocks that hold a cached prefix which nobody refers to.
    """

    finished: tuple[RequestState, ...]
    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_held_tokens: int
    num_cached_blocks: int


class Scheduler:
    """Own the queues, the seats, the token budget and the blocks; ask a policy whom to serve.

    `submit` requests, then alternate `schedule` and `commit`. A request that the pool runs out of blocks
    for is preempted by recompute: it gives back its blocks, keeps its tokens and waits at the front.

    Args:
        policy: Decides the order, and whom to preempt.
        config: Seats, token budget and longest request.
        cache: Size of the KV pool.
    """

    def __init__(self, policy: Policy, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.policy = policy
        self.config = config
        self.blocks = BlockManager(cache)
        self.num_submitted = 0
        self._step = 0
        self._states: dict[str, RequestState] = {}
        self._waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._running: list[RequestState] = []
        self._kept: list[RequestState] = []
        self._free_seats = list(range(config.max_num_seqs))
        self._held_tokens = 0
        self._view = _View(self)
        self._plan = _Draft(0)
        self._served = _overridden_served(policy)

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> Sequence[RequestState]:
        """Return the unfinished requests with a seat, in the order of admission."""
        return self._running

    @property
    def waiting(self) -> Iterable[RequestState]:
        """Return the requests without a seat: preempted ones first, then by arrival."""
        return self._waiting.values()

    def submit(self, request: Request) -> RequestState:
        """Queue a request.

        Raises:
            ValueError: Its id is taken, or it can never be served within the limits; nothing has changed.
        """
        if request.id in self._states:
            raise ValueError(f"request {request.id!r}: the id is taken; give each request an id of its own")
        num_tokens = request.num_prompt_tokens + request.max_tokens
        asked = (
            f"request {request.id!r}: prompt {request.num_prompt_tokens} + max_tokens {request.max_tokens}"
        )
        limit = self.config.max_model_len
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"{asked} = {num_tokens} tokens, over the model's length of {limit}; "
                "shorten the prompt or lower max_tokens"
            )
        # The last token is never fed back, so it needs no KV.
        needed = self.blocks.blocks_for(num_tokens - 1)
        if needed > self.blocks.num_blocks:
            cache = self.blocks.config
            raise ValueError(
                f"{asked} needs KV for {num_tokens - 1} tokens = {needed} blocks of {cache.block_size}, but "
                f"the pool has {cache.num_blocks} ({cache.num_tokens} tokens); raise num_blocks or lower "
                "max_tokens"
            )
        state = RequestState(request, self.num_submitted)
        self.num_submitted += 1
        self._states[request.id] = state
        self._waiting[request.id] = state
        return state

    def schedule(self, now: float) -> Plan:
        """Plan the next step.

        Args:
            now: Seconds since the start of the run.

        Raises:
            RuntimeError: There is work but none of it could be scheduled, or the policy's proposals have no
                end; the message has the numbers.
        """
        draft = self._plan = _Draft(self.config.max_num_batched_tokens)
        self._view.now = now
        step = self._step
        most = 10 * (len(self._running) + len(self._waiting)) + 100
        for count, (state, wanted) in enumerate(self.policy.propose(self._view)):
            if not draft.budget:
                break
            if count > most:
                raise RuntimeError(
                    f"policy {self.policy.name!r} made over {most} proposals in step {step}, for "
                    f"{len(self._running)} running and {len(self._waiting)} waiting requests; it must end"
                )
            if state.scheduled_step == step or state.status is RequestStatus.FINISHED:
                continue
            num_tokens = min(wanted, state.num_tokens - state.num_computed_tokens, draft.budget)
            if num_tokens < 1:
                continue
            if type(num_tokens) is not int:
                raise TypeError(
                    f"policy {self.policy.name!r} proposed {wanted!r} tokens for {state}; give a whole number"
                )
            if state.status is RequestStatus.RUNNING:
                added = self._grow(state, num_tokens)
                if added is not None:
                    self._schedule(state, num_tokens, added)
            else:
                self._admit(state, num_tokens)
        self._settle_queues(now)
        if not draft.scheduled and self.has_work:
            raise RuntimeError(self._why_stuck())
        self._step += 1
        return Plan(
            step=step,
            scheduled=tuple(draft.scheduled.values()),
            admitted=tuple(
                Admission(state.request, seat, tuple(state.output_token_ids))
                for state, seat in draft.admitted.values()
            ),
            preempted=tuple(state.id for state in draft.preempted),
            padding=tuple(
                Padding(state.id, state.seat, state.num_computed_tokens)
                for state in self._kept[: draft.budget]
                if state.seat is not None
            ),
        )

    def commit(self, plan: Plan, result: StepResult, now: float) -> Committed:
        """Take in what a step produced.

        Args:
            plan: The plan that `schedule` returned last.
            result: What the executor made of it.
            now: Seconds since the start of the run, at the end of the step.
        """
        states, tokens = self._states, result.tokens
        caching, block_size = self.blocks.config.prefix_caching, self.blocks.config.block_size
        finished: list[RequestState] = []
        for entry in plan.scheduled:
            request_id = entry.request_id
            state = states[request_id]
            end = entry.start + entry.num_tokens
            state.num_computed_tokens = end
            if entry.start < state.num_covered_tokens:
                state.num_recomputed_tokens += min(end, state.num_covered_tokens) - entry.start
            if end > state.num_covered_tokens:
                state.num_covered_tokens = end
            self._held_tokens += entry.num_tokens
            if caching and end // block_size > entry.start // block_size:
                self.blocks.enter(request_id, state.token_ids, end, _extra(state.request))
            if entry.samples:
                output = state.output_token_ids
                output.append(tokens[request_id])
                state.num_tokens += 1
                state.token_times.append(now)
                if request_id in result.stopped:
                    state.finish_reason = "stop"
                    finished.append(state)
                elif len(output) >= state.request.max_tokens:
                    state.finish_reason = "length"
                    finished.append(state)
            if self._served is not None:
                self._served(state, entry.num_tokens)
        committed = Committed(
            tuple(finished),
            len(self._running),
            len(self._waiting),
            self.blocks.num_held_blocks,
            self._num_held_tokens(),
            self.blocks.num_cached_blocks,
        )
        if finished:
            self._finish(finished)
        return committed

    def check(self) -> None:
        """Prove the invariants of queues, seats and blocks.

        Raises:
            AssertionError: One does not hold.
        """
        self.blocks.check()
        seated = self._running + self._kept
        seats = [state.seat for state in seated]
        assert len(seated) <= self.config.max_num_seqs, "more requests than seats"
        assert sorted([*self._free_seats, *(seat for seat in seats if seat is not None)]) == list(
            range(self.config.max_num_seqs)
        ), f"seats are lost or shared: held {seats}, free {self._free_seats}"
        assert not set(self._waiting) & {state.id for state in seated}, "a request is in two queues"
        for state in self._waiting.values():
            assert state.status is RequestStatus.WAITING, f"{state} is in the waiting queue"
            assert not self.blocks.table(state.id), f"{state} waits but holds blocks"
        for state in self._running:
            assert state.status is RequestStatus.RUNNING, f"{state} is in the running queue"
        held = sum(state.num_computed_tokens for state in self._running)
        assert held == self._held_tokens, f"{held} tokens are held, {self._held_tokens} counted"
        if not seated:
            assert self.blocks.num_held_blocks == 0, "blocks are held although nothing runs"

    def _num_held_tokens(self) -> int:
        """Count the tokens of unfinished requests in held blocks, shared ones once."""
        if not self._kept:
            return self._held_tokens - self.blocks.num_shared_tokens
        # Some references are those of finished rows, whose tokens do not count.
        size = self.blocks.config.block_size
        in_block = {
            block: min(size, state.num_computed_tokens - size * place)
            for state in self._running
            for place, block in enumerate(self.blocks.table(state.id))
        }
        return sum(in_block.values())

    def _schedule(self, state: RequestState, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        start, draft = state.num_computed_tokens, self._plan
        pending = state.num_tokens - start
        state.scheduled_step = self._step
        draft.budget -= num_tokens
        draft.scheduled[state.request.id] = Scheduled(
            state.request.id,
            state.seat,  # type: ignore[arg-type]
            start,
            num_tokens,
            pending > 1 or not state.output_token_ids,
            num_tokens == pending,
            new_block_ids,
        )

    def _grow(self, state: RequestState, num_tokens: int) -> tuple[int, ...] | None:
        """Get a running request the blocks for its next tokens, preempting others or, at last, itself."""
        needed = state.num_computed_tokens + num_tokens
        added = self.blocks.allocate(state.request.id, needed)
        while added is None:
            if self._kept:
                # A row computed for nothing gives way before anyone loses work.
                self._vacate(self._kept.pop())
            else:
                victim = self.policy.victim(self._view, self._running)
                self._preempt(victim)
                if victim is state:
                    return None
            added = self.blocks.allocate(state.request.id, needed)
        return added

    def _admit(self, state: RequestState, wanted: int) -> None:
        """Seat a waiting request if a seat and the blocks for all its known tokens are free."""
        draft = self._plan
        if draft.closed or not self._free_seats:
            return
        if self._waiting.get(state.id) is not state:
            raise ValueError(
                f"policy {self.policy.name!r} proposed {state}; propose requests of the view only"
            )
        extra = _extra(state.request)
        matched = self.blocks.match(state.token_ids, extra)
        if not self.blocks.can_allocate(state.id, state.num_tokens, matched):
            draft.closed = True
            return
        num_cached = len(matched) * self.blocks.config.block_size
        num_tokens = min(wanted, state.num_tokens - num_cached)
        # Shared first: what was matched can then not be evicted to make room for the rest.
        self.blocks.share(state.id, matched)
        added = self.blocks.allocate(state.id, num_cached + num_tokens)
        assert added is not None
        state.num_computed_tokens = num_cached
        self._held_tokens += num_cached
        state.seat = heappop(self._free_seats)
        state.status = RequestStatus.RUNNING
        draft.admitted[state.id] = (state, state.seat)
        self._running = [*self._running, state]
        self._schedule(state, num_tokens, matched + added)

    def _preempt(self, state: RequestState) -> None:
        """Take a request's seat and blocks, and its part of this step if it has one already."""
        if state not in self._running:
            raise ValueError(
                f"policy {self.policy.name!r} chose {state} as victim; choose one of the candidates"
            )
        draft = self._plan
        draft.closed = True
        entry = draft.scheduled.pop(state.id, None)
        if entry is not None:
            draft.budget += entry.num_tokens
        if draft.admitted.pop(state.id, None) is None:
            draft.preempted.append(state)
            state.num_preemptions += 1
        self._held_tokens -= state.num_computed_tokens
        state.num_computed_tokens = 0
        state.status = RequestStatus.WAITING
        # It may not come back in the step that took its seat.
        state.scheduled_step = self._step
        # A new list, since the policy may be walking the old one.
        self._running = [other for other in self._running if other is not state]
        self._vacate(state)

    def _vacate(self, state: RequestState) -> None:
        if self.blocks.table(state.id):
            self.blocks.free(state.id)
        assert state.seat is not None
        heappush(self._free_seats, state.seat)
        state.seat = None

    def _settle_queues(self, now: float) -> None:
        """Move who was admitted or preempted; put off until now because the policy walks the queue."""
        for state, _ in self._plan.admitted.values():
            del self._waiting[state.id]
            if state.first_scheduled is None:
                state.first_scheduled = now
            found = state.num_computed_tokens - state.num_covered_tokens
            if found > 0:
                state.num_cached_tokens += found
                state.num_covered_tokens += found
        for state in self._plan.preempted:
            self._waiting[state.id] = state
            self._waiting.move_to_end(state.id, last=False)

    def _finish(self, finished: list[RequestState]) -> None:
        for state in finished:
            state.status = RequestStatus.FINISHED
            self._held_tokens -= state.num_computed_tokens
        self._running = [state for state in self._running if state.status is RequestStatus.RUNNING]
        leaving = finished
        if self.policy.keeps_seats:
            self._kept.extend(finished)
            leaving = [] if self._running else self._kept
        for state in leaving:
            self._vacate(state)
        if not self._running:
            self._kept = []

    def _why_stuck(self) -> str:
        first = next(iter(self._running or self._waiting.values()))
        return (
            f"policy {self.policy.name!r} left step {self._step} without work: {len(self._running)} running, "
            f"{len(self._waiting)} waiting, {len(self._free_seats)} of {self.config.max_num_seqs} seats "
            f"free, {self.blocks.num_free_blocks} of {self.blocks.num_blocks} blocks free, token budget "
            f"{self.config.max_num_batched_tokens}; first in line is {first}. Its `propose` must yield every "
            f"request that it may serve, and go on after one that does not fit"
        )


class _Draft:
    """A plan while it is being made."""

    __slots__ = ("admitted", "budget", "closed", "preempted", "scheduled")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.closed = False
        self.scheduled: dict[str, Scheduled] = {}
        self.admitted: dict[str, tuple[RequestState, int]] = {}
        self.preempted: list[RequestState] = []


class _View:
    """The policy's read-only window on the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now = 0.0

    @property
    def waiting(self) -> Iterable[RequestState]:
        return self._scheduler.waiting

    @property
    def running(self) -> Sequence[RequestState]:
        return self._scheduler.running

    @property
    def token_budget(self) -> int:
        return self._scheduler._plan.budget

    @property
    def max_num_batched_tokens(self) -> int:
        return self._scheduler.config.max_num_batched_tokens

    @property
    def admitting(self) -> bool:
        return bool(self._scheduler._free_seats) and not self._scheduler._plan.closed

    @property
    def num_free_seats(self) -> int:
        return len(self._scheduler._free_seats)

    @property
    def max_num_seqs(self) -> int:
        return self._scheduler.config.max_num_seqs

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.blocks.num_free_blocks

    @property
    def block_size(self) -> int:
        return self._scheduler.blocks.config.block_size


def _extra(request: Request) -> Extra:
    """Return what beside its tokens tells a request's prefix apart."""
    return () if request.cache_salt is None else (("salt", request.cache_salt),)


def _overridden_served(policy: Policy) -> Callable[[RequestState, int], None] | None:
    """Return the policy's `served` unless it is the base's, which does nothing: it is a call per token."""
    return policy.served if type(policy).served is not Policy.served else None
