"""The clock of a cluster: arrivals, steps that end, and KV on its way."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from cbresearch.cluster.replica import Replica, ReplicaConfig
from cbresearch.cluster.routers import Router
from cbresearch.request import Refusal, Request, RequestState
from cbresearch.serve import record_of
from cbresearch.trace import RequestRecord, Trace


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
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Handover: {name} is {getattr(self, name)!r}; give 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"Handover: bandwidth is {self.bandwidth!r}; give bytes per second above 0")

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that the KV of some tokens takes."""
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth


class Route(NamedTuple):
    """Where a request was served.

    Attributes:
        replica: Place of the replica that served it, or that computed its prompt.
        decoded_by: Place of the replica that took it over, or None.
        handed_over: Seconds at which it was there, or None.
    """

    replica: int
    decoded_by: int | None = None
    handed_over: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """What happened in a cluster.

    Attributes:
        router: The router's name.
        replicas: Each replica's trace; a request that was handed over is in both of its replicas'.
        requests: The requests as their clients saw them, in the order given.
        routes: Where each was served, by id; refused ones are not in it.
    """

    router: str
    replicas: tuple[Trace, ...]
    requests: tuple[RequestRecord, ...]
    routes: dict[str, Route]

    @property
    def trace(self) -> Trace:
        """Return the requests as one trace without steps, for metrics of requests."""
        return replace(self.replicas[0], policy=self.router, steps=(), requests=self.requests)


def simulate_cluster(
    requests: Iterable[Request | Refusal],
    replicas: Sequence[ReplicaConfig],
    router: Router,
    handover: Handover | None = None,
) -> ClusterRun:
    """Serve requests on several replicas, each step by step, on one virtual clock.

    A router sees what there is when a request arrives: steps that are under way have not ended. Where there
    are replicas for prefill and for decode, a request's prompt and first token are computed by one of the
    first kind, its KV moves, and one of the second kind goes on (DistServe, OSDI 2024).

    Args:
        requests: Who comes.
        replicas: The cluster.
        router: Who decides; for the taking over as well.
        handover: How long KV takes to move; no time by default.

    Returns:
        The run. A request that no replica can serve is in it with its error.

    Raises:
        ValueError: An id is given twice, or there is no replica, or only one of the two halves of a
            disaggregated cluster.
    """
    given = list(requests)
    served = [request for request in given if isinstance(request, Request)]
    _check_cluster(served, replicas)
    cluster = _Cluster([Replica(place, config) for place, config in enumerate(replicas)], router, handover)
    cluster.run(served)
    return ClusterRun(
        router.name,
        tuple(
            Trace(
                policy=replica.loop.scheduler.policy.name,
                scheduler=replica.config.scheduler,
                cache=replica.config.cache,
                steps=tuple(replica.steps),
                requests=tuple(record_of(state.request, state) for state in replica.states.values()),
            )
            for replica in cluster.replicas
        ),
        tuple(cluster.record(request) for request in given),
        cluster.routes,
    )


class _Cluster:
    """The replicas, the router, and what is under way between them."""

    def __init__(self, replicas: list[Replica], router: Router, handover: Handover | None) -> None:
        router.begin()
        self.replicas = replicas
        self.routes: dict[str, Route] = {}
        self._router = router
        self._handover = handover or Handover()
        self._errors: dict[str, str] = {}
        self._whole: dict[str, Request] = {}
        self._numbers = count()
        # Seconds, number, what happens.
        self._events: list[tuple[float, int, Any]] = []

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests until all are finished."""
        for request in sorted(requests, key=lambda request: request.arrival):
            heappush(self._events, (request.arrival, next(self._numbers), request))
        while self._events:
            now = self._events[0][0]
            happening = []
            while self._events and self._events[0][0] == now:
                happening.append(heappop(self._events)[2])
            # Steps end before anyone arrives, as in a server of its own.
            for replica in self.replicas:
                for state in replica.end(now):
                    self._hand_over(state, now)
            for event in happening:
                if isinstance(event, Request):
                    self._arrive(event)
                elif event is not None:
                    request, begun = event
                    self._take_over(request, begun, now)
            for replica in self.replicas:
                wake = replica.begin(now)
                if wake is not None:
                    heappush(self._events, (wake, next(self._numbers), None))

    def record(self, request: Request | Refusal) -> RequestRecord:
        """Return what there is to know of a request."""
        if isinstance(request, Refusal) or request.id not in self.routes:
            return record_of(request, None, self._errors.get(request.id))
        route = self.routes[request.id]
        last = self.replicas[route.replica if route.decoded_by is None else route.decoded_by]
        return record_of(request, last.states[request.id])

    def _arrive(self, request: Request) -> None:
        """Send a request to one of those that can serve it, on with others where it has to move."""
        fronts = [replica for replica in self.replicas if replica.config.role != "decode"]
        problems = {replica.place: self._problem(replica, request) for replica in fronts}
        able = [replica for replica in fronts if problems[replica.place] is None]
        if not able:
            self._errors[request.id] = next(iter(problems.values())) or ""
            return
        chosen = self._router.choose(request, able)
        self.routes[request.id] = Route(chosen.place)
        if chosen.config.role == "prefill":
            self._whole[request.id] = request
            request = _first_part(request)
        chosen.send(request)

    def _problem(self, replica: Replica, request: Request) -> str | None:
        """Return why a replica cannot begin with a request, or None."""
        if replica.config.role == "both":
            return replica.refusal(request)
        takers = [other for other in self.replicas if other.config.role == "decode"]
        problems = [taker.refusal(request) for taker in takers]
        return replica.refusal(_first_part(request)) or (problems[0] if all(problems) else None)

    def _hand_over(self, state: RequestState, now: float) -> None:
        """Let a request's KV go on its way, if the request is not at its end with its first token."""
        whole = self._whole.pop(state.id, None)
        if whole is not None and state.finish_reason == "length" and whole.max_tokens > 1:
            arrival = now + self._handover.seconds(state.num_computed_tokens)
            heappush(self._events, (arrival, next(self._numbers), (whole, state)))

    def _take_over(self, request: Request, begun: RequestState, now: float) -> None:
        able = [
            replica
            for replica in self.replicas
            if replica.config.role == "decode" and replica.refusal(request) is None
        ]
        chosen = self._router.choose(request, able)
        self.routes[request.id] = Route(self.routes[request.id].replica, chosen.place, now)
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
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise ValueError(f"request {request.id!r} is given twice; give each request an id of its own")
        seen.add(request.id)
    if not replicas:
        raise ValueError("the cluster has no replica; give at least one")
    roles = {config.role for config in replicas}
    if ("prefill" in roles) != ("decode" in roles):
        raise ValueError(
            f"the replicas' roles are {sorted(roles)}; replicas for prefill need some for decode, and the "
            "other way round"
        )
