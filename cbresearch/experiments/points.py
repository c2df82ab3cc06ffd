"""One run of a sweep: draw the requests, serve them in the simulator, measure; in whatever process."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any, NamedTuple

import numpy as np

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.metrics import Slo, goodput, slo_attainment, summary
from cbresearch.policies import Policy
from cbresearch.request import Refusal, Request, expand
from cbresearch.simulator import simulate
from cbresearch.trace import Trace
from cbresearch.workloads import load, resolve_prompts

Draw = Callable[[np.random.Generator], Iterable[Request | Refusal]]


@dataclass(frozen=True, slots=True)
class Point:
    """All that a run depends on.

    Attributes:
        workload: A name for `workloads.load`, or a function that draws the requests.
        policy: Who decides.
        scheduler: The limits of a step.
        cache: The KV pool, or None for one in which memory never runs out.
        cost: The step time.
        seed: Of the run's own generator.
        slo: What is promised, or None.
    """

    workload: str | Draw
    policy: Policy
    scheduler: SchedulerConfig
    cache: CacheConfig | None
    cost: CostModel
    seed: int
    slo: Slo | None = None


class Outcome(NamedTuple):
    """What became of the point at a place: what it gave, or the error that ended it."""

    place: int
    value: Any
    error: str | None


def serve_point(point: Point) -> Trace:
    """Draw a point's requests from its seed alone, and serve them in the simulator."""
    rng = np.random.default_rng(point.seed)
    workload = point.workload
    given = load(workload, rng) if isinstance(workload, str) else list(workload(rng))
    requests = expand(resolve_prompts(given, None, None, np.random.default_rng(point.seed)))
    return simulate(requests, point.policy, cost=point.cost, scheduler=point.scheduler, cache=point.cache)


def measure(point: Point) -> dict[str, float | int | None]:
    """Return a run's `metrics.summary`; with an SLO, how much of it was kept too."""
    trace = serve_point(point)
    measured = summary(trace)
    if point.slo is not None:
        measured["slo_attainment"] = slo_attainment(trace, point.slo)
        measured["goodput_requests_per_s"] = goodput(trace, point.slo)
    # What is read from a file later is then equal to what was computed; what JSON cannot hold raises here.
    again: dict[str, float | int | None] = json.loads(json.dumps(measured, allow_nan=False))
    return again


def count_kept(point: Point) -> tuple[int, int]:
    """Return how many of a run's requests kept the SLO, and how many there were."""
    trace, slo = serve_point(point), point.slo
    return sum(slo is None or slo.is_met(record) for record in trace.requests), len(trace.requests)


def run_all(
    function: Callable[[Point], Any], points: Sequence[tuple[int, Point]], n_jobs: int | None
) -> Iterator[Outcome]:
    """Yield what a function gives for each point as soon as it is there, in any order.

    An exception is the outcome of its point alone.

    Args:
        function: Called in the process of joblib's choice.
        points: The points with their places.
        n_jobs: Processes at once, as for `joblib.Parallel`.
    """
    from joblib import Parallel, delayed, effective_n_jobs

    unsent: list[Outcome] = []
    calls = (delayed(_run)(function, place, content) for place, content in _pickled(points, unsent))
    try:
        # One run a task: what is finished is handed over, and can be stored, at once.
        stream = Parallel(n_jobs=n_jobs, batch_size=1, return_as="generator_unordered")
    except ValueError:
        # Backends built on a pool, Ray's among them, hand over nothing before the end: they get it in rounds.
        stream = None
    if stream is not None:
        yield from stream(calls)
    else:
        size = 2 * effective_n_jobs(n_jobs)
        with Parallel(n_jobs=n_jobs, batch_size=1) as pool:
            while batch := list(islice(calls, size)):
                yield from pool(batch)
    yield from unsent


def checked_seeds(seeds: Any) -> list[int]:
    """Return the seeds as plain ints.

    Raises:
        ValueError: There is none, one is no integer of at least 0, or one is given twice.
    """
    if not isinstance(seeds, Iterable):
        raise ValueError(f"seeds is {seeds!r}; give several, such as range(5)")
    checked = []
    for given in seeds:
        try:
            seed = -1 if isinstance(given, bool) else index(given)
        except TypeError:
            seed = -1
        if seed < 0:
            raise ValueError(f"a seed is {given!r}; give integers of at least 0")
        checked.append(seed)
    if not checked:
        raise ValueError("no seed is given; give at least one")
    refuse_twice(checked, "seed")
    return checked


def refuse_twice(things: Sequence[Any], what: str) -> None:
    """Raise ValueError if one of the things is given twice."""
    for place, thing in enumerate(things):
        if thing in things[:place]:
            raise ValueError(f"{what} {thing!r} is given twice; give each once, or labels of their own")


def _pickled(points: Sequence[tuple[int, Point]], unsent: list[Outcome]) -> Iterator[tuple[int, bytes]]:
    """Yield the points as bytes: each run has objects of its own, in every backend alike."""
    # It takes along classes and functions that a worker cannot import, such as those of a notebook's cells.
    import cloudpickle

    for place, point in points:
        try:
            content = cloudpickle.dumps(point)
        except Exception as error:
            unsent.append(Outcome(place, None, _text(error)))
        else:
            yield place, content


def _run(function: Callable[[Point], Any], place: int, content: bytes) -> Outcome:
    import cloudpickle

    try:
        return Outcome(place, function(cloudpickle.loads(content)), None)
    except Exception as error:
        return Outcome(place, None, _text(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
