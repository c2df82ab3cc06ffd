"""The block tables told from a trace alone are those of the block manager that served the run."""

import numpy as np
import pytest
from test_two_tiers import Meddler, NewcomersFirst, random_case

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor, simulate
from cbresearch.viz.blockmap import NOWHERE, holdings

POLICIES = ("fcfs", "static", "static:release", "prefill_first", "sjf", "vllm_v1")


class Watched(Scheduler):
    """Write down the tables of both pools in each step, before the finished requests give theirs back."""

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
            self.seen.append((device, host))

    def commit(self, plan, result, now):
        self._noted = False
        committed = super().commit(plan, result, now)
        self._note()
        return committed

    def _finish(self, finished):
        self._note()
        super()._finish(finished)


def run(requests, policy, limits, cache, between=None):
    policy = policies.get(policy) if isinstance(policy, str) else policy
    scheduler = Watched(policy, limits, cache)
    executor = CostExecutor(Linear(step=1.0))
    on_step = None if between is None else lambda record: between(scheduler, record)
    trace = serve(requests, scheduler, executor, on_step=on_step, fast_forward=False)
    return trace, scheduler.seen


def told(trace, max_steps=None):
    steps = [({}, {}) for _ in trace.steps[:max_steps]]
    for holding in holdings(trace, max_steps):
        for step in range(holding.first, holding.end):
            tables = steps[step][holding.on_host]
            assert holding.request_id not in tables, "one request, one table"
            tables[holding.request_id] = holding.table(step)
    return steps


def assert_told(trace, seen):
    assert len(seen) == len(trace.steps) > 0
    for step, (mine, theirs) in enumerate(zip(told(trace), seen, strict=True)):
        assert mine == theirs, f"step {step}"


@pytest.mark.parametrize("policy", [*POLICIES, NewcomersFirst])
def test_tables_are_those_of_the_block_manager_under_random_swaps_windows_forks_and_aborts(policy):
    kinds = set()
    for seed in range(60):
        requests, limits, cache = random_case(seed, windows=(None, None, 3, 8))
        given = policy if isinstance(policy, str) else policy()
        trace, seen = run(requests, given, limits, cache, Meddler(seed, aborts=0.1 * (seed % 2)))
        assert_told(trace, seen)
        for step, (_, host) in enumerate(seen):
            kinds.update(transfer.kind for transfer in trace.steps[step].plan.transfers)
            kinds |= {"host"} if host else set()
        kinds |= (
            {"null"} if any(NOWHERE in table for device, _ in seen for table in device.values()) else set()
        )
    assert kinds >= {"swap_out", "swap_in", "host", "null"}
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
    for record, (device, host) in zip(trace.steps, told(trace), strict=True):
        references = [block for table in device.values() for block in table]
        assert len(set(references)) == record.num_held_blocks
        assert len(references) - len(set(references)) == record.num_shared_blocks
        assert len({block for table in host.values() for block in table}) == record.num_held_host_blocks
        assert len(host) == record.num_swapped


def test_the_first_steps_are_told_alike_whatever_follows():
    requests, limits, cache = random_case(3)
    trace, _ = run(requests, "fcfs", limits, cache)
    assert told(trace, 4) == told(trace)[:4]
