"""Predict real runs with the simulator, calibrated on one workload, and print how far off it is by policy.

    OMP_NUM_THREADS=1 python tests/fidelity.py [--model tiny|smollm2-135m] [--size N] [--csv FILE]

Durations are CPU seconds of one thread, divided by how much longer than usual a fixed step took just then.
"""

import argparse
import csv
import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from cbresearch import (
    CacheConfig,
    Linear,
    ModelExecutor,
    Request,
    Scheduler,
    SchedulerConfig,
    metrics,
    models,
    policies,
    simulate,
    workloads,
)
from cbresearch.costs import Calibrated
from cbresearch.experiments.environment import progress_bar
from cbresearch.experiments.simulation_error import (
    DriftCorrectedExecutor,
    calibration_probe,
    predict_run,
    simulation_error,
)
from cbresearch.serve import serve
from cbresearch.workloads import AtOnce, Gamma, Poisson, Prefixes, Uniform

POLICIES = ("fcfs", "sjf", "srpt", "static")
SEATS, BUDGET, BLOCK = 8, 128, 16
ROOMY = 8 * 16


@dataclass(frozen=True)
class Case:
    """A workload with the limits it is served under; a load of 0 brings all requests at once."""

    name: str
    requests: list[Request]
    load: float = 0.0
    num_blocks: int = ROOMY
    preemption: str = "recompute"
    caching: bool = False

    @property
    def limits(self) -> SchedulerConfig:
        return SchedulerConfig(SEATS, BUDGET, preemption=self.preemption)

    @property
    def pool(self) -> CacheConfig:
        host = self.num_blocks if self.preemption == "swap" else 0
        return CacheConfig(self.num_blocks, BLOCK, prefix_caching=self.caching, num_host_blocks=host)


def cases(size: int, seed: int, brief: bool = False) -> tuple[Case, list[Case]]:
    """Return the calibration's workload, which covers sizes and contexts of the others, and five others."""
    rng = np.random.default_rng(seed)

    def drawn(arrivals, prompts, outputs, number, prefixes=None):
        # A slow model writes half as much.
        outputs = Uniform(*(max(1, tokens // 2) for tokens in outputs)) if brief else Uniform(*outputs)
        lengths = (Uniform(*prompts), outputs)
        made = workloads.make_requests(arrivals, lengths, number, rng, prefixes=prefixes)
        return workloads.resolve_prompts(made, None, 256, rng)

    # A fit is asked for no more than it has seen: many prompts that begin in one step, many that go on
    # behind a cached prefix, and long ones in chunks.
    parts = [
        *drawn(AtOnce(), (1, 15), (1, 12), size),
        *drawn(AtOnce(), (1, 24), (2, 3), size, Prefixes(1, Uniform(112, 112))),
        *drawn(AtOnce(), (1, 180), (1, 48), size),
    ]
    mixed = [replace(request, id=f"c{place}") for place, request in enumerate(parts)]
    calibration = Case("calibration", mixed, caching=True)
    tight = 16 if brief else 26
    others = [
        Case("short answers", drawn(AtOnce(), (60, 160), (2, 12), size)),
        Case("long answers", drawn(Poisson(1.0), (4, 30), (24, 48), size), 0.8),
        Case(
            "shared prefixes, bursts",
            drawn(Gamma(1.0, 0.3), (4, 40), (4, 32), size, Prefixes(2, Uniform(80, 100))),
            0.9,
            caching=True,
        ),
        Case("tight pool, recompute", drawn(Poisson(1.0), (16, 100), (8, 40), size), 2.0, tight),
        Case("tight pool, swap", drawn(AtOnce(), (16, 100), (8, 40), size), 0.0, tight, "swap"),
    ]
    return calibration, others


class Bench:
    """The real engine, with one calibration probe for all runs."""

    def __init__(self, model: str) -> None:
        self.loaded = models.load(model)
        self.probe = calibration_probe(self.loaded)
        self.usual = median(self.probe() for _ in range(20))

    def run(self, case: Case, policy: str, bar=None):
        # Filled, so that no page of the pool is touched for the first time while the clock runs.
        executor = ModelExecutor(self.loaded, case.limits, case.pool, clock=time.thread_time, fill=0.0)
        executor.warm_up()
        corrected = DriftCorrectedExecutor(executor, self.probe, self.usual)
        scheduler = Scheduler(policies.get(policy), case.limits, case.pool)
        return serve(
            case.requests, scheduler, corrected, on_step=lambda _: None if bar is None else bar.update()
        )


def settings(case: Case) -> list[tuple[Case, str]]:
    """Return how the calibration serves its workload: with room, as a static batch, and so tight it swaps."""
    tight = replace(case, num_blocks=22, preemption="swap", caching=False)
    return [*((case, policy) for policy in POLICIES), (tight, "fcfs"), (tight, "srpt")]


def timed(case: Case, cost) -> Case:
    """Spread the arrivals such that they bring the load: work per time, in what the engine can do."""
    if not case.load:
        return case
    at_once = [replace(request, arrival=0.0) for request in case.requests]
    trace = simulate(at_once, cost=cost, scheduler=case.limits, cache=case.pool)
    gap = metrics.makespan(trace) / len(at_once) / case.load
    return replace(
        case, requests=[replace(request, arrival=request.arrival * gap) for request in case.requests]
    )


def summary(model: str, cost: str, policy: str, runs) -> dict[str, object]:
    """Return one row of the table: medians of the errors without sign, over some runs' requests together."""
    latency, ttft = (np.abs(np.concatenate(errors)) for errors in list(zip(*runs, strict=True))[:2])
    return {
        "model": model,
        "cost": cost,
        "policy": policy,
        "num_requests": len(latency),
        "latency_error": round(float(np.median(latency)), 4),
        "ttft_error": round(float(np.median(ttft)), 4),
        "makespan_error": round(float(np.median([abs(run.makespan) for run in runs])), 4),
        "worst_makespan_error": round(max(abs(run.makespan) for run in runs), 4),
        "equal_plans": round(float(np.mean([run.equal_plans for run in runs])), 3),
    }


def report(model: str, others: dict[str, Case], costs, traces, again) -> list[dict[str, object]]:
    """Return the errors of each cost by policy, and those of a second run as a prediction of the first."""
    rows = []
    for name, cost in costs.items():
        everything = []
        for policy in POLICIES:
            runs = [
                simulation_error(trace, predict_run(trace, others[case].requests, cost))
                for (case, served), trace in traces.items()
                if served == policy
            ]
            everything += runs
            rows.append(summary(model, name, policy, runs))
        rows.append(summary(model, name, "all", everything))
    rows.append(
        summary(
            model,
            "second run",
            "fcfs",
            [simulation_error(traces[key], trace) for key, trace in again.items()],
        )
    )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=models.BUILT_IN)
    parser.add_argument("--size", type=int, default=24, help="requests of a workload")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--csv", help="write the table here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    calibration, drawn = cases(arguments.size, arguments.seed, arguments.model != "tiny")
    bench = Bench(arguments.model)
    with progress_bar(None, "engine steps", "step") as bar:
        runs = [bench.run(*setting, bar) for setting in settings(calibration)]
        costs = {"calibrated": Calibrated.fit(*runs), "linear": Linear.fit(*runs, context=True)}
        others = {case.name: timed(case, costs["calibrated"]) for case in drawn}
        traces = {
            (name, policy): bench.run(case, policy, bar)
            for name, case in others.items()
            for policy in POLICIES
        }
        again = {(name, "fcfs"): bench.run(case, "fcfs", bar) for name, case in others.items()}
    rows = report(arguments.model, others, costs, traces, again)
    print_table(rows, costs["calibrated"], traces)
    print(f"{time.process_time() - began:.0f} CPU seconds")
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def print_table(rows, cost: Calibrated, traces) -> None:
    print(
        f"calibrated on {cost.num_fitted} steps; {cost.num_held_out} held out are off by "
        f"{cost.held_out_error:.1%} in the median, and by {cost.held_out_bias:+.1%} together; "
        f"{sum(len(trace.steps) for trace in traces.values())} steps predicted, "
        f"{sum(map(metrics.num_preemptions, traces.values()))} preemptions"
    )
    print("cost        policy   requests  latency    TTFT  makespan   worst  plans equal")
    for row in rows:
        print(
            f"{row['cost']:12}{row['policy']:8}{row['num_requests']:9}{row['latency_error']:9.1%}"
            f"{row['ttft_error']:8.1%}{row['makespan_error']:10.1%}{row['worst_makespan_error']:8.1%}"
            f"{row['equal_plans']:13.0%}"
        )


if __name__ == "__main__":
    main()
