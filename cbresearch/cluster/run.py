"""The clock of a cluster: arrivals, steps that end, and KV on its way."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from cbresearch.checks import real
from cbresearch.cluster.replica import Replica, ReplicaConfig, Router, least_outstanding
from cbresearch.request import Rejected, Request, RequestState
from cbresearch.serve import from_first_arrival, record_of
from cbresearch.simulator import check_limits
from cbresearch.trace import Origin, RequestRecord, Trace


@dataclass(frozen=True, slots=True)
class Handover:
    """The way of a request's KV from one replica to another.

    Attributes:
        latency: Seconds that it takes whatever its size.
        bytes_per_token: KV bytes of one token.
        bandwidth: Bytes/s.

    Raises:
        ValueError: A number is negative or not finite, or the bandwidth is 0.
    """

    latency: float = 0.0
    bytes_per_token: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name in ("latency", "bytes_per_token"):
            real(f"Handover: {name}", getattr(self, name))
        if self.bandwidth != math.inf and not real("Handover: bandwidth", self.bandwidth):
            raise ValueError(f"Handover: bandwidth is {self.bandwidth!r}; give bytes per second above 0")

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that the KV of some tokens takes."""
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """What happened in a cluster.

    Attributes:
        router: The router's name.
        replicas: Each replica's trace; a request that was handed over is in both of its replicas'.
        requests: The requests as their clients saw them, in the order given.
        routes: By request id, the places of the replicas that served it: one, or that of its prompt and then
            that of its decoding; rejected requests are not in it.
    """

    router: str
    replicas: tuple[Trace, ...]
    requests: tuple[RequestRecord, ...]
    routes: dict[str, tuple[int, ...]]

    @property
    def trace(self) -> Trace:
        """Return the requests as one trace without steps, for metrics of requests."""
        return replace(self.replicas[0], policy=self.router, steps=(), requests=self.requests)


def simulate_cluster(
    requests: Iterable[Request | Rejected],
    replicas: Sequence[ReplicaConfig],
    router: Router = least_outstanding,
    handover: Handover | None = None,
) -> ClusterRun:
    """Serve requests on several replicas, each step by step, on one virtual clock.

    A router sees what there is when a request arrives: running steps have not ended. Where there are replicas
    for prefill and for decode, a request's prompt and first token are computed by one of the first kind, its
    KV moves, and one of the second kind continues it (DistServe, OSDI 2024).

    Args:
        requests: The workload.
        replicas: The cluster.
        router: Chooses each request's replica, and the one to which its KV moves.
        handover: How long KV takes to move; no time by default.

    Returns:
        The run. A request that no replica can serve is in it with its error.

    Raises:
        ValueError: An id is given twice, or there is no replica, or only one of the two halves of a
            disaggregated cluster.
    """
    given, epoch = from_first_arrival(requests)
    replicas = list(replicas)
    served = [request for request in given if isinstance(request, Request)]
    _check_cluster(served, replicas)
    cluster = _Cluster(
        [Replica(place, config) for place, config in enumerate(replicas)], router, handover or Handover()
    )
    cluster.run(served)
    traces = tuple(
        Trace(
            policy=replica.loop.scheduler.policy.name,
            scheduler=replica.config.scheduler,
            cache=replica.config.cache,
            steps=tuple(replica.steps),
            requests=tuple(record_of(state.request, state) for state in replica.states.values()),
            origin=Origin(epoch=epoch),
        )
        for replica in cluster.replicas
    )
    name = getattr(router, "__name__", type(router).__name__)
    return ClusterRun(name, traces, tuple(map(cluster.record, given)), cluster.routes)


class _Cluster:
    """The replicas, the router, and what is under way between them."""

    def __init__(self, replicas: list[Replica], router: Router, handover: Handover) -> None:
        self.replicas = replicas
        self.routes: dict[str, tuple[int, ...]] = {}
        self._decoders = [replica for replica in replicas if replica.config.role == "decode"]
        self._fronts = [replica for replica in replicas if replica.config.role != "decode"]
        self._router, self._handover = router, handover
        self._errors: dict[str, str] = {}
        # Requests whose prompt is at a replica for prefill, which knows of their first token only.
        self._whole: dict[str, Request] = {}
        self._numbers = count()
        # Seconds, number, the request that arrives (with its state if its KV moved) or None for a replica.
        self._events: list[tuple[float, int, tuple[Request, RequestState | None] | None]] = []

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests until all are finished."""
        for request in sorted(requests, key=lambda request: request.arrival):
            self._at(request.arrival, (request, None))
        while self._events:
            now = self._events[0][0]
            happening = []
            while self._events and self._events[0][0] == now:
                happening.append(heappop(self._events)[2])
            # Steps end before a request arrives, as in a single server.
            for replica in self.replicas:
                for state in replica.end_step(now):
                    self._hand_over(state, now)
            for event in happening:
                if event is not None:
                    request, begun = event
                    self._arrive(request) if begun is None else self._continue(request, begun)
            for replica in self.replicas:
                wake = replica.begin_step(now)
                if wake is not None:
                    self._at(wake, None)

    def record(self, request: Request | Rejected) -> RequestRecord:
        """Return a request's record, of the replica that served it last."""
        if isinstance(request, Rejected) or request.id not in self.routes:
            return record_of(request, None, self._errors.get(request.id))
        last = self.replicas[self.routes[request.id][-1]]
        return record_of(request, last.states[request.id])

    def _at(self, time: float, event: tuple[Request, RequestState | None] | None) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def _arrive(self, request: Request) -> None:
        """Send a request to one of the replicas that can serve it, or its prompt where it has to move."""
        problems = [self._problem(replica, request) for replica in self._fronts]
        able = [replica for replica, problem in zip(self._fronts, problems, strict=True) if problem is None]
        if not able:
            self._errors[request.id] = problems[0] or ""
            return
        chosen = self._router(request, able)
        self.routes[request.id] = (chosen.place,)
        if chosen.config.role == "prefill":
            self._whole[request.id] = request
            request = _first_part(request)
        chosen.send(request)

    def _problem(self, replica: Replica, request: Request) -> str | None:
        """Return why a replica cannot begin with a request, or None."""
        if replica.config.role == "both":
            return replica.reason_against(request)
        problems = [decoder.reason_against(request) for decoder in self._decoders]
        return replica.reason_against(_first_part(request)) or (problems[0] if all(problems) else None)

    def _hand_over(self, state: RequestState, now: float) -> None:
        """Let a request's KV go on its way, unless the request ended with its first token."""
        whole = self._whole.pop(state.id, None)
        if whole is not None and state.finish_reason == "length" and whole.max_tokens > 1:
            self._at(now + self._handover.seconds(state.num_computed_tokens), (whole, state))

    def _continue(self, request: Request, begun: RequestState) -> None:
        able = [decoder for decoder in self._decoders if decoder.reason_against(request) is None]
        chosen = self._router(request, able)
        self.routes[request.id] += (chosen.place,)
        chosen.send(request, begun)


def _first_part(request: Request) -> Request:
    """Return what a replica for prefill serves of a request: its prompt and its first token."""
    return replace(
        request,
        max_tokens=1,
        output_length=1 if request.output_length == 1 else None,
        sampling=replace(request.sampling, min_tokens=0),
    )


def _check_cluster(requests: Iterable[Request], replicas: Sequence[ReplicaConfig]) -> None:
    for request_id, number in Counter(request.id for request in requests).items():
        if number > 1:
            raise ValueError(f"request {request_id!r} is given twice; give each request an id of its own")
    if not replicas:
        raise ValueError("the cluster has no replica; give at least one")
    for config in replicas:
        check_limits(replica=(config, ReplicaConfig))
    roles = {config.role for config in replicas}
    if ("prefill" in roles) != ("decode" in roles):
        raise ValueError(
            f"the replicas' roles are {sorted(roles)}; replicas for prefill need some for decode, and the "
            "other way round"
        )
