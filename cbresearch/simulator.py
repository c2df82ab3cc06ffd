"""Serve requests without a model: a cost model says how long each step takes."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from heapq import nlargest
from typing import Any, NamedTuple

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel, Linear, Replayed
from cbresearch.fast_forward import Outlook
from cbresearch.policies import Policy
from cbresearch.request import Rejected, Request, RequestState, listed
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.step import Plan, StepResult
from cbresearch.trace import RequestRecord, StepRecord, Trace, TraceWriter

_MAX_UNLIMITED_TOKENS = 2**20

UNIT_STEP = Linear(step=1.0)
"""One second a step, whatever is in it."""


class _Length(NamedTuple):
    """What is known beforehand of a running request's output, in tokens.

    Attributes:
        prompt: Length of the prompt.
        output: Output length at which the answer really ends, or None.
        most: Output length at which it is cut off.
        end: Length of prompt and output together at the end.
    """

    prompt: int
    output: int | None
    most: int
    end: int


class CostExecutor:
    """Carry out plans by cost alone.

    A request ends after its `output_length`, or after `max_tokens` where that is None. The tokens are
    those given for it, and zeros behind them.

    Args:
        cost: The step time.
        outputs: Output token ids by request id, from an earlier run.
        errors: Error messages by request id, of requests that fail in the place of the token behind those.

    Raises:
        TypeError: The cost cannot be called.
    """

    def __init__(
        self,
        cost: CostModel,
        outputs: Mapping[str, Sequence[int]] | None = None,
        errors: Mapping[str, str] | None = None,
    ) -> None:
        if not callable(cost):
            raise TypeError(f"cost is {cost!r}; give a function from a Plan to seconds, such as Linear(0.01)")
        self.cost = cost
        self._outputs = outputs or {}
        self._errors = errors or {}
        self._lengths: dict[str, _Length] = {}

    def check(self, request: Request) -> None:
        """Accept every request: a length is enough here."""

    def execute(self, plan: Plan) -> StepResult:
        """Return the step's predicted duration and a token for each entry that samples."""
        lengths, outputs = self._lengths, self._outputs
        for request_id in plan.aborted:
            lengths.pop(request_id, None)
        for request, _, _ in plan.admitted:
            prompt, output, most = request.num_prompt_tokens, request.output_length, request.max_tokens
            end = prompt + (most if output is None else min(output, most))
            lengths[request.id] = _Length(prompt, output, most, end)
        tokens, stopped, failed = {}, [], {}
        for request_id, _, start, num_tokens, _, samples, _ in plan.rows:
            if not samples:
                continue
            num_prompt_tokens, output_length, max_tokens, _ = lengths[request_id]
            # A request that samples has all its tokens computed, those that it generated before included.
            place = start + num_tokens - num_prompt_tokens
            known = outputs.get(request_id, ())
            if place == len(known) and request_id in self._errors:
                failed[request_id] = self._errors[request_id]
                del lengths[request_id]
                continue
            tokens[request_id] = known[place] if place < len(known) else 0
            if place + 1 == output_length:
                stopped.append(request_id)
                del lengths[request_id]
            elif place + 1 >= max_tokens:
                del lengths[request_id]
        return StepResult(self.cost(plan), tokens, frozenset(stopped), failed)

    @property
    def outlook(self) -> Outlook | None:
        """Return what is needed to take many steps at once, or None where the cost or a subclass decides."""
        durations = _durations_of(self.cost)
        if durations is None or self._outputs or type(self).execute is not CostExecutor.execute:
            return None
        return _Known(durations, self._lengths)


class _Known:
    """What a cost executor without given outputs knows beforehand; see `fast_forward.Outlook`."""

    def __init__(
        self, durations: Callable[[int, range], Sequence[float]], lengths: dict[str, _Length]
    ) -> None:
        self.durations = durations
        self._lengths = lengths

    def num_left(self, states: Sequence[RequestState]) -> list[int]:
        """Return how many output tokens requests still get."""
        lengths = self._lengths
        return [lengths[state.id].end - state.num_tokens for state in states]

    def finish_reason(self, state: RequestState) -> str:
        """Return the reason for which a request ends that has all its output tokens."""
        return "stop" if len(state.output_token_ids) == state.request.output_length else "length"

    def tokens(self, number: int) -> Sequence[int]:
        """Return zeros."""
        return [0] * number

    def finished(self, request_id: str) -> None:
        """Drop a request's lengths."""
        del self._lengths[request_id]


def _durations_of(cost: CostModel) -> Callable[[int, range], Sequence[float]] | None:
    """Return a cost model's `durations`, unless a class derived from the one that has it costs otherwise."""
    for kind in type(cost).__mro__:
        if "durations" in vars(kind):
            return cost.durations  # type: ignore[attr-defined, no-any-return]
        if "__call__" in vars(kind):
            return None
    return None


def unlimited_cache(
    requests: Iterable[Request | Rejected],
    max_num_seqs: int,
    block_size: int = 16,
    max_model_len: int | None = None,
) -> CacheConfig:
    """Return a KV pool that is never the limit: the largest requests of a workload fit all seats at once.

    Args:
        requests: The workload; a text prompt counts nothing.
        max_num_seqs: Seats.
        block_size: Tokens per block.
        max_model_len: Longest request in tokens that can be served, or None for no limit.
    """
    # Raises for a block size that cannot be, before it divides.
    CacheConfig(1, block_size)
    lengths = (
        request.num_prompt_tokens + request.max_tokens
        for request in requests
        if isinstance(request, Request) and not isinstance(request.prompt, str)
    )
    # A length with too many zeros must not fill the host's memory with a pool: the request is rejected.
    longest = min(max_model_len or _MAX_UNLIMITED_TOKENS, _MAX_UNLIMITED_TOKENS)
    blocks = nlargest(max_num_seqs, (-(-length // block_size) for length in lengths if length <= longest))
    return CacheConfig(max(1, sum(blocks)), block_size)


def check_limits(**given: tuple[object, type]) -> None:
    """Reject limits that are neither None nor of their class, given as `name=(value, class)`; TypeError."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind | None):
            raise TypeError(f"{name} is {value!r}; give a {kind.__name__}(…), or leave it out")


def simulate(
    requests: Iterable[Request | Rejected],
    policy: str | Policy = "fcfs",
    *,
    cost: CostModel = UNIT_STEP,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    on_finish: Callable[[RequestRecord], Iterable[Request]] | None = None,
    fast_forward: bool = True,
    verify: bool = False,
    writer: TraceWriter | None = None,
) -> Trace:
    """Serve requests in the simulator.

    Args:
        requests: The workload; a prompt may be a mere length.
        policy: A policy or its name.
        cost: The step time; one second a step by default, so that seconds count steps.
        scheduler: The limits of a step.
        cache: The KV pool; by default one in which memory never runs out.
        on_step: Called with each step's record.
        on_finish: Says which requests follow on one that ends, as for `serve`.
        fast_forward: Take many steps at once where that makes no difference, as for `serve`.
        verify: Serve the workload step by step as well, and compare: a policy that wrongly says
            `fast_forward = True` is found. Takes the time of both.
        writer: Gets each step and request as it comes about, as for `serve`.

    Raises:
        TypeError: The requests are no list of them, the cost cannot be called, or the policy or a limit is of
            another class.
        ValueError: The policy's name or option is unknown, or a step's cost is negative or not finite.
        RuntimeError: `verify` found a step that fast-forward got wrong; the message names it.
    """
    if isinstance(requests, str):
        remedy = f"workloads.load({requests!r}, rng), or ask compare({requests!r}, policies, cost=...)"
        raise TypeError(f"the requests are {requests!r}; give a list of them, such as {remedy}")
    check_limits(scheduler=(scheduler, SchedulerConfig), cache=(cache, CacheConfig))
    requests = listed(requests)
    limits = scheduler or SchedulerConfig()
    pool = cache or unlimited_cache(requests, limits.max_num_seqs)
    policy = policies.get(policy)

    def run(**options: Any) -> Trace:
        # A cost model that can tell a step's time beforehand is the policy's step-time model as well.
        served = Scheduler(policy, limits, pool, getattr(cost, "seconds", None))
        return serve(requests, served, CostExecutor(cost), **options)

    if not verify:
        return run(on_step=on_step, on_finish=on_finish, fast_forward=fast_forward, writer=writer)
    # A client that remembers its run is asked once; the second run gets what it sent in the first.
    sent: deque[tuple[RequestRecord, tuple[Request, ...]]] = deque()

    def noted(record: RequestRecord) -> tuple[Request, ...]:
        assert on_finish is not None
        sent.append((record, tuple(on_finish(record))))
        return sent[-1][1]

    def repeated(record: RequestRecord) -> tuple[Request, ...]:
        known, followers = sent.popleft() if sent else (None, ())
        return followers if record == known else ()

    # With `on_step` every step would be taken by itself, and nothing be proved.
    trace = run(on_finish=on_finish and noted, fast_forward=fast_forward, writer=writer)
    _require_equal(trace, run(on_step=on_step, on_finish=on_finish and repeated, fast_forward=False))
    return trace


def _require_equal(fast: Trace, stepped: Trace) -> None:
    """Raise RuntimeError where a trace differs from that of the same run taken step by step."""
    remedy = "set `fast_forward` to False, or let no decision turn on the time, tokens served or free blocks"
    for place, (one, other) in enumerate(zip(fast.steps, stepped.steps, strict=False)):
        wrong = [
            field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)
        ]
        if wrong:
            raise RuntimeError(
                f"policy {fast.policy!r} says fast_forward, but step {place} taken at once differs from the "
                f"same step taken by itself in {', '.join(wrong)}: {one} instead of {other}; {remedy}"
            )
    if len(fast.steps) != len(stepped.steps) or fast.requests != stepped.requests:
        raise RuntimeError(
            f"policy {fast.policy!r} says fast_forward, but {len(fast.steps)} steps taken at once differ "
            f"from {len(stepped.steps)} steps taken one by one; {remedy}"
        )


def replay(
    trace: Trace,
    requests: Iterable[Request | Rejected],
    policy: str | Policy,
    step_time: Callable[[int, int], float] | None = None,
) -> Trace:
    """Serve the requests of a recorded run again in the simulator, with the durations that it recorded.

    The plans come out equal, step for step (`trace.steps[k].plan`), if nothing that schedules depends on
    the model except how long a step takes and where each output ends.

    Args:
        trace: The recorded run; of a window of one, the run.
        requests: Its requests, in the order in which they were given.
        policy: Its policy.
        step_time: Its step-time model, if the policy looked ahead with one.
    """
    trace = trace.whole or trace
    again: list[Request | Rejected] = []
    for request, record in zip(requests, trace.requests, strict=True):
        if record.is_rejected or isinstance(request, Rejected):
            # Whatever rejected it then, it took no part.
            again.append(Rejected(request.id, record.error or "", request.arrival))
        else:
            again.append(_with_known_end(request, record))
    executor = CostExecutor(Replayed(step.duration for step in trace.steps), trace.outputs, _errors(trace))
    served = Scheduler(policies.get(policy), trace.scheduler, trace.cache, step_time)
    repeated = serve(again, served, executor)
    pairs = zip(trace.requests, repeated.requests, strict=True)
    return replace(repeated, requests=tuple(old if old.is_rejected else new for old, new in pairs))


class PlanDifference(NamedTuple):
    """A recorded step that is planned otherwise.

    Attributes:
        step: Index of the step.
        recorded: The plan in the trace.
        replanned: The plan made anew; None if there was nothing to plan, or planning failed.
        reason: The fields that differ, or the error.
    """

    step: int
    recorded: Plan
    replanned: Plan | None
    reason: str


class Replan(NamedTuple):
    """How the plans of a recorded run compare with plans made anew.

    Attributes:
        num_steps: Recorded steps.
        num_equal: Those planned alike.
        first_difference: The first of the others, or None.
    """

    num_steps: int
    num_equal: int
    first_difference: PlanDifference | None


def policy_of(trace: Trace, policy: str | Policy | None = None) -> Policy:
    """Return a policy, by default that of a recorded run.

    Raises:
        ValueError: The policy is unknown; or it is a file that only the trace names, which may come from a
            stranger: name it yourself to run it.
    """
    if policy is None and ".py" in trace.policy:
        raise ValueError(
            f"the trace names the policy {trace.policy!r}, which would run that file; if you trust it, say "
            f"so by policy={trace.policy!r}"
        )
    return policies.get(policy or trace.policy)


def replan(
    trace: Trace,
    policy: str | Policy | None = None,
    step_time: Callable[[int, int], float] | None = None,
    requests: Iterable[Request | Rejected] = (),
) -> Replan:
    """Plan each recorded step anew, on the clock of the recorded run: conformance for any engine.

    Requests are queued at the times at which the recorded scheduler got to know them, and get the outputs
    that they got then. Of another engine's run (`trace.origin`) the decisions are compared: the requests
    scheduled, in their order, with their tokens, and those preempted; block ids are the engine's own.

    Args:
        trace: The recorded run; of a window of one, the run.
        policy: A policy or its name; by default the trace's.
        step_time: Its step-time model, if it looks ahead with one.
        requests: Its requests. Only those that were never admitted are looked up here: of them the trace has
            neither token ids nor priority, deadline, prediction and group.

    Raises:
        ValueError: As for `policy_of`.
    """
    trace = trace.whole or trace
    scheduler = Scheduler(policy_of(trace, policy), trace.scheduler, trace.cache, step_time)
    executor = CostExecutor(UNIT_STEP, trace.outputs, _errors(trace))
    coming = _queued_requests(trace, requests)
    num_equal, first = 0, None
    ended: set[str] = set()
    for place, (record, aborted_next) in enumerate(zip(trace.steps, _next_aborts(trace), strict=True)):
        replanned, reason = None, "no request to plan for"
        try:
            while coming and coming[-1][0] <= record.start:
                queued, request = coming.pop()
                scheduler.submit(request, now=queued)
            for request_id in record.plan.aborted:
                if request_id not in ended:
                    scheduler.abort(request_id)
            if scheduler.has_work:
                replanned = scheduler.schedule(record.start)
                result = executor.execute(replanned)
                ended = _aborted_meanwhile(record, aborted_next, scheduler.running, result, trace.outputs)
                for request_id in ended:
                    scheduler.abort(request_id)
                scheduler.commit(replanned, result, record.end)
                reason = _difference(record.plan, replanned, trace.origin.engine == "cbresearch")
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        num_equal += not reason
        if reason and first is None:
            first = PlanDifference(place, record.plan, replanned, reason)
    return Replan(len(trace.steps), num_equal, first)


def _next_aborts(trace: Trace) -> list[tuple[str, ...]]:
    """Return the ids of the requests that were aborted behind each step's plan."""
    aborts: list[tuple[str, ...]] = []
    for part in trace.parts:
        aborts += [part.plan.aborted] if isinstance(part, StepRecord) else [()] * len(part)
    return [*aborts[1:], ()] if aborts else []


def _aborted_meanwhile(
    record: StepRecord,
    aborted_next: Sequence[str],
    running: Sequence[RequestState],
    result: StepResult,
    outputs: Mapping[str, Sequence[int]],
) -> set[str]:
    """Return which aborted requests ended while the step was computed, so that it gave them nothing.

    A token that the record lacks tells of it; for a part of a prompt, the number of running requests does.
    """
    aborted = [state for state in running if state.id in aborted_next]
    ended = {
        state.id
        for state in aborted
        if state.id in result.tokens and state.num_output_tokens == len(outputs.get(state.id, ()))
    }
    num_missing = len(running) - len(ended) - record.pool.num_running
    chunks = [state.id for state in aborted if state.id not in result.tokens]
    return ended.union(chunks[: max(0, num_missing)])


def _queued_requests(trace: Trace, requests: Iterable[Request | Rejected]) -> list[tuple[float, Request]]:
    """Return when which request was queued, the last first; plans know all of a request that was admitted."""
    known = {request.id: request for request in requests if isinstance(request, Request)}
    known |= {entry.request.id: entry.request for step in trace.steps for entry in step.plan.admitted}
    coming = []
    for place, record in enumerate(trace.requests):
        if record.is_rejected or record.num_prompt_tokens is None or record.max_tokens is None:
            continue
        request = known.get(record.id) or Request(
            record.id, record.num_prompt_tokens, record.max_tokens, record.arrival, client=record.client
        )
        queued = record.arrival if record.queued is None else record.queued
        coming.append((queued, record.arrival, place, _with_known_end(request, record)))
    coming.sort(key=lambda entry: entry[:3], reverse=True)
    return [(queued, request) for queued, _, _, request in coming]


def _with_known_end(request: Request, record: RequestRecord) -> Request:
    """Return a request that ends where it ended in a recorded run."""
    length = len(record.tokens) if record.finish_reason == "stop" else None
    if not record.is_complete and (request.output_length or 0) > len(record.tokens):
        # It never came to its end, but a contiguous pool may have reserved room for just that.
        length = request.output_length
    return replace(request, output_length=length)


def _errors(trace: Trace) -> dict[str, str]:
    return {record.id: record.error for record in trace.served if record.error is not None}


def _difference(recorded: Plan, replanned: Plan, is_ours: bool) -> str:
    """Return the fields in which two plans differ, an empty text for none."""
    if is_ours:
        names = [field.name for field in fields(Plan) if field.name != "step"]
        return ", ".join(name for name in names if getattr(recorded, name) != getattr(replanned, name))
    pairs = (
        [(entry.request_id, entry.start, entry.num_tokens) for entry in plan.scheduled]
        for plan in (recorded, replanned)
    )
    reasons = [] if next(pairs) == next(pairs) else ["scheduled"]
    if set(recorded.preempted) != set(replanned.preempted):
        reasons.append("preempted")
    return ", ".join(reasons)
