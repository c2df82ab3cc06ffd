"""Tables and sets of blocks folded from plans and block events are those of the KV manager, at every step."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.core import POLICIES, BlockLedger, Meddler, NewcomersFirst, random_case

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.kv import NULL_BLOCK
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.step import StepResult


class Watched(Scheduler):
    """Note both pools in each step, before its finished requests give back their blocks."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
        self.names: set[str] = set()
        self.is_noted = True

    def submit(self, request, *args, **options):
        self.names.add(request.id)
        return super().submit(request, *args, **options)

    def commit(self, plan, result, now):
        self.is_noted = False
        committed = super().commit(plan, result, now)
        self.note()
        return committed

    def finish(self, finished):
        self.note()
        super().finish(finished)

    def note(self):
        if self.is_noted:
            return
        self.is_noted = True
        # Rows that are computed for nothing hold blocks, too.
        tables = {name: self.kv.table(name) for name in sorted(self.names) if self.kv.table(name)}
        held = {block for table in tables.values() for block in table} - {NULL_BLOCK}
        running = {state.id: tables[state.id] for state in self.running}
        host = {state.id: self.kv.host_table(state.id) for state in self.swapped}
        self.seen.append((running, host, held, set(getattr(self.kv, "cached_block_ids", ()))))


class Failing(CostExecutor):
    """Let requests fail at random.

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
    scheduler = Watched(policies.get(policy), limits, cache)
    executor = executor or CostExecutor(Linear(step=1.0))
    on_step = None if between is None else lambda record: between(scheduler, record)
    return serve(requests, scheduler, executor, on_step=on_step), scheduler.seen


def assert_told(trace, seen):
    assert len(seen) == len(trace.steps) > 0
    ledger = BlockLedger(trace.cache)
    for record, (tables, host, held, cached) in zip(trace.steps, seen, strict=True):
        ledger.take(record)
        step = record.plan.step
        assert {name: tuple(table) for name, table in ledger.tables.items()} == tables, f"step {step}"
        assert {name: tuple(table) for name, table in ledger.host_tables.items()} == host, f"step {step}"
        assert (ledger.held, ledger.cached) == (held, cached), f"step {step}"


@pytest.mark.parametrize("on_schedule", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, "vllm_v1", NewcomersFirst])
def test_block_events_tell_swaps_windows_forks_hits_and_aborts(policy, on_schedule):
    seen_kinds: Counter[str] = Counter()
    for seed in range(40):
        requests, limits, cache = random_case(seed, windows=(None, None, 3, 8))
        cache = replace(cache, cache_on_schedule=on_schedule)
        given = policy if isinstance(policy, str) else policy()
        trace, seen = run(requests, given, limits, cache, Meddler(seed, aborts=0.1 * (seed % 2)))
        assert_told(trace, seen)
        for record, (tables, host, _, cached) in zip(trace.steps, seen, strict=True):
            seen_kinds.update(transfer.kind for transfer in record.plan.transfers)
            seen_kinds.update(name for name, events in record.events._asdict().items() if events)
            seen_kinds["on the host"] += bool(host)
            seen_kinds["kept cached"] += bool(cached)
            seen_kinds["out of the window"] += any(NULL_BLOCK in table for table in tables.values())
    expected = {"swap_out", "swap_in", "cached", "evicted", "freed", "released", "host_held", "host_freed"}
    assert seen_kinds.keys() >= expected | {"on the host", "kept cached", "out of the window"}
    # A static batch is admitted at once, so no request of it finds a sibling whose prompt is there.
    assert (seen_kinds["copy"] > 0) == (not str(policy).startswith("static"))


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v1"])
def test_block_events_leave_nothing_of_a_failed_request_cached(policy):
    num_failures = num_cached = 0
    for seed in range(40):
        requests, limits, cache = random_case(seed, windows=(None, 8))
        cache = replace(cache, prefix_caching=True, cache_on_schedule=bool(seed % 2))
        trace, seen = run(requests, policy, limits, cache, executor=Failing(seed, 0.05))
        assert_told(trace, seen)
        num_failures += sum(record.finish_reason == "error" for record in trace.requests)
        num_cached += sum(len(cached) for _, _, _, cached in seen)
    assert num_failures and num_cached


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_block_events_tell_contiguous_runs(policy, reservation):
    rng = np.random.default_rng(4)
    requests = [
        Request(f"r{n}", int(rng.integers(1, 40)), int(rng.integers(1, 20)), float(n)) for n in range(20)
    ]
    cache = CacheConfig(16, 4, reservation=reservation)
    assert_told(*run(requests, policy, SchedulerConfig(4, 64, max_model_len=64), cache))


@pytest.mark.parametrize("policy", ["fcfs", "static", "static:release", "vllm_v0"])
def test_block_events_of_decode_runs_are_those_of_their_steps(policy):
    requests = [Request(f"r{n}", 5 + n, 30 + n, arrival=7.0 * n) for n in range(12)]
    limits, cache = SchedulerConfig(4, 64), CacheConfig(14, 4)
    scheduler = Scheduler(policies.get(policy), limits, cache)
    fast = serve(requests, scheduler, CostExecutor(Linear(step=1.0)))
    stepped, seen = run(requests, policy, limits, cache)
    assert len(fast.parts) < len(fast.steps)
    assert_told(fast, seen)
    assert [step.events for step in fast.steps] == [step.events for step in stepped.steps]
