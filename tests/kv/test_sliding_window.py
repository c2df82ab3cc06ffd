"""With a sliding window a request holds the blocks that later tokens still see, and gives back the others."""

from collections import Counter

import pytest
from helpers.core import (
    POLICIES,
    Meddler,
    distinct,
    entries_of,
    is_out_of_window,
    random_case,
    serve_refereed,
)

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.kv import NULL_BLOCK
from cbresearch.request import Request
from cbresearch.simulator import simulate

WINDOWS = (1, 2, 3, 4, 7, 8)


def most_blocks(window, chunk, block_size):
    """Count the blocks over which a chunk's tokens and what the first of them sees can spread."""
    num_tokens = window - 1 + chunk
    return max(
        len({position // block_size for position in range(start, start + num_tokens)})
        for start in range(block_size)
    )


def serve_windowed(requests, window, num_blocks, **options):
    options = {"block_size": 2, "budget": 5, "seats": 4, "preemption": "swap", **options}
    return serve_refereed(requests, num_blocks=num_blocks, sliding_window=window, **options)


# --- one request


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_request_holds_no_more_blocks_than_its_window_and_its_chunk_touch(window, block_size, budget):
    bound = -(-(window - 1 + budget) // block_size) + 1
    assert most_blocks(window, budget, block_size) <= bound
    request = Request("a", distinct(10, 40), 30)
    num_blocks = min(bound, -(-69 // block_size))
    trace, referee = serve_windowed([request], window, num_blocks, block_size=block_size, budget=budget)
    assert referee.most_held["a"] <= most_blocks(window, budget, block_size)
    # Between the steps it holds what the next token sees.
    assert all(step.num_held_blocks <= most_blocks(window, 1, block_size) for step in trace.steps)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_table_entries_are_null_exactly_where_no_later_token_attends(window, block_size):
    seen_null = []

    def between(scheduler, record):
        for state in scheduler.running:
            computed = state.num_computed_tokens
            table = scheduler.kv.table(state.id)
            for place, block in enumerate(table):
                is_null = block == NULL_BLOCK
                assert is_null == is_out_of_window(place, computed, window, block_size), (table, computed)
                seen_null.append(is_null)

    requests = [Request("a", distinct(10, 13), 12), Request("b", distinct(50, 3), 20, 2.0)]
    serve_windowed(requests, window, 60, block_size=block_size, between=between)
    assert any(seen_null)
    # A window of 1 shows the next token itself alone: nothing but a block that it goes on filling.
    assert all(seen_null) == (window == block_size == 1)


@pytest.mark.parametrize("window", WINDOWS)
def test_held_tokens_are_those_in_blocks_within_the_window(window):
    trace, _ = serve_windowed([Request("a", distinct(10, 13), 12)], window, 60)
    for step in trace.steps[:-1]:
        (entry,) = step.plan.scheduled
        computed = entry.context_length
        held = [p for p in range(computed) if not is_out_of_window(p // 2, computed, window, 2)]
        assert step.num_held_tokens == len(held)
        assert step.num_held_blocks == len({position // 2 for position in held})


def test_a_window_that_no_request_outgrows_changes_no_plan():
    requests = [Request(str(n), distinct(50 * n, 9), 8, float(n)) for n in range(4)]
    limits = SchedulerConfig(3, 7)
    plain = simulate(requests, scheduler=limits, cache=CacheConfig(12, 2))
    windowed = simulate(requests, scheduler=limits, cache=CacheConfig(12, 2, sliding_window=17))
    assert [step.plan for step in windowed.steps] == [step.plan for step in plain.steps]


# --- longer than the pool


def test_a_windowed_request_longer_than_the_pool_is_accepted_and_finishes():
    trace, _ = serve_windowed([Request("a", distinct(10, 100), 100)], window=4, num_blocks=5, budget=5)
    assert len(trace.outputs["a"]) == 100
    assert trace.requests[0].num_preemptions == 0


@pytest.mark.parametrize("window", [1, 4, 7])
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_a_pool_one_block_short_of_the_window_and_the_chunk_is_rejected_with_the_numbers(window, budget):
    bound = -(-(window - 1 + budget) // 2) + 1
    request = Request("a", distinct(10, 60), 20)
    limits = SchedulerConfig(4, budget)
    for num_blocks in (bound - 1, bound):
        trace = simulate([request], scheduler=limits, cache=CacheConfig(num_blocks, 2, sliding_window=window))
        error = trace.requests[0].error
        if num_blocks == bound:
            assert error is None
            assert len(trace.outputs["a"]) == 20
        else:
            assert f"{bound} blocks of 2" in error
            assert f"the pool has {num_blocks}" in error


def test_blocks_that_one_request_gave_back_serve_others_while_it_runs():
    # Each is longer than the pool; together they run without a preemption.
    requests = [Request(name, distinct(50 * n, 11), 40, float(n)) for n, name in enumerate("abc")]
    trace, _ = serve_windowed(requests, window=4, num_blocks=12, budget=8)
    assert sum(record.num_preemptions for record in trace.requests) == 0
    holders: dict[int, set[str]] = {}
    for step in trace.steps:
        for entry in step.plan.scheduled:
            for block in entry.new_block_ids:
                holders.setdefault(block, set()).add(entry.request_id)
    together = max(step.num_running for step in trace.steps)
    assert together == 3
    assert max(len(names) for names in holders.values()) == 3


# --- beside the other features


def test_blocks_that_fell_out_of_the_window_stay_cached_for_the_same_prompt():
    prompt = distinct(10, 12)
    requests = [Request("a", (*prompt, 1), 6), Request("b", (*prompt, 2), 6, 50.0)]
    trace, _ = serve_windowed(requests, window=4, num_blocks=40, prefix_caching=True)
    assert trace.requests[1].num_cached_tokens == 12
    _, entry = entries_of(trace, "b")[0]
    # It begins behind the hit, and holds of it what its first token sees: positions 9 to 12.
    assert entry.start == 12
    assert [block == NULL_BLOCK for block in entry.new_block_ids] == [True] * 4 + [False] * 3


def test_a_windowed_request_whose_head_is_cached_needs_no_more_blocks_than_one_without():
    # The least pool for a chunk of 7 behind a window of 3.
    requests = [Request("x", distinct(0, 5), 1), Request("y", distinct(0, 4) + distinct(50, 11), 2, 5.0)]
    trace, _ = serve_windowed(requests, window=3, num_blocks=6, budget=7, prefix_caching=True)
    assert trace.requests[1].num_cached_tokens == 4


@pytest.mark.parametrize("length", [5, 9, 12, 13])
def test_a_swap_moves_only_the_blocks_within_the_window(length):
    requests = [Request("other", distinct(100, 3), 30), Request("a", distinct(10, length), 12)]
    moved = []

    def between(scheduler, record):
        if record.plan.step == 5:
            (state,) = [state for state in scheduler.running if state.id == "a"]
            num_blocks = -(-state.num_computed_tokens // 2)
            moved.append(
                sum(not is_out_of_window(p, state.num_computed_tokens, 4, 2) for p in range(num_blocks))
            )
            scheduler.preempt("a", "swap")
            assert scheduler.kv.num_held_host_blocks == moved[0]

    trace, referee = serve_windowed(
        requests, window=4, num_blocks=40, budget=64, between=between, num_host_blocks=40
    )
    assert referee.num_transfers == {"swap_out": moved[0], "swap_in": moved[0]}
    assert moved[0] < -(-(length + 5) // 2)
    assert trace.requests[1].num_recomputed_tokens == 0


def test_a_windowed_request_recomputes_what_its_window_still_shows():
    def between(scheduler, record):
        if record.plan.step in (6, 9):
            scheduler.preempt("a", "recompute")

    trace, _ = serve_windowed([Request("a", distinct(10, 13), 12)], 4, 6, between=between)
    assert trace.requests[0].num_preemptions == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_windowed_answers_are_those_of_the_prompt_alone(policy):
    seen: Counter[str] = Counter()
    for seed in range(40):
        requests, limits, cache = random_case(3000 + seed, windows=WINDOWS)
        between = Meddler(seed, rate=0.1, aborts=0.01) if seed % 2 else None
        trace, referee = serve_refereed(requests, policy, limits, cache, between)
        seen.update(referee.num_transfers)
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
        seen["longer than the pool"] += any(
            request.num_prompt_tokens + request.max_tokens - 1 > cache.num_tokens for request in requests
        )
    wanted = ("swap_out", "swap_in", "preempted", "cached", "longer than the pool")
    assert all(seen[kind] > 0 for kind in wanted), seen


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("length", [3, 4, 7, 8])
def test_a_padding_row_keeps_what_its_window_shows(window, length):
    requests = [Request("a", distinct(0, length), 1), Request("b", distinct(20, 5), 9)]
    limits, cache = SchedulerConfig(3, 64), CacheConfig(60, 4, sliding_window=window)
    trace, _ = serve_refereed(requests, "static", limits, cache)
    assert sum(len(step.plan.padding) for step in trace.steps) == 8
