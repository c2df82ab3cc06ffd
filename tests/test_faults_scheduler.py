"""Kinds of faults that other servers had in their schedulers; each test's name is the claim."""

import re

import pytest
from test_two_tiers import Meddler, random_case, serve_watched

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, CostExecutor

EVERY = (*policies.available(), "static:release", "vllm_v0:swap", "vllm_v1:priority", "orca:reserve=pow2")
# Their rules let nobody join who may not finish beside the others.
RESERVING = {"no_evict", "orca", "orca:reserve=pow2", "mc_sf"}


def run(requests, policy="fcfs", *, seats=8, budget=1000, num_blocks=1000, block_size=1, **limits):
    host = limits.pop("num_host_blocks", 0)
    scheduler = Scheduler(
        policies.get(policy) if isinstance(policy, str) else policy,
        SchedulerConfig(seats, budget, **limits),
        CacheConfig(num_blocks, block_size, num_host_blocks=host),
    )
    return serve(requests, scheduler, CostExecutor(UNIT_STEP), on_step=lambda record: scheduler.check())


def served(trace):
    return [[entry.request_id for entry in step.plan.scheduled] for step in trace.steps]


def admitted(trace):
    return [admission.request.id for step in trace.steps for admission in step.plan.admitted]


# --- what can never be served


@pytest.mark.parametrize("policy", EVERY)
def test_a_request_that_can_never_fit_is_rejected_and_holds_up_nobody_under_any_policy(policy):
    requests = [Request("never", 20, 1), Request("next", 4, 5), Request("last", 3, 2, arrival=1.0)]
    trace = run(requests, policy, num_blocks=4, block_size=4)
    assert [record.error is None for record in trace.requests] == [False, True, True]
    assert all(record.finish_reason == "length" for record in trace.served)


@pytest.mark.parametrize("policy", EVERY)
def test_what_is_accepted_is_admitted_up_to_the_last_block_under_any_policy(policy):
    # A policy that counted more strictly than the submission would never let the second one join.
    for needed, fits in ((15, True), (16, True), (17, False)):
        for max_tokens in (1, 2, 9):
            request = Request("a", needed + 1 - max_tokens, max_tokens)
            (record,) = run([request], policy, num_blocks=4, block_size=4).requests
            assert (record.error is None) == fits
            assert (record.finish_reason == "length") == fits


def test_a_prompt_over_the_budget_is_rejected_when_prompts_are_not_cut():
    requests = [Request("long", 12, 1), Request("fits", 8, 1), Request("grows", 5, 5)]
    trace = run(requests, budget=8, chunked_prefill=False)
    errors = {record.id: record.error for record in trace.requests}
    # What a preemption makes to be computed again must fit a step too: 5 + 5 - 1 tokens.
    assert [name for name, error in errors.items() if error] == ["long", "grows"]
    assert {12, 8} <= {int(number) for number in re.findall(r"\d+", errors["long"])}
    assert "max_num_batched_tokens" in errors["long"]
    assert run(requests, budget=8).requests[0].error is None


@pytest.mark.parametrize("policy", EVERY)
def test_no_prompt_is_cut_where_cutting_is_off_and_nobody_overtakes_the_one_that_needs_a_whole_step(policy):
    requests = [Request(f"small {n}", 3, 6) for n in range(4)] + [Request("large", 14, 2, arrival=1.0)]
    requests += [Request(f"late {n}", 3, 6, arrival=2.0 + n) for n in range(12)]
    trace = run(requests, policy, budget=16, chunked_prefill=False)
    for step in trace.steps:
        assert all(entry.samples for entry in step.plan.scheduled)
    assert all(record.finish_reason == "length" for record in trace.requests)


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_preemptions"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_of_nothing_is_rejected_at_construction(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SchedulerConfig(**{name: value})


# --- seats and budget


@pytest.mark.parametrize("policy", EVERY)
def test_decodes_beyond_the_budget_take_turns_under_any_policy(policy):
    trace = run([Request(name, 1, 5) for name in "abcdef"], policy, budget=4)
    assert max(step.plan.num_tokens for step in trace.steps) <= 4
    assert all(record.finish_reason == "length" for record in trace.requests)


# Andes lets a reader who is ahead lose its seat to one who is behind, though nothing else tells them apart.
@pytest.mark.parametrize("policy", [name for name in EVERY if name != "andes"])
def test_nobody_joins_while_every_seat_is_held_by_equals(policy):
    trace = run([Request(name, 1, 3, deadline=50.0) for name in "abc"], policy, seats=1)
    assert max(step.num_running for step in trace.steps) == 1
    assert not any(step.plan.preempted for step in trace.steps)
    assert admitted(trace) == ["a", "b", "c"]


# --- priorities


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", ["priority", "vllm_v1:priority"])
def test_a_negative_priority_goes_first_in_a_full_server(policy, chunked):
    requests = [Request(f"r{n}", 6, 4) for n in range(8)]
    requests.append(Request("urgent", 6, 4, arrival=1.0, priority=-10))
    trace = run(requests, policy, seats=2, budget=12, chunked_prefill=chunked)
    assert admitted(trace)[:3] == ["r0", "r1", "urgent"]
    # One displaces a running request, the other waits for the first free seat.
    assert trace.requests[8].first_scheduled == (1.0 if policy == "priority" else 4.0)


def test_a_victim_of_low_priority_that_was_scheduled_already_leaves_the_plan_with_its_budget():
    # "low" came first and is first in the step; "high" then needs the block that low has just taken.
    requests = [Request("low", 3, 6, priority=5), Request("high", 3, 6, priority=0)]
    trace = run(requests, "vllm_v1:priority", num_blocks=9)
    step = next(step for step in trace.steps if step.plan.preempted)
    assert step.plan.preempted == ("low",)
    assert [entry.request_id for entry in step.plan.scheduled] == ["high"]
    assert step.plan.num_tokens == 1
    assert step.num_running + step.num_waiting == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority", "vllm_v1", "vllm_v1:priority", "vllm_v0", "sarathi"])
def test_a_preempted_request_comes_back_before_one_of_its_rank_that_never_ran(policy):
    requests = [Request("a", 4, 8), Request("b", 4, 8), Request("new", 1, 2, arrival=1.5)]
    trace = run(requests, policy, num_blocks=14, seats=2)
    assert [name for step in trace.steps for name in step.plan.preempted] == ["b"]
    assert admitted(trace) == ["a", "b", "b", "new"]


# --- preemption without end


class Quarrelsome(Policy):
    """Whoever waits displaces whoever runs, always."""

    name = "quarrelsome"

    def propose(self, view):
        for state in [*view.waiting, *view.swapped, *view.running]:
            yield state, state.num_pending_tokens

    def displace(self, view, newcomer, candidates):
        return candidates[0] if candidates else None


@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_no_request_is_displaced_more_often_than_the_bound(bound, mode):
    trace = run(
        [Request(name, 2, 9) for name in "abcd"],
        Quarrelsome(),
        seats=1,
        preemption=mode,
        num_host_blocks=100,
        max_preemptions=bound,
    )
    # The last to run finds nobody left who could displace it.
    counts = sorted(record.num_preemptions for record in trace.requests)
    assert counts[-1] == bound
    assert all(record.finish_reason == "length" for record in trace.requests)


class Spiteful(Policy):
    """Preempt whoever has come farthest, so that nobody would ever get to its end."""

    name = "spiteful"

    def victim(self, view, candidates):
        return max(candidates, key=lambda state: state.num_computed_tokens)


@pytest.mark.parametrize("bound", [1, 2])
def test_a_policy_that_always_preempts_whoever_is_nearest_to_its_end_still_comes_to_one(bound):
    requests = [Request(name, 9, 6) for name in "abc"]
    trace = run(requests, Spiteful(), num_blocks=20, max_preemptions=bound)
    assert all(record.finish_reason == "length" for record in trace.requests)
    assert max(record.num_preemptions for record in trace.requests) >= bound


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("chunk", [1, 2, 99])
def test_two_prompts_that_do_not_fit_together_both_finish_under_any_policy(policy, chunk):
    requests = [Request(name, 18, 2, client=name) for name in "ab"]
    for mode in ("recompute", "swap"):
        trace = run(
            requests, policy, budget=3 * chunk, num_blocks=8, block_size=3, preemption=mode, num_host_blocks=9
        )
        assert all(record.finish_reason == "length" for record in trace.requests)
        preemptions = sum(record.num_preemptions for record in trace.requests)
        assert preemptions <= (0 if policy in RESERVING else 2)


def test_several_victims_of_one_step_all_leave_and_all_come_back():
    requests = [Request("large", 12, 5), *(Request(name, 2, 12) for name in "bcd")]

    class Hungry(Policy):
        """Compute the large prompt bit by bit, and the others' first."""

        name = "hungry"

        def propose(self, view):
            for state in [*view.running, *view.swapped, *view.waiting]:
                few = (
                    1
                    if state.is_prefill and state.id == "large" and view.now < 2
                    else state.num_pending_tokens
                )
                yield state, few

    for mode, host in (("recompute", 0), ("swap", 2), ("swap", 50)):
        trace = run(requests, Hungry(), num_blocks=16, preemption=mode, num_host_blocks=host)
        assert max(len(step.plan.preempted) for step in trace.steps) >= 2
        assert all(record.finish_reason == "length" for record in trace.requests)


# --- starvation


def last_start(policy, num_short):
    """Return when a long request without anything cached gets its seat beside an endless short stream."""
    hot = tuple(range(40))
    requests = [
        Request("warm", hot, 2, client="hot", deadline=2.0),
        Request("long", tuple(range(100, 160)), 12, arrival=0.5, client="cold", priority=5, deadline=1e6),
        *(
            Request(str(n), (*hot, 1000 + n), 2, arrival=float(2 * n), client="hot", deadline=2.0 * n + 9)
            for n in range(1, num_short)
        ),
    ]
    trace = simulate(
        requests, policy, scheduler=SchedulerConfig(1, 200), cache=CacheConfig(100, 4, prefix_caching=True)
    )
    return trace.requests[1].first_scheduled


@pytest.mark.parametrize("policy", ["sjf", "srpt", "trail", "lpm", "priority", "edf", "mc_sf"])
def test_a_pure_order_starves_whoever_is_last_in_it_for_as_long_as_others_come(policy):
    assert [last_start(policy, number) for number in (40, 80)] == [80.0, 160.0]


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "hrrn", "rank:starvation=20", "mlfq:quantum=8,aging=20", "vtc", "dlpm:quantum=16", "vllm_v1"],
)
def test_aging_turns_and_fair_shares_bound_the_wait_whatever_else_comes(policy):
    first, second = (last_start(policy, number) for number in (40, 80))
    assert first == second <= 40.0


# --- what the answer depends on


@pytest.mark.parametrize("policy", EVERY)
def test_every_answer_is_that_of_the_prompt_alone_under_any_policy(policy):
    for seed in range(4):
        requests, limits, cache = random_case(3000 + seed)
        serve_watched(requests, policy, limits, cache, between=Meddler(seed, rate=0.15))
