"""The one loop: arrivals, clock, steps, finish."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from numbers import Real
from typing import Any, Protocol

from cbresearch import fast_forward as decode_runs
from cbresearch.fast_forward import Outlook
from cbresearch.request import Rejected, Request, RequestState, listed
from cbresearch.scheduler import Scheduler
from cbresearch.step import DecodeRun, Plan, StepResult
from cbresearch.trace import Origin, RequestRecord, StepRecord, Steps, Trace, TraceWriter

_TIME_OF_DAY = 1e9
"""Seconds from which on arrivals count from 1970, not from the start of a run."""


class Executor(Protocol):
    """Something that carries out plans: a model, or a model of its cost.

    One that knows beforehand what comes of a step has an `outlook`, too (see `fast_forward.Outlook`), or None
    there; many steps are then taken at once.
    """

    def check(self, request: Request) -> None:
        """Reject a request that this executor can never serve.

        Raises:
            ValueError: What is wrong, and the remedy.
        """

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step."""


class Loop:
    """Alternate plan, execution and commitment on a clock of the caller's.

    Args:
        scheduler: Plans the steps.
        executor: Carries out the plans.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def validate(self, request: Request) -> None:
        """Reject a request that can never be served, whatever its id.

        Raises:
            ValueError: What it needs, what there is, and the remedy.
        """
        self.executor.check(request)
        self.scheduler.validate(request)

    def submit(self, request: Request, now: float) -> RequestState:
        """Queue a request.

        Args:
            request: The request.
            now: Seconds since the start of the run.

        Raises:
            ValueError: The executor or the scheduler can never serve it; nothing has changed.
        """
        self.executor.check(request)
        return self.scheduler.submit(request, now=now)

    def step(self, clock: Callable[[], float]) -> tuple[StepRecord, tuple[RequestState, ...]]:
        """Serve one step; there has to be work.

        Args:
            clock: Seconds since the start of the run.

        Returns:
            The step's record and the states of the requests that it finished.

        Raises:
            ValueError: The executor says that the step took no sensible time.
        """
        plan = self.scheduler.schedule(clock())
        start = clock()
        return self.finish(plan, self.execute(plan), start)

    def execute(self, plan: Plan) -> StepResult:
        """Carry out a plan.

        Raises:
            ValueError: The executor says that it took no sensible time.
        """
        result = self.executor.execute(plan)
        if not isinstance(result.duration, Real) or not 0 <= result.duration < math.inf:
            raise ValueError(
                f"step {plan.step} took {result.duration} seconds; a cost is finite and not negative"
            )
        return result

    def finish(
        self, plan: Plan, result: StepResult, start: float
    ) -> tuple[StepRecord, tuple[RequestState, ...]]:
        """Take in what a step produced that began at `start` seconds; return as for `step`."""
        pool, events, finished = self.scheduler.commit(plan, result, start + result.duration)
        ids = tuple([state.id for state in finished])
        return StepRecord(start, result.duration, plan, ids, pool, events, result.device_duration), finished


def serve(
    requests: Iterable[Request | Rejected],
    scheduler: Scheduler,
    executor: Executor,
    *,
    on_step: Callable[[StepRecord], object] | None = None,
    on_finish: Callable[[RequestRecord], Iterable[Request]] | None = None,
    fast_forward: bool = True,
    writer: TraceWriter | None = None,
    origin: Origin | None = None,
) -> Trace:
    """Serve requests until all are finished.

    The clock is virtual with either executor: it advances by each step's duration, and jumps to the next
    arrival when there is nothing to do. So a run of a real model can be replayed by the simulator.

    A clock that counts from 1970 leaves a float no digits for the length of a step. A workload whose first
    arrival is 10⁹ seconds or later tells the time of day: the run begins with that arrival, its times count
    from there, and `Trace.origin.epoch` says when it was.

    Args:
        requests: The workload; a `Rejected` only keeps its place in the results.
        scheduler: A scheduler that has served no request yet.
        executor: Carries out the plans.
        on_step: Called with each step's record, for a progress bar; every step is then taken by itself.
        on_finish: Called with the record of each request that a step ends or the scheduler rejects; returns
            the requests that its client sends next (a user who waits for an answer, the next turn of a chat).
            They come behind those given, and arrive no earlier than the moment at which they are sent.
        fast_forward: Take many steps at once where the executor knows what comes of them and the policy says
            that it would decide nothing (`Policy.fast_forward`). The trace is the same, bit for bit.
        writer: Gets each step and request as it comes about, so that a run that is killed leaves its trace.
        origin: The engine behind the executor; by default this package without a model.

    Returns:
        The trace. A request that cannot be served is in it with its error; the others are served.
    """
    run = Run(requests, scheduler, executor, on_step, on_finish, writer, origin)
    outlook: Outlook | None = None
    if fast_forward and on_step is None and decode_runs.allows(scheduler):
        outlook = getattr(executor, "outlook", None)
    for _ in run.steps(outlook):
        pass
    return run.trace()


def from_first_arrival(requests: Iterable[Request | Rejected]) -> tuple[list[Request | Rejected], float]:
    """Return requests whose times count from the first arrival if they tell the time of day, and when it was.

    Returns:
        The requests, and the seconds by which their times are less than those given; 0 as a rule.
    """
    given = listed(requests)
    first = min((entry.arrival for entry in given if isinstance(entry, Request)), default=0.0)
    return (given, 0.0) if first < _TIME_OF_DAY else ([_since(first, entry) for entry in given], first)


def _since(first: float, entry: Any) -> Any:
    """Return a request, or a rejection, whose times count from the first arrival."""
    deadline = getattr(entry, "deadline", None)
    later = {} if deadline is None else {"deadline": max(0.0, deadline - first)}
    return replace(entry, arrival=max(0.0, entry.arrival - first), **later)


class Run:
    """One run on the virtual clock, and what has come of it; see `serve` for the arguments."""

    def __init__(
        self,
        requests: Iterable[Request | Rejected],
        scheduler: Scheduler,
        executor: Executor,
        on_step: Callable[[StepRecord], object] | None = None,
        on_finish: Callable[[RequestRecord], Iterable[Request]] | None = None,
        writer: TraceWriter | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._requests, self._epoch = from_first_arrival(requests)
        self.now = 0.0
        self.parts: list[StepRecord | DecodeRun] = []
        self._loop = Loop(scheduler, executor)
        self._scheduler, self._origin = scheduler, origin or Origin()
        self._on_step, self._on_finish, self._writer = on_step, on_finish, writer
        self._places: dict[str, int] = {}
        self._states: dict[int, RequestState] = {}
        self._records: dict[int, RequestRecord] = {}
        # (arrival, place) of the requests to come, the last first; followers are few and kept by themselves.
        self._upcoming = sorted(
            (
                (entry.arrival, place)
                for place, entry in enumerate(self._requests)
                if isinstance(entry, Request)
            ),
            reverse=True,
        )
        self._followers: list[tuple[float, int]] = []

    def steps(self, outlook: Outlook | None = None) -> Iterator[int]:
        """Serve until no request is left, and yield the rows of each step, so that several can take turns.

        Args:
            outlook: What lets many steps be taken at once, or None.
        """
        scheduler = self._scheduler
        if self._writer is not None:
            for entry in self._requests:
                if isinstance(entry, Rejected):
                    self._writer.request(record_of(entry, None))
        while True:
            arrival = self._next_arrival()
            if not scheduler.has_work:
                if arrival == math.inf:
                    break
                self.now = max(self.now, arrival)
            while arrival <= self.now:
                self._submit_next()
                arrival = self._next_arrival()
            if not scheduler.running:
                if not scheduler.has_work:
                    continue
                wake = scheduler.wakes(self.now)
                if wake is not None:
                    self.now = min(wake, arrival)
                    continue
            run = None
            if outlook is not None:
                passes_finishes = self._on_finish is None
                run = decode_runs.fast_forward(scheduler, outlook, self.now, arrival, passes_finishes)
            if run is not None and outlook is not None:
                part, finished = run
                self.now = part.ends[-1]
                rows = zip(part.request_ids, part.num_steps, strict=True) if self._writer is not None else ()
                self._add(part, {name: outlook.tokens(num_steps) for name, num_steps in rows})
            else:
                plan = scheduler.schedule(self.now)
                result = self._loop.execute(plan)
                record, finished = self._loop.finish(plan, result, self.now)
                self.now = record.end
                self._add(record, result.tokens)
                if self._on_step is not None:
                    self._on_step(record)
            for state in finished:
                # The record alone is kept, for it is far smaller than the state.
                place = self._places.pop(state.id)
                self._end(place, record_of(state.request, self._states.pop(place)))
            yield sum(part.num_steps) if run is not None else len(plan.scheduled)
        # What is left was aborted from outside.
        if self._writer is not None:
            for state in self._states.values():
                self._writer.request(record_of(state.request, state))

    def trace(self) -> Trace:
        """Return what has happened so far, the requests in the order in which they were given."""
        records = [
            self._records.get(place) or record_of(request, self._states.get(place))
            for place, request in enumerate(self._requests)
        ]
        return Trace(
            policy=self._scheduler.policy.name,
            scheduler=self._scheduler.config,
            cache=self._scheduler.kv.config,
            steps=Steps(self.parts),
            requests=tuple(records),
            origin=replace(self._origin, epoch=self._epoch),
        )

    def _next_arrival(self) -> float:
        arrival = self._upcoming[-1][0] if self._upcoming else math.inf
        return min(arrival, self._followers[0][0]) if self._followers else arrival

    def _submit_next(self) -> None:
        is_given = not self._followers or (self._upcoming and self._upcoming[-1][0] <= self._followers[0][0])
        _, place = self._upcoming.pop() if is_given else heappop(self._followers)
        request = self._requests[place]
        assert isinstance(request, Request)
        try:
            state = self._loop.submit(request, self.now)
        except ValueError as error:
            self._end(place, record_of(request, None, str(error)))
        else:
            self._places[request.id], self._states[place] = place, state
            if self._writer is not None:
                self._writer.queued(record_of(request, state))

    def _add(self, part: StepRecord | DecodeRun, tokens: Mapping[str, int | Sequence[int]]) -> None:
        self.parts.append(part)
        if self._writer is not None:
            self._writer.step(part, tokens)

    def _end(self, place: int, record: RequestRecord) -> None:
        """Keep and pass on what became of a request, and take the requests that its client sends next."""
        self._records[place] = record
        if self._writer is not None:
            self._writer.request(record)
        for successor in listed(self._on_finish(record) or ()) if self._on_finish is not None else ():
            if self._epoch and successor.arrival >= _TIME_OF_DAY:
                successor = _since(self._epoch, successor)
            if successor.arrival < self.now:
                successor = successor.moved(self.now)
            self._requests.append(successor)
            heappush(self._followers, (successor.arrival, len(self._requests) - 1))


def record_of(
    request: Request | Rejected, state: RequestState | None, error: str | None = None
) -> RequestRecord:
    """Return the record of a request.

    Args:
        request: The request.
        state: Its state in the scheduler, or None if it was rejected.
        error: Why it was rejected.
    """
    if isinstance(request, Rejected):
        return RequestRecord(request.id, request.arrival, error=request.error)
    if state is None:
        length = None if isinstance(request.prompt, str) else request.num_prompt_tokens
        return RequestRecord(
            request.id, request.arrival, length, request.max_tokens, request.client, error=error
        )
    return RequestRecord(
        id=request.id,
        arrival=request.arrival,
        num_prompt_tokens=state.num_prompt_tokens,
        max_tokens=request.max_tokens,
        client=request.client,
        queued=state.queued,
        first_scheduled=state.first_scheduled,
        tokens=tuple(state.output_token_ids),
        token_times=tuple(state.token_times),
        finish_reason=state.finish_reason,
        num_preemptions=state.num_preemptions,
        num_cached_tokens=state.num_cached_tokens,
        num_recomputed_tokens=state.num_recomputed_tokens,
        error=state.error,
        logprobs=tuple(state.logprobs),
    )
