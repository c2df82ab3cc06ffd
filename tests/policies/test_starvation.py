"""Which policies let a request wait for as long as others come: computed for each, and said by its rule."""

import inspect
import re

import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, policies, simulate


def last_start(policy, num_short):
    """Return when a long request without anything cached gets its seat beside an endless short stream."""
    hot = tuple(range(40))
    requests = [
        Request("warm", hot, 2, client="hot", deadline=2.0),
        Request("long", tuple(range(100, 160)), 12, arrival=0.5, client="cold", priority=5),
        *(
            Request(str(n), (*hot, 1000 + n), 2, arrival=float(2 * n), client="hot", deadline=2.0 * n + 9)
            for n in range(1, num_short)
        ),
    ]
    trace = simulate(
        requests, policy, scheduler=SchedulerConfig(1, 200), cache=CacheConfig(100, 4, prefix_caching=True)
    )
    return trace.requests[1].first_scheduled


def longest_pause(policy, num_prompts):
    """Return the longest time between two tokens of a request while a prompt arrives in each step."""
    prompts = [Request(str(n), 4, 1, arrival=float(n)) for n in range(1, num_prompts)]
    trace = simulate([Request("decodes", 4, 8), *prompts], policy, scheduler=SchedulerConfig(8, 100))
    return max(trace.requests[0].itl)


@pytest.mark.parametrize("policy", ["sjf", "srpt", "trail", "lpm", "priority", "edf", "mc_sf"])
def test_a_pure_order_starves_its_last_request_for_as_long_as_others_come(policy):
    assert [last_start(policy, number) for number in (40, 80)] == [80.0, 160.0]


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "hrrn", "rank:starvation=20", "mlfq:quantum=8,aging=20", "vtc", "dlpm:quantum=16", "vllm_v1"],
)
def test_aging_turns_and_fair_shares_bound_the_wait_whatever_else_comes(policy):
    first, second = (last_start(policy, number) for number in (40, 80))
    assert first == second <= 40.0


@pytest.mark.parametrize("policy", ["prefill_first", "vllm_v0"])
def test_prompts_before_decodes_let_a_decode_wait_for_as_long_as_prompts_come(policy):
    assert [longest_pause(policy, number) for number in (20, 40)] == [20.0, 40.0]
    # The rule of the table says so by itself.
    assert "decodes starve for as long as prompts come" in policies.table()[policy].rule


@pytest.mark.parametrize("policy", policies.available())
def test_every_policy_that_starves_a_request_says_so_and_no_other_does(policy):
    starves = last_start(policy, 350) > last_start(policy, 340)
    starves |= longest_pause(policy, 40) > longest_pause(policy, 20)
    rule = " ".join(inspect.getdoc(type(policies.get(policy))).split())
    assert starves == bool(re.search("starves? for as long as", rule))
