"""With a sliding window a request holds the blocks that later tokens still see, and gives back the others."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from cbresearch.blocks import NULL_BLOCK, BlockManager
from test_two_tiers import (
    POLICIES,
    Meddler,
    distinct,
    entries_of,
    random_case,
    serve_on_model,
    serve_watched,
)

from cbresearch.config import CacheConfig, SchedulerConfig
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


def is_out_of_sight(place, next_position, window, block_size):
    """Say whether the next token, and so any later one, sees nothing of a block."""
    seen = range(max(0, next_position - window + 1), next_position + 1)
    return not set(seen) & set(range(place * block_size, (place + 1) * block_size)) and (
        (place + 1) * block_size <= next_position
    )


def serve_windowed(
    requests, window, num_blocks, block_size=2, budget=5, between=None, policy="fcfs", **options
):
    limits = SchedulerConfig(4, budget, preemption=options.pop("preemption", "swap"))
    cache = CacheConfig(num_blocks, block_size, sliding_window=window, **options)
    return serve_watched(requests, policy, limits, cache, between)


# --- one request


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_request_holds_no_more_blocks_than_its_window_and_its_chunk_touch(window, block_size, budget):
    bound = -(-(window - 1 + budget) // block_size) + 1
    assert most_blocks(window, budget, block_size) <= bound
    request = Request("a", distinct(10, 40), 30)
    num_blocks = min(bound, -(-69 // block_size))
    trace, witness = serve_windowed([request], window, num_blocks, block_size, budget)
    assert witness.most_held["a"] <= most_blocks(window, budget, block_size)
    # Between the steps it holds what the next token sees.
    assert all(step.num_held_blocks <= most_blocks(window, 1, block_size) for step in trace.steps)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_entries_of_blocks_that_nobody_sees_any_more_are_null_and_only_those(window, block_size):
    seen_null = []

    def between(scheduler, record):
        for state in scheduler.running:
            computed = state.num_computed_tokens
            table = scheduler.blocks.table(state.id)
            for place, block in enumerate(table):
                is_null = block == NULL_BLOCK
                assert is_null == is_out_of_sight(place, computed, window, block_size), (table, computed)
                seen_null.append(is_null)

    requests = [Request("a", distinct(10, 13), 12), Request("b", distinct(50, 3), 20, 2.0)]
    serve_windowed(requests, window, 60, block_size, between=between)
    assert any(seen_null)
    # A window of 1 shows the next token itself alone: nothing but a block that it goes on filling.
    assert all(seen_null) == (window == block_size == 1)


def test_blocks_are_given_back_by_hand():
    # Window 4, blocks of 2: the token at position 9 sees 6 to 9.
    blocks = BlockManager(CacheConfig(6, 2, sliding_window=4))
    table = blocks.allocate("a", 9)
    assert blocks.forget("a", 4) == 0
    assert blocks.forget("a", 5) == 1
    assert blocks.table("a") == (NULL_BLOCK, *table[1:])
    assert blocks.forget("a", 9) == 3
    assert blocks.table("a") == (NULL_BLOCK,) * 3 + table[3:]
    assert blocks.forget("a", 9) == 3
    assert blocks.num_free_blocks == 4
    blocks.check()
    blocks.free("a")
    assert blocks.num_free_blocks == 6
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        blocks.free("a")


@pytest.mark.parametrize("window", WINDOWS)
def test_held_tokens_are_those_in_blocks_that_are_still_held(window):
    trace, _ = serve_windowed([Request("a", distinct(10, 13), 12)], window, 60, 2)
    for step in trace.steps[:-1]:
        (entry,) = step.plan.scheduled
        computed = entry.context_length
        held = [p for p in range(computed) if not is_out_of_sight(p // 2, computed, window, 2)]
        assert step.num_held_tokens == len(held)
        assert step.num_held_blocks == len({position // 2 for position in held})


def test_a_window_that_nobody_outgrows_changes_no_plan():
    requests = [Request(str(n), distinct(50 * n, 9), 8, float(n)) for n in range(4)]
    limits = SchedulerConfig(3, 7)
    plain = simulate(requests, scheduler=limits, cache=CacheConfig(12, 2))
    windowed = simulate(requests, scheduler=limits, cache=CacheConfig(12, 2, sliding_window=17))
    assert [step.plan for step in windowed.steps] == [step.plan for step in plain.steps]


# --- longer than the pool


def test_a_request_longer_than_the_pool_is_accepted_and_finishes():
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


def test_a_request_whose_head_is_cached_needs_no_more_blocks_than_one_without():
    # The least pool for a chunk of 7 behind a window of 3.
    requests = [Request("x", distinct(0, 5), 1), Request("y", distinct(0, 4) + distinct(50, 11), 2, 5.0)]
    trace, _ = serve_windowed(requests, window=3, num_blocks=6, budget=7, prefix_caching=True)
    assert trace.requests[1].num_cached_tokens == 4


@pytest.mark.parametrize("length", [5, 9, 12, 13])
def test_a_swap_moves_only_what_the_window_still_shows(length):
    requests = [Request("other", distinct(100, 3), 30), Request("a", distinct(10, length), 12)]
    moved = []

    def between(scheduler, record):
        if record.plan.step == 5:
            (state,) = [state for state in scheduler.running if state.id == "a"]
            num_blocks = -(-state.num_computed_tokens // 2)
            moved.append(
                sum(not is_out_of_sight(p, state.num_computed_tokens, 4, 2) for p in range(num_blocks))
            )
            scheduler.preempt("a", "swap")
            assert scheduler.blocks.num_held_host_blocks == moved[0]

    trace, witness = serve_windowed(
        requests, window=4, num_blocks=40, budget=64, between=between, num_host_blocks=40
    )
    assert witness.num_transfers == {"swap_out": moved[0], "swap_in": moved[0]}
    assert moved[0] < -(-(length + 5) // 2)
    assert trace.requests[1].num_recomputed_tokens == 0


def test_a_recompute_gives_the_window_its_blocks_back():
    def between(scheduler, record):
        if record.plan.step in (6, 9):
            scheduler.preempt("a", "recompute")

    trace, _ = serve_windowed([Request("a", distinct(10, 13), 12)], 4, 6, between=between)
    assert trace.requests[0].num_preemptions == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_the_prompt_alone_in_windows_of_any_size(policy):
    seen: Counter[str] = Counter()
    for seed in range(40):
        requests, limits, cache = random_case(3000 + seed, windows=WINDOWS)
        between = Meddler(seed, rate=0.1, aborts=0.01) if seed % 2 else None
        trace, witness = serve_watched(requests, policy, limits, cache, between)
        seen.update(witness.num_transfers)
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
        alone = replace(cache, sliding_window=None)
        seen["longer than the pool"] += any(
            request.num_prompt_tokens + request.max_tokens - 1 > alone.num_tokens for request in requests
        )
    wanted = ("swap_out", "swap_in", "preempted", "cached", "longer than the pool")
    assert all(seen[kind] > 0 for kind in wanted), seen


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("length", [3, 4, 7, 8])
def test_a_row_that_a_static_batch_computes_over_again_still_has_what_it_reads(window, length):
    requests = [Request("a", distinct(0, length), 1), Request("b", distinct(20, 5), 9)]
    limits, cache = SchedulerConfig(3, 64), CacheConfig(60, 4, sliding_window=window)
    trace, _ = serve_watched(requests, "static", limits, cache)
    assert sum(len(step.plan.padding) for step in trace.steps) == 8


# --- a real model


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_freed_blocks_are_never_read_by_a_model_with_a_window(block_size, caching):
    import torch
    from conftest import generate_alone
    from transformers import MistralConfig, MistralForCausalLM

    from cbresearch import models

    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        sliding_window=4,
    )
    loaded = models.wrap("windowed", MistralForCausalLM(config))
    loaded = replace(loaded, eos_token_ids=frozenset())
    requests = [
        Request(str(n), tuple((7 * n + 3 * k) % 60 + 3 for k in range(1 + 5 * n)), 12, 0.001 * n)
        for n in range(5)
    ]
    num_blocks = math.ceil((3 + 7) / block_size) + 3
    limits = SchedulerConfig(4, 7, preemption="swap")
    cache = CacheConfig(num_blocks, block_size, caching, num_host_blocks=8, sliding_window=4)
    assert max(request.num_prompt_tokens + 11 for request in requests) > cache.num_tokens

    def between(scheduler, record):
        if record.plan.step % 5 == 4 and scheduler.running:
            scheduler.preempt(scheduler.running[-1].id, "swap")

    trace, executor = serve_on_model(loaded, requests, "fcfs", limits, cache, between)
    for request in requests:
        assert trace.outputs[request.id] == generate_alone(loaded.model, request.prompt, 12)
    assert executor.num_transfers["swap_out"] > 0
    assert caching or executor.num_transfers["swap_in"] > 0
