"""Steps taken at once are those taken one by one; `tests/fuzz_fast_forward.py` says it at length."""

import gc
import math
import os
import sys
import weakref
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from cbresearch.plan import Plan, Scheduled
from cbresearch.streaming import StreamingSummary
from fuzz_fast_forward import STEADY, differences, features

from cbresearch import (
    CacheConfig,
    ModelShape,
    Policy,
    Request,
    Scheduler,
    SchedulerConfig,
    export,
    metrics,
    policies,
    simulate,
)
from cbresearch.costs import CARDS, Linear, Roofline
from cbresearch.policies.base import steadiness
from cbresearch.serve import serve, stream
from cbresearch.simulator import CostExecutor
from cbresearch.step import DecodeRun as Leap
from cbresearch.trace import RequestRecord, StepRecord, Steps

NUM_WORKLOADS = int(os.environ.get("CBRESEARCH_FUZZ", "4"))
COST = Linear(0.3, 0.01, 0.0007)
# A small model, so that overhead, weights and cache all matter.
ROOFLINE = Roofline(ModelShape(2, 8, 8, 64, 10**6, 2), CARDS["l4"], overhead=1e-6)

# What each policy says, and why no more: a decision that turns on something else than who is there.
CLAIMS = {
    "fcfs": "always",
    "static": "always",
    "prefill_first": "always",
    "vllm_v0": "always",
    "vllm_v1": "always",
    "sarathi": "always",
    "splitfuse": "always",
    "max_utilization": "always",
    "no_evict": "always",
    "orca": "always",
    "sjf": "always",
    "lpm": "always",
    "priority": "ranked",
    "edf": "ranked",
    # The order of the queue turns on the time.
    "hrrn": "alone",
    "rank": "alone",
    "least_slack": "alone",
    # Admission turns on tokens generated.
    "mc_sf": "alone",
    "past_future": "alone",
    "orca:reserve=pow2": "alone",
    "orca:reserve=oracle": "alone",
    # Admission turns on tokens served.
    "vtc": "alone",
    "vtc:output_weight=0.1": "never",
    "dlpm": "alone",
    # Each step changes the share that is reserved.
    "new_token_ratio": "never",
    # The order of those who run turns on tokens generated or served, or on the time.
    "srpt": "never",
    "trail": "never",
    "mlfq": "never",
    "andes": "never",
}


def workload(number=12, seed=0, spread=40.0):
    rng = np.random.default_rng(seed)
    return [
        Request(str(place), int(rng.integers(1, 40)), int(rng.integers(1, 60)), arrival=float(arrival))
        for place, arrival in enumerate(np.sort(rng.random(number) * spread))
    ]


def leaps_of(trace):
    return (
        [part for part in trace.steps.parts if isinstance(part, Leap)]
        if isinstance(trace.steps, Steps)
        else []
    )


# --- the same run


@pytest.mark.parametrize("policy", STEADY)
def test_steps_taken_at_once_leave_the_trace_and_the_blocks_of_steps_taken_one_by_one(policy):
    num_leaps = 0
    for seed in range(NUM_WORKLOADS):
        found, trace = differences(policy, seed)
        assert not found, f"workload {seed}: {found[:3]}"
        num_leaps += len(leaps_of(trace))
    assert num_leaps


def test_the_workloads_compared_have_all_that_could_go_wrong():
    total = Counter()
    for policy in ("fcfs", "static", "vllm_v1"):
        for seed in range(40):
            found, trace = differences(policy, seed)
            assert not found, f"{policy}, workload {seed}: {found[:3]}"
            total.update(features(trace))
    assert all(number > 0 for number in total.values()), total
    assert len(total) == 11


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0"])
def test_every_metric_of_a_trace_with_leaps_is_that_of_its_steps(policy):
    stepped = simulate(workload(), policy, cost=COST, fast_forward=False)
    leapt = simulate(workload(), policy, cost=COST)
    assert leaps_of(leapt)
    assert metrics.summary(leapt) == metrics.summary(stepped)
    assert list(metrics.memory(leapt)) == list(metrics.memory(stepped))
    assert sorted(leapt.stays()) == sorted(stepped.stays())
    assert export.to_chrome(leapt) == export.to_chrome(stepped)
    assert export.explain(leapt, "3") == export.explain(stepped, "3")
    assert leapt.steps_frame().equals(stepped.steps_frame())


def test_a_long_answer_is_decoded_in_a_few_pieces():
    trace = simulate([Request("a", 5, 10_000)], cost=COST)
    assert len(trace.steps.parts) <= 4
    assert trace == simulate([Request("a", 5, 10_000)], cost=COST, fast_forward=False)


def test_a_request_that_arrives_as_a_step_ends_joins_the_next_one_all_the_same():
    requests = [Request("a", 1, 9), Request("b", 1, 3, arrival=4.0), Request("c", 1, 3, arrival=4.5)]
    trace = simulate(requests)
    assert trace.requests[1].first_scheduled == 4.0
    assert trace.requests[2].first_scheduled == 5.0


# --- who may be taken ahead


def test_each_policy_says_of_itself_what_it_is_known_to_keep():
    assert {name: steadiness(policies.get(name)) for name in CLAIMS} == CLAIMS
    assert policies.available().keys() <= CLAIMS.keys()


@pytest.mark.parametrize("policy", [name for name, claim in CLAIMS.items() if claim == "never"])
def test_a_policy_that_says_never_is_asked_at_every_step(policy):
    assert not leaps_of(simulate(workload(), policy, cost=COST))


def test_a_policy_derived_from_another_is_asked_at_every_step_until_it_speaks_for_itself():
    class Mine(Policy):
        name = "mine"

    class Ours(Policy):
        name = "ours"
        steady = "always"

    assert not leaps_of(simulate(workload(), Mine(), cost=COST))
    assert leaps_of(simulate(workload(), Ours(), cost=COST))


def test_a_policy_that_says_something_else_is_rejected_by_name_and_word():
    class Hasty(Policy):
        name = "hasty"
        steady = True

    with pytest.raises(ValueError, match="'hasty': steady is True; choose one of"):
        simulate(workload(), Hasty(), cost=COST)


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
)
def test_whoever_cannot_tell_beforehand_is_asked_at_every_step(kind, executor):
    scheduler = kind(policies.get("fcfs"), SchedulerConfig(), CacheConfig(500))
    assert not leaps_of(serve(workload(), scheduler, executor))


def test_on_step_sees_every_step():
    seen = []
    trace = simulate(workload(), cost=COST, on_step=seen.append)
    assert trace.steps == tuple(seen) == simulate(workload(), cost=COST).steps


def test_a_cost_tells_beforehand_the_very_seconds_that_plans_cost():
    for cost in (COST, Linear(0.1), Linear(0.0, 0.3), Linear(0.1, 0.2, 0.3, 0.4), ROOFLINE):
        contexts = range(7, 7 + 3 * 50, 3)
        plans = [
            Plan(
                0,
                tuple(
                    Scheduled(str(row), row, start, 1, False, True, ()) for row, start in enumerate(starts)
                ),
            )
            for starts in ((context - 5, 1, 1) for context in contexts)
        ]
        assert cost.durations(3, contexts) == [cost(plan) for plan in plans]


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v1"])
def test_steps_on_the_roofline_are_taken_at_once_and_take_as_long(policy):
    leapt, stepped = (
        simulate(workload(), policy, cost=ROOFLINE, fast_forward=fast_forward)
        for fast_forward in (True, False)
    )
    assert leaps_of(leapt) and not leaps_of(stepped)
    assert leapt.steps == stepped.steps and leapt.requests == stepped.requests


def test_a_step_that_takes_no_sensible_time_stops_the_run_as_if_it_were_taken_by_itself():
    requests = [Request("a", 1, 10)]
    errors = []
    for fast_forward in (True, False):
        with pytest.raises(ValueError, match="step 1 took inf seconds") as error:
            simulate(requests, cost=Linear(0.0, 0.0, 1e308), fast_forward=fast_forward)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# --- the sequence of steps


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


def test_a_leap_cannot_be_changed():
    (leap, *_) = leaps_of(simulate([Request("a", 5, 9)], cost=COST))
    with pytest.raises(AttributeError):
        leap.start = 0.0
    assert all(isinstance(getattr(leap, field.name), int | float | tuple) for field in fields(leap))


# --- runs that are not kept


class Kept:
    def __init__(self):
        self.parts, self.records = [], []
        self.step, self.request = self.parts.append, self.records.append


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0", "srpt"])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_stream_hands_on_what_a_trace_keeps_and_keeps_nothing(policy, fast_forward):
    requests = [*workload(30), Request("never", 10_000, 5, arrival=99.0)]
    limits, cache = SchedulerConfig(5), CacheConfig(40, 4)
    whole = serve(requests, Scheduler(policies.get(policy), limits, cache), CostExecutor(COST))
    scheduler, executor, kept = Scheduler(policies.get(policy), limits, cache), CostExecutor(COST), Kept()
    stream(iter(requests), scheduler, executor, kept, fast_forward=fast_forward)
    assert Steps(kept.parts) == whole.steps
    assert sorted(kept.records, key=lambda record: record.arrival) == list(whole.requests)
    assert not scheduler._states and not executor._lengths
    assert scheduler.blocks.num_free_blocks == cache.num_blocks


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0"])
def test_figures_added_up_on_the_way_are_those_of_the_whole_trace(policy):
    requests = [*workload(40), Request("never", 10_000, 5, arrival=99.0)]
    limits, cache = SchedulerConfig(5), CacheConfig(40, 4)
    whole = metrics.summary(
        serve(requests, Scheduler(policies.get(policy), limits, cache), CostExecutor(COST))
    )
    sink = StreamingSummary(limits.max_num_seqs, cache.num_blocks, cache.block_size)
    stream(requests, Scheduler(policies.get(policy), limits, cache), CostExecutor(COST), sink)
    figures = sink.summary()
    assert whole["num_preemptions"] > 0 or policy == "static"
    assert figures == pytest.approx({name: whole[name] for name in figures}, rel=1e-12)


def test_figures_of_nothing_are_undefined():
    figures = StreamingSummary(4, 10).summary()
    whole = metrics.summary(simulate([]))
    assert figures == {name: whole[name] for name in figures}


def test_a_stream_that_goes_back_in_time_is_rejected_by_name_and_time():
    requests = [Request("a", 1, 1, arrival=2.0), Request("b", 1, 1, arrival=1.0)]
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(10))
    with pytest.raises(ValueError, match=r"'b' arrives at 1\.0 s, before the one given before it, at 2\.0 s"):
        stream(requests, scheduler, CostExecutor(COST), Kept())


def test_who_follows_in_a_stream_is_served_in_its_turn():
    def then(record: RequestRecord):
        return [Request(record.id + "+", 3, 4, arrival=record.finish + 0.5)] if len(record.id) < 4 else []

    requests, kept = workload(4), Kept()
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(2), CacheConfig(100))
    stream(requests, scheduler, CostExecutor(COST), kept, then=then)
    again = Scheduler(policies.get("fcfs"), SchedulerConfig(2), CacheConfig(100))
    whole = serve(requests, again, CostExecutor(COST), then=then)
    assert sorted(kept.records, key=lambda record: record.id) == sorted(
        whole.requests, key=lambda record: record.id
    )
    assert math.isclose(
        kept.parts[-1].ends[-1] if isinstance(kept.parts[-1], Leap) else kept.parts[-1].end, whole.duration
    )


# --- the garbage collector


@pytest.fixture
def collector():
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    (gc.enable if was_enabled else gc.disable)()
    gc.unfreeze()


class BrokenError(Exception):
    pass


def raises(_):
    raise BrokenError


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("threshold", [(700, 10, 10), (0, 10, 10), (9_000_000, 3, 2)])
def test_a_run_leaves_the_garbage_collector_as_it_was_even_if_it_fails(collector, threshold, is_enabled):
    def state():
        return gc.get_threshold(), gc.isenabled()

    (gc.enable if is_enabled else gc.disable)()
    gc.set_threshold(*threshold)
    during = []
    simulate(workload(), cost=COST, on_step=lambda _: during.append(state()))
    assert state() == (threshold, is_enabled)
    ((seen, was_enabled),) = set(during)
    assert was_enabled == is_enabled
    assert seen == threshold or (is_enabled and seen[0] > threshold[0] > 0 and seen[1:] == threshold[1:])
    with pytest.raises(BrokenError):
        simulate(workload(), cost=COST, on_step=raises)
    assert state() == (threshold, is_enabled)
    kept = Kept()
    kept.request = raises
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(500))
    with pytest.raises(BrokenError):
        stream(workload(), scheduler, CostExecutor(COST), kept)
    assert state() == (threshold, is_enabled)


def test_what_the_caller_froze_stays_frozen(collector):
    gc.collect()
    gc.freeze()
    number = gc.get_freeze_count()
    simulate(workload(), cost=COST)
    # A few of them may be freed meanwhile.
    assert gc.get_freeze_count() > 0.9 * number > 0


class Circle:
    def __init__(self):
        self.me = self


@pytest.mark.parametrize("num_tokens", [20, 8000])
def test_what_the_caller_left_in_circles_is_not_moved_to_the_oldest_generation(collector, num_tokens):
    gc.enable()
    gc.set_threshold(100_000, 10, 10)
    circle = weakref.ref(Circle())
    simulate([Request("a", 1, num_tokens)], fast_forward=False)
    gc.collect(1)
    assert circle() is None


def test_what_a_long_run_kept_is_not_walked_as_soon_as_it_is_over(collector):
    gc.enable()
    gc.set_threshold(700, 10, 10)
    trace = simulate([Request("a", 1, 8000)], fast_forward=False)
    assert gc.get_count()[0] <= 700
    assert any(kept is trace.steps[-1] for kept in gc.get_objects(2))


def test_what_goes_round_in_circles_is_still_found_during_a_run(collector, monkeypatch):
    def leave_a_circle(_):
        circles.append(weakref.ref(Circle()))
        num_alive.append(sum(circle() is not None for circle in circles))

    circles, num_alive = [], []
    gc.enable()
    gc.set_threshold(200, 10, 10)
    monkeypatch.setattr(sys.modules["cbresearch.serve"], "_NUM_NEW_OBJECTS", 1000)
    simulate([Request("a", 1, 2000)], on_step=leave_a_circle)
    assert len(circles) == 2000
    assert 100 < max(num_alive) <= 1000
