"""Which policies starve a request for as long as others come, and which bound its wait."""

import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, simulate


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
def test_a_pure_order_starves_its_last_request_for_as_long_as_others_come(policy):
    assert [last_start(policy, number) for number in (40, 80)] == [80.0, 160.0]


@pytest.mark.parametrize(
    "policy",
    ["fcfs", "hrrn", "rank:starvation=20", "mlfq:quantum=8,aging=20", "vtc", "dlpm:quantum=16", "vllm_v1"],
)
def test_aging_turns_and_fair_shares_bound_the_wait_whatever_else_comes(policy):
    first, second = (last_start(policy, number) for number in (40, 80))
    assert first == second <= 40.0
