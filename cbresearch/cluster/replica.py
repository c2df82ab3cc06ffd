"""One replica of a cluster, and the routers that choose between replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.request import Request, RequestState
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Loop
from cbresearch.simulator import CostExecutor, check_limits
from cbresearch.step import Plan, StepResult
from cbresearch.trace import StepRecord

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """One replica of a cluster.

    Attributes:
        cost: Its step time.
        scheduler: The limits of a step.
        cache: Its KV pool.
        policy: Its policy's name.
        role: "both", or "prefill" for a replica that computes prompts and hands the requests on, or "decode"
            for one that continues them.

    Raises:
        TypeError: The cost or a limit is of another class.
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
        # Refuses a cost that cannot be called.
        CostExecutor(self.cost)
        check_limits(scheduler=(self.scheduler, SchedulerConfig), cache=(self.cache, CacheConfig))


class Replica:
    """A replica while it runs; routers read it.

    Attributes:
        place: Its place in the cluster.
        config: Its limits.
        num_routed: Requests that were sent to it.
        num_outstanding: Those of them that are not finished.
        loop: Its scheduler and its executor.
        steps: The records of its steps.
        states: The states of its requests, by id.
    """

    def __init__(self, place: int, config: ReplicaConfig) -> None:
        self.place, self.config = place, config
        self.num_routed = self.num_outstanding = 0
        step_time = getattr(config.cost, "seconds", None)
        scheduler = Scheduler(policies.get(config.policy), config.scheduler, config.cache, step_time)
        self.loop = Loop(scheduler, CostExecutor(config.cost))
        self.steps: list[StepRecord] = []
        self.states: dict[str, RequestState] = {}
        self._inbox: list[tuple[Request, RequestState | None]] = []
        self._running: tuple[float, Plan, StepResult] | None = None

    def reason_against(self, request: Request) -> str | None:
        """Return why the replica can never serve a request, or None."""
        try:
            self.loop.validate(request)
        except ValueError as error:
            return str(error)
        return None

    def send(self, request: Request, begun: RequestState | None = None) -> None:
        """Queue a request, which its scheduler sees from the next step on.

        Args:
            request: The request.
            begun: Its state in another replica, if its KV comes along.
        """
        self.num_routed += 1
        self.num_outstanding += 1
        self._inbox.append((request, begun))

    def begin_step(self, now: float) -> float | None:
        """Begin a step if none runs and requests are there; return when to look again, or None."""
        scheduler = self.loop.scheduler
        if self._running is not None:
            return None
        for request, begun in self._inbox:
            self.states[request.id] = scheduler.submit(request, begun, now)
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

    def end_step(self, now: float) -> Sequence[RequestState]:
        """End the running step if it is due; return the requests that it finished."""
        if self._running is None or self._running[0] + self._running[2].duration > now:
            return ()
        start, plan, result = self._running
        self._running = None
        record, finished = self.loop.finish(plan, result, start)
        self.steps.append(record)
        self.num_outstanding -= len(finished)
        return finished


Router = Callable[[Request, Sequence[Replica]], Replica]
"""Chooses one of the replicas that can serve a request; any function will do."""


def round_robin(request: Request, replicas: Sequence[Replica]) -> Replica:
    """Return the replica that was sent the fewest requests; of several, the first."""
    return min(replicas, key=lambda replica: (replica.num_routed, replica.place))


def least_outstanding(request: Request, replicas: Sequence[Replica]) -> Replica:
    """Return the replica with the fewest unfinished requests; of several, the first."""
    return min(replicas, key=lambda replica: (replica.num_outstanding, replica.place))
