"""Grids of simulated runs: in parallel, each by itself, kept in a folder, resumed after a kill."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel
from cbresearch.experiments.environment import environment, progress_bar, usable_folder
from cbresearch.experiments.fingerprint import fingerprint, package_fingerprint
from cbresearch.experiments.points import Draw, Point, as_list, checked_seeds, distinct, measure, run_all
from cbresearch.metrics import Slo, mean_interval
from cbresearch.names import suggestion
from cbresearch.policies import Policy, get
from cbresearch.simulator import UNIT_STEP
from cbresearch.trace import write_json, write_whole
from cbresearch.workloads import find

if TYPE_CHECKING:
    import pandas as pd

Workloads = str | os.PathLike[str] | Draw
SweptPolicies = str | Policy
_LIMITS = tuple(field.name for config in (SchedulerConfig, CacheConfig) for field in fields(config))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a sweep.

    Attributes:
        workload: Label of the workload.
        policy: Label of the policy.
        scheduler: The limits of a step.
        cache: The KV pool, or None for one in which memory never runs out.
        seed: Seed of the workload's generator.
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

    def row(self) -> dict[str, Any]:
        """Return the run as one flat row; without a pool its limits are None."""
        limits = {name: getattr(self.scheduler, name, getattr(self.cache, name, None)) for name in _LIMITS}
        labels = {"workload": self.workload, "policy": self.policy}
        return {**labels, **limits, "seed": self.seed, **self.metrics, "error": self.error}


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
        return ("workload", "policy", *_LIMITS, "seed", *self._metrics, "error")

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.metrics))

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
            confidence: Confidence of the interval.

        Raises:
            ValueError: There is no such metric, or the confidence is out of range.
        """
        import pandas as pd

        if metric not in self._metrics:
            raise ValueError(f"unknown metric {metric!r}; {suggestion(metric, self._metrics)}")
        frame = self.frame()
        varied = [name for name in _LIMITS if frame[name].nunique(dropna=False) > 1]
        cell = ["workload", "policy", *varied]
        rows = []
        for values in frame.groupby(cell, sort=False, dropna=False)[metric]:
            estimate = mean_interval(values[1].dropna().tolist(), confidence) or (None, None, None, 0)
            rows.append((*values[0], metric, *estimate))
        return pd.DataFrame(rows, columns=[*cell, "metric", "mean", "low", "high", "n"])

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

    With a folder, `joblib.Memory` keeps each finished run there, and a sweep that was killed goes on where it
    was. A kept run is used again while all that it depends on is equal: the workload (its name and the
    content of files that the name names, or a function's code), the policy's class and state, limits, cost,
    seed, SLO, and this package's sources. Of your own functions and classes the compiled code counts, with
    the values, functions and classes that it refers to; of your own modules, the file. What such a module
    imports in turn is not noticed: after a change there, use another folder. Runs that failed are not kept.

    Args:
        workloads: Names for `workloads.load`, functions that draw requests from a generator, or either by
            label.
        policies: Policy names, options included, or policies, or either by label. Each run has its own copy.
        cost: The step time; one second a step by default.
        scheduler: The limits of a step, one or several.
        cache: The KV pool, one or several; None is one in which memory never runs out.
        seeds: Each run's generator is made from one of these alone.
        slo: Adds attainment and goodput to the metrics.
        folder: Where finished runs are kept; all processes must see it.
        n_jobs: Processes at once, -1 for all cores; None is 1, or what `joblib.parallel_config` says.

    Raises:
        TypeError: A policy, the cost, the SLO or a limit is of another class.
        ValueError: Something is given twice or not at all, a function has no name, the folder cannot be
            written, or, with a folder, what the runs depend on cannot be read.
    """
    drawn = {
        label: os.fspath(workload) if isinstance(workload, os.PathLike) else workload
        for label, workload in _labelled(workloads, _workload_label, "workload").items()
    }
    chosen = _labelled(policies, lambda policy: getattr(policy, "name", str(policy)), "policy")
    limits = SchedulerConfig() if scheduler is None else scheduler
    schedulers = distinct(as_list(limits, SchedulerConfig), "SchedulerConfig")
    caches = distinct(as_list(cache, CacheConfig), "CacheConfig")
    numbers = checked_seeds(seeds)
    built = {label: _built(policy) for label, policy in chosen.items()}
    runs = [
        Run(workload, policy, limits, pool, seed, {})
        for workload, policy, limits, pool, seed in product(drawn, built, schedulers, caches, numbers)
    ]
    points: dict[int, Point] = {}
    for place, run in enumerate(runs):
        decider = built[run.policy]
        if isinstance(decider, str):
            runs[place] = replace(run, error=decider)
        else:
            points[place] = Point(drawn[run.workload], decider, run.scheduler, run.cache, cost, run.seed, slo)
    num_failed, num_kept = len(runs) - len(points), 0
    function, keys = measure, dict.fromkeys(points, "")
    if folder is not None:
        folder = usable_folder("folder", folder)
        from joblib import Memory

        package = package_fingerprint()
        keys = {place: _key(point, package) for place, point in points.items()}
        function = Memory(folder, verbose=0).cache(measure, ignore=["point"])
        num_kept = sum(function.check_call_in_cache(points[place], key) for place, key in keys.items())
    calls = ((place, (point, keys[place])) for place, point in points.items())
    with progress_bar(len(runs), "sweep", "run", initial=num_failed) as bar:
        for place, measured, error in run_all(function, calls, n_jobs):
            runs[place] = replace(runs[place], metrics=measured or {}, error=error)
            num_failed += error is not None
            if num_failed:
                bar.set_postfix(failed=num_failed, refresh=False)
            bar.update()
    # An address says nothing to a reader.
    facts = {"cost": re.sub(r" at 0x[0-9a-fA-F]+", "", repr(cost)), "slo": slo}
    stamp = environment(**facts, seeds=" ".join(map(str, numbers)))
    return SweepResult(tuple(runs), stamp, len(points) - num_kept)


def _labelled(given: Any, label_of: Callable[[Any], Any], what: str) -> dict[str, Any]:
    """Return workloads or policies by label, a mapping's own where there is one."""
    is_labelled = isinstance(given, Mapping)
    things = list(given.values()) if is_labelled else as_list(given, str | os.PathLike | Policy)
    # Asked for in any case, for it refuses what is neither.
    labels = [label_of(thing) for thing in things]
    if is_labelled:
        labels = list(given)
    if None in labels:
        nameless = things[labels.index(None)]
        raise ValueError(f"the {what} {nameless!r} has no name; give it one, as in {{'mine': …}}")
    return dict(zip(distinct(labels, what), things, strict=True))


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


def _built(policy: str | Policy) -> Policy | str:
    """Return the policy, or what is wrong with its name; raise TypeError if it is neither.

    It is built here, for what a notebook registered is not known in other processes.
    """
    try:
        return get(policy)
    except Exception as error:
        if not isinstance(policy, str):
            raise
        return f"{type(error).__name__}: {error}"


def _key(point: Point, package: str) -> str:
    """Return the hash of all that a run depends on; labels are no part of it.

    Args:
        point: The run.
        package: The hash of this package.

    Raises:
        ValueError: Something that the run depends on cannot be hashed.
    """
    name = point.workload if isinstance(point.workload, str) else ""
    # A file that the name, or an option in it, names counts by its content.
    paths = [find(part) for part in dict.fromkeys([name, *re.split(r"[:,=]", name)]) if part]
    contents = [path.read_bytes() for path in paths if path is not None and path.is_file()]
    parts = [package, np.__version__, fingerprint(contents)]
    for field in fields(point):
        value = getattr(point, field.name)
        try:
            parts.append(fingerprint(value))
        except Exception as error:
            raise ValueError(
                f"the {field.name} is {value!r}, whose state cannot be read ({error}), so that a finished "
                "run would not be known again; build it where it is used, or sweep without a folder"
            ) from error
    return fingerprint(parts)
