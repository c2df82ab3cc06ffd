"""Every policy: what is accepted is served within seats and budget, and the answers are the same."""

import re

import pytest
from helpers.core import Meddler, admission_order, random_case, serve_refereed

from cbresearch import Request, SchedulerConfig, policies

EVERY = (*policies.available(), "static:release", "vllm_v0:swap", "vllm_v1:priority", "orca:reserve=pow2")
# Their rules let no request join that may not finish beside the others.
RESERVING = {"no_evict", "orca", "orca:reserve=pow2", "mc_sf"}


def run(requests, policy="fcfs", **options):
    return serve_refereed(requests, policy, **{"budget": 1000, **options})[0]


# --- what can never be served


@pytest.mark.parametrize("policy", EVERY)
def test_a_request_that_can_never_fit_is_rejected_and_holds_up_no_other_under_any_policy(policy):
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


def test_a_prompt_over_the_budget_is_rejected_without_chunked_prefill():
    requests = [Request("long", 12, 1), Request("fits", 8, 1), Request("grows", 5, 5)]
    trace = run(requests, budget=8, chunked_prefill=False)
    errors = {record.id: record.error for record in trace.requests}
    # What a preemption makes to be computed again must fit a step too: 5 + 5 - 1 tokens.
    assert [name for name, error in errors.items() if error] == ["long", "grows"]
    assert {12, 8} <= {int(number) for number in re.findall(r"\d+", errors["long"])}
    assert "max_num_batched_tokens" in errors["long"]
    assert run(requests, budget=8).requests[0].error is None


@pytest.mark.parametrize("policy", EVERY)
def test_without_chunked_prefill_no_prompt_is_cut_and_none_is_overtaken_for_ever_under_any_policy(policy):
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
def test_scheduler_config_rejects_a_limit_below_one(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SchedulerConfig(**{name: value})


# --- seats and budget


@pytest.mark.parametrize("policy", EVERY)
def test_decodes_beyond_the_budget_take_turns_under_any_policy(policy):
    trace = run([Request(name, 1, 5) for name in "abcdef"], policy, budget=4)
    assert max(step.plan.num_tokens for step in trace.steps) <= 4
    assert all(record.finish_reason == "length" for record in trace.requests)


# Andes lets a request whose reader is ahead lose its seat to one whose reader is behind, all else equal.
@pytest.mark.parametrize("policy", [name for name in EVERY if name != "andes"])
def test_no_request_joins_while_every_seat_is_held_by_its_equals_under_any_policy(policy):
    trace = run([Request(name, 1, 3, deadline=50.0) for name in "abc"], policy, seats=1)
    assert max(step.num_running for step in trace.steps) == 1
    assert not any(step.plan.preempted for step in trace.steps)
    assert admission_order(trace) == ["a", "b", "c"]


# --- priorities


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", ["priority", "vllm_v1:priority"])
def test_a_negative_priority_goes_first_in_a_full_server(policy, chunked):
    requests = [Request(f"r{n}", 6, 4) for n in range(8)]
    requests.append(Request("urgent", 6, 4, arrival=1.0, priority=-10))
    trace = run(requests, policy, seats=2, budget=12, chunked_prefill=chunked)
    assert admission_order(trace)[:3] == ["r0", "r1", "urgent"]
    # One displaces a running request, the other waits for the first free seat.
    assert trace.requests[8].first_scheduled == (1.0 if policy == "priority" else 4.0)


# --- blocks


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


# --- what the answer depends on


@pytest.mark.parametrize("policy", EVERY)
def test_answers_are_those_of_the_prompt_alone_under_any_policy(policy):
    for seed in range(4):
        requests, limits, cache = random_case(3000 + seed)
        serve_refereed(requests, policy, limits, cache, between=Meddler(seed, rate=0.15))
