"""Serve random workloads step by step and with steps taken at once, and compare all that comes of it.

    python tests/fuzz_fast_forward.py [WORKLOADS] [POLICY ...]

prints a line for each policy that allows it, and exits with 1 if anything differs. Workload k is the same in
every run; each draws its own pool, limits, cost and requests.
"""

import sys
from collections import Counter
from dataclasses import fields

import numpy as np
from fuzz_policies import POLICIES
from tqdm.auto import tqdm

from cbresearch import metrics, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.kv import reserved_tokens
from cbresearch.policies.base import may_fast_forward
from cbresearch.request import Request, expand
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.step import DecodeRun
from cbresearch.trace import Trace

STEADY = tuple(name for name in POLICIES if may_fast_forward(policies.get(name)))
COSTS = (
    Linear(1.0),
    Linear(0.3, 0.01, 0.0007),
    Linear(0.05, 0.02),
    Linear(0.0, 0.1),
    Linear(0.7, 0, 1e-3, 0.1),
)


def workload(rng: np.random.Generator) -> list[Request]:
    """Draw requests: mere lengths or token ids that begin alike, bursts or a trickle, early ends, samples."""
    number, has_ids = int(rng.integers(1, 14)), rng.random() < 0.6
    stems = [rng.integers(0, 3, 40).tolist() for _ in range(2)]
    spread, longest = float(rng.choice([0.0, 5.0, 30.0, 200.0])), int(rng.choice([4, 20, 60]))
    requests = []
    for place in range(number):
        prompt: int | tuple[int, ...] = int(rng.integers(1, 30))
        if has_ids and rng.random() < 0.9:
            stem, tail = stems[place % 2][: int(rng.integers(0, 30))], rng.integers(0, 2, rng.integers(1, 6))
            prompt = tuple([*stem, *tail.tolist()])
        most = int(rng.integers(1, longest + 1))
        requests.append(
            Request(
                f"r{place}",
                prompt,
                most,
                arrival=(arrival := float(rng.random() * spread) if rng.random() < 0.8 else 0.0),
                client=f"c{int(rng.integers(3))}",
                priority=int(rng.integers(-1, 2)),
                deadline=arrival + float(rng.random() * 60) if rng.integers(2) else None,
                predicted_output=int(rng.integers(1, longest + 5)) if rng.integers(2) else None,
                output_length=int(rng.integers(1, longest + 1)) if rng.integers(3) == 0 else None,
                group=f"g{place % 3}" if rng.random() < 0.1 else None,
                cache_salt="s" if rng.random() < 0.1 else None,
            )
        )
    return expand(requests)


def limits(requests: list[Request], rng: np.random.Generator) -> tuple[SchedulerConfig, CacheConfig]:
    """Draw seats, budget and a pool: tight or roomy, paged or reserved, with a host's pool, or a window."""
    block_size = int(rng.choice([1, 2, 3, 8, 16]))
    lengths = [request.num_prompt_tokens + request.max_tokens for request in requests]
    kind = rng.choice(["plain", "plain", "cached", "cached", "window", "cached window", "reserved"])
    is_swapping, is_tight = rng.random() < 0.4, rng.random() < 0.7
    reservation = str(rng.choice(["max", "pow2", "oracle"])) if kind == "reserved" else None
    if reservation is not None:
        lengths = [reserved_tokens(request, reservation, max(lengths)) + 1 for request in requests]
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = max(needed) + int(rng.integers(0, 6)) if is_tight else sum(needed) + len(needed)
    if reservation is not None:
        num_blocks = 1 << (num_blocks - 1).bit_length() + int(rng.integers(2))
    is_chunked = rng.random() < 0.7
    return (
        SchedulerConfig(
            int(rng.integers(1, 8)) if rng.random() < 0.7 else 20,
            int(rng.choice([3, 8, 16, 100])) if is_chunked else max(lengths) + 20,
            max_model_len=max(lengths),
            preemption="swap" if is_swapping and kind != "reserved" else "recompute",
            max_preemptions=int(rng.choice([1, 3, 8])),
            chunked_prefill=is_chunked,
        ),
        CacheConfig(
            num_blocks,
            block_size,
            "cached" in kind,
            num_host_blocks=int(rng.integers(1, 2 * num_blocks)) if is_swapping and kind != "reserved" else 0,
            sliding_window=int(rng.integers(1, 25)) if "window" in kind else None,
            reservation=reservation,
            cache_on_schedule=bool(rng.integers(2)),
        ),
    )


def run(policy: str, seed: int, fast_forward: bool) -> tuple[Trace, Scheduler]:
    """Serve one workload."""
    rng = np.random.default_rng(seed)
    requests = workload(rng)
    scheduler = Scheduler(policies.get(policy), *limits(requests, rng))
    cost = COSTS[int(rng.integers(len(COSTS)))]
    if rng.random() < 0.3:
        # Two more turns of two clients.
        follows = {f"{name}{turn}": f"{name}{turn}+" for name in ("r0", "r1") for turn in ("", "+")}

        def follow(record):
            if record.id in follows and record.error is None:
                return [Request(follows[record.id], 5, 7, arrival=record.finish + 0.37)]
            return []

    else:
        follow = None
    trace = serve(requests, scheduler, CostExecutor(cost), on_finish=follow, fast_forward=fast_forward)
    scheduler.check()
    return trace, scheduler


def differences(policy: str, seed: int) -> tuple[list[str], Trace]:
    """Return in what a run with steps taken at once differs from one that steps, and the former's trace."""
    (stepped, scheduler), (fast, other) = run(policy, seed, False), run(policy, seed, True)
    found = []
    if len(stepped.steps) != len(fast.steps):
        found.append(f"{len(stepped.steps)} steps, {len(fast.steps)} with decode runs")
    for one, two in zip(stepped.steps, fast.steps, strict=False):
        for field in fields(one):
            if getattr(one, field.name) != getattr(two, field.name):
                found.append(
                    f"step {one.plan.step}, {field.name}: {getattr(one, field.name)} is "
                    f"{getattr(two, field.name)}"
                )
        if found:
            break
    for one, two in zip(stepped.requests, fast.requests, strict=True):
        for field in fields(one):
            if getattr(one, field.name) != getattr(two, field.name):
                found.append(f"request {one.id}, {field.name}")
    if stepped != fast or fast != stepped:
        found.append("the traces are unequal")
    if metrics.summary(stepped) != metrics.summary(fast):
        found.append("the metrics differ")
    if [*metrics.memory(stepped)] != [*metrics.memory(fast)]:
        found.append("the memory use differs")
    if not stepped.steps_frame().equals(fast.steps_frame()):
        found.append("the columns differ")
    if getattr(scheduler.kv, "cached_block_ids", ()) != getattr(other.kv, "cached_block_ids", ()):
        found.append("other blocks are cached")
    if all_blocks(scheduler) != all_blocks(other):
        found.append("the free blocks lie in another order")
    for name, value in vars(scheduler.policy).items():
        if not isinstance(value, list) and vars(other.policy)[name] != value:
            found.append(f"the policy's {name} is {vars(other.policy)[name]}, not {value}")
    return found, fast


def all_blocks(scheduler: Scheduler) -> tuple[int, ...] | None:
    """Take all blocks of a pool of pages that serves no request, in the order in which it hands them out."""
    config = scheduler.kv.config
    return None if config.reservation else scheduler.kv.allocate("all", config.num_tokens)


def features(trace: Trace) -> Counter[str]:
    """Count what a trace has of what could go wrong."""
    runs = [part for part in trace.parts if isinstance(part, DecodeRun)]
    return Counter(
        steps=len(trace.steps),
        decode_runs=len(runs),
        steps_in_runs=sum(map(len, runs)),
        runs_with_a_queue=sum(run.pool(0).num_waiting > 0 for run in runs),
        runs_with_padding=sum(bool(run.padding) for run in runs),
        preemptions=sum(record.num_preemptions for record in trace.served),
        swaps=sum(len(step.plan.swapped) for step in trace.steps),
        windows=int(trace.cache.sliding_window is not None),
        reservations=int(trace.cache.reservation is not None),
    )


def main(num_workloads: int, names: tuple[str, ...]) -> int:
    """Print what each policy's workloads came to; return 1 if anything differed."""
    failures, total = 0, Counter[str]()
    with tqdm(total=num_workloads * len(names), desc="workloads", unit="run") as bar:
        for name in names:
            counts: Counter[str] = Counter()
            for seed in range(num_workloads):
                bar.update()
                try:
                    found, trace = differences(name, seed)
                except Exception as error:
                    failures += 1
                    tqdm.write(f"{name}, workload {seed}: {type(error).__name__}: {error}")
                    continue
                counts["workloads"] += 1
                counts.update(features(trace))
                if found:
                    failures += 1
                    tqdm.write(f"{name}, workload {seed}: {'; '.join(found[:3])}")
            total.update(counts)
            tqdm.write(f"{name}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
    print(f"{len(names)} policies: " + ", ".join(f"{number} {what}" for what, number in total.items()))
    print(f"{failures} differences")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 500, tuple(sys.argv[2:]) or STEADY))
