"""Serve requests without a model: a cost model says how long each step takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel, Linear, Recorded
from cbresearch.plan import Plan, StepResult
from cbresearch.policies import Policy
from cbresearch.request import Refusal, Request, RequestState
from cbresearch.scheduler import Foresight, Scheduler
from cbresearch.serve import serve
from cbresearch.trace import RequestRecord, StepRecord, Trace

_MAX_ROOMY_TOKENS = 2**20

UNIT_STEP = Linear(step=1.0)
"""One second a step, whatever is in it."""


class CostExecutor:
    """Carry out plans by cost alone.

    A request ends after its `output_length`, or after `max_tokens` where that is None. The tokens are
    those given for it, or zeros.

    Args:
        cost: The step time.
        outputs: Output token ids by request id, from an earlier run.
        errors: What requests fail of in the place of the token behind those, by request id.

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
            raise TypeError(
                f"cost is {cost!r}; give a function from a Plan to seconds, such as costs.Linear(step=0.01)"
            )
        self.cost = cost
        self._outputs = outputs or {}
        self._errors = errors or {}
        # Of who runs: the prompt's length, the output's if it is known, and the most that it can be; then
        # the length of both together at the end.
        self._lengths: dict[str, tuple[int, int | None, int, int]] = {}

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
            lengths[request.id] = prompt, output, most, end
        tokens, stopped, failed = {}, [], {}
        for request_id, _, start, num_tokens, _, samples, _ in plan.scheduled:
            if not samples:
                continue
            num_prompt_tokens, output_length, max_tokens, _ = lengths[request_id]
            # Whoever samples has all its tokens computed, those that it generated before included.
            place = start + num_tokens - num_prompt_tokens
            known = outputs.get(request_id)
            if known is not None and place == len(known) and request_id in self._errors:
                failed[request_id] = self._errors[request_id]
                del lengths[request_id]
                continue
            tokens[request_id] = known[place] if known is not None else 0
            if place + 1 == output_length:
                stopped.append(request_id)
                del lengths[request_id]
            elif place + 1 >= max_tokens:
                del lengths[request_id]
        return StepResult(self.cost(plan), tokens, frozenset(stopped), failed)

    @property
    def foresight(self) -> Foresight | None:
        """Return what is needed to take many steps at once, or None where the cost or a subclass decides."""
        durations = _durations_of(self.cost)
        if durations is None or self._outputs or type(self).execute is not CostExecutor.execute:
            return None
        return _Known(durations, self._lengths)


class _Known:
    """What a cost executor without given outputs knows beforehand."""

    def __init__(
        self,
        durations: Callable[[int, range], Sequence[float]],
        lengths: dict[str, tuple[int, int | None, int, int]],
    ) -> None:
        self.durations = durations
        self._lengths = lengths

    def num_left(self, states: Sequence[RequestState]) -> list[int]:
        """Return how many output tokens requests still get."""
        lengths = self._lengths
        return [lengths[state.id][3] - state.num_tokens for state in states]

    def reason(self, state: RequestState) -> str:
        """Return the reason for which a request ends that has all its output tokens."""
        return "stop" if len(state.output_token_ids) == state.request.output_length else "length"

    def tokens(self, number: int) -> Sequence[int]:
        """Return zeros."""
        return [0] * number

    def leave(self, request_id: str) -> None:
        """Forget a request."""
        del self._lengths[request_id]


def _durations_of(cost: CostModel) -> Callable[[int, range], Sequence[float]] | None:
    """Return a cost model's `durations`, unless a class derived from the one that has it costs otherwise."""
    for kind in type(cost).__mro__:
        if "durations" in vars(kind):
            return cost.durations  # type: ignore[attr-defined, no-any-return]
        if "__call__" in vars(kind):
            return None
    return None


def roomy_pool(
    requests: Iterable[Request | Refusal],
    max_num_seqs: int,
    block_size: int = 16,
    max_model_len: int | None = None,
) -> CacheConfig:
    """Return a pool in which full seats can never run out of memory.

    Args:
        requests: Who comes; a text prompt counts nothing.
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
    # A length with too many zeros must not fill the host's memory with a pool: the request is refused.
    longest = min(max_model_len or _MAX_ROOMY_TOKENS, _MAX_ROOMY_TOKENS)
    blocks = nlargest(max_num_seqs, (-(-length // block_size) for length in lengths if length <= longest))
    return CacheConfig(max(1, sum(blocks)), block_size)


def simulate(
    requests: Iterable[Request | Refusal],
    policy: str | Policy = "fcfs",
    *,
    cost: CostModel = UNIT_STEP,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    then: Callable[[RequestRecord], Iterable[Request]] | None = None,
    fast_forward: bool = True,
) -> Trace:
    """Serve requests in the simulator.

    Args:
        requests: Who comes; a prompt may be a mere length.
        policy: A policy or its name.
        cost: The step time; one second a step by default, so that seconds count steps.
        scheduler: The limits of a step.
        cache: The KV pool; by default one in which memory never runs out.
        on_step: Called with each step's record.
        then: Says which requests follow on one that ends, as for `serve`.
        fast_forward: Take many steps at once where that makes no difference, as for `serve`.

    Raises:
        TypeError: The requests are a workload's name, the cost cannot be called, or the policy is none.
        ValueError: The policy's name or option is unknown, or a step's cost is negative or not finite.
    """
    if isinstance(requests, str):
        raise TypeError(
            f"the requests are {requests!r}; give a list of them, such as workloads.load({requests!r}, rng), "
            "or ask compare_simulated"
        )
    requests = list(requests)
    scheduler = scheduler or SchedulerConfig()
    if cache is None:
        cache = roomy_pool(requests, scheduler.max_num_seqs)
    policy = policies.get(policy)
    # A cost model that can tell a step's time beforehand is the policy's step-time model as well.
    served = Scheduler(policy, scheduler, cache, getattr(cost, "seconds", None))
    return serve(requests, served, CostExecutor(cost), on_step=on_step, then=then, fast_forward=fast_forward)


def replay(
    trace: Trace,
    requests: Iterable[Request | Refusal],
    policy: str | Policy,
    step_time: Callable[[int, int], float] | None = None,
) -> Trace:
    """Serve the requests of a recorded run again in the simulator, with the durations that it recorded.

    The plans come out equal, step for step (`trace.steps[k].plan`), if nothing that schedules depends on
    the model except how long a step takes and where each output ends.

    Args:
        trace: The recorded run.
        requests: Its requests, in the order in which they were given.
        policy: Its policy.
        step_time: Its step-time model, if the policy looked ahead with one.
    """
    again: list[Request | Refusal] = []
    for request, record in zip(requests, trace.requests, strict=True):
        if record.is_refused or isinstance(request, Refusal):
            # Whatever refused it then, it took no part.
            again.append(Refusal(request.id, record.error or "", request.arrival))
        else:
            stopped = record.finish_reason == "stop"
            again.append(replace(request, output_length=len(record.tokens) if stopped else None))
    policy = policies.get(policy)
    errors = {record.id: record.error for record in trace.served if record.error is not None}
    executor = CostExecutor(Recorded(step.duration for step in trace.steps), trace.outputs, errors)
    repeated = serve(again, Scheduler(policy, trace.scheduler, trace.cache, step_time), executor)
    pairs = zip(trace.requests, repeated.requests, strict=True)
    return replace(repeated, requests=tuple(old if old.is_refused else new for old, new in pairs))
