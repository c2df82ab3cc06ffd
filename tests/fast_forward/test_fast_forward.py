"""Steps taken at once are those taken one by one; `tests/fuzz_fast_forward.py` says it at length."""

import os
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from fuzz_fast_forward import STEADY, differences, features
from fuzz_policies import POLICIES
from helpers.core import random_case

from cbresearch import (
    CacheConfig,
    ModelShape,
    Policy,
    Request,
    Scheduler,
    SchedulerConfig,
    metrics,
    policies,
    simulate,
)
from cbresearch.costs import CARDS, Linear, Roofline
from cbresearch.export import stays_of
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor
from cbresearch.step import DecodeRun
from cbresearch.trace import StepRecord, Steps

NUM_WORKLOADS = int(os.environ.get("CBRESEARCH_FUZZ", "4"))
COST = Linear(0.3, 0.01, 0.0007)
# A small model, so that overhead, weights and cache all matter.
ROOFLINE = Roofline(ModelShape(2, 8, 8, 64, 10**6, 2), CARDS["l4"], overhead=1e-6)

# Those whose decisions turn on the time, on tokens served or on free blocks.
STEPPED = {
    "andes",
    "dlpm",
    "hrrn",
    "least_slack",
    "mc_sf",
    "mlfq",
    "new_token_ratio",
    "orca:reserve=oracle",
    "orca:reserve=pow2",
    "past_future",
    "rank",
    "srpt",
    "trail",
    "vtc",
}


def workload(number=12, seed=0, spread=40.0):
    rng = np.random.default_rng(seed)
    return [
        Request(str(place), int(rng.integers(1, 40)), int(rng.integers(1, 60)), arrival=float(arrival))
        for place, arrival in enumerate(np.sort(rng.random(number) * spread))
    ]


def runs_of(trace):
    """Return the decode runs of a trace."""
    return [part for part in trace.parts if isinstance(part, DecodeRun)]


def both(requests, *args, **options):
    """Return a run with steps taken at once, and the same one stepped."""
    return (
        simulate(requests, *args, **options),
        simulate(requests, *args, fast_forward=False, **options),
    )


# --- the same run


@pytest.mark.parametrize("policy", STEADY)
def test_fast_forward_leaves_the_trace_and_the_blocks_of_stepping(policy):
    num_runs = 0
    for seed in range(NUM_WORKLOADS):
        found, trace = differences(policy, seed)
        assert not found, f"workload {seed}: {found[:3]}"
        num_runs += len(runs_of(trace))
    assert num_runs


def test_the_workloads_that_are_compared_have_all_that_could_go_wrong():
    total = Counter()
    for policy in ("fcfs", "static", "vllm_v1"):
        for seed in range(40):
            found, trace = differences(policy, seed)
            assert not found, f"{policy}, workload {seed}: {found[:3]}"
            total.update(features(trace))
    assert all(number > 0 for number in total.values()), total
    assert len(total) == 9


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0"])
def test_metrics_columns_and_stays_of_decode_runs_are_those_of_their_steps(policy):
    limits = SchedulerConfig(5, preemption="swap")
    cache = CacheConfig(40, 4, num_host_blocks=30)
    fast, stepped = both(workload(30), policy, cost=COST, scheduler=limits, cache=cache)
    assert runs_of(fast) and not runs_of(stepped)
    assert metrics.summary(fast) == metrics.summary(stepped)
    assert sorted(stays_of(fast)) == sorted(stays_of(stepped))
    assert fast.steps_frame().equals(stepped.steps_frame())
    assert fast.requests_frame().equals(stepped.requests_frame())


def test_a_long_answer_is_decoded_in_a_few_parts():
    fast, stepped = both([Request("a", 5, 10_000)], cost=COST)
    assert len(fast.parts) <= 4
    assert fast == stepped


def test_a_request_that_arrives_as_a_step_of_a_decode_run_ends_joins_the_next_one():
    requests = [Request("a", 1, 9), Request("b", 1, 3, arrival=4.0), Request("c", 1, 3, arrival=4.5)]
    trace = simulate(requests)
    assert trace.requests[1].first_scheduled == 4.0
    assert trace.requests[2].first_scheduled == 5.0


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v0", "static", "edf"])
def test_under_overload_waits_are_the_same_where_steps_are_taken_at_once(policy):
    # Twice what the seats can serve: the queue grows until the last arrival.
    requests = [
        Request(str(place), 5 + place % 7, 10 + place % 31, arrival=0.5 * place, deadline=100.0 + place)
        for place in range(120)
    ]
    fast, stepped = both(requests, policy, cost=Linear(0.2, 0.01), scheduler=SchedulerConfig(4))
    assert fast == stepped
    assert max(record.first_scheduled - record.arrival for record in fast.requests) > 60
    assert len(runs_of(fast)) > 30


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v1"])
def test_steps_on_the_roofline_are_taken_at_once_and_take_as_long(policy):
    fast, stepped = both(workload(), policy, cost=ROOFLINE)
    assert runs_of(fast) and not runs_of(stepped)
    assert fast.steps == stepped.steps and fast.requests == stepped.requests


def test_a_step_of_no_sensible_time_stops_a_run_as_if_it_were_taken_by_itself():
    errors = []
    for fast_forward in (True, False):
        with pytest.raises(ValueError, match="step 1 took inf seconds") as error:
            simulate([Request("a", 1, 10)], cost=Linear(0.0, 0.0, 1e308), fast_forward=fast_forward)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
def test_the_last_token_of_a_request_that_ends_at_a_block_edge_takes_no_block(block_size, fast_forward):
    # Prompt and output are one token more than the pool holds; the KV of the last one is never read.
    requests = [Request("a", block_size, 7 * block_size + 1), Request("b", block_size, 1)]
    trace = simulate(
        requests,
        cost=COST,
        scheduler=SchedulerConfig(1),
        cache=CacheConfig(8, block_size),
        fast_forward=fast_forward,
    )
    first, second = trace.requests
    assert len(first.tokens) == 7 * block_size + 1
    assert first.num_preemptions == second.num_preemptions == 0
    assert max(step.num_held_blocks for step in trace.steps) == 8
    full = next(step for step in trace.steps if "a" in step.finished)
    assert full.num_held_blocks == 8 and not full.plan.scheduled[0].new_block_ids[1:]


def test_blocks_are_conserved_at_every_decision_of_a_run_that_takes_steps_at_once():
    num_decisions = 0

    class Watched(type(policies.get("vllm_v0:swap"))):
        fast_forward = True

        def propose(self, view):
            nonlocal num_decisions
            num_decisions += 1
            pool = scheduler.kv
            pool.check()
            assert pool.num_held_blocks + pool.num_free_blocks == pool.num_blocks
            assert pool.num_held_host_blocks <= pool.config.num_host_blocks
            yield from super().propose(view)

    num_runs = num_swaps = 0
    for seed in range(30):
        requests, limits, cache = random_case(seed)
        scheduler = Scheduler(Watched(swap=True), limits, cache)
        trace = serve(requests, scheduler, CostExecutor(COST))
        num_runs += len(runs_of(trace))
        num_swaps += sum(len(step.plan.swapped) for step in trace.steps)
        assert scheduler.kv.num_free_blocks == cache.num_blocks
        assert scheduler.kv.num_held_host_blocks == 0
    assert num_decisions and num_runs and num_swaps


# --- which runs are taken at once


def test_each_policy_steps_whose_decisions_turn_on_time_tokens_or_free_blocks():
    # Of the options only a reservation of Orca's turns a decision on free blocks.
    stepped = {name if name.startswith("orca") else name.partition(":")[0] for name in POLICIES}
    assert {name for name in stepped if name not in STEADY} == STEPPED


@pytest.mark.parametrize("policy", sorted(STEPPED))
def test_a_policy_that_does_not_say_fast_forward_is_asked_at_every_step(policy):
    assert not runs_of(simulate(workload(), policy, cost=COST))


def test_a_class_that_says_nothing_is_stepped_even_if_its_base_says_fast_forward():
    class Mine(Policy):
        name = "mine"

    class Speaking(Policy):
        name = "speaking"
        fast_forward = True

    class Derived(Speaking):
        name = "derived"

    assert not runs_of(simulate(workload(), Mine(), cost=COST))
    assert runs_of(simulate(workload(), Speaking(), cost=COST))
    assert not runs_of(simulate(workload(), Derived(), cost=COST))


def test_an_object_may_say_fast_forward_for_itself():
    policy = Policy()
    policy.fast_forward = False
    assert not runs_of(simulate(workload(), policy, cost=COST))
    assert runs_of(simulate(workload(), Policy(), cost=COST))


class Costlier(Linear):
    def __call__(self, plan):
        return 1 + super().__call__(plan)


class Watching(CostExecutor):
    def execute(self, plan):
        return super().execute(plan)


class Logging(Scheduler):
    def schedule(self, now):
        return super().schedule(now)


@pytest.mark.parametrize(
    ("kind", "executor"),
    [
        (Scheduler, CostExecutor(lambda plan: 1.0)),
        (Scheduler, CostExecutor(Costlier(1.0))),
        (Scheduler, CostExecutor(Linear(1.0), {"0": [7] * 60})),
        (Scheduler, Watching(Linear(1.0))),
        (Logging, CostExecutor(Linear(1.0))),
    ],
    ids=["a function", "a derived cost", "given outputs", "a derived executor", "a derived scheduler"],
)
def test_every_step_is_taken_by_itself_where_its_time_or_outcome_is_not_known_beforehand(kind, executor):
    scheduler = kind(policies.get("fcfs"), SchedulerConfig(), CacheConfig(500))
    assert not runs_of(serve(workload(), scheduler, executor))


def test_on_step_sees_every_step():
    seen = []
    trace = simulate(workload(), cost=COST, on_step=seen.append)
    assert trace.steps == tuple(seen) == simulate(workload(), cost=COST).steps


def test_a_pool_in_which_requests_are_preempted_still_takes_steps_at_once():
    requests = [Request(str(place), 8, 100, arrival=float(place)) for place in range(40)]
    trace = simulate(requests, cost=COST, scheduler=SchedulerConfig(8), cache=CacheConfig(24, 16))
    assert sum(record.num_preemptions for record in trace.requests) > 10
    assert len(trace.parts) < 2 / 3 * len(trace.steps)


@pytest.mark.parametrize("policy", ["fcfs", "vllm_v0"])
def test_the_parts_of_a_run_grow_with_its_requests_and_not_with_its_tokens(policy):
    def num_parts(number):
        requests = [Request(str(place), 8, 50 + place % 13, arrival=2.0 * place) for place in range(number)]
        return len(simulate(requests, policy, cost=Linear(0.1, 0.001)).parts)

    few, many = num_parts(300), num_parts(3000)
    # A step for the prompt, and one decode run until the next arrival.
    assert few <= 2.1 * 300
    assert many <= 10.1 * few


def test_fast_forward_does_not_look_at_the_hosts_clock(no_clocks):
    requests = [Request(str(place), 3, 40, arrival=float(place)) for place in range(9)]
    plain = simulate(requests, "vllm_v0", cost=COST)
    with no_clocks():
        patched = simulate(requests, "vllm_v0", cost=COST)
    assert runs_of(patched)
    assert patched == plain


class Remembering(Policy):
    """Note the requests whose end it is told, and the tokens of each."""

    name = "remembering"
    fast_forward = True

    def begin(self):
        self.tokens, self.ended = Counter(), []

    def served(self, request, num_tokens):
        self.tokens[request.id] += num_tokens
        if request.finish_reason is not None:
            self.ended.append((request.id, request.finish_reason, request.num_output_tokens))


def test_a_policy_is_told_the_end_of_each_request_whether_or_not_steps_are_taken_at_once():
    requests = [*workload(), Request("stops", 4, 30, output_length=9)]
    told = []
    for fast_forward in (True, False):
        policy = Remembering()
        trace = simulate(requests, policy, cost=COST, fast_forward=fast_forward)
        assert bool(runs_of(trace)) == fast_forward
        told.append((policy.tokens, policy.ended))
    assert told[0] == told[1] and len(told[0][1]) == len(requests)


# --- a decode run as steps


def test_steps_are_a_sequence_like_the_tuple_of_their_records():
    steps = simulate(workload(), cost=COST).steps
    plain = tuple(steps)
    assert isinstance(steps, Steps) and len(steps.parts) < len(steps) == len(plain)
    assert all(isinstance(step, StepRecord) for step in plain)
    assert [step.plan.step for step in steps] == list(range(len(plain)))
    assert [steps[place] for place in range(-len(plain), len(plain))] == [*plain, *plain]
    for part in (slice(None), slice(3, 17), slice(-9, None), slice(40, 3, -4), slice(5, 5), slice(2, 999, 7)):
        assert steps[part] == plain[part]
    with pytest.raises(IndexError):
        steps[len(plain)]
    assert steps == plain and plain == steps and hash(steps) == hash(plain)
    assert steps != plain[1:] and steps != (*plain[1:], plain[0]) and steps != list(plain)
    assert list(reversed(steps)) == [*reversed(plain)]


def test_a_decode_run_cannot_be_changed():
    (run, *_) = runs_of(simulate([Request("a", 5, 9)], cost=COST))
    with pytest.raises(AttributeError):
        run.start = 0.0
    assert all(isinstance(getattr(run, entry.name), int | float | tuple) for entry in fields(run))
