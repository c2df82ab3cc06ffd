"""Serve random workloads in tiny pools under every policy, with every invariant checked after every step.

    python tests/fuzz_policies.py [WORKLOADS] [POLICY ...]

prints a line for each policy with what its cells came to, and exits with 1 if a cell fails. A cell is a
policy, a way of preemption, the prefix cache on or off, and prompts cut at the token budget or not.
"""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.trace import Trace

VARIANTS = (
    "orca:reserve=pow2",
    "orca:reserve=oracle",
    "static:release",
    "static:wait=3",
    "vllm_v0:swap",
    "vllm_v1:priority",
    "least_slack:relative",
    "mlfq:levels=3,quantum=4,aging=9",
    "lpm:most=4,shared=2",
    "dlpm:quantum=8",
    "andes:ttft=3,speed=0.3",
    "new_token_ratio:ratio=0.3,decay=9",
)
POLICIES = (*policies.available(), *VARIANTS)


@dataclass(frozen=True)
class Cell:
    """How a policy is run.

    Attributes:
        policy: Its name.
        room: "recompute", "swap", or "roomy": a pool in which no request ever has to make room.
        caching: Whether prefixes are cached.
        chunked: Whether a prompt may be cut where the token budget ends.
    """

    policy: str
    room: str
    caching: bool
    chunked: bool


def cells(policy: str) -> Iterator[Cell]:
    """Yield all cells of a policy."""
    for options in itertools.product(("recompute", "swap", "roomy"), (False, True), (False, True)):
        yield Cell(policy, *options)


def workload(rng: np.random.Generator) -> list[Request]:
    """Draw requests, some of them alike, some impossible."""
    number = int(rng.integers(1, 16))
    stems = [rng.integers(0, 3, 30).tolist() for _ in range(2)]
    return [
        Request(
            f"r{place}",
            tuple(
                [*stems[place % 2][: int(rng.integers(0, 20))], *rng.integers(0, 3, int(rng.integers(1, 12)))]
            ),
            int(rng.integers(1, 16)),
            arrival=(arrival := float(rng.choice([0.0, rng.random() * 25]))),
            client=f"c{int(rng.integers(3))}",
            priority=int(rng.integers(-1, 2)),
            deadline=arrival + float(rng.random() * 60) if rng.integers(2) else None,
            predicted_output=int(rng.integers(1, 20)) if rng.integers(2) else None,
            output_length=int(rng.integers(1, 16)) if rng.integers(3) == 0 else None,
        )
        for place in range(number)
    ] + [Request("huge", 10_000, 5, arrival=float(rng.random() * 20))] * int(rng.integers(2))


def limits(
    cell: Cell, requests: list[Request], rng: np.random.Generator
) -> tuple[SchedulerConfig, CacheConfig]:
    """Draw seats, budget and a pool in which the longest request just fits, unless the cell is roomy."""
    block_size = int(rng.choice([1, 3, 8]))
    lengths = [
        request.num_prompt_tokens + request.max_tokens - 1 for request in requests if request.id != "huge"
    ]
    needed = [-(-length // block_size) for length in lengths]
    # In a roomy pool no request is short of blocks even if all are there at once.
    num_blocks = sum(needed) + len(needed) if cell.room == "roomy" else max(needed) + int(rng.integers(0, 5))
    budget = int(rng.choice([3, 16, 60])) if cell.chunked else max(lengths)
    seats = len(requests) if cell.room == "roomy" else int(rng.integers(1, 7))
    return (
        SchedulerConfig(
            seats,
            budget,
            preemption="swap" if cell.room == "swap" else "recompute",
            max_preemptions=int(rng.choice([1, 3, 8])),
            chunked_prefill=cell.chunked,
        ),
        CacheConfig(
            num_blocks,
            block_size,
            cell.caching,
            num_host_blocks=int(rng.integers(1, 2 * num_blocks)) if cell.room == "swap" else 0,
            cache_on_schedule=bool(rng.integers(2)),
        ),
    )


def run(cell: Cell, seed: int) -> Trace:
    """Serve one workload of a cell and judge the end.

    Raises:
        AssertionError: An invariant broke, a request was left out, or the run does not come to an end.
    """
    rng = np.random.default_rng(seed)
    requests = workload(rng)
    scheduler = Scheduler(policies.get(cell.policy), *limits(cell, requests, rng))
    # Each request may be computed as often as it can be preempted, and all may have to wait for it.
    work = sum(request.num_prompt_tokens + request.max_tokens for request in requests if request.id != "huge")
    patience = 20 * work * (scheduler.config.max_preemptions + 1)

    def look(record):
        scheduler.check()
        assert record.plan.step < patience, "the run does not come to an end"

    trace = serve(requests, scheduler, CostExecutor(Linear(1.0)), on_step=look)
    judge(cell, requests, trace)
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
    return trace


def judge(cell: Cell, requests: list[Request], trace: Trace) -> None:
    """Hold a trace against what was asked for."""
    for request, record in zip(requests, trace.requests, strict=True):
        if request.id == "huge":
            assert "10005" in record.error or "10004" in record.error or "taken" in record.error
            continue
        assert record.error is None, record.error
        assert len(record.tokens) == min(request.max_tokens, request.output_length or request.max_tokens)
        assert record.finish_reason in ("stop", "length")
    if cell.room == "roomy":
        assert not any(step.plan.preempted for step in trace.steps), "no request had to make room"
    for step in trace.steps:
        assert step.plan.num_tokens <= trace.scheduler.max_num_batched_tokens
        assert step.num_running <= trace.scheduler.max_num_seqs
        if not cell.chunked:
            assert all(entry.samples for entry in step.plan.scheduled), "a prompt was cut"


def main(num_workloads: int, names: tuple[str, ...]) -> int:
    """Print what each policy's cells came to; return 1 if one failed."""
    failures = 0
    for name in names:
        counts: Counter[str] = Counter()
        began = time.perf_counter()
        for cell in cells(name):
            counts["cells"] += 1
            for seed in range(num_workloads):
                counts["workloads"] += 1
                try:
                    trace = run(cell, seed)
                except Exception as error:
                    failures += 1
                    print(f"{cell}, seed {seed}: {type(error).__name__}: {error}")
                    continue
                counts["steps"] += len(trace.steps)
                counts["preemptions"] += sum(record.num_preemptions for record in trace.served)
                counts["swaps"] += sum(len(step.plan.swapped) for step in trace.steps)
                counts["rejections"] += len(trace.requests) - len(trace.served)
        numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
        print(f"{name}: {numbers}, {time.perf_counter() - began:.1f} s", flush=True)
    print(f"{len(names)} policies, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, tuple(sys.argv[2:]) or POLICIES))
