"""The blocks that the records tell are those of the block manager that served the run."""

from collections import Counter

import numpy as np
import pytest
from helpers.block_events import NULL, recorded
from helpers.demo_runs import prefixed

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request, parallel_samples
from cbresearch.simulator import simulate
from cbresearch.viz.memory import BlockMap

POLICIES = ("fcfs", "static", "static:release", "prefill_first", "sjf", "vllm_v1")


class NewcomersFirst(policies.Policy):
    """Admit before serving the running requests, so that an admission can be undone within its step."""

    name = "newcomers_first"

    def propose(self, view):
        yield from policies.joining(view, policies.queued(view))
        yield from policies.whole(view.running)


def told(trace):
    """Return device blocks by request, host blocks by request, and cached blocks, for each step."""
    blocks = BlockMap.of(trace.steps)
    steps = [({}, {}, set()) for _ in trace.steps]
    for table in blocks.tables:
        for step in range(table.first, table.end):
            tables = steps[step][table.on_host]
            assert table.request_id not in tables, "one request, one table"
            tables[table.request_id] = table.held(step)
    for block, first, end in blocks.cached:
        for step in range(first, end):
            assert block not in steps[step][2], "one block, one span"
            steps[step][2].add(block)
    return steps


def assert_told(trace, seen):
    """Hold what the records tell against their counts, and against the tables that the executor saw."""
    assert len(seen) == len(trace.steps) > 0
    steps = zip(trace.steps, told(trace), seen, strict=True)
    for record, (device, host, cached), tables in steps:
        references = [block for blocks in device.values() for block in blocks]
        assert record.pool.num_held_blocks == len(set(references))
        assert record.pool.num_shared_blocks == len(references) - len(set(references))
        assert record.pool.num_cached_blocks == len(cached)
        assert record.pool.num_swapped == len(host)
        assert record.pool.num_held_host_blocks == len({b for blocks in host.values() for b in blocks})
        released = Counter(name for name, _ in record.events.released)
        for name, table in tables.items():
            assert device[name] == [block for block in table if block != NULL][released[name] :]


def drawn_case(seed):
    """Draw requests (some alike, some parallel samples), limits and pools, with and without a window."""
    rng = np.random.default_rng(seed)
    heads = [tuple(rng.integers(0, 5, size=12).tolist()) for _ in range(2)]
    requests = []
    for place in range(int(rng.integers(3, 8))):
        prompt = (*heads[int(rng.integers(2))][: int(rng.integers(1, 13))], place)
        request = Request(f"r{place}", prompt, int(rng.integers(1, 16)), float(rng.integers(10)))
        requests += parallel_samples(request, 2) if rng.random() < 0.4 else [request]
    size = int(rng.choice([1, 2, 4]))
    window = (None, None, 3, 8)[int(rng.integers(4))]
    limits = SchedulerConfig(int(rng.integers(2, 8)), 64, preemption="swap")
    pool = -(-40 // size) + int(rng.integers(3))
    hosted = int(rng.choice([0, 5, 100]))
    return requests, limits, CacheConfig(pool, size, bool(rng.integers(2)), hosted, sliding_window=window)


def meddler(seed):
    """Return a function that preempts and aborts at random between steps."""
    rng = np.random.default_rng(seed)

    def between(scheduler, record):
        if record.plan.step < 40 and rng.random() < 0.3 and scheduler.running:
            victim = scheduler.running[int(rng.integers(len(scheduler.running)))]
            scheduler.preempt(victim.id, str(rng.choice(["swap", "recompute"])))
        known = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
        if known and rng.random() < 0.04:
            scheduler.abort(known[int(rng.integers(len(known)))].id)

    return between


@pytest.mark.parametrize("policy", [*POLICIES, NewcomersFirst])
def test_block_map_follows_swaps_windows_forks_and_aborts(policy):
    kinds = set()
    for seed in range(25):
        given = policy if isinstance(policy, str) else policy()
        trace, seen = recorded(*drawn_case(seed)[:1], given, *drawn_case(seed)[1:], meddler(seed))
        if not trace.steps:
            continue
        assert_told(trace, seen)
        kinds.update(transfer.kind for record in trace.steps for transfer in record.plan.transfers)
        kinds |= {"host"} if any(record.pool.num_swapped for record in trace.steps) else set()
        kinds |= {"cached"} if any(record.pool.num_cached_blocks for record in trace.steps) else set()
        kinds |= {"null"} if any(NULL in table for tables in seen for table in tables.values()) else set()
    assert kinds >= {"swap_out", "swap_in", "host", "null", "cached"}


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_block_map_takes_a_reserved_run_of_blocks_as_a_table(policy, reservation):
    rng = np.random.default_rng(4)
    requests = [
        Request(f"r{n}", int(rng.integers(1, 40)), int(rng.integers(1, 20)), float(n)) for n in range(20)
    ]
    cache = CacheConfig(16, 4, reservation=reservation)
    assert_told(*recorded(requests, policy, SchedulerConfig(4, 64, max_model_len=64), cache))


def test_block_map_of_decode_runs_is_that_of_single_steps():
    requests = [Request(f"r{n}", 5 + n, 30 + n, arrival=7.0 * n) for n in range(12)]
    limits, cache = SchedulerConfig(4, 64), CacheConfig(14, 4)
    fast, slow = (
        simulate(requests, "fcfs", scheduler=limits, cache=cache, fast_forward=is_fast)
        for is_fast in (True, False)
    )
    assert len(fast.parts) < len(slow.parts)
    assert told(fast) == told(slow)


def test_block_map_follows_blocks_that_parallel_samples_share():
    requests = [
        sample for n in range(6) for sample in parallel_samples(Request(f"r{n}", tuple(range(9 + n)), 12), 2)
    ]
    limits = SchedulerConfig(6, 64, preemption="swap")
    trace, seen = recorded(requests, "fcfs", limits, CacheConfig(14, 4, True, 30))
    assert any(record.pool.num_shared_blocks for record in trace.steps)
    assert any(record.pool.num_held_host_blocks for record in trace.steps)
    assert_told(trace, seen)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", [*POLICIES, "srpt"])
def test_block_map_follows_prompts_that_begin_alike(policy, preemption, prefix_caching):
    is_whole = policy.startswith(("static", "prefill"))
    host = 24 if preemption == "swap" else 0
    limits = SchedulerConfig(5, 256 if is_whole else 32, preemption=preemption)
    cache = CacheConfig(24, 4, prefix_caching=prefix_caching, num_host_blocks=host)
    trace, seen = recorded(prefixed(), policy, limits, cache)
    assert any(record.plan.preempted for record in trace.steps)
    assert any(record.pool.num_cached_blocks for record in trace.steps) == prefix_caching
    assert_told(trace, seen)
