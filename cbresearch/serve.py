"""The one loop: arrivals, clock, steps, finish."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from cbresearch.leap import run_of
from cbresearch.plan import Plan, StepResult
from cbresearch.request import Refusal, Request, RequestState
from cbresearch.scheduler import Foresight, Scheduler, look_ahead
from cbresearch.scheduler.admission import check_request
from cbresearch.step import DecodeRun, PoolState
from cbresearch.trace import RequestRecord, StepRecord, Steps, Trace

_NUM_NEW_OBJECTS = 1_000_000
_NUM_LONG_RUN = 5_000


class Executor(Protocol):
    """Something that carries out plans: a model, or a model of its cost.

    One that knows beforehand what comes of a step has a `foresight`, too (see `scheduler.Foresight`), or None
    there; many steps are then taken at once.
    """

    def check(self, request: Request) -> None:
        """Refuse a request that this executor can never serve.

        Raises:
            ValueError: What is wrong, and the remedy.
        """

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step."""


class Loop:
    """Alternate plan, execution and commitment on a clock of the caller's.

    Args:
        scheduler: A scheduler.
        executor: Who carries out its plans.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def validate(self, request: Request) -> None:
        """Refuse a request that can never be served, whatever its id.

        Raises:
            ValueError: What it needs, what there is, and the remedy.
        """
        self.executor.check(request)
        check_request(request, self.scheduler.config, self.scheduler.blocks)

    def submit(self, request: Request) -> RequestState:
        """Queue a request.

        Raises:
            ValueError: The executor or the scheduler can never serve it; nothing has changed.
        """
        self.executor.check(request)
        return self.scheduler.submit(request)

    def foresight(self) -> Foresight | None:
        """Return what is needed to take many steps at once, if executor and scheduler allow for it."""
        kind = type(self.scheduler)
        if kind.schedule is not Scheduler.schedule or kind.commit is not Scheduler.commit:
            return None
        return getattr(self.executor, "foresight", None)

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
        if not 0 <= result.duration < math.inf:
            raise ValueError(
                f"step {plan.step} took {result.duration} seconds; a cost is finite and not negative"
            )
        return result

    def finish(
        self, plan: Plan, result: StepResult, start: float
    ) -> tuple[StepRecord, tuple[RequestState, ...]]:
        """Take in what a step produced that began at `start` seconds; return as for `step`."""
        committed = self.scheduler.commit(plan, result, start + result.duration)
        record = StepRecord(
            start,
            result.duration,
            plan,
            tuple(state.id for state in committed.finished),
            PoolState(*committed[1:]),
            device_duration=result.device_duration,
        )
        return record, committed.finished


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look for cycles more rarely, as long as this is entered.

    What a run makes is kept or freed by its reference counts, and nothing in it refers to itself. So the
    collector walks every record and every time in it, again and again, and finds nothing. What a policy or a
    sink leaves in circles is still found behind so many new objects, which bounds the memory that it takes.
    """
    before = gc.get_threshold()
    # Nothing to do for a run within a run, nor where the collector is off.
    if not gc.isenabled() or not 0 < before[0] < _NUM_NEW_OBJECTS:
        yield
        return
    # What the caller left in circles must not end up among the old objects.
    gc.collect(0)
    gc.set_threshold(_NUM_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if gc.get_count()[0] > _NUM_LONG_RUN and not gc.get_freeze_count():
            # Together they move all there is to the oldest generation, where it would be by now. Else the
            # next object that anyone makes would have a long run walked at once, for a fifth of its time.
            # Circles among it wait for a full collection.
            gc.freeze()
            gc.unfreeze()


@_rare_collections()
def serve(
    requests: Iterable[Request | Refusal],
    scheduler: Scheduler,
    executor: Executor,
    *,
    on_step: Callable[[StepRecord], object] | None = None,
    then: Callable[[RequestRecord], Iterable[Request]] | None = None,
    fast_forward: bool = True,
) -> Trace:
    """Serve requests until all are finished.

    The clock is virtual with either executor: it advances by each step's duration, and jumps to the next
    arrival when there is nothing to do. So a run of a real model can be replayed by the simulator.

    Args:
        requests: Who comes; a `Refusal` only keeps its place in the results.
        scheduler: A scheduler that has served nobody yet.
        executor: Who carries out the plans.
        on_step: Called with each step's record, for a progress bar; every step is then taken by itself.
        then: Called with the record of each request that ends, a refused one too; returns the requests
            that its client sends next (a user who waits for an answer, the next turn of a chat). They come
            behind those given, and arrive no earlier than the moment at which they are sent.
        fast_forward: Take many steps at once where the executor knows what comes of them and the policy says
            that it would decide nothing (`Policy.steady`). The trace is the same, bit for bit.

    Returns:
        The trace. A request that cannot be served is in it with its error; the others are served.
    """
    collected = _Collected(requests, on_step)
    given = collected.requests
    order = sorted(
        (request.arrival, place) for place, request in enumerate(given) if isinstance(request, Request)
    )
    # The list grows by the requests that follow; those are not in this order.
    upcoming = [(place, given[place]) for _, place in order]
    _run(
        iter(upcoming),  # type: ignore[arg-type]
        Loop(scheduler, executor),
        collected,
        then,
        fast_forward and on_step is None,
    )
    parts = collected.parts
    return Trace(
        policy=scheduler.policy.name,
        scheduler=scheduler.config,
        cache=scheduler.blocks.config,
        steps=Steps(parts) if any(isinstance(part, DecodeRun) for part in parts) else tuple(parts),  # type: ignore[arg-type]
        requests=tuple(
            record_of(request, collected.states.get(place), collected.refusals.get(place))
            for place, request in enumerate(given)
        ),
    )


class Sink(Protocol):
    """Where the records of a run go that is too long to keep them all."""

    def step(self, part: StepRecord | DecodeRun) -> object:
        """Take a step, or several that were taken at once."""

    def request(self, record: RequestRecord) -> object:
        """Take a request that is finished or refused."""


@_rare_collections()
def stream(
    requests: Iterable[Request],
    scheduler: Scheduler,
    executor: Executor,
    sink: Sink,
    *,
    then: Callable[[RequestRecord], Iterable[Request]] | None = None,
    fast_forward: bool = True,
) -> None:
    """Serve requests that come one by one, as `serve` does, and keep nothing of those that are finished.

    Args:
        requests: Who comes, in the order of arrival; each is asked for only when the one before has come.
        scheduler: A scheduler that has served nobody yet.
        executor: Who carries out the plans.
        sink: Where the records go, as they come about.
        then: As for `serve`.
        fast_forward: As for `serve`.

    Raises:
        ValueError: A request arrives before the one that was given before it.
    """
    _run(_in_order(requests), Loop(scheduler, executor), _Passed(sink, scheduler), then, fast_forward)


def _in_order(requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
    last = 0.0
    for request in requests:
        if request.arrival < last:
            raise ValueError(
                f"request {request.id!r} arrives at {request.arrival} s, before the one given before it, at "
                f"{last} s; give them in the order of arrival"
            )
        last = request.arrival
        yield 0, request


class _Collected:
    """All that happens in a run."""

    def __init__(
        self, requests: Iterable[Request | Refusal], on_step: Callable[[StepRecord], object] | None
    ) -> None:
        self.requests = list(requests)
        self.states: dict[int, RequestState] = {}
        self.refusals: dict[int, str] = {}
        self.parts: list[StepRecord | DecodeRun] = []
        self._on_step = on_step

    def step(self, part: StepRecord | DecodeRun) -> None:
        self.parts.append(part)
        if self._on_step is not None and isinstance(part, StepRecord):
            self._on_step(part)

    def follows(self, request: Request) -> int:
        self.requests.append(request)
        return len(self.requests) - 1

    def submitted(self, place: int, state: RequestState) -> None:
        self.states[place] = state

    def refused(self, place: int, request: Request, error: str) -> None:
        self.refusals[place] = error

    def finished(self, state: RequestState) -> None:
        pass


class _Passed:
    """Pass the records on; places play no part."""

    def __init__(self, sink: Sink, scheduler: Scheduler) -> None:
        self._sink, self._scheduler = sink, scheduler
        self._leaving: list[str] = []
        self.step = sink.step

    def follows(self, request: Request) -> int:
        return 0

    def submitted(self, place: int, state: RequestState) -> None:
        pass

    def refused(self, place: int, request: Request, error: str) -> None:
        self._sink.request(record_of(request, None, error))

    def finished(self, state: RequestState) -> None:
        self._sink.request(record_of(state.request, state))
        if self._scheduler.policy.keeps_seats:
            # Whoever is done may still have its row: it can be forgotten with the others of its batch.
            self._leaving.append(state.id)
            if self._scheduler.running:
                return
        for request_id in self._leaving or (state.id,):
            self._scheduler.forget(request_id)
        self._leaving.clear()


def _run(
    upcoming: Iterator[tuple[int, Request]],
    loop: Loop,
    sink: _Collected | _Passed,
    then: Callable[[RequestRecord], Iterable[Request]] | None,
    fast_forward: bool,
) -> None:
    """Serve requests that come in the order of arrival, each with its place, and those that follow."""
    scheduler = loop.scheduler
    foresight = loop.foresight() if fast_forward else None
    coming = next(upcoming, None)
    followers: list[tuple[float, int, Request]] = []
    now = 0.0

    def virtual() -> float:
        return now

    def follow_up(request: Request, state: RequestState | None, error: str | None = None) -> None:
        for successor in then(record_of(request, state, error)) if then is not None else ():
            if successor.arrival < now:
                successor = replace(successor, arrival=now)
            heappush(followers, (successor.arrival, sink.follows(successor), successor))

    def next_arrival() -> float:
        arrival = math.inf if coming is None else coming[1].arrival
        return min(arrival, followers[0][0]) if followers else arrival

    while scheduler.has_work or coming is not None or followers:
        arrival = next_arrival()
        if arrival > now and not scheduler.has_work:
            now = arrival
        while arrival <= now and (coming is not None or followers):
            if coming is not None and coming[1].arrival <= arrival:
                place, request = coming
                coming = next(upcoming, None)
            else:
                _, place, request = heappop(followers)
            try:
                sink.submitted(place, loop.submit(request))
            except ValueError as error:
                sink.refused(place, request, str(error))
                follow_up(request, None, str(error))
            arrival = next_arrival()
        if not scheduler.has_work:
            continue
        wake = scheduler.wakes(now)
        if wake is not None:
            now = min(wake, arrival)
            continue
        ahead = None
        if foresight is not None:
            ahead = look_ahead(scheduler, foresight, now, arrival, passes_finishes=then is None)
        if ahead is not None:
            sink.step(run_of(ahead.leap))
            now, finished = ahead.leap.ends[-1], ahead.finished
        else:
            step, finished = loop.step(virtual)
            now = step.end
            sink.step(step)
        for state in finished:
            sink.finished(state)
            if then is not None:
                follow_up(state.request, state)


def record_of(
    request: Request | Refusal, state: RequestState | None, error: str | None = None
) -> RequestRecord:
    """Return what there is to know of a request.

    Args:
        request: What was asked for.
        state: How far it came, or None if it was refused.
        error: Why it was refused.
    """
    if isinstance(request, Refusal):
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
