"""Where the pool's slots are, step by step: six categories that add up, counted again one slot at a time."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cbresearch.blocks import NULL_BLOCK
from test_two_tiers import Meddler, distinct, least_pool, random_case, serve_watched
from test_window_blocks import is_out_of_sight

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.metrics import memory, memory_shares
from cbresearch.request import Request, parallel_samples
from cbresearch.simulator import simulate

CATEGORIES = ("token_states", "reserved", "internal", "external", "cached", "free")


def uses(trace):
    return list(memory(trace))


def parts(use):
    return tuple(getattr(use, name) for name in CATEGORIES)


def assert_adds_up(trace):
    used = uses(trace)
    assert len(used) == len(trace.steps)
    for step, use in zip(trace.steps, used, strict=True):
        assert min(use) >= 0, (step.plan.step, use)
        assert sum(parts(use)) == trace.cache.num_tokens, (step.plan.step, use)
        assert use.token_states + use.reserved + use.internal == step.num_held_blocks * trace.cache.block_size


# --- one slot at a time


@dataclass
class Seated:
    table: list[int]
    computed: int
    end: int
    is_done: bool = False


def count_slots(trace, keeps_rows=False):
    """Yield (token states, reserved, internal, shared) of each step, from the plans and the answers alone."""
    size, window = trace.cache.block_size, trace.cache.sliding_window
    ends = {record.id: record.num_prompt_tokens + len(record.tokens) - 1 for record in trace.requests}
    seated: dict[str, Seated] = {}
    for step in trace.steps:
        for name in step.plan.preempted:
            del seated[name]
        for admission in step.plan.admitted:
            seated[admission.request.id] = Seated([], 0, ends[admission.request.id])
        for entry in step.plan.scheduled:
            row = seated[entry.request_id]
            row.table += entry.new_block_ids
            row.computed = entry.context_length
        references: Counter[int] = Counter()
        tokens, later = set(), set()
        for row in seated.values():
            for place, block in enumerate(row.table):
                if block == NULL_BLOCK:
                    continue
                if window is not None and is_out_of_sight(place, row.computed, window, size):
                    continue
                references[block] += 1
                if row.is_done:
                    continue
                for offset in range(size):
                    position = place * size + offset
                    if position < row.computed:
                        tokens.add((block, offset))
                    elif position < row.end:
                        later.add((block, offset))
        reserved = len(later - tokens)
        held = len(references) * size
        shared = (references.total() - len(references)) * size
        yield len(tokens), reserved, held - len(tokens) - reserved, shared
        for name in step.finished:
            seated[name].is_done = True
        if not keeps_rows or all(row.is_done for row in seated.values()):
            seated = {name: row for name, row in seated.items() if not row.is_done}


def assert_counted(trace, keeps_rows=False):
    counted = list(count_slots(trace, keeps_rows))
    used = [(use.token_states, use.reserved, use.internal, use.shared) for use in uses(trace)]
    assert used == counted


# --- by hand


def one_request(cache, output_length=None, max_tokens=4, **limits):
    request = Request("a", 5, max_tokens, output_length=output_length)
    trace = simulate([request], scheduler=SchedulerConfig(**limits), cache=cache)
    assert_adds_up(trace)
    return [parts(use) for use in uses(trace)]


def test_one_request_in_pages_by_hand():
    # 5 + 4 tokens, of which the last needs no slot: 8 slots, two blocks from the start.
    assert one_request(CacheConfig(4, 4)) == [
        (5, 3, 0, 0, 0, 8),
        (6, 2, 0, 0, 0, 8),
        (7, 1, 0, 0, 0, 8),
        (8, 0, 0, 0, 0, 8),
    ]
    assert one_request(CacheConfig(4, 4), max_tokens=6) == [
        (5, 3, 0, 0, 0, 8),
        (6, 2, 0, 0, 0, 8),
        (7, 1, 0, 0, 0, 8),
        (8, 0, 0, 0, 0, 8),
        (9, 1, 2, 0, 0, 4),
        (10, 0, 2, 0, 0, 4),
    ]


def test_only_tokens_that_came_were_reserved_for():
    # The answer might have had 20 tokens, and ended after 3: the last of 8 slots never fills.
    expected = [(5, 2, 1, 0, 0, 16), (6, 1, 1, 0, 0, 16), (7, 0, 1, 0, 0, 16)]
    assert one_request(CacheConfig(6, 4), output_length=3, max_tokens=20) == expected
    assert one_request(CacheConfig(6, 4), max_tokens=3) == expected


def test_a_prompt_in_chunks_fills_whole_blocks_before_it_takes_others():
    assert one_request(CacheConfig(4, 4), max_tokens=2, max_num_batched_tokens=3) == [
        (3, 1, 0, 0, 0, 12),
        (5, 1, 2, 0, 0, 8),
        (6, 0, 2, 0, 0, 8),
    ]


@pytest.mark.parametrize(
    ("reservation", "held", "external"),
    # 16 slots for everyone; 5 + 4 slots in 3 blocks out of a run of 4; 5 + 4 - 1 slots in 2 blocks.
    [("max", 16, 0), ("pow2", 12, 4), ("oracle", 8, 0)],
)
def test_one_request_in_a_reservation_by_hand(reservation, held, external):
    cache = CacheConfig(8, 4, reservation=reservation)
    assert one_request(cache, max_model_len=16) == [
        (5 + n, 3 - n, held - 8, external, 0, 32 - held - external) for n in range(4)
    ]


def test_a_reservation_for_the_longest_answer_is_internal_where_the_answer_ends_early():
    cache = CacheConfig(8, 4, reservation="pow2")
    # Told 4, rounded to 4; told 9 at most, and not when it ends, the same request would reserve 5 + 16.
    assert one_request(cache, output_length=4, max_tokens=9)[0] == (5, 3, 4, 4, 0, 16)
    assert one_request(cache, max_tokens=9)[0] == (5, 8, 24 - 13, 32 - 24, 0, 0)


def test_free_blocks_are_external_exactly_while_memory_rejects_someone():
    requests = [Request("a", 5, 4), Request("b", 5, 4)]
    trace = simulate(requests, cache=CacheConfig(3, 4))
    assert [(use.external, use.free) for use in memory(trace)] == [(4, 0)] * 4 + [(0, 4)] * 4
    assert_adds_up(trace)


def test_free_runs_that_lie_apart_are_external_while_a_longer_one_is_rejected():
    # Four runs of one block. The first and the third come free first: that is no run of two for "e".
    requests = [Request(name, 2, max_tokens) for name, max_tokens in zip("abcd", (1, 3, 1, 3), strict=True)]
    requests.append(Request("e", 7, 2, 0.5))
    trace = simulate(requests, cache=CacheConfig(4, 4, reservation="oracle"))
    assert [parts(use) for use in memory(trace)] == [
        (8, 4, 4, 0, 0, 0),
        (6, 2, 0, 8, 0, 0),
        (8, 0, 0, 8, 0, 0),
        (7, 1, 0, 0, 0, 8),
        (8, 0, 0, 0, 0, 8),
    ]


def test_samples_of_one_prompt_by_hand():
    samples = parallel_samples(Request("s", distinct(0, 6), 3), 2)
    trace, _ = serve_watched(samples, cache=CacheConfig(4, 4))
    assert [(*parts(use), use.shared) for use in memory(trace)] == [
        (6, 2, 0, 0, 0, 8, 0),
        # The first has 7 tokens. The other shares 4 and has copied 2, of which the last was computed again.
        (4 + 3 + 2, 1 + 2, 0, 0, 0, 4, 4),
        (4 + 4 + 3, 1, 0, 0, 0, 4, 4),
        (8, 0, 0, 0, 0, 8, 0),
    ]


def test_what_a_static_batch_keeps_of_the_finished_is_internal_by_hand():
    trace = simulate([Request("a", 3, 1), Request("b", 3, 3)], "static", cache=CacheConfig(4, 4))
    assert [parts(use) for use in memory(trace)] == [
        (6, 1, 1, 0, 0, 8),
        (4, 0, 4, 0, 0, 8),
        (5, 0, 3 + 4, 0, 0, 4),
    ]


def test_blocks_that_nobody_refers_to_are_cached_until_their_room_is_needed():
    requests = [Request("a", distinct(0, 8), 1), Request("b", distinct(50, 3), 8, 5.0)]
    trace = simulate(requests, cache=CacheConfig(3, 4, prefix_caching=True))
    assert [parts(use) for use in memory(trace)] == [
        (8, 0, 0, 0, 0, 4),
        (3, 1, 0, 0, 8, 0),
        (4, 0, 0, 0, 8, 0),
        (5, 3, 0, 0, 4, 0),
        (6, 2, 0, 0, 4, 0),
        (7, 1, 0, 0, 4, 0),
        (8, 0, 0, 0, 4, 0),
        (9, 1, 2, 0, 0, 0),
        (10, 0, 2, 0, 0, 0),
    ]


def test_a_window_gives_back_what_it_no_longer_shows_by_hand():
    # Window 3, blocks of 2: position 6 sees 4 to 6.
    trace, _ = serve_watched([Request("a", distinct(0, 5), 4)], cache=CacheConfig(5, 2, sliding_window=3))
    assert [parts(use) for use in memory(trace)] == [
        # Position 5 sees 3 to 5: block 0 goes, blocks 1 and 2 stay with 3 tokens and a slot to fill.
        (3, 1, 0, 0, 0, 6),
        (2, 0, 0, 0, 0, 8),
        (3, 1, 0, 0, 0, 6),
        (2, 0, 0, 0, 0, 8),
    ]


def test_slots_in_the_hosts_pool_are_counted_while_their_request_is_out():
    requests = [Request("a", distinct(10, 10), 12), Request("b", distinct(40, 10), 12)]
    trace, _ = serve_watched(requests, cache=CacheConfig(7, 4, num_host_blocks=20))
    out = next(step.plan.step for step in trace.steps if step.plan.swapped)
    back = next(step.plan.step for step in trace.steps if step.plan.num_transfers("swap_in"))
    num_blocks = trace.steps[out].plan.num_transfers("swap_out")
    assert num_blocks >= 3
    assert [use.host for use in memory(trace)] == [
        4 * num_blocks * (out <= step < back) for step in range(len(trace.steps))
    ]
    # What is out holds no slot here.
    assert trace.steps[out].num_running == 1
    assert uses(trace)[out].token_states == trace.steps[out].plan.scheduled[0].context_length


def test_an_aborted_request_reserves_nothing_once_it_is_gone():
    # "b" goes in the middle of its prompt; the slots that it would have filled are not its any more.
    requests = [Request("a", distinct(10, 5), 30), Request("b", distinct(40, 19), 5)]

    def between(scheduler, record):
        if record.plan.step == 1:
            scheduler.abort("b")

    limits = SchedulerConfig(4, 8)
    trace, _ = serve_watched(requests, limits=limits, cache=CacheConfig(20, 4), between=between)
    assert trace.requests[1].finish_reason == "abort"
    assert_adds_up(trace)
    for use, step in zip(uses(trace)[2:], trace.steps[2:], strict=True):
        # What "a" alone has: 5 + 30 - 1 slots at its end.
        (entry,) = step.plan.scheduled
        size = 4 * step.num_held_blocks
        assert parts(use)[:3] == (
            entry.context_length,
            min(size, 34) - entry.context_length,
            max(0, size - 34),
        )


# --- any run


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "sjf", "static:release"])
def test_every_slot_is_in_the_category_that_counting_slots_says(policy):
    seen: Counter[str] = Counter()
    for seed in range(30):
        requests, limits, cache = random_case(4000 + seed)
        trace, witness = serve_watched(requests, policy, limits, cache)
        assert_adds_up(trace)
        assert_counted(trace)
        seen.update(witness.num_transfers)
        for use in memory(trace):
            seen.update(use._asdict())
    assert all(seen[name] > 0 for name in (*CATEGORIES, "host", "swap_in")), seen


def test_every_slot_is_in_the_category_that_counting_slots_says_under_windows():
    shared = 0
    for seed in range(40):
        requests, limits, cache = random_case(5000 + seed, windows=(1, 2, 3, 8))
        # Twice the least pool, so that a run depends on nothing else but the window.
        cache = replace(cache, num_blocks=2 * cache.num_blocks + 4)
        trace, _ = serve_watched(requests, "fcfs", limits, cache)
        assert_adds_up(trace)
        assert_counted(trace)
        shared += sum(use.shared for use in memory(trace))
    assert shared > 0


def test_every_slot_is_in_the_category_that_counting_slots_says_after_forced_preemptions():
    for seed in range(25):
        requests, limits, cache = random_case(6000 + seed)
        trace, _ = serve_watched(requests, "fcfs", limits, cache, Meddler(seed, patience=30))
        assert_adds_up(trace)
        assert_counted(trace)


@pytest.mark.parametrize("caching", [False, True])
def test_rows_that_a_static_batch_keeps_are_internal_slot_by_slot(caching):
    for seed in range(20):
        requests, limits, cache = random_case(7000 + seed)
        roomy = sum(-(-(r.num_prompt_tokens + r.max_tokens) // cache.block_size) for r in requests)
        cache = replace(cache, num_blocks=roomy, prefix_caching=caching)
        # All at once: who joins a batch that is being filled could share a block with a row that is kept.
        limits = replace(limits, max_num_batched_tokens=2048)
        trace = simulate(requests, "static", scheduler=limits, cache=cache)
        assert_adds_up(trace)
        assert_counted(trace, keeps_rows=True)


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "static:release"])
def test_reservations_are_counted_slot_by_slot(reservation, policy):
    seen: Counter[str] = Counter()
    for seed in range(20):
        requests, limits, cache = random_case(8000 + seed)
        limits = replace(limits, max_model_len=max(r.num_prompt_tokens + r.max_tokens for r in requests) + 5)
        longest = -(-2 * limits.max_model_len // cache.block_size)
        cache = CacheConfig(1 << longest.bit_length(), cache.block_size, reservation=reservation)
        trace, _ = serve_watched(requests, policy, limits, cache)
        assert_adds_up(trace)
        assert_counted(trace)
        for use in memory(trace):
            seen.update(use._asdict())
    assert all(seen[name] > 0 for name in ("token_states", "reserved", "internal", "external")), seen
    assert seen["cached"] == seen["shared"] == seen["host"] == 0


@pytest.mark.parametrize("policy", ["static", "fcfs"])
def test_the_categories_add_up_in_pools_that_preempt_whoever_is_aborted(policy):
    for seed in range(30):
        requests, limits, cache = random_case(9000 + seed)
        if policy == "static":
            cache = replace(cache, prefix_caching=False)
        trace, _ = serve_watched(requests, policy, limits, cache, Meddler(seed, 0.1, 0.03))
        assert_adds_up(trace)


def test_pages_waste_less_than_one_block_a_request():
    rng = np.random.default_rng(2)
    requests = [
        Request(str(n), int(rng.integers(1, 60)), int(rng.integers(1, 60)), float(n)) for n in range(40)
    ]
    limits = SchedulerConfig(8, 64)
    for size in (1, 4, 16):
        cache = CacheConfig(least_pool(requests, limits, size) * 3, size)
        trace = simulate(requests, scheduler=limits, cache=cache)
        for step, use in zip(trace.steps, memory(trace), strict=True):
            assert use.reserved + use.internal <= (size - 1) * step.num_running
        shares = memory_shares(trace)
        totals = np.array([parts(use) for use in memory(trace)]).sum(axis=0)
        assert [shares[name] for name in CATEGORIES] == pytest.approx((totals / totals.sum()).tolist())
