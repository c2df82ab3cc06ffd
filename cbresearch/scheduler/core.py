"""The mechanism: turn a policy's proposals into a plan that fits seats, token budget and blocks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from cbresearch.blocks import BlockManager
from cbresearch.config import PREEMPTIONS, CacheConfig, SchedulerConfig
from cbresearch.plan import Committed, Plan, Scheduled, StepResult
from cbresearch.policies import Policy
from cbresearch.policies.base import steadiness
from cbresearch.request import Request, RequestState, RequestStatus
from cbresearch.reservation import ReservationManager
from cbresearch.scheduler.admission import check_request, choose_losers, farthest_sibling
from cbresearch.scheduler.draft import NEW_TUPLE, Draft
from cbresearch.scheduler.invariants import check_scheduler, why_stuck
from cbresearch.scheduler.memory import Memory, num_kept_tokens
from cbresearch.scheduler.progress import take_in
from cbresearch.scheduler.view import LiveView

# In a loop the lookup on the class costs as much as a call.
RUNNING, FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class Scheduler:
    """Own the queues, the seats, the token budget and the blocks; ask a policy whom to serve.

    `submit` requests, then alternate `schedule` and `commit`; `abort` and `preempt` in between. A request
    that has to make room keeps its tokens and waits at the front. By recompute it gives back its blocks, and
    its KV is computed again; by swap its KV moves to the host's pool, as long as that has room.

    Args:
        policy: Decides the order, whom to preempt and how.
        config: Seats, token budget and longest request.
        cache: The KV pool.
        step_time: Seconds of a step of so many tokens and tokens of context, for policies that look ahead.
    """

    def __init__(
        self,
        policy: Policy,
        config: SchedulerConfig,
        cache: CacheConfig,
        step_time: Callable[[int, int], float] | None = None,
    ) -> None:
        policy.begin()
        self.policy = policy
        self.step_time = step_time
        self.config = config
        self.blocks: BlockManager | ReservationManager = (
            BlockManager(cache, config.max_num_batched_tokens)
            if cache.reservation is None
            else ReservationManager(cache, config.max_model_len)
        )
        self.num_submitted = 0
        self._step = 0
        self._states: dict[str, RequestState] = {}
        self._waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._swapped: OrderedDict[str, RequestState] = OrderedDict()
        self._running: list[RequestState] = []
        self._kept: list[RequestState] = []
        self._free_seats = list(range(config.max_num_seqs))
        self._memory = Memory(self.blocks, policy.keeps_seats)
        self._was_refused = False
        self._view = LiveView(self)
        self._plan = Draft(config.max_num_batched_tokens)
        # The base's does nothing, and would be a call for each token.
        self._served = policy.served if type(policy).served is not Policy.served else None
        self.steady = steadiness(policy)
        self._last: tuple[Draft, Plan | None, Plan | None, int] = self._plan, None, None, 0

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self._running or self._waiting or self._swapped)

    @property
    def running(self) -> Sequence[RequestState]:
        """Return the unfinished requests with a seat, in the order of admission."""
        return self._running

    @property
    def waiting(self) -> Iterable[RequestState]:
        """Return the requests without a seat: preempted ones first, then by arrival."""
        return self._waiting.values()

    @property
    def swapped(self) -> Iterable[RequestState]:
        """Return the requests whose KV lies in the host's pool, the earliest admitted first."""
        return self._swapped.values()

    def submit(self, request: Request, begun: RequestState | None = None) -> RequestState:
        """Queue a request.

        Args:
            request: The request.
            begun: How far another scheduler came with it, if its KV comes along.

        Raises:
            ValueError: Its id is taken, or it can never be served within the limits; nothing has changed.
        """
        if request.id in self._states:
            raise ValueError(f"request {request.id!r}: the id is taken; give each an id of its own")
        check_request(request, self.config, self.blocks)
        state = RequestState(request, self.num_submitted)
        if begun is not None:
            state.take_over(begun)
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
        draft = self._plan
        self._view.now = now
        step = self._step
        num_outside = len(self._waiting) + len(self._swapped)
        most = 10 * (len(self._running) + num_outside) + 100
        for count, (state, wanted) in enumerate(self.policy.propose(self._view)):
            if not draft.budget:
                break
            if count > most:
                raise RuntimeError(
                    f"policy {self.policy.name!r} made over {most} proposals in step {step}, for "
                    f"{len(self._running)} running and {num_outside} waiting requests; it must end"
                )
            if state.scheduled_step == step or state.status is FINISHED:
                continue
            pending = state.num_tokens - state.num_computed_tokens
            num_tokens = min(wanted, pending, draft.budget)
            if num_tokens < 1:
                continue
            if type(num_tokens) is not int:
                raise TypeError(
                    f"policy {self.policy.name!r} proposed {wanted!r} tokens for {state}; give a whole number"
                )
            if num_tokens < pending and not self.config.chunked_prefill:
                # Nobody may overtake it: others would take what it needs of the budget, again and again.
                draft.skipped[state.id] = draft.closed = "chunk"
            elif state.status is RUNNING:
                self._go_on(state, num_tokens)
            elif draft.closed is not None:
                draft.skipped[state.id] = draft.closed
            else:
                self._admit(state, num_tokens)
        self._settle_queues(now)
        # A step that only makes room is progress too: there are fewer who run then.
        if not draft.scheduled and not draft.preempted and self.has_work:
            raise RuntimeError(why_stuck(self, step))
        self._step += 1
        self._was_refused = draft.closed == "blocks"
        self._plan = Draft(self.config.max_num_batched_tokens)
        plan = draft.plan(step, self._running, self._kept, self._memory.take_transfers(), self._free_seats)
        self._last = draft, plan, self._last[1], self.num_submitted
        return plan

    def wakes(self, now: float) -> float | None:
        """Return the seconds until which the policy wants to wait although there is work, or None."""
        self._view.now = now
        wake = None if self._running else self.policy.wakes(self._view)
        return wake if wake is not None and wake > now else None

    def commit(self, plan: Plan, result: StepResult, now: float) -> Committed:
        """Take in what a step produced.

        Args:
            plan: The plan that `schedule` returned last.
            result: What the executor made of it.
            now: Seconds since the start of the run, at the end of the step.
        """
        memory = self._memory
        finished: list[RequestState] = []
        for entry in plan.scheduled:
            state = self._states[entry.request_id]
            if take_in(state, entry, result, memory, now):
                finished.append(state)
            if self._served is not None:
                self._served(state, entry.num_tokens)
        blocks = self.blocks
        num_external = blocks.num_unusable_blocks
        if self._was_refused:
            num_external = blocks.num_blocks - blocks.num_held_blocks - blocks.num_cached_blocks
        committed = Committed(
            tuple(finished),
            len(self._running),
            len(self._waiting) + len(self._swapped),
            blocks.num_held_blocks,
            memory.num_held_tokens(self._running, are_all=not self._kept),
            blocks.num_cached_blocks,
            num_external,
            blocks.num_shared_blocks,
            len(self._swapped),
            blocks.num_held_host_blocks,
        )
        if finished:
            self._finish(finished)
        return committed

    def preempt(self, request_id: str, mode: str | None = None) -> None:
        """Preempt a running request before the next step, for a test or an experiment.

        Args:
            request_id: Who has to make room.
            mode: "recompute" or "swap"; by default what the policy says.

        Raises:
            ValueError: It is not running, or the mode is unknown.
        """
        state = self._states.get(request_id)
        if state is None or state.status is not RUNNING:
            raise ValueError(f"request {request_id!r} is not running, so it cannot be preempted")
        served = state.scheduled_step
        self._preempt(state, mode)
        # Nobody was refused: the next step is open to everyone, to this one as well.
        self._plan.closed = None
        state.scheduled_step = served
        self._settle_queues(0.0)
        self._finish([])

    def abort(self, request_id: str) -> RequestState:
        """End a request wherever it is, between two steps; what it generated so far stays in its state.

        Raises:
            ValueError: The request is unknown or finished.
        """
        state = self._states.get(request_id)
        if state is None or state.status is FINISHED:
            raise ValueError(
                f"request {request_id!r} is {'finished' if state else 'unknown'}, so it cannot be aborted"
            )
        state.finish_reason = "abort"
        self._plan.aborted.append(state.id)
        if state.status is RUNNING:
            self._finish([state])
            return state
        if state.status is RequestStatus.SWAPPED:
            self.blocks.free(state.id)
        self._waiting.pop(state.id, None)
        self._swapped.pop(state.id, None)
        state.status = FINISHED
        return state

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a finished request, so that a server can go on for ever; its id is free again.

        Raises:
            ValueError: The request is unknown or not finished.
        """
        state = self._states.get(request_id)
        if state is None or state.status is not FINISHED or state in self._kept:
            raise ValueError(f"request {request_id!r} is not finished, so it cannot be forgotten")
        del self._states[request_id]

    def check(self) -> None:
        """Prove the invariants of queues, seats and blocks.

        Raises:
            AssertionError: One does not hold.
        """
        check_scheduler(self)

    def _schedule(self, state: RequestState, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        start, draft = state.num_computed_tokens, self._plan
        pending = state.num_tokens - start
        state.scheduled_step = self._step
        draft.budget -= num_tokens
        request_id = state.id
        is_prefill = pending > 1 or not state.output_token_ids
        draft.scheduled[request_id] = NEW_TUPLE(
            Scheduled,
            (request_id, state.seat, start, num_tokens, is_prefill, num_tokens == pending, new_block_ids),
        )
        if self.policy.hits_at_once:
            self._memory.enter(state, start + num_tokens)

    def _go_on(self, state: RequestState, num_tokens: int) -> None:
        """Schedule a running request, preempting others for its blocks or, at last, itself."""
        end = state.num_computed_tokens + num_tokens
        while (added := self.blocks.allocate(state.id, end)) is None:
            if not self._make_room(state):
                return
        self._schedule(state, num_tokens, added)

    def _make_room(self, state: RequestState) -> bool:
        """Free some blocks for a running request; return whether it still runs itself."""
        if self._kept:
            # A row computed for nothing gives way before anyone loses work.
            self._vacate(self._kept.pop())
            return True
        candidates = [other for other in self._running if other.num_preemptions < self.config.max_preemptions]
        # Where all had their share of preemptions the latest comer goes, so that the oldest gets to its end.
        victim = self.policy.victim(self._view, candidates) if candidates else self._running[-1]
        self._preempt(victim)
        return victim is not state

    def _admit(self, state: RequestState, wanted: int) -> None:
        """Seat a waiting or swapped request if the blocks for all its known tokens are free."""
        queue = self._swapped if state.status is RequestStatus.SWAPPED else self._waiting
        if queue.get(state.id) is not state:
            raise ValueError(
                f"policy {self.policy.name!r} proposed {state}; propose requests of the view only"
            )
        draft, sibling = self._plan, self._sibling(state)
        if sibling is not None and sibling.num_computed_tokens < state.num_prompt_tokens:
            # Its prompt is being computed: joining later saves computing it twice.
            draft.skipped[state.id] = "sibling"
            return
        if not self._free_seats and not self._displace(state):
            draft.skipped[state.id] = "seats"
            return
        if not (self._claim(state) or (self._displace(state) and self._claim(state))):
            draft.skipped[state.id] = draft.closed = "blocks"
            return
        num_tokens = min(wanted, state.num_tokens - state.num_computed_tokens)
        added = self.blocks.allocate(state.id, state.num_computed_tokens + num_tokens)
        assert added is not None
        state.seat = heappop(self._free_seats)
        state.status = RUNNING
        draft.skipped.pop(state.id, None)
        draft.admitted[state.id] = (state, state.seat)
        self._running = [*self._running, state]
        self._schedule(state, num_tokens, self.blocks.table(state.id))

    def _claim(self, state: RequestState) -> bool:
        """Get a request without a seat the KV that it left on the host, or that others hold of its prompt."""
        if state.status is RequestStatus.SWAPPED:
            return self._memory.swap_in(state)
        # Asked for again: the one that was there may just have been displaced.
        sibling = self._sibling(state)
        is_ready = sibling is not None and sibling.num_computed_tokens >= state.num_prompt_tokens
        return self._memory.begin(state, sibling if is_ready else None)

    def _displace(self, newcomer: RequestState) -> bool:
        """Let running requests make room for a newcomer, if the policy wants it and it is of use."""
        if type(self.policy).displace is Policy.displace:
            return False
        draft, bound = self._plan, self.config.max_preemptions
        candidates = [
            state
            for state in self._running
            if state.id not in draft.admitted and state.num_preemptions < bound
        ]
        losers = choose_losers(
            self.policy, self._view, newcomer, candidates, self.blocks, len(self._free_seats)
        )
        for loser in losers:
            self._preempt(loser)
        # Nobody was refused: whoever comes next may still join.
        draft.closed = None
        return bool(losers)

    def _sibling(self, state: RequestState) -> RequestState | None:
        if state.request.group is None or not self.policy.joins_late:
            return None
        return farthest_sibling(state, self._running) if self.blocks.config.reservation is None else None

    def _preempt(self, state: RequestState, mode: str | None = None) -> None:
        """Take a request's seat and blocks, and its part of this step if it has one already."""
        if state not in self._running:
            raise ValueError(
                f"policy {self.policy.name!r} chose {state} as victim; choose one of the candidates"
            )
        mode = mode or self.policy.preemption(self._view, state)
        if mode not in PREEMPTIONS:
            raise ValueError(
                f"policy {self.policy.name!r} wants {state} preempted by {mode!r}; choose one of "
                f"{PREEMPTIONS}"
            )
        draft = self._plan
        draft.closed = "blocks"
        entry = draft.scheduled.pop(state.id, None)
        if entry is not None:
            draft.budget += entry.num_tokens
            if self.policy.hits_at_once:
                newcomers = [other for other, _ in draft.admitted.values()]
                for other in self._memory.leave(state, newcomers):
                    if other in self._running:
                        self._preempt(other)
        came_now = draft.admitted.pop(state.id, None) is not None
        # What only the prefix cache gave it in this very step is not worth moving.
        is_new = came_now and state.id not in self._swapped
        if mode == "swap" and not is_new and self._memory.swap_out(state):
            state.status = RequestStatus.SWAPPED
            draft.swapped += [] if came_now else [state.id]
        else:
            self._memory.discard(state)
            state.status = RequestStatus.WAITING
        if not is_new:
            draft.displaced.append(state)
        if not came_now:
            draft.preempted.append(state)
            state.num_preemptions += 1
        # It may not come back in the step that took its seat.
        state.scheduled_step = self._step
        # A new list, since the policy may be walking the old one.
        self._running = [other for other in self._running if other is not state]
        self._vacate(state)

    def _vacate(self, state: RequestState) -> None:
        self._plan.has_room = True
        self._memory.release(state)
        assert state.seat is not None
        heappush(self._free_seats, state.seat)
        state.seat = None

    def _settle_queues(self, now: float) -> None:
        """Move who was admitted or preempted; put off until now because the policy walks the queues."""
        draft = self._plan
        for state, _ in draft.admitted.values():
            if self._swapped.pop(state.id, None) is None:
                del self._waiting[state.id]
            if state.first_scheduled is None:
                state.first_scheduled = now
            found = state.num_computed_tokens - state.num_covered_tokens
            if found > 0:
                state.num_cached_tokens += found
                state.num_covered_tokens += found
        for state in draft.displaced:
            self._swapped.pop(state.id, None)
            queue = self._swapped if state.status is RequestStatus.SWAPPED else self._waiting
            queue[state.id] = state
            queue.move_to_end(state.id, last=False)
        draft.displaced = []

    def _finish(self, finished: list[RequestState]) -> None:
        self._plan.has_room = True
        for state in finished:
            state.status = FINISHED
            self._memory.num_referred_tokens -= num_kept_tokens(state)
        self._running = [state for state in self._running if state.status is RUNNING]
        leaving = finished
        if self.policy.keeps_seats:
            # Of a failed row nothing is there to compute over again.
            leaving = [state for state in finished if state.error is not None]
            self._kept += [state for state in finished if state.error is None]
            if not self._running:
                leaving += self._kept
        for state in leaving:
            self._vacate(state)
        if not self._running:
            self._kept = []
