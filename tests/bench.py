"""Benchmarks, printed as ratios measured in one run: `make bench`.

The engine against others on the same requests, and its time against the time inside the model
(`bench_engines`); the scheduler's and the block manager's time.
"""

import argparse
import statistics
import time

from bench_engines import compare_throughput, compare_to_forward

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.kv import BlockManager
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.simulator import CostExecutor


def time_scheduler(num_running: int, num_steps: int = 400) -> None:
    """Print the scheduler's host time per running request and step of vllm_v1, with nothing but decodes."""
    limits = SchedulerConfig(num_running, max(2048, num_running))
    scheduler = Scheduler(policies.get("vllm_v1"), limits, CacheConfig(num_running * 64))
    executor = CostExecutor(Linear(step=1.0))
    for place in range(num_running):
        scheduler.submit(Request(str(place), prompt=8, max_tokens=1000))
    samples = []
    now = 0.0
    for _ in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        planned = time.perf_counter()
        result = executor.execute(plan)
        executed = time.perf_counter()
        scheduler.commit(plan, result, now)
        samples.append((planned - began + time.perf_counter() - executed) / len(plan.scheduled))
        now += result.duration
    print(
        f"scheduler at {num_running} running: {statistics.median(samples) * 1e6:.2f} us "
        "per running request and step (schedule and commit, median step)"
    )


def time_blocks(num_blocks: int, num_rounds: int = 400) -> dict[str, float]:
    """Return the seconds of the block manager's operations in a pool full of cached blocks."""
    size, num_hits = 16, 8
    blocks = BlockManager(CacheConfig(num_blocks, size, prefix_caching=True))
    prefix = tuple(range(num_hits * size))
    # Everything is cached, so that each new block has to evict one, as in a server that has run for long.
    for place in range(num_blocks // 10):
        token_ids = (place, *range(10 * size - 1))
        blocks.allocate("filler", len(token_ids))
        blocks.cache_full_blocks("filler", token_ids, len(token_ids))
        blocks.free("filler")
    seconds: dict[str, list[float]] = {"append": [], "allocate with 8 hits": [], "free": []}
    for place in range(num_rounds):
        token_ids = (*prefix, place)
        began = time.perf_counter()
        matched = blocks.match(token_ids)
        assert blocks.can_allocate("a", len(token_ids), matched)
        blocks.fork("a", matched)
        blocks.allocate("a", len(token_ids))
        allocated = time.perf_counter()
        for num_tokens in range(len(token_ids) + 1, len(token_ids) + 1 + size):
            blocks.allocate("a", num_tokens)
        appended = time.perf_counter()
        if not matched:
            blocks.cache_full_blocks("a", prefix, len(prefix))
        freeing = time.perf_counter()
        blocks.free("a")
        freed = time.perf_counter()
        assert len(matched) == (num_hits if place else 0)
        seconds["allocate with 8 hits"].append(allocated - began)
        seconds["append"].append((appended - allocated) / size)
        seconds["free"].append(freed - freeing)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compare_pool_sizes(small: int = 1_000, large: int = 100_000, num_rounds: int = 5) -> None:
    """Print what the block manager takes in a small and in a large pool, best of interleaved rounds."""
    rounds = [(time_blocks(small), time_blocks(large)) for _ in range(num_rounds)]
    few, many = (
        {name: min(times[name] for times in side) for name in side[0]} for side in zip(*rounds, strict=True)
    )
    for name, seconds in few.items():
        print(
            f"blocks: {name:20} {seconds * 1e6:6.2f} us at {small:,} blocks, {many[name] * 1e6:6.2f} us at "
            f"{large:,}: {many[name] / seconds:.2f}x"
        )


def main() -> None:
    """Run all benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128, help="requests in the throughput comparison")
    parser.add_argument(
        "--rounds", type=int, default=3, help="interleaved rounds of the throughput comparison"
    )
    options = parser.parse_args()
    compare_pool_sizes()
    for num_running in (64, 256, 1024):
        time_scheduler(num_running)
    compare_to_forward(options.requests, options.rounds)
    compare_throughput("tiny", (8, 64), options.requests, options.rounds)
    compare_throughput("smollm2-135m", (8,), None, options.rounds)


if __name__ == "__main__":
    main()
