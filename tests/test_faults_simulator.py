"""Kinds of faults that other simulators had; each test's name is the claim.

That the wall clock reaches no run, and that a recorded run is replayed step for step, is tested with the loop
(`test_serve`) and the simulator (`test_simulator`).
"""

import pytest
from cbresearch.leap import Leap
from fuzz_policies import POLICIES
from test_two_tiers import random_case

from cbresearch import CacheConfig, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.costs import Linear
from cbresearch.serve import Loop, serve
from cbresearch.simulator import CostExecutor
from cbresearch.trace import Steps

COST = Linear(0.3, 0.01, 0.0007)


def leaps_of(trace):
    return [part for part in trace.steps.parts if isinstance(part, Leap)]


# --- memory at the end of a request


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_last_token_of_a_request_that_ends_at_a_blocks_edge_takes_no_block(block_size, fast_forward):
    # Prompt and output are one token more than the pool holds; nobody reads the KV of the last one.
    requests = [Request("a", block_size, 7 * block_size + 1), Request("b", block_size, 1)]
    cache = CacheConfig(8, block_size)
    trace = simulate(
        requests, cost=COST, scheduler=SchedulerConfig(1), cache=cache, fast_forward=fast_forward
    )
    first, second = trace.requests
    assert len(first.tokens) == 7 * block_size + 1
    assert first.num_preemptions == second.num_preemptions == 0
    assert max(step.num_held_blocks for step in trace.steps) == 8
    full = next(step for step in trace.steps if "a" in step.finished)
    assert full.num_held_blocks == 8 and not full.plan.scheduled[0].new_block_ids[1:]


def test_blocks_are_conserved_after_every_event_of_a_run_that_takes_steps_at_once():
    num_events = 0

    class Watched(policies.get("vllm_v0:swap").__class__):
        steady = "always"

        def propose(self, view):
            nonlocal num_events
            num_events += 1
            scheduler.blocks.check()
            blocks = scheduler.blocks
            assert blocks.num_held_blocks + blocks.num_free_blocks == blocks.num_blocks
            assert blocks.num_held_host_blocks <= blocks.config.num_host_blocks
            yield from super().propose(view)

    num_leaps = num_swaps = 0
    for seed in range(30):
        requests, limits, cache = random_case(seed)
        scheduler = Scheduler(Watched(swap=True), limits, cache)
        trace = serve(requests, scheduler, CostExecutor(COST))
        num_leaps += len(leaps_of(trace)) if isinstance(trace.steps, Steps) else 0
        num_swaps += sum(len(step.plan.swapped) for step in trace.steps)
        assert scheduler.blocks.num_free_blocks == cache.num_blocks
        assert scheduler.blocks.num_held_host_blocks == 0
    assert num_events and num_leaps and num_swaps


# --- the simulator's scheduler is the scheduler


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v0", "static", "edf"])
def test_under_overload_nobody_waits_shorter_because_steps_are_taken_at_once(policy):
    # Twice what the seats can serve: the queue grows until the last arrival.
    requests = [
        Request(str(place), 5 + place % 7, 10 + place % 31, arrival=0.5 * place, deadline=100.0 + place)
        for place in range(120)
    ]
    stepped, leapt = (
        simulate(
            requests, policy, cost=Linear(0.2, 0.01), scheduler=SchedulerConfig(4), fast_forward=fast_forward
        )
        for fast_forward in (False, True)
    )
    waits = [record.first_scheduled - record.arrival for record in leapt.requests]
    assert waits == [record.first_scheduled - record.arrival for record in stepped.requests]
    assert max(waits) > 60
    assert [step.plan for step in leapt.steps] == [step.plan for step in stepped.steps]
    assert len(leaps_of(leapt)) > 30


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill": False},
        {"preemption": "swap", "num_host_blocks": 30},
        {"prefix_caching": True},
        {"sliding_window": 9},
        {"reservation": "pow2"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_every_policy_runs_with_every_option(policy, options):
    limits = {name: options[name] for name in ("chunked_prefill", "preemption") if name in options}
    memory = {name: value for name, value in options.items() if name not in limits}
    requests = [
        Request(
            str(place),
            (1, 2, place % 2, *range(3 + place % 9)),
            3 + place % 20,
            arrival=place / 4,
            client=f"c{place % 3}",
            deadline=40.0,
        )
        for place in range(12)
    ]
    trace = simulate(
        requests,
        policy,
        cost=COST,
        scheduler=SchedulerConfig(5, 64, **limits),
        cache=CacheConfig(32, 4, **memory),
    )
    assert [len(record.tokens) for record in trace.requests] == [3 + place % 20 for place in range(12)]


# --- the host's clock, and the work that a run takes


def test_the_host_clock_is_not_looked_at_when_steps_are_taken_at_once(no_clocks):
    requests = [Request(str(place), 3, 40, arrival=float(place)) for place in range(9)]
    plain = simulate(requests, "vllm_v0", cost=COST)

    with no_clocks():
        patched = simulate(requests, "vllm_v0", cost=COST)
    assert leaps_of(patched)
    assert patched == plain


def num_rounds(number, policy, monkeypatch, **limits):
    """Return how often a run of so many requests takes a step or several at once."""
    rounds = 0
    step = Loop.step

    def counted(self, clock):
        nonlocal rounds
        rounds += 1
        return step(self, clock)

    requests = [Request(str(place), 8, 50 + place % 13, arrival=2.0 * place) for place in range(number)]
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", counted)
        trace = simulate(requests, policy, cost=Linear(0.1, 0.001), **limits)
    assert all(record.error is None for record in trace.requests)
    return rounds + len(leaps_of(trace))


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v0"])
def test_the_work_of_a_run_grows_with_its_requests_and_not_with_its_tokens(policy, monkeypatch):
    few, many = num_rounds(300, policy, monkeypatch), num_rounds(3000, policy, monkeypatch)
    # A step for the prompt, and one leap until the next arrival.
    assert few <= 2.1 * 300
    assert many <= 10.1 * few


def test_a_pool_that_makes_requests_lose_their_seats_still_takes_steps_at_once():
    requests = [Request(str(place), 8, 100, arrival=float(place)) for place in range(40)]
    trace = simulate(
        requests, cost=COST, scheduler=SchedulerConfig(8), cache=CacheConfig(24, 16), fast_forward=True
    )
    assert sum(record.num_preemptions for record in trace.requests) > 10
    assert len(trace.steps.parts) < 2 / 3 * len(trace.steps)
