"""The blocks told from a trace alone are those of the block manager that served the run."""

from dataclasses import replace

import numpy as np
import pytest
from test_two_tiers import Meddler, NewcomersFirst, random_case

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.plan import StepResult
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor, simulate
from cbresearch.viz.blockmap import NOWHERE, BlockMap

POLICIES = ("fcfs", "static", "static:release", "prefill_first", "sjf", "vllm_v1")


class Watched(Scheduler):
    """Write down both pools in each step, before the finished requests give back their blocks."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
        self._noted = True

    def _note(self):
        if not self._noted:
            self._noted = True
            ids = [state.id for state in (*self._running, *self._kept)]
            device = {name: self.blocks.table(name) for name in ids if self.blocks.table(name)}
            host = {state.id: self.blocks.host_table(state.id) for state in self.swapped}
            cached = getattr(self.blocks, "cached_block_ids", ())
            self.seen.append((device, host, frozenset(cached)))

    def commit(self, plan, result, now):
        self._noted = False
        committed = super().commit(plan, result, now)
        self._note()
        return committed

    def _finish(self, finished):
        self._note()
        super()._finish(finished)


class Failing(CostExecutor):
    """Let some requests fail in some steps.

    Args:
        seed: Of the draws.
        rate: How likely each is to fail, in each step.
    """

    def __init__(self, seed, rate):
        super().__init__(Linear(step=1.0))
        self.rng, self.rate = np.random.default_rng(seed), rate

    def execute(self, plan):
        result = super().execute(plan)
        failed = {entry.request_id: "lost" for entry in plan.scheduled if self.rng.random() < self.rate}
        tokens = {name: token for name, token in result.tokens.items() if name not in failed}
        return StepResult(result.duration, tokens, result.stopped - failed.keys(), failed=failed)


def run(requests, policy, limits, cache, between=None, executor=None):
    policy = policies.get(policy) if isinstance(policy, str) else policy
    scheduler = Watched(policy, limits, cache)
    executor = executor or CostExecutor(Linear(step=1.0))
    on_step = None if between is None else lambda record: between(scheduler, record)
    trace = serve(requests, scheduler, executor, on_step=on_step, fast_forward=False)
    return trace, scheduler.seen


def told(trace, max_steps=None):
    blocks = BlockMap.of(trace, max_steps)
    steps = [({}, {}, state.cached) for state in blocks.states()]
    for table in blocks.tables:
        for step in range(table.first, table.end):
            tables = steps[step][table.on_host]
            assert table.request_id not in tables, "one request, one table"
            tables[table.request_id] = table.table(step)
    return steps


def assert_told(trace, seen):
    assert len(seen) == len(trace.steps) > 0
    for step, (mine, theirs) in enumerate(zip(told(trace), seen, strict=True)):
        assert mine == theirs, f"step {step}"


def prefixed(num_requests=14):
    """Return requests of which some begin alike, and parallel samples of one more."""
    generator = np.random.default_rng(1)
    begins = (tuple(range(24)), tuple(range(100, 120)), ())
    requests = [
        Request(
            f"r{n}",
            (*begins[n % 3], *generator.integers(0, 50, generator.integers(1, 20)).tolist()),
            int(generator.integers(2, 20)),
            arrival=n / 100,
        )
        for n in range(num_requests)
    ]
    return [*requests, *parallel_samples(Request("p", tuple(range(30, 43)), 9, arrival=0.05), 3)]


@pytest.mark.parametrize("policy", [*POLICIES, NewcomersFirst])
def test_blocks_are_those_of_the_block_manager_under_random_swaps_windows_forks_and_aborts(policy):
    kinds = set()
    for seed in range(60):
        requests, limits, cache = random_case(seed, windows=(None, None, 3, 8))
        given = policy if isinstance(policy, str) else policy()
        trace, seen = run(requests, given, limits, cache, Meddler(seed, aborts=0.1 * (seed % 2)))
        assert_told(trace, seen)
        for step, (_, host, cached) in enumerate(seen):
            kinds |= {"cached"} if cached else set()
            kinds.update(transfer.kind for transfer in trace.steps[step].plan.transfers)
            kinds |= {"host"} if host else set()
        kinds |= (
            {"null"} if any(NOWHERE in table for device, _, _ in seen for table in device.values()) else set()
        )
    assert kinds >= {"swap_out", "swap_in", "host", "null", "cached"}
    # A static batch is admitted at once, so nobody of it finds a sibling whose prompt is there.
    assert policy.startswith("static") if "copy" not in kinds else True


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_a_reserved_run_of_blocks_is_a_table_too(policy, reservation):
    rng = np.random.default_rng(4)
    requests = [
        Request(f"r{n}", int(rng.integers(1, 40)), int(rng.integers(1, 20)), float(n)) for n in range(20)
    ]
    cache = CacheConfig(16, 4, reservation=reservation)
    assert_told(*run(requests, policy, SchedulerConfig(4, 64, max_model_len=64), cache))


def test_tables_of_a_run_taken_in_leaps_are_those_of_the_run_step_by_step():
    requests = [Request(f"r{n}", 5 + n, 30 + n, arrival=7.0 * n) for n in range(12)]
    limits, cache = SchedulerConfig(4, 64), CacheConfig(14, 4)
    fast, slow = (
        simulate(requests, "fcfs", scheduler=limits, cache=cache, fast_forward=leaps)
        for leaps in (True, False)
    )
    assert len(fast.steps.parts) < len(slow.steps)
    assert told(fast) == told(slow)


def test_counts_of_a_step_follow_from_its_tables():
    requests = [
        sample for n in range(6) for sample in parallel_samples(Request(f"r{n}", tuple(range(9 + n)), 12), 2)
    ]
    trace, _ = run(requests, "fcfs", SchedulerConfig(6, 64, preemption="swap"), CacheConfig(14, 4, True, 30))
    assert any(record.num_shared_blocks for record in trace.steps)
    assert any(record.num_held_host_blocks for record in trace.steps)
    for record, (device, host, cached) in zip(trace.steps, told(trace), strict=True):
        references = [block for table in device.values() for block in table]
        assert len(set(references)) == record.num_held_blocks
        assert len(references) - len(set(references)) == record.num_shared_blocks
        assert len({block for table in host.values() for block in table}) == record.num_held_host_blocks
        assert len(host) == record.num_swapped
        assert len(cached) == record.num_cached_blocks


def test_the_first_steps_are_told_alike_whatever_follows():
    requests, limits, cache = random_case(3)
    trace, _ = run(requests, "fcfs", limits, cache)
    assert told(trace, 4) == told(trace)[:4]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", [*POLICIES, "srpt"])
def test_blocks_are_those_of_the_block_manager_where_prompts_begin_alike(policy, preemption, prefix_caching):
    is_whole = policy.startswith(("static", "prefill"))
    host = 24 if preemption == "swap" else 0
    limits = SchedulerConfig(5, 256 if is_whole else 32, preemption=preemption)
    cache = CacheConfig(24, 4, prefix_caching=prefix_caching, num_host_blocks=host)
    trace, seen = run(prefixed(), policy, limits, cache)
    assert any(record.plan.preempted for record in trace.steps)
    assert any(cached for _, _, cached in seen) == prefix_caching
    assert_told(trace, seen)


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v1"])
def test_nothing_of_a_failed_request_stays_cached(policy):
    failures = cached = 0
    for seed in range(40):
        requests, limits, cache = random_case(seed, windows=(None, 8))
        cache = replace(cache, prefix_caching=True)
        trace, seen = run(requests, policy, limits, cache, executor=Failing(seed, 0.05))
        assert_told(trace, seen)
        failures += sum(record.finish_reason == "error" for record in trace.requests)
        cached += sum(len(blocks) for _, _, blocks in seen)
    assert failures and cached


@pytest.mark.parametrize("policy", ["static", "fcfs"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_blocks_follow_a_sliding_window_and_a_run_of_many_steps_at_once(policy, prefix_caching):
    cache = CacheConfig(24, 4, prefix_caching=prefix_caching, sliding_window=9)
    trace = simulate(prefixed(), policy, scheduler=SchedulerConfig(5, 256), cache=cache)
    for state, record in zip(BlockMap.of(trace).states(), trace.steps, strict=True):
        assert len(state.holders) == record.num_held_blocks
        assert len(state.cached) == record.num_cached_blocks


def test_a_state_of_the_pool_tells_who_holds_each_block_and_what_nobody_holds():
    trace, seen = run(prefixed(), "fcfs", SchedulerConfig(5, 32), CacheConfig(24, 4, True))
    blocks = BlockMap.of(trace)
    states = list(blocks.states())
    for step, (device, _, cached) in enumerate(seen):
        holders = {}
        for name, table in device.items():
            for block in table:
                holders[block] = sorted((*holders.get(block, ()), name))
        assert {block: sorted(names) for block, names in states[step].holders.items()} == holders
        assert states[step].cached == cached
        assert not cached & holders.keys()
        assert blocks.state(step) == states[step]
