"""A request may leave the device with its KV and come back from the host's pool to go on."""

from collections import Counter

import numpy as np
import pytest
from helpers.core import (
    POLICIES,
    Meddler,
    NewcomersFirst,
    distinct,
    entries_of,
    kinds,
    least_pool,
    preempting,
    random_case,
    serve_refereed,
)

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.simulator import replay
from cbresearch.step import StepResult


def serve_swapping(requests, policy="fcfs", **options):
    return serve_refereed(requests, policy, **{"block_size": 4, "preemption": "swap", **options})


# --- out and back


def crowded(num_host_blocks, preemption="swap", policy="fcfs"):
    """Serve two requests that fit together at first and not at last: "b" has to leave with 3 blocks."""
    requests = [Request("a", distinct(10, 10), 12), Request("b", distinct(40, 10), 12)]
    return serve_swapping(
        requests, policy, num_blocks=7, num_host_blocks=num_host_blocks, preemption=preemption
    )


def test_a_swapped_request_goes_on_where_it_stopped():
    trace, _ = crowded(num_host_blocks=20)
    b = trace.requests[1]
    assert b.num_preemptions == 1
    assert b.num_recomputed_tokens == 0
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert left.swapped == left.preempted == ("b",)
    entries = [entry for _, entry in entries_of(trace, "b")]
    ends = [0, *(entry.context_length for entry in entries)]
    assert [entry.start for entry in entries] == ends[:-1], "each part begins where the one before it ended"
    back = next(step.plan for step in trace.steps[left.step :] if step.plan.admitted)
    (entry,) = [entry for entry in back.scheduled if entry.request_id == "b"]
    assert entry.start > 10
    assert kinds(left) == ["swap_out"] * -(-entry.start // 4)
    assert kinds(back) == ["swap_in"] * -(-entry.start // 4)


def test_a_recomputed_request_begins_anew():
    trace, referee = crowded(num_host_blocks=20, preemption="recompute")
    assert trace.requests[1].num_recomputed_tokens > 10
    assert [entry.start for _, entry in entries_of(trace, "b")].count(0) == 2
    assert not referee.num_transfers


@pytest.mark.parametrize("policy", POLICIES)
def test_a_swap_without_a_host_pool_is_a_recompute(policy):
    swapped, recomputed = crowded(0, "swap", policy)[0], crowded(0, "recompute", policy)[0]
    assert [step.plan for step in swapped.steps] == [step.plan for step in recomputed.steps]
    assert sum(record.num_preemptions for record in swapped.requests) > 0


@pytest.mark.parametrize("short", [0, 1])
def test_a_host_pool_that_lacks_one_block_makes_a_swap_a_recompute(short):
    enough = next(len(step.plan.transfers) for step in crowded(20)[0].steps if step.plan.swapped)
    trace, referee = crowded(enough - short)
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert left.swapped == (() if short else ("b",))
    assert (trace.requests[1].num_recomputed_tokens > 0) == bool(short)
    assert referee.num_transfers["swap_in"] == (0 if short else enough)


def test_a_host_pool_with_room_for_one_of_two_victims_takes_one_and_the_other_recomputes():
    requests = [Request(name, distinct(20 * n, 8), 12) for n, name in enumerate("abc")]

    def between(scheduler, record):
        if record.plan.step == 2:
            scheduler.preempt("b", "swap")
            assert scheduler.kv.num_held_host_blocks == 3
            scheduler.preempt("c", "swap")
            assert scheduler.kv.num_held_host_blocks == 3

    trace, _ = serve_swapping(requests, between=between, num_blocks=30, num_host_blocks=4)
    (left,) = [step.plan for step in trace.steps if step.plan.preempted]
    assert (set(left.preempted), left.swapped) == ({"b", "c"}, ("b",))
    assert [record.num_recomputed_tokens for record in trace.requests] == [0, 0, 8 + 2]


def test_host_blocks_are_counted_in_the_record_of_each_step_until_their_request_is_back():
    trace, _ = crowded(num_host_blocks=20)
    out = next(step.plan.step for step in trace.steps if step.plan.swapped)
    back = next(step.plan.step for step in trace.steps if "swap_in" in kinds(step.plan))
    num_moved = len(trace.steps[out].plan.transfers)
    assert [step.num_held_host_blocks for step in trace.steps] == [
        num_moved if out <= step < back else 0 for step in range(len(trace.steps))
    ]
    assert [step.num_swapped for step in trace.steps] == [
        int(out <= step < back) for step in range(len(trace.steps))
    ]


def test_a_swap_brings_back_only_what_left_the_device():
    # Both prompts begin with the same two blocks, which "a" goes on holding.
    prompt = distinct(10, 8)
    requests = [Request("a", (*prompt, 30), 12), Request("b", (*prompt, 40), 12, arrival=1.0)]
    between = preempting("b", {3}, "swap")
    trace, referee = serve_swapping(
        requests, between=between, num_blocks=30, num_host_blocks=30, prefix_caching=True
    )
    assert trace.requests[1].num_cached_tokens == 8
    assert referee.num_transfers == {"swap_out": 3, "swap_in": 1}
    assert trace.requests[1].num_recomputed_tokens == 0


def test_what_is_still_cached_on_the_device_is_not_swapped_in():
    # No other request holds the blocks of "b", but none needs their room either.
    requests = [Request("a", distinct(10, 4), 12), Request("b", distinct(40, 9), 4)]
    between = preempting("b", {0}, "swap")
    _, referee = serve_swapping(
        requests, between=between, num_blocks=30, num_host_blocks=30, prefix_caching=True
    )
    assert referee.num_transfers == {"swap_out": 3, "swap_in": 1}


def test_a_second_swap_of_the_same_blocks_copies_only_what_was_written_since():
    # The first two blocks of "c" have copies on the host, which "b" keeps there.
    prompt = distinct(10, 8)
    requests = [
        Request("a", distinct(60, 4), 20),
        Request("b", (*prompt, 40), 9),
        Request("c", (*prompt, 50), 9, arrival=1.0),
    ]

    def between(scheduler, record):
        if record.plan.step == 3:
            scheduler.preempt("b", "swap")
            scheduler.preempt("c", "swap")

    trace, referee = serve_swapping(
        requests, between=between, num_blocks=30, num_host_blocks=30, prefix_caching=True
    )
    assert trace.requests[2].num_cached_tokens == 8
    assert referee.num_transfers["swap_out"] == 3 + 1


def test_the_blocks_that_swapped_samples_share_are_copied_once_each_way():
    samples = parallel_samples(Request("s", distinct(10, 9), 8), 3)
    requests = [Request("other", distinct(60, 4), 20), *samples]

    def between(scheduler, record):
        if record.plan.step == 3:
            for sample in samples:
                scheduler.preempt(sample.id, "swap")
            assert scheduler.kv.num_held_host_blocks == 2 + 3

    trace, referee = serve_swapping(requests, between=between, num_blocks=40, num_host_blocks=40)
    assert [record.num_preemptions for record in trace.requests] == [0, 1, 1, 1]
    # The prompt's two full blocks once, and one block that is each sample's own.
    assert referee.num_transfers == {"swap_out": 2 + 3, "swap_in": 2 + 3}
    back = next(step for step in trace.steps if "swap_in" in kinds(step.plan))
    assert back.num_shared_blocks == 2 * 2


# --- which requests are swapped, and which come back first


class PerVictim(policies.Policy):
    """Swap some, let others compute again."""

    name = "per_victim"

    def __init__(self, answers):
        self.answers = answers

    def preemption(self, view, victim):
        return self.answers[victim.id]


@pytest.mark.parametrize("default", ["recompute", "swap"])
def test_a_policy_decides_for_each_victim_what_becomes_of_its_kv(default):
    requests = [Request(name, distinct(20 * n, 10), 14) for n, name in enumerate("abc")]
    answers = {"b": "swap", "c": "recompute"}
    trace, _ = serve_swapping(
        requests, PerVictim(answers), num_blocks=10, num_host_blocks=50, preemption=default
    )
    swapped = {name for step in trace.steps for name in step.plan.swapped}
    preempted = {name for step in trace.steps for name in step.plan.preempted}
    assert (swapped, preempted) == ({"b"}, {"b", "c"})
    assert trace.requests[1].num_recomputed_tokens == 0
    assert trace.requests[2].num_recomputed_tokens > 0


def test_limits_say_how_to_preempt_where_the_policy_does_not():
    class Looking(policies.Policy):
        name = "looking"
        seen = frozenset()

        def preemption(self, view, victim):
            self.seen |= {view.preemption}
            return super().preemption(view, victim)

    for mode in ("recompute", "swap"):
        policy = Looking()
        crowded(20, mode, policy)
        assert policy.seen == {mode}


@pytest.mark.parametrize("answer", ["swop", None, "", True])
def test_an_unknown_kind_of_preemption_is_an_error_that_names_the_policy(answer):
    class Wrong(PerVictim):
        def preemption(self, view, victim):
            return answer

    with pytest.raises(ValueError, match=r"'per_victim' wants .*'b'.* preempted by .*recompute.*swap"):
        crowded(20, policy=Wrong({}))


@pytest.mark.parametrize("mode", ["swop", ""])
def test_scheduler_preempt_rejects_an_unknown_kind_and_a_request_that_does_not_run(mode):
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(), CacheConfig(10, 4))
    scheduler.submit(Request("a", 3, 4))
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, StepResult(1.0, {"a": 1}), 1.0)
    if mode:
        with pytest.raises(ValueError, match="preempted by 'swop'"):
            scheduler.preempt("a", mode)
    for name in ("b", "A"):
        with pytest.raises(ValueError, match=f"{name!r} is not running"):
            scheduler.preempt(name)
    scheduler.check()
    assert [state.id for state in scheduler.running] == ["a"]


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first"])
def test_swapped_requests_come_back_before_a_new_request_joins(policy):
    num_swaps = num_joined_after = 0
    for seed in range(25):
        rng = np.random.default_rng(seed)
        requests = [
            Request(str(n), distinct(50 * n, int(rng.integers(2, 20))), int(rng.integers(2, 20)), float(n))
            for n in range(8)
        ]
        limits = SchedulerConfig(4, 64, preemption="swap")
        cache = CacheConfig(least_pool(requests, limits, 4) + 2, 4, num_host_blocks=100)
        trace, _ = serve_refereed(requests, policy, limits, cache)
        outside: set[str] = set()
        for step in trace.steps:
            back = [entry.request.id for entry in step.plan.admitted if entry.request.id in outside]
            new = [entry.request.id for entry in step.plan.admitted if entry.request.id not in outside]
            outside -= set(back)
            if new:
                assert not outside, f"{new} joined while {outside} were swapped out"
                num_joined_after += num_swaps > 0
            outside |= set(step.plan.swapped)
            num_swaps += len(step.plan.swapped)
    assert num_swaps > 0
    assert num_joined_after > 0


def test_requests_that_were_swapped_out_together_come_back_in_the_order_in_which_they_sat():
    requests = [Request(name, distinct(20 * n, 6), 10) for n, name in enumerate("abcd")]

    def between(scheduler, record):
        if record.plan.step == 2:
            for name in "dcb":
                scheduler.preempt(name, "swap")
            assert [state.id for state in scheduler.swapped] == ["b", "c", "d"]

    serve_swapping(requests, seats=4, num_blocks=30, num_host_blocks=30, between=between)


@pytest.mark.parametrize("policy", ["static", "static:release"])
def test_the_victim_of_a_static_batch_goes_on_from_the_host_in_a_later_one(policy):
    requests = [Request(name, distinct(20 * n, 6), 16) for n, name in enumerate("abc")]
    trace, referee = serve_swapping(requests, policy, seats=3, num_blocks=11, num_host_blocks=30)
    victims = {name for step in trace.steps for name in step.plan.swapped}
    assert victims
    assert referee.num_transfers["swap_in"] > 0
    assert [record.num_recomputed_tokens for record in trace.requests] == [0, 0, 0]
    for name in victims:
        left = max(step.plan.step for step in trace.steps if name in step.plan.swapped)
        step, entry = next((step, entry) for step, entry in entries_of(trace, name) if step > left)
        assert entry.start > 6
        # It came back with an empty batch, not into a batch under way.
        seated = {admission.request.id for admission in trace.steps[step].plan.admitted}
        assert {entry.request_id for entry in trace.steps[step].plan.scheduled} == seated


def test_a_request_may_be_swapped_out_again_in_the_step_in_which_it_was_swapped_in():
    # "b" comes back to the last free blocks in the very step in which "a" needs one of them.
    requests = [Request("a", distinct(10, 7), 9), Request("b", distinct(40, 5), 4)]
    between = preempting("b", {1}, "swap")
    trace, _ = serve_swapping(requests, NewcomersFirst(), between=between, num_blocks=4, num_host_blocks=10)
    plan = trace.steps[2].plan
    assert kinds(plan) == ["swap_out"] * 2 + ["swap_in"] * 2 + ["swap_out"] * 2
    assert not plan.admitted
    assert [entry.request_id for entry in plan.scheduled] == ["a"]
    assert trace.steps[2].num_held_host_blocks == 2
    b = trace.requests[1]
    assert (b.num_preemptions, b.num_recomputed_tokens) == (1, 0)


def test_what_only_the_prefix_cache_gave_an_admission_that_is_undone_is_not_moved():
    # "old" needs its next block in the step in which "new" was admitted on a hit, so "new" is put back.
    requests = [
        Request("seed", (1,) * 8, 1),
        Request("old", (2,) * 4, 8, 1.0),
        Request("new", (1,) * 9, 1, 2.0),
    ]
    undone = []

    class Watching(NewcomersFirst):
        def victim(self, view, candidates):
            undone.append(candidates[-1].id)
            return candidates[-1]

    trace, referee = serve_swapping(
        requests, Watching(), num_blocks=4, num_host_blocks=10, prefix_caching=True
    )
    assert "new" in undone
    assert trace.requests[2].num_preemptions == 0
    assert not referee.num_transfers


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_repeats_a_run_with_swaps_and_forks_step_for_step(policy):
    rng = np.random.default_rng(5)
    requests = [
        Request(f"r{n}", distinct(50 * n, int(rng.integers(2, 20))), int(rng.integers(2, 20)), float(n))
        for n in range(6)
    ]
    requests += parallel_samples(Request("s", distinct(300, 9), 12, 2.0), 3)
    limits = SchedulerConfig(5, 64, preemption="swap")
    cache = CacheConfig(least_pool(requests, limits, 4) + 1, 4, num_host_blocks=20)
    trace, referee = serve_refereed(requests, policy, limits, cache)
    assert referee.num_transfers["swap_in"] > 0
    again = replay(trace, requests, policy)
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    assert again.requests == trace.requests
    assert [step.pool for step in again.steps] == [step.pool for step in trace.steps]


# --- any combination


@pytest.mark.parametrize("policy", [*POLICIES, NewcomersFirst])
def test_answers_are_those_of_the_prompt_alone_and_both_pools_come_back_whole(policy):
    policy = policy if isinstance(policy, str) else policy()
    seen: Counter[str] = Counter()
    for seed in range(30):
        requests, limits, cache = random_case(seed)
        trace, referee = serve_refereed(requests, policy, limits, cache)
        seen.update(referee.num_transfers)
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
        seen["recomputed"] += sum(record.num_recomputed_tokens for record in trace.requests)
    assert min(seen[kind] for kind in ("swap_out", "swap_in", "preempted", "cached", "recomputed")) > 0
    assert (seen["copy"] > 0) == (not str(policy).startswith("static"))


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_the_prompt_alone_whatever_is_preempted_between_steps(policy):
    seen: Counter[str] = Counter()
    for seed in range(25):
        requests, limits, cache = random_case(1000 + seed)
        _, referee = serve_refereed(requests, policy, limits, cache, between=Meddler(seed))
        seen.update(referee.num_transfers)
    assert min(seen[kind] for kind in ("swap_out", "swap_in")) > 0


@pytest.mark.parametrize("host", [0, 1, 3, 100])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_pool_of_any_size_never_stops_the_run(host, policy):
    requests = [Request(str(n), 9, 12, float(n)) for n in range(6)]
    trace, _ = serve_swapping(
        requests, policy, seats=4, budget=64, num_blocks=6, num_host_blocks=host, preemption="swap"
    )
    swapped = sum(len(step.plan.swapped) for step in trace.steps)
    assert (swapped > 0) == (host >= 3)
    assert max(step.num_held_host_blocks for step in trace.steps) <= host
