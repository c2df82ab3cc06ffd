"""Single simulated runs of sweeps and searches, spread over processes by joblib."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cbresearch.checks import count
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.metrics import Reporting, Slo, summary
from cbresearch.policies import Policy
from cbresearch.request import Rejected, Request, expand, listed
from cbresearch.simulator import CostExecutor, check_limits, simulate
from cbresearch.trace import Trace
from cbresearch.workloads import load, resolve_prompts

T = TypeVar("T")
Draw = Callable[[np.random.Generator], Iterable[Request | Rejected]]


@dataclass(frozen=True, slots=True)
class Point:
    """All that a run depends on.

    Attributes:
        workload: A name for `workloads.load`, or a function that draws the requests from a generator.
        policy: The policy, which the run copies.
        scheduler: The limits of a step.
        cache: The KV pool, or None for one in which memory never runs out.
        cost: The step time.
        seed: Of the run's own generator.
        slo: The promise, or None.

    Raises:
        TypeError: The cost, a limit or the promise is of another class.
    """

    workload: str | Draw
    policy: Policy
    scheduler: SchedulerConfig
    cache: CacheConfig | None
    cost: CostModel
    seed: int
    slo: Slo | None = None

    def __post_init__(self) -> None:
        # Refuses a cost that cannot be called.
        CostExecutor(self.cost)
        limits = {"scheduler": (self.scheduler, SchedulerConfig), "cache": (self.cache, CacheConfig)}
        check_limits(**limits, slo=(self.slo, Slo))


def serve_point(point: Point) -> Trace:
    """Draw a point's requests from its seed alone, and serve them in the simulator."""
    rng = np.random.default_rng(point.seed)
    workload = point.workload
    given = load(workload, rng) if isinstance(workload, str) else listed(workload(rng))
    requests = expand(resolve_prompts(given, None, None, np.random.default_rng(point.seed)))
    return simulate(requests, point.policy, cost=point.cost, scheduler=point.scheduler, cache=point.cache)


def measure(point: Point, key: str = "") -> dict[str, float | int | None]:
    """Return a run's `metrics.summary`; with an SLO, attainment and goodput too.

    Args:
        point: All that the run depends on.
        key: Its hash, by which `joblib.Memory` knows the run.
    """
    return summary(serve_point(point), reporting=Reporting(point.slo))


def count_kept(point: Point) -> tuple[int, int]:
    """Return how many of a run's requests kept the SLO, and how many requests it had."""
    trace, slo = serve_point(point), point.slo
    return sum(slo is None or slo.is_met(record) for record in trace.requests), len(trace.requests)


def run_all(
    function: Callable[..., Any], calls: Iterable[tuple[int, tuple[Any, ...]]], n_jobs: int | None
) -> Iterator[tuple[int, Any, str | None]]:
    """Call a function with the arguments of each place, in processes of joblib's choice.

    Each call has its own copy of its arguments, in every backend. An exception ends that call alone.

    Args:
        function: The function, which has to be picklable.
        calls: Places and arguments.
        n_jobs: Number of processes, as for `joblib.Parallel`.

    Yields:
        (place, returned value, error or None), as soon as a call has ended, in any order.

    Raises:
        TypeError: The number of processes is none.
    """
    if n_jobs is not None and (type(n_jobs) is not int or n_jobs == 0):
        raise TypeError(f"n_jobs is {n_jobs!r}; give a number of processes, -1 for all cores, or None")
    # It takes along classes and functions that a worker cannot import, such as those of a notebook's cells.
    import cloudpickle
    from joblib import Parallel, delayed

    unsent: list[tuple[int, None, str]] = []

    def tasks() -> Iterator[Any]:
        for place, arguments in calls:
            try:
                content = cloudpickle.dumps(arguments)
            except Exception as error:
                unsent.append((place, None, f"{type(error).__name__}: {error}"))
            else:
                yield delayed(_run)(function, place, content)

    try:
        # One call a task, so that each counts and is kept as soon as it has ended.
        parallel = Parallel(n_jobs=n_jobs, batch_size=1, return_as="generator_unordered")
    except ValueError:
        # Backends that are built on a pool, such as Ray's, return nothing before the end.
        parallel = Parallel(n_jobs=n_jobs)
    yield from parallel(tasks())
    yield from unsent


def _run(function: Callable[..., Any], place: int, content: bytes) -> tuple[int, Any, str | None]:
    import cloudpickle

    try:
        try:
            return place, function(*cloudpickle.loads(content)), None
        except OSError:
            # A full disk keeps a result from being kept, not from being computed.
            return place, getattr(function, "func", function)(*cloudpickle.loads(content)), None
    except (Exception, SystemExit) as error:
        return place, None, f"{type(error).__name__}: {error}"


def checked_seeds(seeds: Any) -> list[int]:
    """Return the seeds as plain ints.

    Raises:
        ValueError: There is none, one is no integer of at least 0, or one is given twice.
    """
    if not isinstance(seeds, Iterable):
        raise ValueError(f"seeds is {seeds!r}; give several, such as range(5)")
    return distinct([count("a seed", seed, 0) for seed in seeds], "seed")


def as_list(given: Any, single: Any) -> list[Any]:
    """Return one thing, which is of the given class or no iterable, or several as a list."""
    is_one = isinstance(given, single) or not isinstance(given, Iterable)
    return [given] if is_one else list(given)


def distinct(things: list[T], what: str) -> list[T]:
    """Return some things; raise ValueError if there is none, or one is given twice."""
    if not things:
        raise ValueError(f"no {what} is given; give at least one")
    for place, thing in enumerate(things):
        if thing in things[:place]:
            raise ValueError(f"{what} {thing!r} is given twice; give each once, or labels of their own")
    return things
