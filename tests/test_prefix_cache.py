"""Prefix caching: a hit is right, safe, counted once, and gone when its room is needed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cbresearch.blocks import BlockManager

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.metrics import prefix_hit_rate, token_counts
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor


class NewcomersFirst(policies.Policy):
    """Admit before serving whoever runs, so that an admission can be undone within its step."""

    name = "newcomers_first"

    def propose(self, view):
        yield from policies.joining(view, view.waiting)
        yield from policies.whole(view.running)


POLICIES = ("static", "static:release", "fcfs", "prefill_first", "sjf", "vllm_v1", NewcomersFirst)


def pool(num_blocks, block_size=4, **options):
    return BlockManager(CacheConfig(num_blocks, block_size, prefix_caching=True), **options)


def hold(blocks, request_id, token_ids, extra=()):
    """Admit a request as the scheduler does, compute all its tokens, and return how many were cached."""
    matched = blocks.match(token_ids, extra)
    assert blocks.can_allocate(request_id, len(token_ids), matched)
    blocks.share(request_id, matched)
    assert blocks.allocate(request_id, len(token_ids)) is not None
    blocks.enter(request_id, token_ids, len(token_ids), extra)
    blocks.check()
    return len(matched) * blocks.config.block_size


def serve_checked(requests, policy="fcfs", seats=8, budget=2048, num_blocks=100, block_size=4):
    scheduler = Scheduler(
        policies.get(policy) if isinstance(policy, str) else policy(),
        SchedulerConfig(seats, budget),
        CacheConfig(num_blocks, block_size, True),
    )
    trace = serve(requests, scheduler, CostExecutor(Linear(1.0)), on_step=lambda record: scheduler.check())
    assert scheduler.blocks.num_free_blocks == num_blocks
    return trace


def test_a_fully_cached_prompt_still_computes_its_last_token():
    prompt = tuple(range(8))
    trace = serve_checked([Request("first", prompt, 6), Request("second", prompt, 6, arrival=50.0)])
    second = next(step for step in trace.steps if step.plan.admitted and step.start >= 50).plan.scheduled[0]
    assert (second.start, second.num_tokens, second.samples) == (4, 4, True)
    assert [record.num_cached_tokens for record in trace.requests] == [0, 4]


def test_a_block_is_a_hit_only_after_its_kv_was_computed():
    blocks = pool(10)
    prompt = tuple(range(12))
    blocks.allocate("a", 12)
    assert blocks.match(prompt) == ()
    blocks.enter("a", prompt, 7)
    assert len(blocks.match(prompt)) == 1


def test_the_last_block_of_a_chain_is_evicted_first():
    blocks = pool(3)
    prompt = tuple(range(13))
    hold(blocks, "a", prompt[:12])
    blocks.free("a")
    blocks.allocate("b", 1)
    assert len(blocks.match(prompt)) == 2


def test_the_least_recently_used_prefix_is_evicted_first():
    blocks = pool(4)
    old, young = (1,) * 5, (2,) * 5
    for name, prompt in (("a", old), ("b", young), ("c", old)):
        hold(blocks, name, prompt)
        blocks.free(name)
    blocks.allocate("d", 12)
    assert len(blocks.match(old)) == 1
    assert blocks.match(young) == ()


def test_partial_blocks_never_displace_cached_ones():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    for name in ("b", "c", "d"):
        hold(blocks, name, (3,))
        blocks.free(name)
    assert len(blocks.match((1,) * 9)) == 2


def test_a_reused_block_is_no_longer_a_hit():
    blocks = pool(1)
    hold(blocks, "x", (1,) * 4)
    blocks.free("x")
    hold(blocks, "y", (2,) * 2)
    assert blocks.match((1,) * 5) == ()
    blocks.free("y")
    assert blocks.match((1,) * 5) == ()


def test_hits_are_counted_anew_after_a_failed_admission():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    hold(blocks, "other", (9,) * 4)
    prompt = (1,) * 16
    assert len(blocks.match(prompt)) == 2
    assert not blocks.can_allocate("b", 16, blocks.match(prompt))
    blocks.allocate("other", 8)
    assert len(blocks.match(prompt)) == 1


def test_a_hit_is_not_evicted_to_make_room_for_the_rest_of_its_own_request():
    blocks = pool(3)
    hold(blocks, "a", (1,) * 8)
    blocks.free("a")
    longer = ((1,) * 8) + (2,) * 5
    assert not blocks.can_allocate("b", 13, blocks.match(longer))
    assert hold(blocks, "b", longer[:12]) == 8


@pytest.mark.parametrize(
    "digest", [lambda content: b"always the same", lambda content: bytes([len(content[0])])]
)
def test_colliding_digests_never_give_another_prompts_blocks(digest):
    blocks = pool(20, digest=digest)
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


def test_a_salt_and_an_adapter_of_the_same_name_do_not_share():
    blocks = pool(10)
    prompt = (1,) * 9
    hold(blocks, "a", prompt, (("salt", "x"),))
    assert len(blocks.match(prompt, (("salt", "x"),))) == 2
    for extra in ((), (("adapter", "x"),), (("salt", "y"),)):
        assert blocks.match(prompt, extra) == ()


def test_requests_share_only_within_their_salt():
    prompt = (1,) * 9
    salts = ["x", "y", "x", None, None]
    requests = [Request(str(n), prompt, 2, arrival=10.0 * n, cache_salt=salt) for n, salt in enumerate(salts)]
    assert [record.num_cached_tokens for record in serve_checked(requests).requests] == [0, 0, 8, 0, 8]


def test_a_resumed_request_computes_only_what_the_cache_lost():
    # The pool holds both prompts, but not both outputs: the later request is preempted and comes back.
    requests = [Request("a", (1,) * 10, 12), Request("b", (2,) * 10, 4)]
    trace = serve_checked(requests, num_blocks=6)
    resumed = trace.requests[1]
    assert resumed.num_preemptions > 0
    spans = [
        (entry.start, entry.num_tokens)
        for step in trace.steps
        for entry in step.plan.scheduled
        if entry.request_id == "b"
    ]
    restarts = [start for start, _ in spans[1:] if start not in {a + b for a, b in spans}]
    assert all(start % 4 == 0 for start in restarts)
    assert sum(count for _, count in spans) == 10 + 4 - 1 + resumed.num_recomputed_tokens


def random_requests(rng):
    heads = [tuple(rng.integers(0, 3, size=rng.integers(1, 30)).tolist()) for _ in range(3)]
    for place in range(int(rng.integers(1, 12))):
        head = heads[int(rng.integers(3))]
        tail = tuple(rng.integers(0, 3, size=rng.integers(0, 8)).tolist())
        prompt = head[: int(rng.integers(1, len(head) + 1))] + tail
        yield Request(str(place), prompt, int(rng.integers(1, 20)), arrival=float(rng.random() * 20))


@pytest.mark.parametrize("policy", POLICIES)
def test_invariants_and_counts_hold_with_shared_prefixes_in_pools_that_preempt(policy):
    num_cached = num_preemptions = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        requests = list(random_requests(rng))
        block_size = int(rng.choice([1, 2, 4, 16]))
        least = max(-(-(r.num_prompt_tokens + r.max_tokens - 1) // block_size) for r in requests)
        trace = serve_checked(
            requests,
            policy,
            seats=int(rng.integers(1, 8)),
            budget=int(rng.choice([1, 7, 64])),
            num_blocks=least + int(rng.integers(4)),
            block_size=block_size,
        )
        counts = token_counts(trace)
        assert (
            counts.computed
            == counts.prompt + counts.output - len(requests) + counts.recomputed - counts.cached
        )
        for record in trace.requests:
            assert len(record.tokens) == record.max_tokens
            assert 0 <= record.num_cached_tokens < record.num_prompt_tokens
            assert record.num_recomputed_tokens >= 0
        for step in trace.steps:
            assert 0 < step.num_held_tokens <= step.num_held_blocks * block_size
        num_cached += counts.cached
        num_preemptions += sum(record.num_preemptions for record in trace.requests)
    assert num_cached > 0
    assert num_preemptions > 0


def test_a_shared_block_is_counted_once_in_memory():
    prompt = (1,) * 8 + (2,)
    requests = [Request("first", prompt, 20), *(Request(str(n), prompt, 5, arrival=3.0) for n in range(5))]
    trace = serve_checked(requests)
    together = next(step for step in trace.steps if step.num_running == 6)
    assert together.num_held_blocks == 2 + 6
    assert together.num_held_tokens <= 8 + 6 * 4
    assert prefix_hit_rate(trace) == pytest.approx(5 * 8 / (6 * 9))


def test_hits_and_evictions_are_the_same_in_every_process():
    code = """
import json, numpy as np, sys
sys.path.insert(0, "tests")
from test_prefix_cache import random_requests, serve_checked
requests = list(random_requests(np.random.default_rng(3)))
trace = serve_checked(requests, num_blocks=30, seats=3)
print(trace.steps_frame().to_json())
"""
    outputs = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert json.loads(outputs.pop())


def test_without_prefix_caching_nothing_is_shared():
    blocks = BlockManager(CacheConfig(10, 4))
    blocks.allocate("a", 8)
    assert blocks.match((1,) * 9) == ()


def test_only_a_new_table_can_begin_with_shared_blocks():
    blocks = pool(10)
    hold(blocks, "a", (1,) * 8)
    blocks.allocate("b", 4)
    with pytest.raises(ValueError, match="'b' holds blocks already"):
        blocks.share("b", blocks.match((1,) * 9))


def test_a_hit_reported_for_an_admission_that_was_undone_is_forgotten():
    # "old" needs its next block in the step in which "new" was admitted on a hit, so "new" is put back.
    requests = [
        Request("seed", (1,) * 8, 1),
        Request("old", (2,) * 4, 8, arrival=1.0),
        Request("new", (1,) * 9, 1, arrival=2.0),
    ]
    trace = serve_checked(requests, NewcomersFirst, num_blocks=4)
    admissions = [
        step.plan.step for step in trace.steps for entry in step.plan.admitted if entry.request.id == "new"
    ]
    computed = sum(
        entry.num_tokens for step in trace.steps for entry in step.plan.scheduled if entry.request_id == "new"
    )
    assert len(admissions) == 1 + trace.requests[2].num_preemptions
    assert computed == 9 + trace.requests[2].num_recomputed_tokens - trace.requests[2].num_cached_tokens
