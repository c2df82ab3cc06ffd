"""Prefix caching: a hit is right, safe, counted once, and gone when its room is needed."""

import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from helpers.core import (
    POLICIES,
    Meddler,
    NewcomersFirst,
    distinct,
    entries_of,
    preempting,
    random_case,
    serve_refereed,
)
from hygiene import ROOT

from cbresearch.config import CacheConfig
from cbresearch.kv import BlockManager, prefix_cache
from cbresearch.request import Request, RequestState


def pool(num_blocks, block_size=4):
    return BlockManager(CacheConfig(num_blocks, block_size, prefix_caching=True))


def hold(blocks, request_id, token_ids, extra=()):
    """Admit a request as the scheduler does, compute all its tokens, and return how many were cached."""
    matched = blocks.match(token_ids, extra)
    assert blocks.can_allocate(request_id, len(token_ids), matched)
    blocks.fork(request_id, matched)
    assert blocks.allocate(request_id, len(token_ids)) is not None
    blocks.cache_full_blocks(request_id, token_ids, len(token_ids), extra)
    blocks.check()
    return len(matched) * blocks.config.block_size


def serve_cached(requests, policy="fcfs", between=None, **options):
    options = {"block_size": 4, "num_blocks": 100, "prefix_caching": True, **options}
    return serve_refereed(requests, policy, between=between, **options)[0]


# --- the block manager's prefix cache


def test_match_finds_a_block_only_after_its_kv_was_computed():
    blocks = pool(10)
    prompt = tuple(range(12))
    blocks.allocate("a", 12)
    assert blocks.match(prompt) == ()
    blocks.cache_full_blocks("a", prompt, 7)
    assert len(blocks.match(prompt)) == 1


def test_prefix_cache_evicts_the_last_block_of_a_chain_first():
    blocks = pool(3)
    prompt = tuple(range(13))
    hold(blocks, "a", prompt[:12])
    blocks.free("a")
    blocks.allocate("b", 1)
    assert len(blocks.match(prompt)) == 2


def test_prefix_cache_evicts_the_least_recently_used_prefix_first():
    blocks = pool(4)
    old, young = (1,) * 5, (2,) * 5
    for name, prompt in (("a", old), ("b", young), ("c", old)):
        hold(blocks, name, prompt)
        blocks.free(name)
    blocks.allocate("d", 12)
    assert len(blocks.match(old)) == 1
    assert blocks.match(young) == ()


def test_partial_blocks_never_evict_cached_ones():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    for name in ("b", "c", "d"):
        hold(blocks, name, (3,))
        blocks.free(name)
    assert len(blocks.match((1,) * 9)) == 2


def test_match_does_not_find_a_block_that_was_reused():
    blocks = pool(1)
    hold(blocks, "x", (1,) * 4)
    blocks.free("x")
    hold(blocks, "y", (2,) * 2)
    assert blocks.match((1,) * 5) == ()
    blocks.free("y")
    assert blocks.match((1,) * 5) == ()


def test_match_counts_hits_anew_after_a_rejected_admission():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    hold(blocks, "other", (9,) * 4)
    prompt = (1,) * 16
    assert len(blocks.match(prompt)) == 2
    assert not blocks.can_allocate("b", 16, blocks.match(prompt))
    blocks.allocate("other", 8)
    assert len(blocks.match(prompt)) == 1


def test_a_hit_is_not_evicted_for_the_rest_of_its_own_request():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    longer = ((1,) * 8) + (2,) * 5
    assert not blocks.can_allocate("b", 13, blocks.match(longer))
    assert hold(blocks, "b", longer[:12]) == 8


@pytest.mark.parametrize(
    "digest", [lambda content: b"always the same", lambda content: bytes([len(content[0])])]
)
def test_match_never_gives_another_prompts_blocks_where_digests_collide(digest, monkeypatch):
    monkeypatch.setattr(prefix_cache, "digest_of", digest)
    blocks = pool(20)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 2, size=rng.integers(1, 20)).tolist()) for _ in range(40)]
    memory = {}
    for n, prompt in enumerate(prompts):
        for place, block in enumerate(blocks.match(prompt)):
            assert memory[block] == prompt[: 4 * (place + 1)]
        hold(blocks, f"r{n}", prompt)
        for place, block in enumerate(blocks.table(f"r{n}")):
            memory[block] = prompt[: 4 * (place + 1)]
        blocks.free(f"r{n}")


def test_match_tells_extra_keys_apart_by_kind_and_value():
    blocks = pool(10)
    prompt = (1,) * 9
    hold(blocks, "a", prompt, (("salt", "x"),))
    assert len(blocks.match(prompt, (("salt", "x"),))) == 2
    for extra in ((), (("adapter", "x"),), (("salt", "y"),)):
        assert blocks.match(prompt, extra) == ()


def test_match_finds_nothing_without_prefix_caching():
    blocks = BlockManager(CacheConfig(10, 4))
    blocks.allocate("a", 8)
    assert blocks.match((1,) * 9) == ()


def test_uncache_takes_out_what_was_cached_before_its_kv_was_computed():
    blocks = pool(10)
    prompt = tuple(range(13))
    state, other = (RequestState(Request(name, prompt, 1), 0) for name in "ab")
    blocks.allocate("a", 13)
    blocks.cache_full_blocks("a", prompt, 12)
    blocks.fork("b", blocks.match(prompt))
    assert blocks.uncache(state, 5, (state, other)) == [other]
    assert blocks.take_events().evicted == blocks.table("a")[1:3]
    assert len(blocks.match(prompt)) == 1
    assert blocks.uncache(state, 5, (state, other)) == []
    blocks.cache_full_blocks("a", prompt, 12)
    assert len(blocks.match(prompt)) == 3
    blocks.check()


# --- several blocks of one content


def pool_with_copies(num_copies, num_blocks=8, prompt=(1, 2)):
    """A pool of blocks of one token in which so many requests each hold all of one prompt's blocks."""
    blocks = pool(num_blocks, block_size=1)
    for n in range(num_copies):
        blocks.allocate(f"r{n}", len(prompt))
        blocks.cache_full_blocks(f"r{n}", prompt, len(prompt))
    blocks.check()
    return blocks, [blocks.table(f"r{n}") for n in range(num_copies)]


def test_a_fully_cached_prompt_leaves_both_blocks_of_its_last_token_cached():
    # The third prompt finds the first's block. The copy comes last, so it outlives what is evicted for it.
    blocks = pool(3, block_size=1)
    for name in ("a", "b"):
        assert hold(blocks, name, (12,)) == 0
    first, copy = blocks.table("a"), blocks.table("b")
    for name in ("a", "b"):
        blocks.free(name)
    assert blocks.num_cached_blocks == 2
    assert hold(blocks, "c", (12, 6)) == 1
    assert blocks.table("c")[0] == first[0]
    blocks.allocate("d", 1)
    assert blocks.take_events().evicted == copy
    blocks.check()


@pytest.mark.parametrize("first_freed", [0, 1, 2])
def test_match_finds_the_copy_that_was_cached_first_as_long_as_it_is_there(first_freed):
    blocks, tables = pool_with_copies(3, num_blocks=6)
    assert blocks.take_events().cached == tuple(block for table in tables for block in table)
    order = [first_freed, *sorted({0, 1, 2} - {first_freed})]
    for n in order:
        assert blocks.match((1, 2, 3)) == tables[0]
        blocks.free(f"r{n}")
    assert blocks.num_cached_blocks == 6
    left = [*tables]
    for n in order:
        assert blocks.match((1, 2, 3)) == left[0]
        blocks.allocate("new", len(blocks.table("new")) + 2)
        # The tail goes before the head, and the copies that are left stay.
        assert blocks.take_events().evicted == tables[n][::-1]
        left.remove(tables[n])
        blocks.check()
    assert blocks.match((1, 2, 3)) == ()


def test_a_hit_takes_the_blocks_of_a_chain_from_several_copies():
    blocks, (first, second) = pool_with_copies(2, num_blocks=4)
    blocks.free("r0")
    blocks.free("r1")
    # Both copies of the tail go, then the second copy of the head is used, and the first remains.
    blocks.allocate("new", 1)
    assert blocks.match((1, 2, 3)) == (first[0], second[1])
    blocks.fork("both", blocks.match((1, 2, 3)))
    blocks.allocate("new", 2)
    assert blocks.take_events().evicted == (first[1], second[0])
    assert blocks.match((1, 2, 3)) == (first[0], second[1])
    blocks.check()


def test_uncache_takes_out_only_a_requests_own_copies():
    blocks, (first, _) = pool_with_copies(2)
    blocks.fork("hit", blocks.match((1, 2, 3)))
    states = [RequestState(Request(name, (1, 2, 3), 1), 0) for name in ("r0", "r1", "hit")]
    assert blocks.uncache(states[1], 0, states) == []
    assert blocks.match((1, 2, 3)) == first
    assert blocks.uncache(states[0], 1, states) == [states[2]]
    assert blocks.match((1, 2, 3)) == first[:1]
    blocks.check()


def test_copies_that_were_swapped_out_come_back_as_blocks_of_their_own():
    blocks = BlockManager(CacheConfig(4, 1, prefix_caching=True, num_host_blocks=4))
    for name in "ab":
        blocks.allocate(name, 2)
        blocks.cache_full_blocks(name, (1, 2), 2)
    tables = blocks.table("a"), blocks.table("b")
    for name in "ab":
        assert len(blocks.move_to_host(name, 2)) == 2
        blocks.check()
    assert (blocks.num_cached_blocks, blocks.num_held_host_blocks) == (4, 4)
    blocks.allocate("new", 1)
    assert len(blocks.move_to_device("b", 2)) == 0
    assert blocks.table("b") == tables[1]
    blocks.free("new")
    ((_, back),) = blocks.move_to_device("a", 2)
    assert blocks.table("a") == (tables[0][0], back)
    # What came back can be found again, after those that stayed.
    blocks.cache_full_blocks("a", (1, 2), 2)
    assert blocks.match((1, 2, 3)) == (tables[0][0], tables[1][1])
    blocks.check()
    for name in "ab":
        blocks.free(name)
    assert blocks.num_cached_blocks == 4


# --- requests that share prefixes


def test_a_fully_cached_prompt_still_computes_its_last_token():
    prompt = tuple(range(8))
    trace = serve_cached([Request("first", prompt, 6), Request("second", prompt, 6, arrival=50.0)])
    _, entry = entries_of(trace, "second")[0]
    assert (entry.start, entry.num_tokens, entry.samples) == (4, 4, True)
    assert [record.num_cached_tokens for record in trace.requests] == [0, 4]


def test_requests_share_cached_prefixes_only_within_their_salt():
    prompt = (1,) * 9
    salts = ["x", "y", "x", None, None]
    requests = [Request(str(n), prompt, 2, arrival=10.0 * n, cache_salt=salt) for n, salt in enumerate(salts)]
    assert [record.num_cached_tokens for record in serve_cached(requests).requests] == [0, 0, 8, 0, 8]


@pytest.mark.parametrize("on_schedule", [False, True])
def test_cache_on_schedule_lets_a_request_share_what_the_same_step_computes(on_schedule):
    requests = [Request(name, (*distinct(10, 8), place), 3) for place, name in enumerate("ab")]
    trace = serve_cached(requests, cache_on_schedule=on_schedule)
    assert [record.num_cached_tokens for record in trace.requests] == [0, 8 if on_schedule else 0]
    assert [record.first_scheduled for record in trace.requests] == [0.0, 0.0]


def test_an_admission_that_relied_on_a_scheduled_prefix_is_undone_with_the_request_that_computes_it():
    # "b" joins on the blocks that "a" is to compute in this step; then "old" needs one of them.
    class OldLast(NewcomersFirst):
        name = "old_last"

        def victim(self, view, candidates):
            return next(state for state in candidates if state.id != "old")

    prompt = distinct(10, 8)
    requests = [
        Request("old", distinct(50, 8), 9),
        Request("a", (*prompt, 1), 2, 1.0),
        Request("b", (*prompt, 2), 2, 1.0),
    ]
    trace = serve_cached(requests, OldLast(), num_blocks=6, cache_on_schedule=True)
    plan = trace.steps[1].plan
    assert [entry.request_id for entry in plan.scheduled] == ["old"]
    assert plan.admitted == plan.preempted == ()


@pytest.mark.parametrize("block_size", [1, 3, 4, 5])
@pytest.mark.parametrize("step", range(5))
def test_a_resumed_request_finds_its_own_blocks_before_its_tokens_are_counted(block_size, step):
    # Counting before it finds its old blocks in the cache would plan tokens behind its end.
    trace = serve_cached(
        [Request("a", distinct(10, 10), 6)],
        num_blocks=30,
        block_size=block_size,
        between=preempting("a", {step}, "recompute"),
    )
    known = 10 + step + 1
    _, entry = entries_of(trace, "a")[step + 1]
    found = (known - 1) // block_size * block_size
    assert (entry.start, entry.num_tokens, entry.samples) == (found, known - found, True)
    assert trace.requests[0].num_cached_tokens == 0
    assert trace.requests[0].num_recomputed_tokens == known - 1 - found


def test_a_resumed_request_computes_only_what_the_cache_lost():
    # The pool holds both prompts, but not both outputs: the later request is preempted and comes back.
    requests = [Request("a", (1,) * 10, 12), Request("b", (2,) * 10, 4)]
    trace = serve_cached(requests, num_blocks=6)
    resumed = trace.requests[1]
    assert resumed.num_preemptions > 0
    spans = [(entry.start, entry.num_tokens) for _, entry in entries_of(trace, "b")]
    restarts = [start for start, _ in spans[1:] if start not in {a + b for a, b in spans}]
    assert all(start % 4 == 0 for start in restarts)
    assert sum(count for _, count in spans) == 10 + 4 - 1 + resumed.num_recomputed_tokens


def test_blocks_behind_a_fully_cached_prompt_are_cached_too():
    prompt = distinct(10, 8)
    requests = [Request("first", prompt, 2), Request("again", prompt, 6, 10.0)]
    longer = Request("longer", prompt + serve_cached(requests).outputs["again"], 2, 20.0)
    # 8 + 6 - 1 tokens of "again" have KV, 12 of them in full blocks.
    trace = serve_cached([*requests, longer])
    assert [record.num_cached_tokens for record in trace.requests] == [0, 4, 12]


def test_an_admission_counts_the_hits_of_the_step_in_which_it_succeeds():
    # While "b" is rejected with two hits, "a" takes the room of one of them.
    head = distinct(10, 8)
    requests = [
        Request("x", head, 1),
        Request("a", distinct(50, 8), 9, 1.0),
        Request("b", head + distinct(90, 9), 1, 2.0),
    ]
    hits = []

    def between(scheduler, record):
        hits.extend(
            scheduler.kv.num_cached_tokens(state) // 4 for state in scheduler.waiting if state.id == "b"
        )

    trace = serve_cached(requests, num_blocks=5, between=between)
    assert (hits[0], hits[-1]) == (2, 1)
    assert trace.requests[2].num_cached_tokens == 4


def test_a_rejected_admission_holds_nothing_and_what_it_would_have_shared_can_be_evicted():
    prompt = distinct(10, 8)
    requests = [
        Request("x", prompt, 1),
        Request("a", distinct(50, 8), 9),
        Request("b", (*prompt, 1), 12, 1.0),
    ]
    rejected = []

    def between(scheduler, record):
        if any(state.id == "b" for state in scheduler.waiting):
            rejected.append(record.plan.step)
            assert scheduler.kv.table("b") == ()
            assert scheduler.kv.num_held_blocks == len(scheduler.kv.table("a"))

    serve_cached(requests, num_blocks=5, between=between)
    assert len(rejected) > 3


def test_a_hit_found_for_an_admission_that_was_undone_is_not_counted():
    # "old" needs its next block in the step in which "new" was admitted on a hit, so "new" is put back.
    requests = [
        Request("seed", (1,) * 8, 1),
        Request("old", (2,) * 4, 8, arrival=1.0),
        Request("new", (1,) * 9, 1, arrival=2.0),
    ]
    trace = serve_cached(requests, NewcomersFirst(), num_blocks=4)
    new = trace.requests[2]
    num_admissions = sum(entry.request.id == "new" for step in trace.steps for entry in step.plan.admitted)
    computed = sum(entry.num_tokens for _, entry in entries_of(trace, "new"))
    assert num_admissions == 1 + new.num_preemptions
    assert computed == 9 + new.num_recomputed_tokens - new.num_cached_tokens


def test_a_padding_row_may_share_its_last_block_with_a_request_that_joins_its_batch():
    # "a" is done while the batch is still being filled, and "b" begins like it.
    requests = [
        Request("a", distinct(10, 8), 1),
        Request("c", distinct(50, 12), 3),
        Request("b", (*distinct(10, 8), 1, 2), 3),
    ]
    trace = serve_cached(requests, "static", seats=3, budget=12, num_blocks=30)
    assert trace.requests[2].num_cached_tokens == 8
    assert trace.steps[1].plan.padding[0].request_id == "a"
    assert trace.steps[1].num_shared_blocks == 2


def test_a_shared_block_is_counted_once_in_memory():
    prompt = (1,) * 8 + (2,)
    requests = [Request("first", prompt, 20), *(Request(str(n), prompt, 5, arrival=3.0) for n in range(5))]
    trace = serve_cached(requests)
    together = next(step for step in trace.steps if step.num_running == 6)
    assert together.num_held_blocks == 2 + 6
    assert together.num_held_tokens <= 8 + 6 * 4
    assert sum(record.num_cached_tokens for record in trace.requests) == 5 * 8


@pytest.mark.parametrize("on_schedule", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, "vllm_v1", NewcomersFirst])
def test_tokens_computed_cached_and_recomputed_add_up_whatever_is_preempted(policy, on_schedule):
    seen: Counter[str] = Counter()
    for seed in range(20):
        requests, limits, cache = random_case(700 + seed)
        cache = CacheConfig(
            cache.num_blocks, cache.block_size, True, cache.num_host_blocks, cache_on_schedule=on_schedule
        )
        given = policy if isinstance(policy, str) else policy()
        trace, _ = serve_refereed(requests, given, limits, cache, Meddler(seed, 0.3, 0.0, 20))
        for record in trace.requests:
            computed = furthest = again = 0
            for _, entry in entries_of(trace, record.id):
                computed += entry.num_tokens
                again += max(0, min(furthest, entry.context_length) - entry.start)
                furthest = max(furthest, entry.context_length)
            length = record.num_prompt_tokens + len(record.tokens) - 1
            assert record.num_recomputed_tokens == again
            assert computed == length - record.num_cached_tokens + again
            seen.update(cached=record.num_cached_tokens, recomputed=again)
    assert seen["cached"] > 0
    assert seen["recomputed"] > 0


def test_random_runs_leave_only_cached_blocks_that_no_request_refers_to():
    num_cached = 0
    for seed in range(30):
        requests, limits, cache = random_case(seed)
        pools = []
        serve_refereed(
            requests, "fcfs", limits, cache, lambda scheduler, _, pools=pools: pools.append(scheduler.kv)
        )
        blocks = pools[-1]
        num_cached += blocks.num_cached_blocks
        # Each of them can be handed out again.
        assert len(set(blocks.allocate("all", blocks.num_blocks * cache.block_size))) == blocks.num_blocks
        assert blocks.num_cached_blocks == 0
        blocks.check()
    assert num_cached > 0


HITS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers.core import random_case, serve_refereed

rows = []
limits = {"num_blocks": 30, "seats": 3, "block_size": 4, "prefix_caching": True}
for seed in (1, 3, 6):
    trace, _ = serve_refereed(random_case(seed)[0], **limits)
    rows += [(step.plan, step.pool, step.events) for step in trace.steps]
print(json.dumps(repr(rows)))
"""


def test_hits_and_evictions_are_the_same_in_every_process():
    outputs = set()
    for seed in ("0", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", HITS, str(ROOT / "tests")],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert "evicted=(" in json.loads(outputs.pop())
