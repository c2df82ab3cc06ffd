"""One server of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.step import Plan, StepResult
from cbresearch.request import Request, RequestState
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Loop
from cbresearch.simulator import CostExecutor
from cbresearch.trace import StepRecord

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One server of a cluster.

    Attributes:
        cost: Its step time.
        scheduler: The limits of a step.
        cache: Its KV pool.
        policy: Its policy's name.
        role: "both", or "prefill" for one that computes prompts and hands the requests on, or "decode"
            for one that takes them over.

    Raises:
        ValueError: The role or the policy is unknown.
    """

    cost: CostModel
    scheduler: SchedulerConfig
    cache: CacheConfig
    policy: str = "fcfs"
    role: str = "both"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a replica's role is {self.role!r}; choose one of {ROLES}")
        policies.get(self.policy)


class Replica:
    """A server of a cluster while it runs; a router reads it.

    Attributes:
        place: Its place in the cluster.
        config: What it is.
        num_outstanding: Requests that were sent to it and are not finished.
    """

    def __init__(self, place: int, config: ReplicaConfig) -> None:
        self.place = place
        self.config = config
        self.num_outstanding = 0
        ahead = getattr(config.cost, "seconds", None)
        mechanism = Scheduler(policies.get(config.policy), config.scheduler, config.cache, ahead)
        self.loop = Loop(mechanism, CostExecutor(config.cost))
        self.steps: list[StepRecord] = []
        self.states: dict[str, RequestState] = {}
        self._inbox: list[tuple[Request, RequestState | None]] = []
        self._running: tuple[float, Plan, StepResult] | None = None

    @property
    def kv_share(self) -> float:
        """Return the share of its KV pool that its requests hold, or will take when they are seated."""
        blocks = self.loop.scheduler.kv
        queued = sum(blocks.blocks_for(request.num_prompt_tokens) for request, _ in self._inbox)
        queued += sum(blocks.blocks_for(state.num_tokens) for state in self.loop.scheduler.waiting)
        return (blocks.num_held_blocks + queued) / blocks.num_blocks

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many of a request's first tokens are in its prefix cache."""
        prompt = request.prompt
        if not isinstance(prompt, tuple):
            return 0
        blocks = self.loop.scheduler.kv
        extra = () if request.cache_salt is None else (("salt", request.cache_salt),)
        return len(blocks.match(prompt, extra)) * blocks.config.block_size

    def refusal(self, request: Request) -> str | None:
        """Return why it can never serve a request, or None."""
        try:
            self.loop.validate(request)
        except ValueError as error:
            return str(error)
        return None

    def send(self, request: Request, begun: RequestState | None = None) -> None:
        """Queue a request; it is seen from the next step on."""
        self.num_outstanding += 1
        self._inbox.append((request, begun))

    def begin(self, now: float) -> float | None:
        """Begin a step if none runs and there is work; return when it ends or wants to begin."""
        scheduler = self.loop.scheduler
        if self._running is not None:
            return None
        for request, begun in self._inbox:
            self.states[request.id] = scheduler.submit(request, begun)
        self._inbox.clear()
        if not scheduler.has_work:
            return None
        wake = scheduler.wakes(now)
        if wake is not None:
            return wake
        plan = scheduler.schedule(now)
        result = self.loop.execute(plan)
        self._running = now, plan, result
        return now + result.duration

    def end(self, now: float) -> Sequence[RequestState]:
        """End the step that runs, if it is due; return who is finished by it."""
        if self._running is None or self._running[0] + self._running[2].duration > now:
            return ()
        start, plan, result = self._running
        self._running = None
        record, finished = self.loop.finish(plan, result, start)
        self.steps.append(record)
        self.num_outstanding -= len(finished)
        return finished
