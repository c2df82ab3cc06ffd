"""The simulator against hand-counted runs, and its replay of runs whose durations are drawn at random."""

import heapq
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
from fuzz_policies import POLICIES as EVERY
from helpers.core import POLICIES

from cbresearch import CacheConfig, Request, Scheduler, SchedulerConfig, policies, replay, simulate
from cbresearch.costs import Linear
from cbresearch.request import Rejected
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, CostExecutor

NUM_SEATS = 8


def classic_lengths():
    """The textbook's workload, drawn as the textbook draws it."""
    state = random.getstate()
    random.seed(2024)
    lengths = [random.randint(4, 12) for _ in range(60)]
    random.setstate(state)
    return lengths


def classic(policy):
    requests = [Request(str(place), 1, length) for place, length in enumerate(classic_lengths())]
    return simulate(requests, policy, scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS))


# --- the classic check


def num_steps_of_batches(lengths):
    return sum(max(lengths[first : first + NUM_SEATS]) for first in range(0, len(lengths), NUM_SEATS))


def num_steps_of_list_scheduling(lengths):
    seats = [0] * NUM_SEATS
    for length in lengths:
        heapq.heappush(seats, heapq.heappop(seats) + length)
    return max(seats)


@pytest.mark.parametrize(
    ("policy", "num_steps", "expected"),
    [
        ("static", num_steps_of_batches, 91),
        ("static:release", num_steps_of_batches, 91),
        ("fcfs", num_steps_of_list_scheduling, 69),
        ("prefill_first", None, None),
    ],
)
def test_the_classic_workload_takes_the_classic_number_of_steps(policy, num_steps, expected):
    lengths = classic_lengths()
    trace = classic(policy)
    assert [len(record.tokens) for record in trace.requests] == lengths
    assert sum(len(record.tokens) for record in trace.requests) == 510
    if num_steps is None:
        # Prompts take steps of their own here, at which decoding requests wait.
        assert len(trace.steps) > num_steps_of_list_scheduling(lengths)
    else:
        assert len(trace.steps) == num_steps(lengths) == expected


def test_only_static_batches_pad_and_they_pad_what_is_left_idle():
    rows = {name: sum(len(step.plan.padding) for step in classic(name).steps) for name in POLICIES}
    lengths = classic_lengths()
    batches = [lengths[first : first + NUM_SEATS] for first in range(0, len(lengths), NUM_SEATS)]
    idle = sum(max(batch) - length for batch in batches for length in batch)
    assert rows == {**dict.fromkeys(POLICIES, 0), "static": idle}


# --- what a step costs


def test_a_step_costs_its_start_its_tokens_and_its_context_padding_included():
    step, token, context = 0.5, 0.01, 0.0001
    requests = [Request("a", 3, 3), Request("b", 2, 1)]
    trace = simulate(requests, "static", cost=Linear(step, token, context))
    assert [record.duration for record in trace.steps] == pytest.approx(
        [
            step + token * (3 + 2) + context * (3 + 2),
            # a reads its prompt and its first token; b's row reads its prompt again.
            step + token * 2 + context * (4 + 2),
            step + token * 2 + context * (5 + 2),
        ]
    )
    released = simulate(requests, "static:release", cost=Linear(step, token, context))
    assert [record.duration for record in released.steps[1:]] == pytest.approx(
        [step + token + context * 4, step + token + context * 5]
    )


def test_a_chunk_of_a_prompt_costs_the_context_before_it_too():
    cost = Linear(1.0, 0.1, 0.01)
    trace = simulate([Request("a", 5, 1)], cost=cost, scheduler=SchedulerConfig(8, 2))
    assert [record.duration for record in trace.steps] == pytest.approx(
        [1 + 0.2 + 0.02, 1 + 0.2 + 0.04, 1 + 0.1 + 0.05]
    )


def test_times_add_up():
    trace = simulate([Request("a", 2, 2), Request("b", 1, 3)], cost=Linear(1.0, 0.25))
    first, second, third = 1.75, 1.75 + 1.5, 1.75 + 1.5 + 1.25
    assert trace.requests[0].token_times == (first, second)
    assert trace.requests[1].token_times == (first, second, third)
    assert trace.duration == third


def test_a_step_takes_a_second_unless_told_otherwise():
    assert {step.duration for step in classic("fcfs").steps} == {1.0}


# --- simulate


@pytest.mark.parametrize(
    ("output_length", "length", "reason"), [(1, 1, "stop"), (4, 4, "stop"), (9, 6, "length")]
)
def test_an_output_ends_where_it_is_known_to_end_and_at_max_tokens_at_the_latest(
    output_length, length, reason
):
    (record,) = simulate([Request("a", 3, 6, output_length=output_length)]).requests
    assert (len(record.tokens), record.finish_reason) == (length, reason)


def test_unlimited_cache_never_runs_out():
    requests = [Request(str(place), 1 + place % 40, 1 + place % 50) for place in range(40)]
    trace = simulate(requests, scheduler=SchedulerConfig(40))
    assert all(record.num_preemptions == 0 and record.error is None for record in trace.requests)


def test_unlimited_cache_counts_what_is_no_request_as_nothing():
    trace = simulate([Rejected("x", "bad"), Request("text", "unresolved", 2), Request("a", 3, 2)])
    assert [record.error is None for record in trace.requests] == [False, False, True]


def test_a_policy_may_be_given_by_name_or_as_an_object():
    requests = [Request(str(place), 3, 1 + place % 4) for place in range(9)]
    by_name = simulate(requests, "static", scheduler=SchedulerConfig(3))
    as_object = simulate(requests, policies.get("static"), scheduler=SchedulerConfig(3))
    assert by_name == as_object


def test_a_trace_is_named_by_the_policy_with_its_options():
    assert simulate([Request("a", 1, 1)], "static:release").policy == "static:release"


def test_cost_executor_gives_out_the_tokens_that_it_was_given():
    requests = [Request("a", 4, 3), Request("b", 4, 3)]
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(8, 1))
    trace = serve(requests, scheduler, CostExecutor(UNIT_STEP, {"a": [7, 8, 9], "b": [4, 5, 6]}))
    assert trace.outputs == {"a": (7, 8, 9), "b": (4, 5, 6)}
    assert any(record.num_preemptions for record in trace.requests)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill": False},
        {"preemption": "swap", "num_host_blocks": 30},
        {"prefix_caching": True},
        {"prefix_caching": True, "cache_on_schedule": True},
        {"sliding_window": 9},
        {"reservation": "pow2"},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_every_policy_runs_with_every_option_of_the_pool(policy, options):
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
        cost=Linear(0.3, 0.01, 0.0007),
        scheduler=SchedulerConfig(5, 64, **limits),
        cache=CacheConfig(32, 4, **memory),
    )
    assert [len(record.tokens) for record in trace.requests] == [3 + place % 20 for place in range(12)]


# --- replay


def tokens_of(request):
    return [zlib.crc32(f"{request.id} {place}".encode()) % 1000 for place in range(request.max_tokens)]


def recorded_run(seed, policy):
    """Serve random requests as a model might: noisy durations, early ends, a pool that preempts."""
    generator = random.Random(seed)
    requests = [
        Request(
            str(place),
            generator.randint(1, 20),
            generator.randint(1, 10),
            arrival=generator.choice((0.0, generator.uniform(0, 2))),
            output_length=generator.choice((None, generator.randint(1, 10))),
            predicted_output=generator.choice((None, generator.randint(1, 10))),
        )
        for place in range(12)
    ]
    requests.insert(3, Request("too long", 99, 9, arrival=0.5))
    requests.insert(5, Request("0", 1, 1, arrival=3.0))
    noise = np.random.default_rng(seed)
    executor = CostExecutor(
        lambda plan: 0.02 + 0.001 * plan.num_tokens + noise.exponential(0.05),
        {request.id: tokens_of(request) for request in reversed(requests)},
    )
    limits = SchedulerConfig(generator.randint(1, 5), generator.choice((3, 7, 64)))
    scheduler = Scheduler(policies.get(policy), limits, CacheConfig(generator.randint(10, 14), 3))
    trace = replace(serve(requests, scheduler, executor), policy=policy)
    unknown_ends = [replace(request, output_length=None) for request in requests]
    return trace, unknown_ends


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_has_the_plans_the_times_and_the_tokens_of_the_run(policy):
    num_preemptions = 0
    for seed in range(12):
        trace, requests = recorded_run(seed, policy)
        again = replay(trace, requests, policy)
        assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
        assert again == trace
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
    assert num_preemptions > 5


def test_a_replay_takes_a_policy_object_and_keeps_the_name_of_the_run():
    trace, requests = recorded_run(0, "static:release")
    again = replay(trace, requests, policies.get("static:release"))
    assert again.policy == "static:release"


def test_a_rejection_may_bear_the_id_of_a_request_that_is_replayed():
    requests = [Request("a", 1, 4, output_length=2), Rejected("a", "line 2: id 'a' is taken")]
    trace = simulate(requests)
    assert replay(trace, requests, "fcfs").steps == trace.steps


def test_a_replay_under_another_policy_runs_out_of_recorded_steps_and_says_so():
    trace = classic("fcfs")
    requests = [Request(str(place), 1, length) for place, length in enumerate(classic_lengths())]
    with pytest.raises(ValueError, match="step 69 was never recorded; the run had 69 steps"):
        replay(trace, requests, "static")


def test_a_replay_looks_ahead_as_the_run_did_if_it_is_given_the_step_time():
    cost = Linear(1.0, 1.0)
    requests = [
        Request("running", 1, 3),
        Request("short", 2, 2, arrival=1.0, deadline=50.0),
        Request("long", 30, 2, arrival=1.0, deadline=60.0),
    ]
    trace = simulate(requests, "least_slack", cost=cost, scheduler=SchedulerConfig(1))
    again = replay(trace, requests, "least_slack", cost.seconds)
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    blind = replay(trace, requests, "least_slack")
    assert [step.plan for step in blind.steps] != [step.plan for step in trace.steps]


# --- bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cost": 0.1}, "cost is 0.1; give a function"),
        ({"policy": policies.Policy}, "class.*Policy.*built from its class"),
        ({"requests": "classic60"}, "'classic60'.*workloads.load.*or ask compare"),
        ({"scheduler": 8}, r"scheduler is 8; give a SchedulerConfig\("),
        ({"cache": 64}, r"cache is 64; give a CacheConfig\("),
    ],
    ids=["a number as a cost", "a class as a policy", "a name as requests", "a number of seats", "of blocks"],
)
def test_simulate_names_what_is_of_a_wrong_kind_and_the_remedy(changes, said):
    with pytest.raises(TypeError, match=said):
        simulate(**{"requests": [Request("a", 5, 3)], **changes})
