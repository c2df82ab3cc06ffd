"""Predict real runs with the simulator, calibrated on one workload, and print how far off it is by policy.

    OMP_NUM_THREADS=1 python tests/fidelity.py [--model tiny|smollm2-135m] [--size N] [--csv FILE]

Durations are CPU seconds of one thread, divided by how much longer than usual a fixed step took just then.
"""

import argparse
import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from cbresearch import CacheConfig, Linear, ModelExecutor, Request, Scheduler, SchedulerConfig
from cbresearch import metrics, models, policies, simulate, workloads
from cbresearch.costs import Calibrated
from cbresearch.experiments.environment import progress_bar
from cbresearch.experiments.fidelity import Paced, fidelity, predict_run, yardstick
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


def cases(size: int, seed: int) -> tuple[Case, list[Case]]:
    """Return the calibration's workload, which covers sizes and contexts of the others, and five others."""
    rng = np.random.default_rng(seed)

    def drawn(arrivals, prompts, outputs, number, prefixes=None):
        lengths = (Uniform(*prompts), Uniform(*outputs))
        made = workloads.make_requests(arrivals, lengths, number, rng, prefixes=prefixes)
        return workloads.resolve_prompts(made, None, 256, rng)

    calibration = Case("calibration", drawn(AtOnce(), (1, 180), (1, 48), 2 * size))
    others = [
        Case("short answers", drawn(AtOnce(), (60, 160), (2, 12), size)),
        Case("long answers", drawn(Poisson(1.0), (4, 30), (24, 48), size), 0.8),
        Case(
            "shared prefixes, bursts",
            drawn(Gamma(1.0, 0.3), (4, 40), (4, 32), size, Prefixes(2, Uniform(80, 100))),
            0.9,
            caching=True,
        ),
        Case("tight pool, recompute", drawn(Poisson(1.0), (16, 100), (8, 40), size), 1.5, 26),
        Case("tight pool, swap", drawn(AtOnce(), (16, 100), (8, 40), size), 0.0, 26, "swap"),
    ]
    return calibration, others


class Bench:
    """The real engine, with one yardstick for all runs."""

    def __init__(self, model: str) -> None:
        self.loaded = models.load(model)
        self.yardstick = yardstick(self.loaded)
        self.usual = median(self.yardstick() for _ in range(20))

    def run(self, case: Case, policy: str, bar=None):
        # Filled, so that no page of the pool is touched for the first time while the clock runs.
        executor = ModelExecutor(self.loaded, case.limits, case.pool, clock=time.thread_time, fill=0.0)
        executor.warm_up()
        paced = Paced(executor, self.yardstick, self.usual)
        scheduler = Scheduler(policies.get(policy), case.limits, case.pool)
        return serve(
            case.requests, scheduler, paced, on_step=lambda _: None if bar is None else bar.update()
        )


def calibrate(bench: Bench, case: Case, bar=None):
    """Serve the calibration's workload with room, as a static batch, and in a pool so tight that it swaps."""
    tight = replace(case, num_blocks=24, preemption="swap")
    return [
        bench.run(case, "fcfs", bar),
        bench.run(case, "static", bar),
        bench.run(tight, "srpt", bar),
        bench.run(tight, "fcfs", bar),
    ]


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


def rows_of(traces, cases_by_name, cost):
    for (name, policy), trace in traces.items():
        yield name, policy, fidelity(trace, predict_run(trace, cases_by_name[name].requests, cost))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", choices=models.BUILT_IN)
    parser.add_argument("--size", type=int, default=32, help="requests of a workload")
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--csv", help="write one row a policy here")
    parser.add_argument("--save", help="pickle the runs here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    calibration, others = cases(arguments.size, arguments.seed)
    bench = Bench(arguments.model)
    with progress_bar(None, "engine steps", "step") as bar:
        runs = calibrate(bench, calibration, bar)
        cost = Calibrated.fit(*runs)
        linear = Linear.fit(*runs, context=True)
        others = {case.name: timed(case, cost) for case in others}
        traces = {
            (name, policy): bench.run(case, policy, bar)
            for name, case in others.items()
            for policy in POLICIES
        }
        again = {(name, "fcfs"): bench.run(case, "fcfs", bar) for name, case in others.items()}
        runs_again = calibrate(bench, calibration, bar)
    if arguments.save:
        import pickle

        with open(arguments.save, "wb") as file:
            pickle.dump((runs, others, traces, again, runs_again), file)
    report(runs, others, traces, again, runs_again)
    print("CPU seconds", time.process_time() - began)


def report(runs, others, traces, again, runs_again):
    pass


if __name__ == "__main__":
    main()
