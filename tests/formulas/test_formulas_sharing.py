"""What sharing saves, against brute force and against what the scheduler does."""

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from mooncake_counts import measured_hits

from cbresearch import formulas
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.metrics import prefix_hit_rate, token_counts
from cbresearch.request import Request, parallel_samples
from cbresearch.simulator import simulate

SHAPES = [
    (prompt, samples, size)
    for prompt in (1, 2, 15, 16, 17, 33, 64, 65)
    for samples in (1, 2, 5)
    for size in (1, 4, 16)
]


def sampled(prompt, samples, size, outputs, prefix_caching=False):
    """Serve parallel samples of one prompt in the simulator."""
    request = Request("r", tuple(range(prompt)), outputs)
    limits = SchedulerConfig(max_num_seqs=samples)
    cache = CacheConfig(1000, size, prefix_caching)
    return simulate(parallel_samples(request, samples), scheduler=limits, cache=cache)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("prompt", "samples", "size"), SHAPES)
def test_samples_hold_copy_and_compute_what_the_formulas_say(prompt, samples, size, prefix_caching):
    outputs = 9
    trace = sampled(prompt, samples, size, outputs, prefix_caching)
    # The first sample is one step ahead of the others, so it is one token ahead, and gone in the last step.
    ahead = [formulas.sample_blocks(prompt, x, 1, size) for x in range(1, outputs + 1)]
    common = (prompt - 1) // size
    expected = [ahead[0]]
    for x in range(2, outputs + 1):
        others = formulas.sample_blocks(prompt, x - 1, samples, size) - common
        expected.append(others * (samples - 1) // samples + ahead[x - 1])
    if samples > 1:
        expected.append(formulas.sample_blocks(prompt, outputs, samples - 1, size))
    assert [step.num_held_blocks for step in trace.steps] == expected
    copies = sum(step.plan.num_transfers("copy") for step in trace.steps)
    assert copies == formulas.sample_copies(prompt, samples, size)
    assert token_counts(trace).prefill == formulas.sample_prefill_tokens(prompt, samples)


@pytest.mark.parametrize(("prompt", "samples", "size"), SHAPES)
def test_without_sharing_every_sample_holds_and_computes_its_own(prompt, samples, size):
    requests = [Request(str(place), tuple(range(prompt)), 9) for place in range(samples)]
    trace = simulate(requests, cache=CacheConfig(1000, size))
    held = [formulas.sample_blocks(prompt, x, samples, size, shared=False) for x in range(1, 10)]
    assert [step.num_held_blocks for step in trace.steps] == held
    assert token_counts(trace).prefill == formulas.sample_prefill_tokens(prompt, samples, shared=False)


def test_one_sample_shares_nothing():
    assert formulas.sample_blocks(33, 5, 1, 16) == formulas.sample_blocks(33, 5, 1, 16, shared=False) == 3
    assert formulas.sample_copies(33, 1, 16) == 0
    assert formulas.sample_prefill_tokens(33, 1) == 33


@pytest.mark.parametrize(("prompt", "copies"), [(1, 0), (2, 3), (16, 3), (17, 0), (18, 3), (33, 0)])
def test_nothing_is_copied_where_the_last_prompt_token_begins_a_block(prompt, copies):
    assert formulas.sample_copies(prompt, 4, 16) == copies


@pytest.mark.parametrize("size", [1, 3, 16, 32, 64, 128])
@pytest.mark.parametrize(("shared", "unique"), [(1, 5), (48, 16), (47, 17), (64, 1), (100, 28), (64, 0)])
def test_a_shared_prefix_is_found_as_far_as_its_full_blocks_go(shared, unique, size):
    num_requests = 6
    requests = [
        Request(
            str(k), (*range(shared), *range(1000 * (k + 1), 1000 * (k + 1) + unique)), 2, arrival=10.0 * k
        )
        for k in range(num_requests)
    ]
    trace = simulate(requests, cache=CacheConfig(2000, size, prefix_caching=True))
    found = formulas.prefix_hit_tokens(shared, unique, size)
    assert [record.num_cached_tokens for record in trace.requests] == [0] + [found] * (num_requests - 1)
    predicted = formulas.prefix_hit_rate(shared, unique, size, num_requests)
    assert prefix_hit_rate(trace) == pytest.approx(predicted, rel=1e-12)


def test_without_end_the_first_request_counts_for_nothing():
    assert formulas.prefix_hit_rate(96, 32, 16) == 0.75
    assert formulas.prefix_hit_rate(96, 32, 16, 10**9) == pytest.approx(0.75)
    assert formulas.prefix_hit_rate(96, 32, 16, 1) == 0


def test_a_block_misses_half_a_block_of_a_prefix_on_average():
    size = 16
    lost = [shared - formulas.prefix_hit_tokens(shared, 1, size) for shared in range(160, 160 + size)]
    assert np.mean(lost) == (size - 1) / 2


# Finite caches.


def random_chains(seed, num_requests=300, num_roots=4):
    """Return the paths of requests down a growing tree, in which a number names a node and so its path."""
    rng = np.random.default_rng(seed)
    children = {None: list(range(num_roots))}
    next_block = num_roots
    chains = []
    for _ in range(num_requests):
        node, chain = None, []
        for _ in range(rng.integers(1, 9)):
            known = children.setdefault(node, [])
            if not known or rng.random() < 0.3:
                known.append(next_block)
                next_block += 1
            node = known[rng.integers(len(known))]
            chain.append(node)
        chains.append(tuple(chain))
    return chains


def hits_by_list(chains, num_blocks):
    """Count the hits of a plain list of recently used blocks."""
    recent, num_hits = OrderedDict(), 0
    for chain in chains:
        hits = [block for block in chain if block in recent]
        num_hits += len(hits)
        for block in hits:
            del recent[block]
        while len(recent) + len(chain) > num_blocks:
            recent.popitem(last=False)
        recent.update(dict.fromkeys(reversed(chain)))
    return num_hits


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_tells_the_hits_of_the_block_manager_at_every_size(seed):
    chains = random_chains(seed)
    depths = formulas.reuse_depths(chains)
    longest, distinct = max(map(len, chains)), len({block for chain in chains for block in chain})
    for num_blocks in [*range(longest, 24), 50, 100, 200, distinct - 1, distinct, 10 * distinct]:
        predicted = int((depths <= num_blocks).sum())
        assert predicted == measured_hits(chains, num_blocks) == hits_by_list(chains, num_blocks)


def test_depths_of_a_stream_of_single_blocks_are_stack_distances():
    # Mattson's definition, one reference a step: the different blocks since the last use, itself included.
    stream = np.random.default_rng(0).integers(0, 20, 500).tolist()
    expected = []
    for place, block in enumerate(stream):
        since = next((back for back in range(place - 1, -1, -1) if stream[back] == block), None)
        if since is not None:
            expected.append(len(set(stream[since:place])))
    assert formulas.reuse_depths([(block,) for block in stream]).tolist() == expected


def test_a_repeated_chain_lies_on_top_with_its_head_first():
    assert formulas.reuse_depths([(1, 2, 3), (1, 2, 3)]).tolist() == [1, 2, 3]
    assert formulas.reuse_depths([(1, 2, 3), (4,), (1, 2)]).tolist() == [2, 3]


def test_nothing_is_used_again_where_all_is_new():
    assert formulas.reuse_depths([]).tolist() == formulas.reuse_depths([(1, 2), (), (3,)]).tolist() == []


def test_a_chain_with_a_block_twice_is_no_chain():
    with pytest.raises(ValueError, match="a block twice, of 3 blocks"):
        formulas.reuse_depths([(1, 2, 1)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [10, 50, 200, 400])
def test_popularity_predicts_the_hits_of_independent_references(seed, num_blocks):
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 501)
    stream = rng.choice(500, size=20_000, p=weights / weights.sum())
    measured = int((formulas.reuse_depths([(block,) for block in stream.tolist()]) <= num_blocks).sum())
    references = np.bincount(stream)
    predicted = formulas.popularity_hits(references[references > 0], num_blocks)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_popularity_says_nothing_of_bursts():
    # Each block four times in a row: one block of cache is enough, and popularity expects next to none.
    bursts = [(block,) for block in range(200) for _ in range(4)]
    assert (formulas.reuse_depths(bursts) <= 1).sum() == 600
    assert formulas.popularity_hits([4] * 200, 1) < 10


def test_a_cache_for_all_blocks_misses_only_the_first_reference_of_each():
    assert formulas.popularity_hits([3, 1, 1, 5], 4) == formulas.popularity_hits([3, 1, 1, 5], 99) == 6
    hits = [formulas.popularity_hits([3, 1, 1, 5], size) for size in (1, 2, 3, 4)]
    assert all(fewer < more for fewer, more in pairwise(hits))


def test_equally_popular_blocks_hit_in_proportion_to_the_cache():
    # Σ (1 − exp(−nT)) = C over M equal blocks, so a later reference hits with probability C/M.
    assert formulas.popularity_hits([5] * 100, 25) == pytest.approx(400 * 0.25)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: formulas.sample_blocks(0, 1, 1, 16), "prompt is 0"),
        (lambda: formulas.sample_blocks(5, 0, 1, 16), "num_outputs is 0"),
        (lambda: formulas.sample_blocks(5, 1, 0, 16), "num_samples is 0"),
        (lambda: formulas.sample_blocks(5, 1, 1, 0), "block_size is 0"),
        (lambda: formulas.sample_copies(5, 1, 1.5), "block_size is 1.5"),
        (lambda: formulas.sample_prefill_tokens(5, -1), "num_samples is -1"),
        (lambda: formulas.prefix_hit_tokens(0, 4, 16), "shared is 0"),
        (lambda: formulas.prefix_hit_tokens(4, -1, 16), "unique is -1"),
        (lambda: formulas.prefix_hit_rate(4, 4, 16, 0), "num_requests is 0"),
        (lambda: formulas.popularity_hits([], 4), r"references has shape \(0,\)"),
        (lambda: formulas.popularity_hits([1, 0], 1), "counts of at least 1"),
        (lambda: formulas.popularity_hits([1, 2], 0), "num_blocks is 0"),
    ],
)
def test_a_value_out_of_range_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
