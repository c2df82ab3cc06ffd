"""Parallel samples of one prompt share its KV, and whoever writes to a shared block writes to a copy."""

from collections import Counter
from dataclasses import replace

import pytest
from cbresearch.blocks import BlockManager
from test_two_tiers import Meddler, distinct, entries_of, random_case, serve_watched

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request, parallel_samples
from cbresearch.simulator import simulate

BLOCK = 4
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12)


def blocks_of(num_tokens):
    return -(-num_tokens // BLOCK)


def samples_of(length, num_samples=3, max_tokens=6, **options):
    return list(parallel_samples(Request("s", distinct(10, length), max_tokens, **options), num_samples))


def serve_samples(requests, policy="fcfs", seats=8, budget=2048, between=None, **options):
    cache = CacheConfig(**{"num_blocks": 60, "block_size": BLOCK, **options})
    return serve_watched(requests, policy, SchedulerConfig(seats, budget), cache, between)


def first_entry(trace, request_id):
    return entries_of(trace, request_id)[0]


# --- how much is shared


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_samples_hold_the_full_blocks_before_the_prompts_last_token_once(length, num_samples):
    trace, _ = serve_samples(samples_of(length, num_samples))
    shared = (length - 1) // BLOCK
    for step in trace.steps[1:-1]:
        # The first sample is a step ahead of the others.
        ahead, behind = blocks_of(length + step.plan.step), blocks_of(length + step.plan.step - 1)
        if num_samples == step.num_running:
            assert step.num_held_blocks == shared + (ahead - shared) + (num_samples - 1) * (behind - shared)
            assert step.num_shared_blocks == (num_samples - 1) * shared
            # Each slot once: the shared part, and in each sample the rest of the prompt and its answer.
            own = length - shared * BLOCK
            assert step.num_held_tokens == shared * BLOCK + num_samples * (own + step.plan.step - 1) + 1
    separate = simulate(
        [replace(request, group=None) for request in samples_of(length, num_samples)],
        cache=CacheConfig(60, BLOCK),
    )
    together = max(step.num_held_blocks for step in trace.steps)
    assert max(step.num_held_blocks for step in separate.steps) - together >= (num_samples - 1) * shared


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("budget", [3, 2048])
def test_the_prompt_is_computed_once_and_its_last_token_by_each_sample(length, budget):
    trace, _ = serve_samples(samples_of(length, 4, 6), budget=budget)
    assert sum(step.plan.num_tokens for step in trace.steps) == length + 3 + 4 * 5
    assert [record.num_cached_tokens for record in trace.requests] == [0] + [length - 1] * 3
    # The others join in the step after the one that ends the prompt; of three tokens the
    # fourth sample gets one when the first is done.
    prompt_ends = -(-length // budget) - 1
    joined = [first_entry(trace, f"s/{n}")[0] - prompt_ends for n in range(1, 4)]
    assert joined == ([1, 1, 6] if budget == 3 else [1, 1, 1])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sample_copies_the_block_that_it_writes_unless_it_begins_a_new_one(length):
    trace, witness = serve_samples(samples_of(length))
    place = (length - 1) // BLOCK
    _, first = first_entry(trace, "s/0")
    joined, _ = first_entry(trace, "s/1")
    copies = {}
    for step in trace.steps:
        for transfer in step.plan.transfers:
            assert transfer.kind == "copy"
            assert step.plan.step == joined
            copies[transfer.target] = transfer.source
    assert len(copies) == (2 if (length - 1) % BLOCK else 0) == witness.num_transfers["copy"]
    tables = [first_entry(trace, f"s/{n}")[1].new_block_ids for n in (1, 2)]
    for table in tables:
        assert table[:place] == first.new_block_ids[:place]
        assert len(table) == place + 1
        if copies:
            assert copies.pop(table[place]) == first.new_block_ids[place]
    assert not copies
    assert len({first.new_block_ids[place], *(table[place] for table in tables)}) == 3


def test_samples_go_apart_without_touching_one_another():
    # Answers of several lengths: the blocks of whoever ends are used by others at once.
    requests = [
        replace(request, output_length=3 + 4 * n)
        for n, request in enumerate(samples_of(10, 4, max_tokens=20))
    ]
    others = [Request(f"o{n}", distinct(100 + 20 * n, 9), 12, float(3 * n)) for n in range(4)]
    trace, _ = serve_samples([*requests, *others], num_blocks=13)
    assert [len(record.tokens) for record in trace.requests[:4]] == [3, 7, 11, 15]


def test_a_sample_that_comes_after_its_siblings_are_done_is_an_ordinary_request():
    *early, late = samples_of(10, 3)
    trace, witness = serve_samples([*early, replace(late, arrival=50.0)])
    _, entry = first_entry(trace, "s/2")
    assert (entry.start, entry.num_tokens) == (0, 10)
    assert trace.requests[2].num_cached_tokens == 0
    assert witness.num_transfers == {"copy": 1}


def test_a_sample_that_joins_late_shares_the_prompt_but_not_what_was_generated():
    *early, late = samples_of(10, 3, max_tokens=20)
    trace, _ = serve_samples([*early, replace(late, arrival=9.0)])
    _, entry = first_entry(trace, "s/2")
    assert (entry.start, entry.num_tokens) == (9, 1)
    assert trace.steps[9].num_shared_blocks == 2 * 2


@pytest.mark.parametrize(
    "change", [{"group": "t"}, {"group": None}, {"prompt": distinct(11, 10)}, {"cache_salt": "x"}]
)
def test_only_the_same_group_prompt_and_salt_share(change):
    one, other = samples_of(10, 2)
    trace, witness = serve_samples([one, replace(other, **change)])
    assert [record.num_cached_tokens for record in trace.requests] == [0, 0]
    assert not witness.num_transfers
    assert all(step.num_shared_blocks == 0 for step in trace.steps)


def test_samples_need_a_number_of_at_least_one():
    request = Request("s", (1, 2), 3)
    for number in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"'s': num_samples is .* at least 1"):
            parallel_samples(request, number)
    (only,) = parallel_samples(request, 1)
    assert (only.id, only.group, only.prompt) == ("s/0", "s", (1, 2))


# --- where nothing is shared


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("static", {}),
        ("static:release", {}),
        *(("fcfs", {"num_blocks": 64, "reservation": kind}) for kind in ("max", "pow2", "oracle")),
    ],
)
def test_static_batches_and_reservations_share_nothing_and_nobody_waits_for_a_sibling(policy, options):
    requests = samples_of(10, 3)
    limits = SchedulerConfig(8, 2048, max_model_len=16)
    trace, witness = serve_watched(
        requests, policy, limits, CacheConfig(**{"num_blocks": 60, "block_size": BLOCK, **options})
    )
    assert not witness.num_transfers
    assert all(step.num_shared_blocks == 0 for step in trace.steps)
    assert [entry.num_tokens for entry in trace.steps[0].plan.scheduled] == [10, 10, 10]


# --- beside the other features


@pytest.mark.parametrize(
    ("length", "is_shared"),
    # The first sample's next token sees one position less than the newcomer's: that may be a block less.
    [(3, True), (4, True), (5, False), (6, True), (7, False), (8, True), (9, False), (10, True)],
)
def test_a_fork_shares_what_its_window_still_shows_and_else_computes_its_prompt(length, is_shared):
    trace, witness = serve_samples(samples_of(length, 2, 12), block_size=2, sliding_window=4)
    assert trace.requests[1].num_cached_tokens == (length - 1 if is_shared else 0)
    assert witness.num_transfers["copy"] == int(is_shared and (length - 1) % 2 > 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_finds_more_than_the_prefix_cache_which_holds_full_blocks_only(length):
    requests = samples_of(length, 2)
    forked, _ = serve_samples(requests, prefix_caching=True)
    hit, _ = serve_samples(
        [replace(request, group=None, arrival=float(n)) for n, request in enumerate(requests)],
        prefix_caching=True,
    )
    assert [record.num_cached_tokens for record in forked.requests] == [0, length - 1]
    assert [record.num_cached_tokens for record in hit.requests] == [0, (length - 1) // BLOCK * BLOCK]


def test_a_fork_after_its_siblings_are_done_finds_their_blocks_in_the_prefix_cache():
    *early, late = samples_of(10, 3)
    trace, _ = serve_samples([*early, replace(late, arrival=50.0)], prefix_caching=True)
    assert trace.requests[2].num_cached_tokens == 8


def test_what_a_fork_generates_is_cached_under_its_own_tokens():
    # The block that a sample copied and filled up is a hit for who asks on with its answer, and right.
    samples = samples_of(6, 2, 8)
    answer = serve_samples(samples)[0].requests[1].tokens
    longer = Request("longer", samples[0].prompt + answer, 4, arrival=50.0)
    trace, _ = serve_samples([*samples, longer], prefix_caching=True)
    # The last generated token was never fed back: 13 of 14 tokens have KV, 12 of them in full blocks.
    assert trace.requests[2].num_cached_tokens == 12


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("caching", [False, True])
def test_an_aborted_sample_takes_nothing_from_its_siblings(step, place, caching):
    def between(scheduler, record):
        if record.plan.step == step:
            scheduler.abort(f"s/{place}")

    trace, _ = serve_samples(samples_of(10, 3, 9), budget=4, between=between, prefix_caching=caching)
    reasons = [record.finish_reason for record in trace.requests]
    assert reasons.count("abort") == 1
    assert reasons[place] == "abort"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("place", range(3))
def test_a_sample_that_was_preempted_comes_back_beside_its_siblings(mode, step, place):
    moved = []

    def between(scheduler, record):
        if record.plan.step == step and any(state.id == f"s/{place}" for state in scheduler.running):
            moved.append(place)
            scheduler.preempt(f"s/{place}", mode)

    trace, _ = serve_samples(samples_of(10, 3, 9), budget=8, between=between, num_host_blocks=40)
    assert [record.num_preemptions for record in trace.requests] == [int(n in moved) for n in range(3)]
    if mode == "swap":
        assert sum(record.num_recomputed_tokens for record in trace.requests) == 0


def test_answers_are_those_of_the_prompt_alone_whatever_is_forked_preempted_and_aborted():
    seen: Counter[str] = Counter()
    for seed in range(60):
        requests, limits, cache = random_case(2000 + seed)
        policy = ("fcfs", "prefill_first", "sjf")[seed % 3]
        meddler = Meddler(seed, rate=0.2, aborts=0.03)
        trace, witness = serve_watched(requests, policy, limits, cache, meddler)
        seen.update(witness.num_transfers)
        seen.update(meddler.num_aborted)
        seen["shared"] += sum(step.num_shared_blocks for step in trace.steps)
    wanted = ("copy", "swap_out", "swap_in", "shared", "running", "waiting", "swapped")
    assert all(seen[kind] > 0 for kind in wanted), seen


# --- the pool alone


def pool_with_fork(num_tokens, num_shared=None, num_blocks=8, **options):
    blocks = BlockManager(CacheConfig(num_blocks, 2, **options))
    blocks.allocate("parent", num_tokens)
    blocks.share("child", blocks.table("parent")[:num_shared])
    blocks.check()
    return blocks


def test_a_shared_block_is_copied_for_whoever_writes_first_and_the_other_writes_its_own():
    for writer, other in (("parent", "child"), ("child", "parent")):
        blocks = pool_with_fork(3)
        before = blocks.table(other)
        ((source, target),) = blocks.make_writable(writer, 1)
        blocks.check()
        assert blocks.table(other) == before
        assert blocks.table(writer) == (before[0], target)
        assert (source, target in before) == (before[1], False)
        # They no longer share it: the last one to refer to it writes in place.
        assert blocks.make_writable(other, 1) == blocks.make_writable(writer, 1) == ()
        assert blocks.table(other) == before


def test_a_block_that_nobody_shares_is_written_in_place():
    blocks = pool_with_fork(3, num_shared=1)
    assert blocks.make_writable("parent", 1) == ()
    blocks.free("child")
    assert blocks.make_writable("parent", 0) == ()
    assert blocks.num_held_blocks == 2


def test_a_copy_that_finds_no_block_changes_nothing():
    blocks = pool_with_fork(3, num_blocks=2)
    before = blocks.table("parent")
    assert blocks.make_writable("child", 1) is None
    blocks.check()
    assert blocks.table("parent") == blocks.table("child") == before
    assert (blocks.num_held_blocks, blocks.num_shared_blocks) == (2, 2)


def test_shared_blocks_are_free_when_the_last_request_lets_go_of_them():
    blocks = pool_with_fork(4)
    blocks.free("parent")
    assert blocks.num_held_blocks == 2
    blocks.free("child")
    assert blocks.num_free_blocks == 8
    for name in ("parent", "child"):
        with pytest.raises(ValueError, match=f"{name!r} holds no blocks"):
            blocks.free(name)
    blocks.check()


def test_a_block_that_is_filled_in_part_is_not_the_same_on_both_tiers_while_its_sibling_goes_on():
    blocks = pool_with_fork(3, num_host_blocks=4)
    full, partial = blocks.table("parent")
    out = blocks.swap_out("child", 3)
    assert [source for source, _ in out] == [full, partial]
    # The parent may write on in its block: the child's content is safe on the host.
    assert blocks.make_writable("parent", 1) == ()
    back = blocks.swap_in("child")
    blocks.check()
    # What is full is shared again, and what is not comes back to a block of its own.
    assert [source for source, _ in back] == [out[1][1]]
    assert blocks.table("child")[0] == full
    assert blocks.table("child")[1] not in (full, partial)
