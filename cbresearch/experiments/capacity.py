"""The largest load under which a promise is still kept."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cbresearch.checks import real
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.experiments.environment import progress_bar
from cbresearch.experiments.points import Point, checked_seeds, count_kept, run_all
from cbresearch.metrics import Slo
from cbresearch.policies import Policy, get
from cbresearch.request import Rejected, Request
from cbresearch.simulator import UNIT_STEP


class TriedRate(NamedTuple):
    """An arrival rate that was tried.

    Attributes:
        rate: Requests per second.
        attainment: Share of the requests of all seeds that kept the SLO.
        num_requests: Number of these requests.
    """

    rate: float
    attainment: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest arrival rate that keeps an SLO.

    Attributes:
        tried: All that was tried, by rate.
        slo: The promise to each request.
        attainment: The share of requests that had to keep it.
    """

    tried: tuple[TriedRate, ...]
    slo: Slo
    attainment: float

    @property
    def kept(self) -> TriedRate | None:
        """Return the largest rate tried that keeps the SLO, or None."""
        return max((one for one in self.tried if one.attainment >= self.attainment), default=None)

    @property
    def lost(self) -> TriedRate | None:
        """Return the smallest rate tried that does not keep the SLO, or None."""
        return min((one for one in self.tried if one.attainment < self.attainment), default=None)

    @property
    def rate(self) -> float | None:
        """Return the capacity in requests per second; None if there is no such rate, or no end to them."""
        return self.kept.rate if self.kept is not None and self.lost is not None else None

    @property
    def is_monotone(self) -> bool:
        """Return whether attainment never rises with the rate; if it does, there may be other capacities."""
        shares = [point.attainment for point in self.tried]
        return all(later <= earlier for earlier, later in pairwise(shares))

    def __str__(self) -> str:
        demands = {field.name: getattr(self.slo, field.name) for field in fields(self.slo)}
        promised = ", ".join(f"{name} ≤ {most:g} s" for name, most in demands.items() if most is not None)
        share = f"{self.attainment:.4g} of the requests"

        def found(tried: TriedRate) -> str:
            return f"at {tried.rate:.4g} requests/s {tried.attainment:.4g} do"

        if self.kept is None:
            lowest = f"at no rate tried do {share} keep {promised}: {found(self.tried[0])}"
            return f"{lowest}; start lower, unless a request alone takes too long"
        if self.lost is None:
            highest = f"at every rate tried {share} keep {promised}: {found(self.tried[-1])}"
            return f"{highest}; draw more requests, so that queues can grow, or start higher"
        between = f"{found(self.kept)}, {found(self.lost)}"
        return f"up to {self.kept.rate:.4g} requests/s, {share} keep {promised}: {between}"


def capacity(
    workload: Callable[[float, np.random.Generator], Iterable[Request | Rejected]],
    policy: str | Policy = "fcfs",
    *,
    slo: Slo,
    attainment: float = 0.9,
    cost: CostModel = UNIT_STEP,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    seeds: Iterable[int] = range(3),
    start: float = 1.0,
    tolerance: float = 0.02,
    max_doublings: int = 20,
    n_jobs: int | None = None,
) -> Capacity:
    """Search the largest arrival rate at which a share of the requests keeps an SLO.

    From the start, the rate is doubled while the SLO is kept, or halved until it is; then the bracket is
    bisected. Every rate has the same seeds, so that rates differ by chance as little as the workload allows.
    All requests count, those of the start too, when queues are still short: draw many.

    Source: DistServe, OSDI 2024, 2.2, where this is called goodput.

    Args:
        workload: Draws the requests of an arrival rate (requests per second) from a generator.
        policy: A policy's name, options included, or a policy; each run has its own copy.
        slo: What is promised to each request.
        attainment: Share of the requests that has to keep it, above 0 and at most 1.
        cost: The step time; one second a step by default.
        scheduler: The limits of a step.
        cache: The KV pool; by default one in which memory never runs out.
        seeds: Each rate is run once with each.
        start: The first rate tried, in requests per second.
        tolerance: The search ends when the bracket's ends differ by this share of the lower one.
        max_doublings: How often the start is doubled, or halved, at most.
        n_jobs: Processes at once for the seeds of a rate, as for `sweep`.

    Raises:
        TypeError: The workload is no function, or the policy, the SLO, the cost or a limit of another class.
        ValueError: A number is out of range, the policy is unknown, or no request is drawn.
        RuntimeError: A run failed; the error names the rate, the seed and the reason.
    """
    real("attainment", attainment, most=1, positive=True)
    for name, value in (("start", start), ("tolerance", tolerance), ("max_doublings", max_doublings)):
        real(name, value, positive=True)
    if slo is None or not callable(workload):
        wrong = "slo is None; give" if slo is None else f"workload is {workload!r}; give f(rate, rng) and"
        raise TypeError(f"{wrong} an Slo(…), as in capacity(draw, slo=Slo(ttft=1.0))")
    numbers = checked_seeds(seeds)
    built = get(policy)
    limits = SchedulerConfig() if scheduler is None else scheduler
    tried: list[TriedRate] = []

    def result() -> Capacity:
        return Capacity(tuple(sorted(tried)), slo, attainment)

    def keeps(rate: float) -> bool:
        draw = partial(workload, rate)
        points = [(Point(draw, built, limits, cache, cost, seed, slo),) for seed in numbers]
        num_kept = num_requests = 0
        for place, counts, error in run_all(count_kept, enumerate(points), n_jobs):
            if error is not None:
                raise RuntimeError(f"at {rate:g} requests/s with seed {numbers[place]}: {error}")
            num_kept += counts[0]
            num_requests += counts[1]
            bar.update()
        if not num_requests:
            raise ValueError(f"the workload draws no request at {rate:g} requests/s; it must return some")
        share = num_kept / num_requests
        tried.append(TriedRate(rate, share, num_requests))
        bar.set_postfix(rate=f"{rate:g}", attainment=f"{share:.3f}", refresh=False)
        return share >= attainment

    with progress_bar(None, "capacity", "run") as bar:
        rate, goes_up = start, keeps(start)
        for _ in range(int(max_doublings)):
            rate = rate * 2 if goes_up else rate / 2
            if keeps(rate) != goes_up:
                break
        found = result()
        while found.kept and found.lost and found.lost.rate > found.kept.rate * (1 + tolerance):
            # The geometric mean halves the bracket in the measure by which it is judged.
            keeps(math.sqrt(found.kept.rate * found.lost.rate))
            found = result()
    return found
