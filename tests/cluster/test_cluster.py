"""Clusters of simulated replicas, against single servers and identities."""

from dataclasses import replace

import numpy as np
import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, metrics, simulate
from cbresearch.cluster import (
    Handover,
    ReplicaConfig,
    least_outstanding,
    round_robin,
    simulate_cluster,
)
from cbresearch.costs import Linear
from cbresearch.kv import NULL_BLOCK
from cbresearch.request import Rejected

COST = Linear(step=0.01, token=0.0005, context=1e-6)
SERVER = ReplicaConfig(COST, SchedulerConfig(4, 64), CacheConfig(60, 4))


def longest_queue(request, replicas):
    """Choose badly, as a router of a reader's own may."""
    return max(replicas, key=lambda replica: (len(replica.loop.scheduler.waiting), -replica.place))


ROUTERS = [round_robin, least_outstanding, longest_queue]


def stream(seed, num_requests=60, gap=0.08, longest=40):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(gap, num_requests)).tolist()
    return [
        Request(str(n), int(rng.integers(1, longest)), int(rng.integers(1, 30)), arrival=arrival)
        for n, arrival in enumerate(arrivals)
    ]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", ["fcfs", "static", "static:wait=0.3", "sjf", "vllm_v1"])
def test_a_cluster_of_one_is_a_server_step_for_step(router, policy):
    requests = [*stream(1), Rejected("bad line", "why", 0.2), Request("too long", 400, 1, arrival=0.5)]
    config = replace(SERVER, policy=policy, cache=CacheConfig(20, 4))
    run = simulate_cluster(requests, [config], router)
    alone = simulate(requests, policy, cost=COST, scheduler=config.scheduler, cache=config.cache)
    assert list(run.replicas[0].steps) == list(alone.steps)
    assert run.requests == alone.requests
    assert {record.id for record in run.requests if record.is_rejected} == {"bad line", "too long"}


def test_round_robin_gives_each_replica_every_nth_request():
    requests = stream(2)
    run = simulate_cluster(requests, [SERVER] * 3, round_robin)
    for place in range(3):
        alone = simulate(
            requests[place::3],
            cost=COST,
            scheduler=SERVER.scheduler,
            cache=SERVER.cache,
            on_step=lambda _: None,
        )
        assert list(run.replicas[place].steps) == list(alone.steps)
        assert run.replicas[place].requests == alone.requests
    assert [run.routes[request.id] for request in requests] == [(n % 3,) for n in range(60)]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_lost_or_served_twice_by_unequal_replicas(router, seed):
    requests = stream(seed, gap=0.03, longest=120)
    small = replace(SERVER, cache=CacheConfig(20, 4), policy="sjf")
    run = simulate_cluster(requests, [SERVER, small, replace(SERVER, cost=Linear(0.03))], router)
    assert [record.id for record in run.requests] == [request.id for request in requests]
    assert all(record.is_complete for record in run.requests)
    held = [record.id for trace in run.replicas for record in trace.requests]
    assert sorted(held) == sorted(request.id for request in requests)
    for trace in run.replicas:
        assert {run.routes[record.id] for record in trace.requests} <= {(run.replicas.index(trace),)}
    # Only the larger ones can take what the small one cannot.
    for request in requests:
        if request.prompt + request.max_tokens - 1 > 80:
            assert run.routes[request.id] != (1,)
    again = simulate_cluster(requests, [SERVER, small, replace(SERVER, cost=Linear(0.03))], router)
    assert again == run


def test_the_least_busy_replica_gets_the_next_request():
    # The first is slow: it should get fewer of a steady stream, and everyone should wait less than in turn.
    requests = [Request(str(n), 4, 10, arrival=0.05 * n) for n in range(80)]
    slow = replace(SERVER, cost=Linear(step=0.06))
    fair = simulate_cluster(requests, [slow, SERVER], least_outstanding)
    blind = simulate_cluster(requests, [slow, SERVER], round_robin)
    assert len(fair.replicas[0].requests) < 30 < len(blind.replicas[0].requests)
    assert metrics.latency(fair.trace).mean < 0.8 * metrics.latency(blind.trace).mean


def test_a_router_does_not_see_the_end_of_a_step_before_it_has_come():
    # At 0.5 both have one request under way; the second's ends at 1.0, which nobody can know yet.
    one_second = replace(SERVER, cost=Linear(step=1.0))
    requests = [
        Request("a", 1, 3),
        Request("b", 1, 1),
        Request("c", 1, 1, arrival=0.5),
        Request("d", 1, 1, arrival=1.0),
    ]
    run = simulate_cluster(requests, [one_second, one_second], least_outstanding)
    assert [run.routes[name] for name in "abcd"] == [(0,), (1,), (0,), (1,)]


def test_a_disaggregated_cluster_gives_the_first_token_where_the_prompt_was_computed():
    requests = [Request(str(n), 20, 10, arrival=1.0 * n) for n in range(5)]
    front, back = replace(SERVER, role="prefill"), replace(SERVER, role="decode")
    handover = Handover(latency=0.2, bytes_per_token=1000, bandwidth=1e5)
    run = simulate_cluster(requests, [front, back], round_robin, handover)
    alone = simulate(requests, cost=COST, scheduler=SERVER.scheduler, cache=SERVER.cache)
    for moved, stayed in zip(run.requests, alone.requests, strict=True):
        assert moved.first_token == pytest.approx(stayed.first_token)
        assert len(moved.tokens) == 10
        # Nothing is computed twice, so only the handover comes between the first two tokens.
        assert moved.latency - stayed.latency == pytest.approx(0.2 + 20 * 1000 / 1e5)
        assert moved.num_recomputed_tokens == moved.num_cached_tokens == 0
        assert run.routes[moved.id] == (0, 1)
    assert sum(step.plan.num_prefill_tokens for step in run.replicas[0].steps) == 100
    assert sum(step.plan.num_prefill_tokens for step in run.replicas[1].steps) == 0
    assert sum(step.plan.num_decode_tokens for step in run.replicas[1].steps) == 5 * 9


@pytest.mark.parametrize("seed", range(3))
def test_a_disaggregated_cluster_under_memory_pressure_finishes_each_request_once(seed):
    requests = [
        *stream(seed, gap=0.02),
        Request("one token", 5, 1, arrival=0.3),
        Request("ends at once", 5, 9, arrival=0.3, output_length=1),
    ]
    fronts = [replace(SERVER, role="prefill")] * 2
    tight = replace(SERVER, role="decode", cache=CacheConfig(20, 4))
    run = simulate_cluster(requests, [*fronts, tight], least_outstanding, Handover(0.01))
    expected = {request.id: request.output_length or request.max_tokens for request in requests}
    assert {record.id: len(record.tokens) for record in run.requests} == expected
    assert all(record.is_complete for record in run.requests)
    assert sum(record.num_preemptions for record in run.requests) > 0
    for name in ("one token", "ends at once"):
        assert len(run.routes[name]) == 1
    for record in run.requests:
        assert list(record.token_times) == sorted(record.token_times)


def test_a_moved_request_takes_no_blocks_for_what_fell_out_of_its_window():
    # A window of 8 and a chunk of 4 tokens lie in at most 4 blocks, however long the prompt was.
    cache = CacheConfig(4, 4, sliding_window=8)
    server = replace(SERVER, scheduler=SchedulerConfig(1, 4), cache=cache)
    run = simulate_cluster(
        [Request("a", 41, 9)], [replace(server, role=name) for name in ("prefill", "decode")]
    )
    assert len(run.requests[0].tokens) == 9 and run.requests[0].num_recomputed_tokens == 0
    first = run.replicas[1].steps[0]
    assert first.plan.scheduled[0].new_block_ids[:8] == (NULL_BLOCK,) * 8
    # Of 42 tokens the first 8 blocks' are given back.
    assert (first.num_held_blocks, first.num_held_tokens) == (3, 42 - 8 * 4)


def test_what_no_replica_can_finish_is_rejected_before_its_prompt_is_computed():
    front, back = replace(SERVER, role="prefill"), replace(SERVER, role="decode", cache=CacheConfig(4, 4))
    run = simulate_cluster([Request("a", 20, 5), Request("b", 5, 5)], [front, back], round_robin)
    assert "needs KV for 24 tokens = 6 blocks of 4, but the pool has 4" in run.requests[0].error
    assert run.requests[1].is_complete
    assert set(run.routes) == {"b"}


@pytest.mark.parametrize(
    ("requests", "replicas", "problem"),
    [
        ([], [], "no replica"),
        ([Request("a", 1, 1), Request("a", 1, 1)], [SERVER], "request 'a' is given twice"),
        ([], [replace(SERVER, role="prefill")], "replicas for prefill need some for decode"),
        ([], [replace(SERVER, role="decode"), SERVER], "replicas for prefill need some for decode"),
    ],
    ids=["none", "twice", "prefill only", "decode only"],
)
def test_a_cluster_that_cannot_be_is_rejected(requests, replicas, problem):
    with pytest.raises(ValueError, match=problem):
        simulate_cluster(requests, replicas, round_robin)


def test_settings_out_of_range_are_rejected_by_name():
    with pytest.raises(ValueError, match="role is 'both of them'"):
        replace(SERVER, role="both of them")
    with pytest.raises(ValueError, match="unknown policy"):
        replace(SERVER, policy="fcsf")
    with pytest.raises(ValueError, match=r"latency is -1"):
        Handover(-1)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        Handover(bandwidth=0)
