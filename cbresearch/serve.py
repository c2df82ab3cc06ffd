"""The one loop: arrivals, clock, steps, finish."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Protocol

from cbresearch.plan import Plan, StepResult
from cbresearch.request import Refusal, Request, RequestState
from cbresearch.scheduler import Scheduler
from cbresearch.scheduler.admission import check_request
from cbresearch.trace import RequestRecord, StepRecord, Trace


class Executor(Protocol):
    """Something that carries out plans: a model, or a model of its cost."""

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
        result = self.executor.execute(plan)
        if not 0 <= result.duration < math.inf:
            raise ValueError(
                f"step {plan.step} took {result.duration} seconds; a cost is finite and not negative"
            )
        committed = self.scheduler.commit(plan, result, start + result.duration)
        record = StepRecord(
            start,
            result.duration,
            plan,
            tuple(state.id for state in committed.finished),
            *committed[1:],
            device_duration=result.device_duration,
        )
        return record, committed.finished


def serve(
    requests: Iterable[Request | Refusal],
    scheduler: Scheduler,
    executor: Executor,
    *,
    on_step: Callable[[StepRecord], object] | None = None,
    then: Callable[[RequestRecord], Iterable[Request]] | None = None,
) -> Trace:
    """Serve requests until all are finished.

    The clock is virtual with either executor: it advances by each step's duration, and jumps to the next
    arrival when there is nothing to do. So a run of a real model can be replayed by the simulator.

    Args:
        requests: Who comes; a `Refusal` only keeps its place in the results.
        scheduler: A scheduler that has served nobody yet.
        executor: Who carries out the plans.
        on_step: Called with each step's record, for a progress bar.
        then: Called with the record of each request that ends, a refused one too; returns the requests
            that its client sends next (a user who waits for an answer, the next turn of a chat). They come
            behind those given, and arrive no earlier than the moment at which they are sent.

    Returns:
        The trace. A request that cannot be served is in it with its error; the others are served.
    """
    given = list(requests)
    refused: dict[int, str] = {}
    arrivals = [
        (request.arrival, place) for place, request in enumerate(given) if isinstance(request, Request)
    ]
    heapify(arrivals)
    loop = Loop(scheduler, executor)
    states: dict[int, RequestState] = {}
    steps: list[StepRecord] = []
    now = 0.0

    def virtual() -> float:
        return now

    def follow_up(request: Request, state: RequestState | None, error: str | None = None) -> None:
        for successor in then(record_of(request, state, error)) if then is not None else ():
            if successor.arrival < now:
                successor = replace(successor, arrival=now)
            heappush(arrivals, (successor.arrival, len(given)))
            given.append(successor)

    while arrivals or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            _, place = heappop(arrivals)
            request = given[place]
            assert isinstance(request, Request)
            try:
                states[place] = loop.submit(request)
            except ValueError as error:
                refused[place] = str(error)
                follow_up(request, None, refused[place])
        if not scheduler.has_work:
            continue
        wake = scheduler.wakes(now)
        if wake is not None:
            now = min(wake, arrivals[0][0]) if arrivals else wake
            continue
        step, finished = loop.step(virtual)
        steps.append(step)
        now = step.end
        for state in finished:
            follow_up(state.request, state)
        if on_step is not None:
            on_step(steps[-1])
    return Trace(
        policy=scheduler.policy.name,
        scheduler=scheduler.config,
        cache=scheduler.blocks.config,
        steps=tuple(steps),
        requests=tuple(
            record_of(request, states.get(place), refused.get(place)) for place, request in enumerate(given)
        ),
    )


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
