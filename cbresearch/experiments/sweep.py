"""Grids of simulated runs: in parallel, each by itself, kept in a folder, resumed after a kill."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.experiments.environment import environment, progress_bar
from cbresearch.experiments.fingerprint import digest, file_digest, package_digest
from cbresearch.experiments.points import Draw, Point, checked_seeds, measure, refuse_twice, run_all
from cbresearch.experiments.store import RunStore
from cbresearch.metrics import Slo, mean_interval
from cbresearch.names import suggestion
from cbresearch.policies import Policy, get
from cbresearch.simulator import UNIT_STEP
from cbresearch.trace import write_json, write_whole
from cbresearch.workloads import find

if TYPE_CHECKING:
    import pandas as pd

Thing = TypeVar("Thing")
Workloads = str | os.PathLike[str] | Draw
SweptPolicies = str | Policy
_LIMITS = tuple(field.name for config in (SchedulerConfig, CacheConfig) for field in fields(config))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep.

    Attributes:
        workload: Its label.
        policy: Its label.
        scheduler: The limits of a step.
        cache: The KV pool, or None for one in which memory never runs out.
        seed: Of its generator.
        metrics: `metrics.summary`, and with an SLO `slo_attainment` and `goodput_requests_per_s`; empty if
            the run failed.
        error: What it failed of, or None.
    """

    workload: str
    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig | None
    seed: int
    metrics: Mapping[str, float | int | None]
    error: str | None = None

    @property
    def cell(self) -> dict[str, Any]:
        """Return what the run has in common with those of other seeds; no pool is None throughout."""
        limits = {name: getattr(self.scheduler, name, getattr(self.cache, name, None)) for name in _LIMITS}
        return {"workload": self.workload, "policy": self.policy, **limits}

    def row(self) -> dict[str, Any]:
        """Return the run as one flat row."""
        return {**self.cell, "seed": self.seed, **self.metrics, "error": self.error}


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The runs of a sweep, in the order of its grid.

    Attributes:
        runs: One for each workload, policy, limits and seed, the last changing first.
        environment: What they ran on.
        num_computed: How many were run now; the others were found in the folder.
    """

    runs: tuple[Run, ...]
    environment: Mapping[str, str]
    num_computed: int

    @property
    def failed(self) -> tuple[Run, ...]:
        """Return the runs that ended with an error."""
        return tuple(run for run in self.runs if run.error is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the table's columns; units end them."""
        metrics = dict.fromkeys(name for run in self.runs for name in run.metrics)
        return ("workload", "policy", *_LIMITS, "seed", *metrics, "error")

    def frame(self) -> "pd.DataFrame":
        """Return a tidy pandas frame, one row a run."""
        import pandas as pd

        return pd.DataFrame([run.row() for run in self.runs], columns=list(self.columns))

    def summary(self, metric: str, confidence: float = 0.95) -> "pd.DataFrame":
        """Return a metric's mean over the seeds of each cell of the grid, with the interval of Student's t.

        Limits are shown where they differ between the cells. Runs that failed, or for which the metric is
        undefined, are left out: `n` counts the others.

        Args:
            metric: A name of `metrics.summary`.
            confidence: Of the interval.

        Raises:
            ValueError: There is no such metric, or the confidence is out of range.
        """
        import pandas as pd

        known = dict.fromkeys(name for run in self.runs for name in run.metrics)
        if metric not in known:
            raise ValueError(f"unknown metric {metric!r}; {suggestion(metric, known)}")
        cells: dict[str, tuple[dict[str, Any], list[float]]] = {}
        for run in self.runs:
            _, values = cells.setdefault(repr(run.cell), (run.cell, []))
            value = run.metrics.get(metric)
            if value is not None:
                values.append(value)
        varied = [name for name in _LIMITS if len({repr(cell[name]) for cell, _ in cells.values()}) > 1]
        rows = []
        for cell, values in cells.values():
            interval = mean_interval(values, confidence)
            estimate = (None, None, None, 0) if interval is None else interval
            numbers = dict(zip(("mean", "low", "high", "n"), estimate, strict=True))
            shown = {name: cell[name] for name in ("workload", "policy", *varied)}
            rows.append({**shown, "metric": metric, **numbers})
        return pd.DataFrame(rows)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write `runs.csv` and `results.json` into a folder, each whole or not at all."""
        import pandas as pd

        folder = Path(folder)
        rows = [run.row() for run in self.runs]
        # As objects, so that a missing count does not turn the others into floats.
        table = pd.DataFrame(rows, columns=list(self.columns), dtype=object)
        write_whole(folder / "runs.csv", table.to_csv(index=False, lineterminator="\n"))
        write_json(folder / "results.json", {"environment": dict(self.environment), "runs": rows})


def sweep(
    workloads: Workloads | Iterable[Workloads] | Mapping[str, Workloads],
    policies: SweptPolicies | Iterable[SweptPolicies] | Mapping[str, SweptPolicies],
    *,
    cost: CostModel = UNIT_STEP,
    scheduler: SchedulerConfig | Iterable[SchedulerConfig] | None = None,
    cache: CacheConfig | Iterable[CacheConfig | None] | None = None,
    seeds: Iterable[int] = range(5),
    slo: Slo | None = None,
    folder: str | os.PathLike[str] | None = None,
    n_jobs: int | None = None,
) -> SweepResult:
    """Simulate each workload under each policy, with all limits and seeds.

    Runs are spread by joblib: over processes with `n_jobs`, or over a cluster inside
    `joblib.parallel_config("dask")`. A run depends on nothing but its place in the grid, so the table is the
    same everywhere. One that raises has its error in the table, and the others go on.

    With a folder, each finished run is kept there, and a sweep that was killed goes on where it was. A kept
    run is used again while all that it depends on is equal: the workload (its name and the content of files
    that the name names, or a function's code), the policy's class and state, limits, cost, seed, SLO, and
    this package's sources. Of your own functions and classes the compiled code counts, with the values,
    functions and classes that it refers to; of your own modules, the file, but not what it imports. Runs
    that failed are not kept.

    Args:
        workloads: Names for `workloads.load`, functions that draw requests from a generator, or either by
            label.
        policies: Policy names, options included, or policies, or either by label. Each run has its own copy.
        cost: The step time; one second a step by default.
        scheduler: The limits of a step, one or several.
        cache: The KV pool, one or several; None is one in which memory never runs out.
        seeds: Each run's generator is made from one of these alone.
        slo: Adds attainment and goodput to the metrics.
        folder: Where finished runs are kept.
        n_jobs: Processes at once, -1 for all cores; None is 1, or what `joblib.parallel_config` says.

    Raises:
        ValueError: Something is given twice or not at all, a function has no name, or, with a folder, what
            the runs depend on cannot be read.
    """
    drawn = {
        label: os.fspath(workload) if isinstance(workload, os.PathLike) else workload
        for label, workload in _labelled(workloads, _workload_label, "workload").items()
    }
    chosen = _labelled(policies, _policy_label, "policy")
    limits = SchedulerConfig() if scheduler is None else scheduler
    schedulers = _several(limits, SchedulerConfig, "SchedulerConfig")
    caches = _several(cache, CacheConfig | None, "CacheConfig")
    numbers = checked_seeds(seeds)
    built = {label: _built(policy) for label, policy in chosen.items()}
    grid = list(product(drawn, built, schedulers, caches, numbers))
    points: dict[int, Point] = {}
    found: dict[int, Run] = {}

    def run(place: int, metrics: Mapping[str, Any], error: str | None = None) -> Run:
        workload, policy, step_limits, pool, seed = grid[place]
        return Run(workload, policy, step_limits, pool, seed, metrics, error)

    for place, (workload, policy, step_limits, pool, seed) in enumerate(grid):
        decider = built[policy]
        if isinstance(decider, str):
            found[place] = run(place, {}, decider)
        else:
            points[place] = Point(drawn[workload], decider, step_limits, pool, cost, seed, slo)
    store = keys = None
    if folder is not None:
        store = RunStore(Path(folder))
        store.folder.mkdir(parents=True, exist_ok=True)
        keys = _keys(points)
        for place, key in keys.items():
            try:
                kept = store.load(key)
            except ValueError as damage:
                warnings.warn(f"{damage}; its run is computed again", stacklevel=2)
                continue
            if kept is not None:
                found[place] = run(place, kept)
    missing = [(place, point) for place, point in points.items() if place not in found]
    num_failed = len(grid) - len(points)
    with progress_bar(len(grid), "sweep", "run", initial=len(found)) as bar:
        for place, measured, error in run_all(measure, missing, n_jobs):
            found[place] = run(place, measured or {}, error)
            if error is None and store is not None and keys is not None:
                store.save(keys[place], _facts(found[place]), measured)
            num_failed += error is not None
            if num_failed:
                bar.set_postfix(failed=num_failed, refresh=False)
            bar.update()
    return SweepResult(
        runs=tuple(found[place] for place in range(len(grid))),
        environment=environment(
            # An address says nothing to a reader.
            cost=re.sub(r" at 0x[0-9a-fA-F]+", "", repr(cost)),
            slo=slo,
            seeds=" ".join(map(str, numbers)),
        ),
        num_computed=len(missing),
    )


def _labelled(given: Any, label_of: Callable[[Any], str | None], what: str) -> dict[str, Any]:
    """Return workloads or policies by label, a mapping's own where there is one."""
    if isinstance(given, Mapping):
        labelled = dict(given)
        for thing in labelled.values():
            label_of(thing)
    else:
        is_one = isinstance(given, str | os.PathLike | Policy) or not isinstance(given, Iterable)
        things = [given] if is_one else list(given)
        labels = [label_of(thing) for thing in things]
        for thing, label in zip(things, labels, strict=True):
            if label is None:
                raise ValueError(f"the {what} {thing!r} has no name; give it one, as in {{'mine': …}}")
        refuse_twice(labels, what)
        labelled = dict(zip(labels, things, strict=True))
    if not labelled:
        raise ValueError(f"no {what} is given; name at least one")
    return labelled


def _workload_label(workload: Any) -> str | None:
    if isinstance(workload, str | os.PathLike):
        # Where a file lies is no part of what it says.
        return os.fspath(workload) if find(workload) is None else Path(workload).name
    if not callable(workload):
        raise ValueError(
            f"the workload {workload!r} is neither a name nor a function; give requests of your own by a "
            "function of a generator that returns them"
        )
    name = getattr(workload, "__name__", None)
    return None if name == "<lambda>" else name


def _policy_label(policy: Any) -> str | None:
    if isinstance(policy, str):
        return policy
    if isinstance(policy, Policy):
        return policy.name
    raise ValueError(f"the policy {policy!r} is neither a name nor a policy; build it, as in MyPolicy()")


def _built(policy: str | Policy) -> Policy | str:
    """Return the policy, or what is wrong with its name."""
    try:
        # By name only here: what a notebook registered is not known in other processes.
        return get(policy) if isinstance(policy, str) else policy
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _several(given: Any, single: Any, what: str) -> list[Any]:
    things = [given] if isinstance(given, single) else list(given)
    if not things:
        raise ValueError(f"no {what} is given; give at least one")
    for thing in things:
        if not isinstance(thing, single):
            raise ValueError(f"the {what} is {thing!r}, which is of another kind")
    refuse_twice(things, what)
    return things


def _keys(points: Mapping[int, Point]) -> dict[int, str]:
    """Return what each run depends on, as one digest."""
    package = [package_digest(), np.__version__]
    known: dict[int, str] = {}

    def part(value: Any, what: str) -> str:
        if id(value) not in known:
            # Labels are no part of it, yet a file's content is.
            content = (value, _files(value)) if isinstance(value, str) else value
            known[id(value)] = digest(content, what)
        return known[id(value)]

    keys = {}
    for place, point in points.items():
        parts = (
            part(point.workload, "the workload"),
            part(point.policy, f"the policy {point.policy.name!r}"),
            part(point.cost, "the cost"),
            *map(repr, (point.scheduler, point.cache, point.slo, point.seed)),
        )
        keys[place] = hashlib.sha256(json.dumps([*package, *parts]).encode()).hexdigest()
    return keys


def _files(name: str) -> list[str]:
    """Return the digests of the files that a workload's name, or an option in it, names."""
    paths = (find(part) for part in dict.fromkeys([name, *re.split(r"[:,=]", name)]))
    return [file_digest(path) for path in paths if path is not None and path.is_file()]


def _facts(run: Run) -> dict[str, Any]:
    return {**run.cell, "seed": run.seed}
