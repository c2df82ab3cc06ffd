"""How many requests a second the simulator serves; a part of `make bench`.

    python tests/bench_simulator.py

prints a line each: a million requests whose records are not kept, requests of the Azure conversation trace
that arrive at random, and that trace with its own arrivals.
"""

import csv
import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from cbresearch.streaming import StreamingSummary
from tqdm.auto import tqdm

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.policies import get
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import stream
from cbresearch.simulator import CostExecutor, simulate

COST = Linear(8e-3, 20e-6, 20e-9)
NUM_SEQS = 128
TRACE = "AzureLLMInferenceTrace_conv.csv"
VIDUR = (225, 366)
"""Requests a second of another simulator on a machine like this one."""


def azure(path: Path) -> list[Request]:
    """Return a request for each row, with its own arrival in seconds since the first."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = np.array([row["TIMESTAMP"] for row in rows], dtype="datetime64[ns]")
    arrivals = ((times - times[0]) / np.timedelta64(1, "s")).tolist()
    return [
        Request(str(place), int(row["ContextTokens"]), int(row["GeneratedTokens"]), arrival=arrival)
        for place, (row, arrival) in enumerate(zip(rows, arrivals, strict=True))
    ]


def rate(requests: list[Request], policy: str, *, fast_forward: bool = True, rounds: int = 3) -> str:
    """Return what the simulator does a second, best of some rounds."""
    seconds, num_steps = [], 0
    for _ in range(rounds):
        gc.collect()
        began = time.perf_counter(), time.process_time()
        trace = simulate(
            requests,
            policy,
            cost=COST,
            scheduler=SchedulerConfig(NUM_SEQS),
            fast_forward=fast_forward,
        )
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        num_steps = len(trace.steps)
        del trace
    wall, cpu = min(seconds)[0], min(both[1] for both in seconds)
    return (
        f"{len(requests) / wall:,.0f} requests/s of wall time ({len(requests) / cpu:,.0f} of CPU time), "
        f"{num_steps:,} steps; {len(requests) / wall / VIDUR[1]:.1f}x to "
        f"{len(requests) / wall / VIDUR[0]:.1f}x {VIDUR[0]} to {VIDUR[1]}"
    )


def lognormal_requests(number: int, arrivals_per_s: float) -> Iterator[Request]:
    """Yield requests of lognormal lengths (means 64 and 32 tokens) that arrive at random times."""
    rng, now, place = np.random.default_rng(0), 0.0, 0
    while place < number:
        size = min(10_000, number - place)
        gaps = rng.exponential(1 / arrivals_per_s, size)
        prompts = np.clip(np.rint(rng.lognormal(np.log(64) - 0.32, 0.8, size)), 1, 1000).astype(int).tolist()
        outputs = np.clip(np.rint(rng.lognormal(np.log(32) - 0.32, 0.8, size)), 1, 500).astype(int).tolist()
        for gap, prompt, output in zip(gaps.tolist(), prompts, outputs, strict=True):
            now += gap
            yield Request(str(place), prompt, output, arrival=now)
            place += 1


def long_run(number: int, share: float = 0.8, num_seqs: int = 16) -> None:
    """Stream many requests and print time and memory on the way."""
    # A step of full seats serves its share of prompts too; who decodes attends to prompt and output.
    mean_prompt, mean_output = 64, 32
    tokens_per_step = num_seqs + num_seqs * mean_prompt / mean_output
    step = COST.seconds(tokens_per_step, num_seqs * (mean_prompt + mean_output))
    capacity = num_seqs / (mean_output * step)
    limits = SchedulerConfig(num_seqs)
    cache = CacheConfig(num_seqs * 1500 // 16)
    sink = StreamingSummary(num_seqs, cache.num_blocks, cache.block_size)
    marks = {number // 4, number // 2, number}
    began = time.perf_counter(), time.process_time()

    def watched() -> Iterator[Request]:
        with tqdm(total=number, desc="a long run", unit="request") as bar:
            for place, request in enumerate(lognormal_requests(number, share * capacity), start=1):
                yield request
                if place % 1000 == 0:
                    bar.update(1000)
                if place in marks:
                    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                    tqdm.write(
                        f"long run: {place:,} requests in {wall:.1f} s ({cpu:.1f} s of CPU time, "
                        f"{cpu / place * 1e6:.1f} us a request), peak memory {peak:.0f} MiB",
                        file=sys.stdout,
                    )

    stream(watched(), Scheduler(get("fcfs"), limits, cache, COST.seconds), CostExecutor(COST), sink)
    figures = sink.summary()
    print(
        f"long run: load {share} of {capacity:.1f} requests/s, {num_seqs} slots: {sink.num_finished:,} "
        f"finished in {sink.num_steps:,} steps, mean occupancy {figures['occupancy_rows']:.2f}, TTFT p99 "
        f"{figures['ttft_p99_s']:.3f} s",
        flush=True,
    )


def main() -> None:
    """Run all benchmarks of the simulator."""
    if len(sys.argv) == 3 and sys.argv[1] == "--long":
        long_run(int(sys.argv[2]))
        return
    # First, since a process counts what its parent held at its start as memory of its own.
    subprocess.run([sys.executable, __file__, "--long", "1000000"], check=True)
    path = Path(os.environ.get("CBRESEARCH_DATA", "")) / TRACE
    if path.is_file():
        whole = azure(path)
        arrivals = np.random.default_rng(0).exponential(1 / 5, 2000).cumsum().tolist()
        requests = [
            replace(request, arrival=arrival) for request, arrival in zip(whole, arrivals, strict=False)
        ]
        print(
            f"simulator, 2,000 Azure requests, 5 a second, vllm_v0: {rate(requests, 'vllm_v0')}", flush=True
        )
        stepped = rate(requests, "vllm_v0", fast_forward=False, rounds=1)
        print(f"simulator, the same, every step by itself: {stepped}", flush=True)
        print(
            f"simulator, the whole trace of {len(whole):,}, its own arrivals, vllm_v0: "
            f"{rate(whole, 'vllm_v0', rounds=1)}",
            flush=True,
        )
    else:
        print(f"simulator: skipped the Azure trace, CBRESEARCH_DATA has no {TRACE}", flush=True)


if __name__ == "__main__":
    main()
