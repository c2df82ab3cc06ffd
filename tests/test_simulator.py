"""The simulator against hand-counted runs, and its replay of runs whose durations are drawn at random."""

import heapq
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
from cbresearch.plan import Plan

from cbresearch import CacheConfig, Request, Scheduler, SchedulerConfig, policies, replay, simulate
from cbresearch.costs import Linear, Replayed
from cbresearch.request import Rejected
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, CostExecutor
from cbresearch.step import PoolState
from cbresearch.trace import StepRecord

BUILT_IN = ["fcfs", "prefill_first", "sjf", "static", "static:release"]
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
        # Prompts take steps of their own here, at which those who decode wait.
        assert len(trace.steps) > num_steps_of_list_scheduling(lengths)
    else:
        assert len(trace.steps) == num_steps(lengths) == expected


def test_only_static_pads_and_it_pads_what_the_batches_leave_idle():
    rows = {name: sum(len(step.plan.padding) for step in classic(name).steps) for name in BUILT_IN}
    lengths = classic_lengths()
    batches = [lengths[first : first + NUM_SEATS] for first in range(0, len(lengths), NUM_SEATS)]
    idle = sum(max(batch) - length for batch in batches for length in batch)
    assert rows == {**dict.fromkeys(BUILT_IN, 0), "static": idle}


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


def test_the_default_pool_never_runs_out():
    requests = [Request(str(place), 1 + place % 40, 1 + place % 50) for place in range(40)]
    trace = simulate(requests, scheduler=SchedulerConfig(40))
    assert all(record.num_preemptions == 0 and record.error is None for record in trace.requests)


def test_the_default_pool_counts_what_is_no_request_as_nothing():
    trace = simulate([Rejected("x", "bad"), Request("text", "unresolved", 2), Request("a", 3, 2)])
    assert [record.error is None for record in trace.requests] == [False, False, True]


def test_a_policy_may_be_given_by_name_or_as_an_object():
    requests = [Request(str(place), 3, 1 + place % 4) for place in range(9)]
    by_name = simulate(requests, "static", scheduler=SchedulerConfig(3))
    as_object = simulate(requests, policies.get("static"), scheduler=SchedulerConfig(3))
    assert by_name == as_object


def test_a_trace_is_named_by_the_policy_with_its_options():
    assert simulate([Request("a", 1, 1)], "static:release").policy == "static:release"


def test_the_executor_gives_out_the_tokens_that_it_was_given():
    requests = [Request("a", 4, 3), Request("b", 4, 3)]
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(8, 1))
    trace = serve(requests, scheduler, CostExecutor(UNIT_STEP, {"a": [7, 8, 9], "b": [4, 5, 6]}))
    assert trace.outputs == {"a": (7, 8, 9), "b": (4, 5, 6)}
    assert any(record.num_preemptions for record in trace.requests)


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


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_replay_has_the_plans_the_times_and_the_tokens_of_the_run(policy):
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


# --- cost models


@pytest.mark.parametrize(
    "coefficients", [(0.02, 0.003, 0.0001), (0.0, 0.5, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.7)]
)
def test_a_fit_recovers_the_coefficients_of_simulated_runs(coefficients):
    requests = [Request(str(place), 1 + 7 * place % 30, 3 + 5 * place % 17) for place in range(20)]
    traces = [simulate(requests, name, cost=Linear(*coefficients)) for name in ("fcfs", "static")]
    fitted = Linear.fit(*traces, context=True)
    assert (fitted.step, fitted.token, fitted.context) == pytest.approx(coefficients, abs=1e-9)


def test_a_fit_without_context_leaves_that_term_out():
    requests = [Request(str(place), 1 + 7 * place % 30, 3 + 5 * place % 17) for place in range(20)]
    fitted = Linear.fit(simulate(requests, cost=Linear(0.02, 0.003)))
    assert (fitted.step, fitted.token, fitted.context) == pytest.approx((0.02, 0.003, 0.0), abs=1e-9)


def trace_of(rows):
    """Return a trace of steps with one request each: (tokens, tokens before them, seconds)."""
    (template,) = simulate([Request("a", 1, 1)]).steps
    (entry,) = template.plan.scheduled
    steps = [
        StepRecord(
            0.0,
            seconds,
            Plan(place, (entry._replace(start=start, num_tokens=tokens),)),
            (),
            PoolState(1, 0, 1, 1),
        )
        for place, (tokens, start, seconds) in enumerate(rows)
    ]
    return replace(simulate([]), steps=tuple(steps))


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_fitted_coefficient_is_negative_however_the_steps_lie(context, seed):
    noise = np.random.default_rng(seed)
    rows = [
        (int(noise.integers(1, 50)), int(noise.integers(0, 500)), float(noise.exponential(1.0)) + 1e-3)
        for _ in range(int(noise.integers(3, 12)))
    ]
    fitted = Linear.fit(trace_of(rows), context=context)
    assert min(fitted.step, fitted.token, fitted.context) >= 0


def test_steps_that_get_faster_with_more_tokens_are_fitted_by_a_constant():
    fitted = Linear.fit(trace_of([(1, 0, 3.0), (2, 0, 2.0), (3, 0, 1.0)]))
    assert fitted.token == 0
    # The constant whose relative errors have the least squares.
    ratios = [1 / 3, 1 / 2, 1]
    assert fitted.step == pytest.approx(sum(ratios) / sum(ratio**2 for ratio in ratios))


@pytest.mark.parametrize(("num_steps", "context"), [(0, False), (1, False), (0, True), (2, True)])
def test_a_fit_needs_a_step_for_each_coefficient(num_steps, context):
    trace = trace_of([(1 + place, place, 1.0) for place in range(num_steps)])
    with pytest.raises(ValueError, match=f"{num_steps} steps are too few"):
        Linear.fit(trace, context=context)


def test_steps_without_duration_do_not_stop_a_fit():
    rows = [(tokens, 0, 0.5 + 0.1 * tokens) for tokens in (1, 2, 3, 4)]
    fitted = Linear.fit(trace_of([*rows, (1, 0, 0.0)]))
    assert (fitted.step, fitted.token) == pytest.approx((0.5, 0.1))


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("linear:1", Linear(1.0)),
        ("linear:1e-3,0.5", Linear(0.001, 0.5)),
        ("linear: 0, 2 ,3", Linear(0.0, 2.0, 3.0)),
    ],
)
def test_a_linear_cost_is_read_from_one_to_three_numbers(text, cost):
    assert Linear.parse(text) == cost


@pytest.mark.parametrize(
    "text",
    [
        "",
        "linear",
        "linear:",
        "linear:x",
        "linear:1,2,3,4,5",
        "linear:1,,2",
        "roofline:1",
        "1,2,3",
        "Linear:1",
    ],
)
def test_a_cost_that_cannot_be_read_is_rejected_by_value_and_remedy(text):
    with pytest.raises(ValueError, match="linear:T0,T_TOKEN,T_CONTEXT") as rejection:
        Linear.parse(text)
    assert repr(text) in str(rejection.value)


@pytest.mark.parametrize(
    "text",
    [
        "linear:-1",
        "linear:1,-2",
        "linear:1,2,-1e-9",
        "linear:nan",
        "linear:1,inf",
        "linear:0",
        "linear:0,0,0",
    ],
)
def test_a_cost_that_no_step_can_have_is_rejected(text):
    with pytest.raises(ValueError, match="finite seconds, none negative and not all 0"):
        Linear.parse(text)


def test_recorded_durations_are_given_out_by_step_and_end():
    recorded = Replayed(iter([0.5, 0.25]))
    assert [recorded(Plan(step, ())) for step in (1, 0, 1)] == [0.25, 0.5, 0.25]
    with pytest.raises(ValueError, match="step 2 was never recorded; the run had 2 steps"):
        recorded(Plan(2, ()))


def test_a_step_time_told_beforehand_is_that_of_the_step():
    cost = Linear(0.5, 0.25, 0.125)
    trace = simulate([Request("a", 7, 3)], cost=cost)
    for step in trace.steps:
        assert cost.seconds(step.plan.num_tokens, step.plan.num_context_tokens) == step.duration


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cost": 0.1}, "cost is 0.1; give a function"),
        ({"policy": policies.Policy}, "class.*Policy.*built from its class"),
        ({"requests": "classic60"}, "'classic60'.*workloads.load.*compare_simulated"),
    ],
    ids=["a number as a cost", "a class as a policy", "a name as requests"],
)
def test_what_is_of_a_wrong_kind_is_named_with_the_remedy(changes, said):
    with pytest.raises(TypeError, match=said):
        simulate(**{"requests": [Request("a", 5, 3)], **changes})
