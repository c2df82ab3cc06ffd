"""The mechanism: turn a policy's proposals into a plan that fits seats, token budget and blocks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import islice, starmap
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from cbresearch import kv, policies
from cbresearch.checks import Bounds, count, real
from cbresearch.config import PREEMPTIONS, CacheConfig, SchedulerConfig
from cbresearch.policies.base import Policy, View, ask, begin, failure
from cbresearch.request import Request, RequestState, RequestStatus
from cbresearch.scheduler.admission import check_request
from cbresearch.step import (
    Admission,
    BlockEvents,
    Padding,
    Plan,
    PoolCounts,
    PoolState,
    ScheduledRows,
    Skipped,
    SkippedRows,
    StepResult,
)

# A policy may look again and again whether to wait on; this often it waits for nothing that comes.
MOST_WAKES = 100_000
# In a loop the lookup on the class costs as much as a call.
RUNNING, FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class DecodeBatch(NamedTuple):
    """The next step, where all it does is to decode every running request, and what stays as it is behind it.

    Attributes:
        order: The running requests in the policy's order.
        padding: Rows computed for nothing.
        skipped: As in `Plan`.
        closed: As in `Plan`.
        is_waiting: Whether requests wait.
        is_short: Whether they wait for memory.
    """

    order: Sequence[RequestState]
    padding: tuple[Padding, ...]
    skipped: tuple[Skipped, ...]
    closed: str | None
    is_waiting: bool
    is_short: bool = False


class _Draft:
    """A plan under construction: what a step's proposals have come to so far."""

    def __init__(self) -> None:
        # The values of a `Scheduled` each.
        self.scheduled: dict[str, tuple[Any, ...]] = {}
        self.admitted: dict[str, tuple[RequestState, int]] = {}
        self.preempted: list[RequestState] = []
        self.requeued: list[RequestState] = []
        self.aborted: list[str] = []
        self.swapped: list[str] = []
        self.skipped: dict[str, str] = {}
        # Whether seats or blocks became free since the last plan, so that a step need not repeat it.
        self.was_freed = False


class Scheduler:
    """Own the queues, the seats, the token budget and the blocks; ask a policy what to schedule.

    `submit` requests, then alternate `schedule` and `commit`; `abort` and `preempt` in between. A request
    that is preempted keeps its tokens and waits at the front. By recompute it gives back its blocks, and
    its KV is computed again; by swap its KV moves to the host's pool, as long as that has room.

    Args:
        policy: Decides the order, which request to preempt and how; a policy or its name.
        config: Seats, token budget and longest request.
        cache: The KV pool.
        step_time: Seconds of a step of so many tokens and tokens of context, for policies that look ahead.

    Raises:
        TypeError: The policy, or one of its flags, is of another class.
        ValueError: The policy's name or option is unknown.
    """

    def __init__(
        self,
        policy: str | Policy,
        config: SchedulerConfig,
        cache: CacheConfig,
        step_time: Callable[[int, int], float] | None = None,
    ) -> None:
        self.policy = policy = policies.get(policy)
        begin(policy)
        self.step_time = step_time
        self.config = config
        self.kv = kv.build(cache, config, policy.pads_finished_rows)
        self.num_submitted = 0
        self._step = self._num_wakes = 0
        # None for those that are finished: of them only the id is kept, which no other request may have.
        self._states: dict[str, RequestState | None] = {}
        self._waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._swapped: OrderedDict[str, RequestState] = OrderedDict()
        self._running: list[RequestState] = []
        # Finished requests of a static batch, whose rows are computed for nothing.
        self._padding: list[RequestState] = []
        self._free_seats = list(range(config.max_num_seqs))
        # Tokens whose KV running requests refer to, a shared one as often as it is referred to.
        self._num_kv_tokens = 0
        self._draft = _Draft()
        # Whether memory rejected or preempted a request in the last step.
        self._is_short = False
        self._last: tuple[_Draft, Plan | None, Plan | None, int] = self._draft, None, None, 0
        self._view = View(
            config, self.kv, self._free_seats, self._waiting.values(), self._swapped.values(), step_time
        )
        self._updates_kv = cache.prefix_caching or cache.sliding_window is not None
        self._caches_on_schedule = cache.prefix_caching and cache.cache_on_schedule
        # Prefill steps skip the same running requests again and again: one pair for each is enough.
        self._skipped = lru_cache(maxsize=4 * config.max_num_seqs)(lambda *pair: pair)
        # The base's hooks do nothing, and one would be a call for each token.
        self.on_scheduled = (
            partial(ask, policy, "served") if type(policy).served is not Policy.served else None
        )
        self._can_displace = type(policy).displace is not Policy.displace

    @property
    def step(self) -> int:
        """Return the index of the next step."""
        return self._step

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

    def validate(self, request: Request) -> None:
        """Reject a request that can never be served within the limits, whatever its id.

        Raises:
            ValueError: What it needs, what there is, and the remedy.
        """
        check_request(request, self.config, self.kv)

    def submit(
        self, request: Request, transferred: RequestState | None = None, now: float | None = None
    ) -> RequestState:
        """Queue a request.

        Args:
            request: The request.
            now: Seconds since the start of the run; by default its arrival.
            transferred: Its state in another scheduler, if its KV comes along (disaggregated prefill).

        Raises:
            ValueError: Its id is taken, or it can never be served within the limits; nothing has changed.
        """
        if request.id in self._states:
            raise ValueError(f"request {request.id!r}: the id is taken; give each an id of its own")
        self.validate(request)
        state = RequestState(request, self.num_submitted, request.arrival if now is None else now)
        if transferred is not None:
            state.resume(transferred)
        self.num_submitted += 1
        self._num_wakes = 0
        self._states[request.id] = state
        self._waiting[request.id] = state
        return state

    def schedule(self, now: float) -> Plan:
        """Plan the next step.

        Args:
            now: Seconds since the start of the run.

        Raises:
            RuntimeError: There is work but none of it could be scheduled, a hook of the policy fails, or its
                proposals have no end; the message has the numbers. No request is lost.
            ValueError: The policy proposes or chooses a request that is none of the view's.
        """
        try:
            self._take_proposals(now)
        except BaseException:
            self._give_up()
            raise
        self._move_between_queues(now)
        plan = self._plan()
        self._step += 1
        self._last = self._draft, plan, self._last[1], self.num_submitted
        self._draft = _Draft()
        return plan

    def _take_proposals(self, now: float) -> None:
        """Draft the next step from what the policy proposes."""
        policy, view, states = self.policy, self._open_view(now), self._states
        self._num_wakes = 0
        num_outside = len(self._waiting) + len(self._swapped)
        most = 10 * (len(self._running) + num_outside) + 100
        is_asking = True
        try:
            for number, (state, wanted) in enumerate(policy.propose(view)):
                is_known = states.get(state.id) is state
                if type(wanted) is not int and wanted != inf:
                    wanted = count(f"the number of tokens for {state}", wanted, *Bounds())
                is_asking = False
                if not view.token_budget:
                    break
                if number > most:
                    raise RuntimeError(
                        f"policy {policy.name!r} made over {most} proposals in step {self._step}, for "
                        f"{len(self._running)} running and {num_outside} waiting requests; it must end"
                    )
                if is_known:
                    self._take(state, wanted)
                elif getattr(state, "status", None) is not FINISHED:
                    raise ValueError(
                        f"policy {policy.name!r} proposed {state}; propose requests of the view only"
                    )
                is_asking = True
        except (Exception, SystemExit) as error:
            if not is_asking:
                raise
            remedy = "; it must yield pairs of a request of the view and a number of tokens"
            raise failure(policy, "propose", error, remedy) from error
        # A step that only frees memory is progress too: fewer requests run then.
        if not self._draft.scheduled and not self._draft.preempted and self.has_work:
            raise RuntimeError(self._why_stuck())

    def _take(self, state: RequestState, wanted: int) -> None:
        """Schedule what fits of a proposal."""
        view, pending = self._view, state.num_tokens - state.num_computed_tokens
        num_tokens = wanted if wanted < pending else pending
        if num_tokens > view.token_budget:
            num_tokens = view.token_budget
        if num_tokens < 1 or state.scheduled_step == self._step:
            return
        if num_tokens < pending and not self.config.chunked_prefill:
            # No request may overtake it: others would take what it needs of the budget, again and again.
            self._draft.skipped[state.id] = view.closed = "chunk"
        elif state.status is RUNNING:
            self._continue(state, num_tokens)
        elif view.closed is not None:
            self._draft.skipped[state.id] = view.closed
        else:
            self._admit(state, num_tokens)

    def _give_up(self) -> None:
        """Take back a step that failed while it was drafted: what it had scheduled is preempted."""
        for state in reversed(self._running):
            if state.id in self._draft.scheduled:
                self._preempt(state, "recompute")
        self._reopen()

    def _reopen(self) -> None:
        """Open the next step to every request, to those as well that were just preempted."""
        self._draft.skipped.clear()
        self._view.closed = None
        self._move_between_queues(0.0)
        for state in (*self._waiting.values(), *self._swapped.values()):
            state.scheduled_step = min(state.scheduled_step, self._step - 1)

    def commit(
        self, plan: Plan, result: StepResult, now: float
    ) -> tuple[PoolState, BlockEvents, tuple[RequestState, ...]]:
        """Take in what a step produced (vLLM: `update_from_output`).

        A request that was aborted since the plan was made is passed over.

        Args:
            plan: The plan that `schedule` returned last.
            result: What the executor made of it.
            now: Seconds since the start of the run, at the end of the step.

        Returns:
            The pool before the finished requests give back their blocks, what became of blocks since the
            commit before, and the states of the requests that the step finished.
        """
        finished: list[RequestState] = []
        served: list[tuple[RequestState, int]] = []
        states, on_scheduled = self._states, self.on_scheduled
        for request_id, _, start, num_tokens, _, samples, _ in plan.rows:
            state = states.get(request_id)
            if state is None or state.status is not RUNNING:
                continue
            self._update(state, start, num_tokens, samples, result, now)
            if state.finish_reason is not None:
                finished.append(state)
            if on_scheduled is not None:
                served.append((state, num_tokens))
        pool, events = PoolState(*self.pool_counts()), self.kv.take_events()
        if finished:
            self.finish(finished)
        # Behind all that has to be done: the hook may fail.
        if on_scheduled is not None:
            for state, num_tokens in served:
                on_scheduled(state, num_tokens)
        return pool, events, tuple(finished)

    def pool_counts(self, num_new_tokens: int = 0) -> PoolCounts:
        """Return the values of a `PoolState` as they are now, with so many more tokens in held blocks."""
        pool, num_swapped, num_waiting = self.kv, len(self._swapped), len(self._waiting)
        num_held, num_cached = pool.num_held_blocks, pool.num_cached_blocks
        num_shared, num_external = pool.num_shared_blocks, pool.num_unusable_blocks
        if num_swapped or num_waiting:
            num_waiting += num_swapped
            num_external = pool.num_blocks - num_held - num_cached if self._is_short else num_external
        # A shared block is full: a block filled in part is copied before a second request writes it.
        num_tokens = self._num_kv_tokens - num_shared * pool.config.block_size
        return (
            len(self._running),
            num_waiting,
            num_held,
            (self._num_held_tokens() if self._padding else num_tokens) + num_new_tokens,
            num_cached,
            num_external,
            num_shared,
            num_swapped,
            pool.num_held_host_blocks,
        )

    def finish(self, finished: Sequence[RequestState]) -> None:
        """End running requests whose `finish_reason` is set, and take back their seats and blocks."""
        self._draft.was_freed = True
        for state in finished:
            state.status = FINISHED
            self._states[state.id] = None
            self._num_kv_tokens -= state.num_kv_tokens
        self._set_running([state for state in self._running if state.status is RUNNING])
        leaving = list(finished)
        if self.policy.pads_finished_rows:
            # A row that failed, or was aborted in its first step, holds nothing to be computed over again.
            leaving = [one for one in finished if one.error is not None or not one.num_computed_tokens]
            self._padding += [one for one in finished if one not in leaving]
            if not self._running:
                leaving += self._padding
                self._padding = []
        for state in leaving:
            self._vacate(state)

    def wakes(self, now: float) -> float | None:
        """Return the seconds until which the policy wants to wait although there is work, or None.

        Raises:
            RuntimeError: The policy's `wakes` fails, or has put off the step for ever.
            ValueError: It says something else than finite seconds.
        """
        if self._running:
            return None
        wake: float | None = ask(self.policy, "wakes", self._open_view(now))
        if wake is not None:
            wake = real(f"policy {self.policy.name!r}: what its `wakes` returns", wake, -inf, unit="seconds")
        if wake is None or wake <= now:
            return None
        self._num_wakes += 1
        if self._num_wakes > MOST_WAKES:
            raise RuntimeError(
                f"policy {self.policy.name!r}: its `wakes` put off step {self._step} {MOST_WAKES} times, now "
                f"from {now} to {wake} seconds, while nothing arrived; it must return None at last"
            )
        return wake

    def preempt(self, request_id: str, mode: str | None = None) -> None:
        """Preempt a running request before the next step, for a test or an experiment.

        Args:
            request_id: Id of the request.
            mode: "recompute" or "swap"; by default what the policy says.

        Raises:
            ValueError: It is not running, or the mode is unknown.
        """
        state = self._states.get(request_id)
        if state is None or state.status is not RUNNING:
            raise ValueError(f"request {request_id!r} is not running, so it cannot be preempted")
        self._preempt(state, mode)
        self._reopen()
        self.finish([])

    def abort(self, request_id: str) -> RequestState:
        """End a request wherever it is, even while a step runs; its state keeps what it generated so far.

        Raises:
            ValueError: The request is unknown or finished.
        """
        state = self._states.get(request_id)
        if state is None:
            what = "finished" if request_id in self._states else "unknown"
            raise ValueError(f"request {request_id!r} is {what}, so it cannot be aborted")
        state.finish_reason = "abort"
        self._draft.aborted.append(state.id)
        if state.status is RUNNING:
            self.finish([state])
        else:
            if state.status is RequestStatus.SWAPPED:
                self.kv.free(state.id)
            self._waiting.pop(state.id, None)
            self._swapped.pop(state.id, None)
            state.status, self._states[state.id] = FINISHED, None
        if self.on_scheduled is not None:
            self.on_scheduled(state, 0)
        return state

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a finished request, so that a server can go on for ever; its id is free again.

        Raises:
            ValueError: The request is unknown or not finished.
        """
        is_finished = request_id in self._states and self._states[request_id] is None
        if not is_finished or any(state.id == request_id for state in self._padding):
            raise ValueError(f"request {request_id!r} is not finished, so it cannot be forgotten")
        del self._states[request_id]

    def check(self) -> None:
        """Prove the invariants of queues, seats and blocks.

        Raises:
            AssertionError: One does not hold.
        """
        self.kv.check()
        config, free_seats = self.config, self._free_seats
        seated = self._running + self._padding
        seats = [state.seat for state in seated]
        assert len(seated) <= config.max_num_seqs, "more requests than seats"
        assert sorted([*free_seats, *(seat for seat in seats if seat is not None)]) == list(
            range(config.max_num_seqs)
        ), f"seats are lost or shared: held {seats}, free {free_seats}"
        queued = [*self._waiting, *self._swapped, *(state.id for state in seated)]
        assert len(set(queued)) == len(queued), "a request is in two queues"
        for state in self._waiting.values():
            assert state.status is RequestStatus.WAITING, f"{state} is in the waiting queue"
            assert not self.kv.table(state.id), f"{state} waits but holds blocks"
            assert not self.kv.host_table(state.id), f"{state} waits but holds host blocks"
        for state in self._swapped.values():
            assert state.status is RequestStatus.SWAPPED, f"{state} is in the swapped queue"
            assert self.kv.host_table(state.id), f"{state} is swapped out but holds no host blocks"
        for state in self._running:
            assert state.status is RUNNING, f"{state} is in the running queue"
        held = sum(state.num_kv_tokens for state in self._running)
        assert held == self._num_kv_tokens, f"{held} tokens are held, {self._num_kv_tokens} counted"
        if not seated:
            assert self.kv.num_held_blocks == 0, "blocks are held although nothing runs"
        if not self._swapped:
            assert self.kv.num_held_host_blocks == 0, "host blocks are held although nothing is swapped"

    def decode_batch(self, now: float) -> DecodeBatch | None:
        """Return the next step if all that it and the steps behind it do is to decode the running requests.

        That holds until a request arrives, finishes or finds no block, if the policy keeps what
        `Policy.fast_forward` promises. Nothing changes by asking.

        Args:
            now: Seconds since the start of the run.
        """
        draft, running, budget = self._draft, self._running, self.config.max_num_batched_tokens
        if not running or len(running) > budget or draft.aborted or draft.preempted:
            return None
        is_waiting = bool(self._waiting or self._swapped)
        last, plan, before, num_submitted = self._last
        if is_waiting and num_submitted != self.num_submitted:
            return None
        # Those admitted last first, which may still compute their prompts.
        for state in reversed(running):
            if state.num_tokens - state.num_computed_tokens != 1 or not state.output_token_ids:
                return None
        padding = self._padding_rows(budget - len(running))
        if not is_waiting:
            order = self._decode_order(now)
            closed = "budget" if len(running) == budget else None if self._free_seats else "seats"
            return None if order is None else DecodeBatch(order, padding, (), closed, False)
        # What was rejected is rejected again as long as nothing is freed: running requests only take blocks.
        if (
            plan is None
            or last.was_freed
            or draft.was_freed
            or (plan.skipped and (before is None or before.skipped != plan.skipped))
            or plan.admitted
            or plan.aborted
            or plan.transfers
            or len(plan.scheduled) != len(running)
            or any(is_prefill or not samples for *_, is_prefill, samples, _ in plan.rows)
        ):
            return None
        states = [self._states[entry.request_id] for entry in plan.scheduled]
        order = [state for state in states if state is not None]
        return DecodeBatch(order, padding, plan.skipped, plan.closed, True, self._is_short)

    def advance(self, num_steps: int, num_tokens: int) -> None:
        """Take note of decode steps whose requests and blocks are brought up to date already.

        Args:
            num_steps: Steps since the last call.
            num_tokens: Tokens that running requests were decoded in them.
        """
        self._step += num_steps
        self._num_kv_tokens += num_tokens

    def _decode_order(self, now: float) -> Sequence[RequestState] | None:
        """Return the running requests in the policy's order; None unless it proposes just these."""
        view, num_running = self._open_view(now), len(self._running)
        order: list[RequestState] = []
        try:
            for state, wanted in islice(self.policy.propose(view), num_running):
                # What else a policy may say is judged when the step is taken by itself.
                if type(wanted) is not int or wanted < 1:
                    return None
                order.append(state)
                view.token_budget -= 1
        except (Exception, SystemExit) as error:
            raise failure(self.policy, "propose", error) from error
        return order if order == self._running or set(order) == set(self._running) else None

    def _open_view(self, now: float) -> View:
        """Return the policy's view of a step in which nothing is scheduled yet."""
        view = self._view
        view.now = now
        view.token_budget = self.config.max_num_batched_tokens
        return view

    def _schedule(self, state: RequestState, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        start = state.num_computed_tokens
        pending = state.num_tokens - start
        state.scheduled_step = self._step
        self._view.token_budget -= num_tokens
        request_id = state.id
        is_prefill = pending > 1 or not state.output_token_ids
        samples = num_tokens == pending
        row = request_id, state.seat, start, num_tokens, is_prefill, samples, new_block_ids
        self._draft.scheduled[request_id] = row
        if self._caches_on_schedule:
            self.kv.cache_scheduled(state, start + num_tokens)

    def _continue(self, state: RequestState, num_tokens: int) -> None:
        """Schedule a running request, preempting others for its blocks or, at last, itself."""
        end = state.num_computed_tokens + num_tokens
        while (added := self.kv.allocate(state.id, end)) is None:
            if not self._free_memory(state, end):
                return
        self._schedule(state, num_tokens, added)

    def _free_memory(self, state: RequestState, end: int) -> bool:
        """Free blocks for tokens of a running request up to `end`; return whether it still runs itself."""
        if self._padding:
            # A row computed for nothing gives way before a request loses work.
            self._vacate(self._padding.pop())
            return True
        # Where all had their share of preemptions the one admitted last goes, so that the oldest is finished.
        last = state if state.num_preemptions < self.config.max_preemptions else self._running[-1]
        for victim in self._victims(state, end) or [last]:
            # One that relied on what another was to compute may have left with it.
            if victim.seat is not None:
                self._preempt(victim)
        return state.seat is not None

    def _victims(self, state: RequestState, num_tokens: int) -> list[RequestState]:
        """Return the running requests that make room for another one, none if all of them were not enough."""
        policy, view, draft, bound = self.policy, self._view, self._draft, self.config.max_preemptions
        is_running = state.seat is not None
        candidates = [
            other
            for other in self._running
            if other.num_preemptions < bound and (is_running or other.id not in draft.admitted)
        ]
        chosen: list[RequestState] = []
        missing = self.kv.missing_blocks(state, num_tokens, (victim.id for victim in chosen))
        while next(missing) > 0 or not (is_running or chosen or self._free_seats):
            if not candidates:
                return []
            # The policy may take its list apart.
            hook, asked = ("victim", (view,)) if is_running else ("displace", (view, state))
            victim = ask(policy, hook, *asked, candidates.copy())
            # A waiting request for which none should leave.
            if victim is None and not is_running:
                return []
            try:
                candidates.remove(victim)
            except ValueError:
                what = f"its `{hook}` chose {victim!r}; choose one of the candidates"
                raise ValueError(f"policy {policy.name!r}: {what}") from None
            # A running request that is to leave itself.
            if victim is state:
                return []
            chosen.append(victim)
            if policy.preempts_one_by_one:
                break
        for victim in tuple(chosen):
            others = [other for other in chosen if other is not victim]
            # What it holds is others' too, so that there may be room without it.
            if not self.kv.num_private_blocks(victim.id) and (is_running or others or self._free_seats):
                *_, num_missing = self.kv.missing_blocks(state, num_tokens, [other.id for other in others])
                chosen = chosen if num_missing > 0 else others
        return chosen

    def _admit(self, state: RequestState, wanted: int) -> None:
        """Seat a waiting or swapped request if the blocks for all its known tokens are free."""
        draft, sibling = self._draft, self._sibling(state)
        if sibling is not None and sibling.num_computed_tokens < state.num_prompt_tokens:
            # Its prompt is being computed: joining later saves computing it twice.
            draft.skipped[state.id] = "sibling"
            return
        if not self._free_seats and not self._displace(state):
            draft.skipped[state.id] = "seats"
            return
        if not (self._allocate_prefix(state) or (self._displace(state) and self._allocate_prefix(state))):
            draft.skipped[state.id] = self._view.closed = "blocks"
            return
        self._num_kv_tokens += state.num_kv_tokens
        num_tokens = min(wanted, state.num_tokens - state.num_computed_tokens)
        added = self.kv.allocate(state.id, state.num_computed_tokens + num_tokens)
        assert added is not None
        state.seat = heappop(self._free_seats)
        state.status = RUNNING
        draft.skipped.pop(state.id, None)
        draft.admitted[state.id] = (state, state.seat)
        self._set_running([*self._running, state])
        self._schedule(state, num_tokens, self.kv.table(state.id))

    def _allocate_prefix(self, state: RequestState) -> bool:
        """Get a request without a seat the KV that it left on the host, or that others hold of its prompt."""
        if state.status is RequestStatus.SWAPPED:
            return self.kv.swap_in(state)
        # Asked for again: the one that was there may just have been displaced.
        sibling = self._sibling(state)
        is_ready = sibling is not None and sibling.num_computed_tokens >= state.num_prompt_tokens
        return self.kv.admit(state, sibling if is_ready else None)

    def _displace(self, waiting: RequestState) -> bool:
        """Preempt running requests for a waiting one, if the policy wants it and it is of use."""
        if not self._can_displace:
            return False
        preempted = self._victims(waiting, waiting.num_tokens)
        for state in preempted:
            self._preempt(state)
        # No request was rejected: the next one may still join.
        self._view.closed = None
        return bool(preempted)

    def _sibling(self, state: RequestState) -> RequestState | None:
        """Return the parallel sample of the same prompt that has come farthest, if one can share it."""
        is_alone = state.request.group is None or self.kv.config.reservation is not None
        if is_alone or not self.policy.joins_running_batch:
            return None
        shared = attrgetter("group", "prompt", "cache_salt")
        siblings = [one for one in self._running if shared(one.request) == shared(state.request)]
        return max(siblings, key=lambda one: one.num_computed_tokens, default=None)

    def _preempt(self, state: RequestState, mode: str | None = None) -> None:
        """Take a request's seat and blocks, and its part of this step if it has one already."""
        mode = mode or ask(self.policy, "preemption", self._view, state)
        if mode not in PREEMPTIONS:
            raise ValueError(
                f"policy {self.policy.name!r} wants {state} preempted by {mode!r}; choose one of "
                f"{PREEMPTIONS}"
            )
        draft = self._draft
        self._view.closed = "blocks"
        entry = draft.scheduled.pop(state.id, None)
        if entry is not None:
            _, _, _, num_tokens, *_ = entry
            self._view.token_budget += num_tokens
            if self._caches_on_schedule:
                admitted = [other for other, _ in draft.admitted.values()]
                for other in self.kv.uncache(state, state.num_computed_tokens, admitted):
                    if other in self._running:
                        self._preempt(other)
        came_now = draft.admitted.pop(state.id, None) is not None
        # What only the prefix cache gave it in this very step is not worth moving.
        is_new = came_now and state.id not in self._swapped
        self._num_kv_tokens -= state.num_kv_tokens
        if mode == "swap" and not is_new and self.kv.swap_out(state):
            state.status = RequestStatus.SWAPPED
            draft.swapped += [] if came_now else [state.id]
        else:
            state.num_computed_tokens = state.num_skipped_tokens = 0
            state.status = RequestStatus.WAITING
        if not is_new:
            draft.requeued.append(state)
        if not came_now:
            draft.preempted.append(state)
            state.num_preemptions += 1
        # It may not come back in the step that took its seat.
        state.scheduled_step = self._step
        self._set_running([other for other in self._running if other is not state])
        self._vacate(state)

    def _vacate(self, state: RequestState) -> None:
        """Take back a request's seat, and its blocks if it holds any."""
        self._draft.was_freed = True
        if self.kv.table(state.id):
            self.kv.free(state.id)
        assert state.seat is not None
        heappush(self._free_seats, state.seat)
        state.seat = None

    def _set_running(self, running: list[RequestState]) -> None:
        # The policy may be walking the old ones, and cannot change the new ones.
        self._running, self._view.running = running, tuple(running)

    def _move_between_queues(self, now: float) -> None:
        """Move requests that were admitted or preempted; put off until now as the policy walks the queues."""
        draft = self._draft
        for state, _ in draft.admitted.values():
            if self._swapped.pop(state.id, None) is None:
                del self._waiting[state.id]
            if state.first_scheduled is None:
                state.first_scheduled = now
            found = state.num_computed_tokens - state.num_peak_computed_tokens
            if found > 0:
                state.num_cached_tokens += found
                state.num_peak_computed_tokens += found
        for state in draft.requeued:
            self._swapped.pop(state.id, None)
            queue = self._swapped if state.status is RequestStatus.SWAPPED else self._waiting
            queue[state.id] = state
            queue.move_to_end(state.id, last=False)
        draft.requeued = []

    def _plan(self) -> Plan:
        """Return the step as it was drafted, and open admission for the next one."""
        draft, view = self._draft, self._view
        if len(draft.scheduled) < len(self._running):
            reason = "policy" if view.token_budget else "budget"
            for state in self._running:
                if state.id not in draft.scheduled:
                    draft.skipped.setdefault(state.id, reason)
        closed, view.closed = view.closed, None
        self._is_short = closed == "blocks"
        if not view.token_budget:
            closed = "budget"
        elif closed is None and not self._free_seats:
            closed = "seats"
        return Plan(
            step=self._step,
            scheduled=ScheduledRows.of(draft.scheduled.values()),
            admitted=tuple(
                [
                    Admission(state.request, seat, tuple(state.output_token_ids))
                    for state, seat in draft.admitted.values()
                ]
            ),
            preempted=tuple([state.id for state in reversed(draft.preempted)]),
            padding=self._padding_rows(view.token_budget),
            aborted=tuple(draft.aborted),
            swapped=tuple(draft.swapped),
            transfers=self.kv.take_transfers(),
            skipped=SkippedRows.of(starmap(self._skipped, draft.skipped.items())) if draft.skipped else (),
            closed=closed,
        )

    def _padding_rows(self, budget: int) -> tuple[Padding, ...]:
        """Return the rows of finished requests that still have their seats, as far as the budget goes."""
        rows = [(one.id, one.seat, one.num_computed_tokens) for one in self._padding[:budget]]
        return tuple([Padding(name, seat, context) for name, seat, context in rows if seat is not None])

    def _update(
        self, state: RequestState, start: int, num_tokens: int, samples: bool, result: StepResult, now: float
    ) -> None:
        """Take in what a step did for a request; its `finish_reason` says whether that was its last."""
        request_id = state.id
        if result.failed and request_id in result.failed:
            state.finish_reason, state.error = "error", result.failed[request_id]
            # No other request may read what is in its blocks.
            self.kv.uncache(state, 0, ())
            return
        end = state.num_computed_tokens = start + num_tokens
        peak = state.num_peak_computed_tokens
        if start < peak:
            state.num_recomputed_tokens += min(end, peak) - start
        if end > peak:
            state.num_peak_computed_tokens = end
        self._num_kv_tokens += num_tokens
        if self._updates_kv:
            skipped = state.num_skipped_tokens
            self.kv.update(state, start)
            self._num_kv_tokens -= state.num_skipped_tokens - skipped
        if not samples:
            return
        state.output_token_ids.append(result.tokens[request_id])
        state.num_tokens += 1
        state.token_times.append(now)
        if request_id in result.logprobs:
            state.logprobs.append(result.logprobs[request_id])
        if request_id in result.stopped:
            state.finish_reason = "stop"
        elif len(state.output_token_ids) >= state.request.max_tokens:
            state.finish_reason = "length"

    def _num_held_tokens(self) -> int:
        """Return the tokens of unfinished requests in held blocks, where padding rows hold some, too."""
        size = self.kv.config.block_size
        in_block: dict[int, int] = {}
        for state in self._running:
            for place, block in enumerate(self.kv.table(state.id)):
                filled = min(size, state.num_computed_tokens - size * place)
                if block != kv.NULL_BLOCK and filled > in_block.get(block, 0):
                    in_block[block] = filled
        return sum(in_block.values())

    def _why_stuck(self) -> str:
        """Return the numbers that explain why a step has no work although there are requests."""
        first = next(iter((*self._running, *self._swapped.values(), *self._waiting.values())))
        config, pool = self.config, self.kv
        return (
            f"policy {self.policy.name!r} left step {self._step} without work: {len(self._running)} running, "
            f"{len(self._waiting)} waiting, {len(self._swapped)} swapped, {len(self._free_seats)} of "
            f"{config.max_num_seqs} seats free, {pool.num_free_blocks} of {pool.num_blocks} blocks free, "
            f"token budget {config.max_num_batched_tokens}; first in line is {first}. Its `propose` must "
            "yield every request that it may serve, and go on after one that does not fit"
        )
