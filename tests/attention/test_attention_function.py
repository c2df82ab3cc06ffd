"""The paged cache and its attention function, against plain loops over blocks and over queries."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.attention_cases import dense, random_chunks, serve_tokens, shape
from transformers import MistralConfig, MistralForCausalLM

from cbresearch.attention import LatentCache, PagedCache, PagedStep, attention_function, pool
from cbresearch.config import CacheConfig
from cbresearch.plan import Transfer

NUM_TRANSFER_SEQUENCES = 200
NUM_BATCHES = 40


def numbered(config, **changes):
    """Return a cache in which every element of both pools is different."""
    cache = PagedCache(shape(**changes), config, dtype=torch.float64)
    first = 0
    for each in (*cache.kv, cache.host):
        each.copy_(torch.arange(first, first + each.numel(), dtype=torch.float64).view(each.shape))
        first += each.numel()
    return cache


@pytest.mark.parametrize("changes", [{}, {"value_head_dim": 4}, {"latent_dim": 5}])
def test_keys_and_values_of_every_layer_are_bit_equal_after_a_swap_to_permuted_blocks_and_back(changes):
    cache = numbered(CacheConfig(9, 4, num_host_blocks=6), **changes)
    out = {1: 5, 4: 0, 7: 2, 8: 3}
    back = {5: 2, 0: 7, 2: 0, 3: 4}
    before = [[view.clone() for view in cache.block_views(layer)] for layer in range(3)]
    cache.transfer([Transfer("swap_out", *pair) for pair in out.items()])
    for layer in cache.kv:
        layer.fill_(math.nan)
    cache.transfer([Transfer("swap_in", *pair) for pair in back.items()])
    for layer in range(3):
        for then, now in zip(before[layer], cache.block_views(layer), strict=True):
            for source, host in out.items():
                assert torch.equal(now[back[host]], then[source])
            assert now[[1, 3, 5, 6, 8]].isnan().all()


@pytest.mark.parametrize("staged_bytes", [2**23, 3_000])
def test_transfers_equal_one_copy_after_the_other_in_random_sequences(staged_bytes, monkeypatch):
    monkeypatch.setattr(pool, "_STAGED_BYTES", staged_bytes)
    for seed in range(NUM_TRANSFER_SEQUENCES):
        rng = np.random.default_rng(seed)
        # So few blocks that chains, overwritten sources and targets written twice are common.
        config = CacheConfig(int(rng.integers(2, 6)), 2, num_host_blocks=int(rng.integers(1, 4)))
        cache, plain = numbered(config), numbered(config)
        device = [layer.view(config.num_blocks, -1) for layer in plain.kv]
        transfers = []
        for _ in range(int(rng.integers(1, 25))):
            kind = str(rng.choice(["copy", "copy", "swap_out", "swap_in"]))
            sizes = [
                config.num_host_blocks if kind == side else config.num_blocks
                for side in ("swap_in", "swap_out")
            ]
            source, target = (int(rng.integers(size)) for size in sizes)
            transfers.append(Transfer(kind, source, target))
            for layer, blocks in enumerate(device):
                host = plain.host[:, layer].view(config.num_host_blocks, -1)
                read, write = host if kind == "swap_in" else blocks, host if kind == "swap_out" else blocks
                write[target] = read[source].clone()
        cache.transfer(transfers)
        for ours, want in zip((*cache.kv, cache.host), (*plain.kv, plain.host), strict=True):
            assert torch.equal(ours, want), (seed, transfers)


@pytest.mark.parametrize(
    ("transfer", "error", "problem"),
    [
        (Transfer("swap_out", -1, 0), IndexError, "outside 0 to 3"),
        (Transfer("swap_out", 0, 2), IndexError, "outside 0 to 1"),
        (Transfer("swap_in", 2, 0), IndexError, "outside 0 to 1"),
        (Transfer("copy", 4, 0), IndexError, "outside 0 to 3"),
        (Transfer("move", 0, 0), ValueError, "unknown kind of transfer 'move'"),
    ],
)
def test_a_transfer_of_a_block_that_is_not_there_is_refused(transfer, error, problem):
    with pytest.raises(error, match=problem):
        numbered(CacheConfig(4, 2, num_host_blocks=2)).transfer([transfer])


@pytest.mark.parametrize("name", ["num_blocks", "num_host_blocks"])
def test_a_pool_without_room_is_refused_by_name(name):
    sizes = {"num_blocks": 2, name: 10**15}
    with pytest.raises(ValueError, match=f"bytes, which .* does not have; lower {name}"):
        PagedCache(shape(), CacheConfig(**sizes))


def test_a_fill_reaches_both_pools():
    cache = PagedCache(shape(), CacheConfig(3, 2, num_host_blocks=2), fill=math.nan)
    assert all(each.isnan().all() for each in (*cache.kv, cache.host))
    assert cache.num_host_bytes * 3 == cache.num_bytes * 2


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "both", "values of another size"])
def test_attention_equals_a_loop_over_queries_whatever_the_window_and_the_steps(kind):
    for seed in range(NUM_BATCHES):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        window = rng.choice([None, 1, 3, 4, 16, 200])
        lengths = rng.integers(1, 40, size=int(rng.integers(1, 5)))
        if seed % 20 == 0:
            lengths[0] = 300
        value_dim = int(rng.choice([3, 9])) if kind == "values of another size" else 6
        tokens = [
            [torch.randn(n, heads, size).double() for heads, size in ((4, 6), (2, 6), (2, value_dim))]
            for n in lengths
        ]
        softcap = 0.7 if kind in ("softcap", "both") else None
        sinks = torch.randn(4).double() if kind in ("sinks", "both") else None
        cache = PagedCache(
            shape(value_head_dim=value_dim),
            CacheConfig(1200, int(rng.choice([1, 3, 16]))),
            dtype=torch.float64,
            fill=math.nan,
        )
        chunks = random_chunks(rng, lengths, int(rng.choice([2, 12, 300])))
        ours = serve_tokens(cache, tokens, window, chunks, freed=window, softcap=softcap, s_aux=sinks)
        for (queries, keys, values), output in zip(tokens, ours, strict=True):
            want = [
                dense(queries[n], keys[: n + 1], values[: n + 1], window, softcap, sinks)
                for n in range(len(queries))
            ]
            torch.testing.assert_close(output, torch.stack(want), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (2, 3, 1, 3), (5, 1, 1, 1, 1), (1, 8)])
def test_a_query_sees_the_keys_that_transformers_lets_it_see_its_own_and_the_window_less_one_before(sizes):
    length, window = 9, 4
    config = MistralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        sliding_window=window,
    )
    model = MistralForCausalLM(config)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.arange(length)[None], output_attentions=True).attentions[0][0, 0]
    cache = PagedCache(
        shape(num_heads=1, num_kv_heads=1, value_head_dim=length), CacheConfig(9, 2), fill=math.nan
    )
    # Equal scores, and values that name their position: an output shows which keys were seen.
    tokens = [torch.zeros(length, 1, 6), torch.zeros(length, 1, 6), torch.eye(length)[:, None]]
    (seen,) = serve_tokens(cache, [tokens], window, [sizes], freed=window)
    want = [list(range(max(0, query - window + 1), query + 1)) for query in range(length)]
    assert [row[0].nonzero()[:, 0].tolist() for row in seen] == want
    assert [row.nonzero()[:, 0].tolist() for row in weights] == want


def test_a_window_is_read_from_the_pool_where_a_layer_does_not_say():
    cache = PagedCache(
        shape(), CacheConfig(20, 2), windows=(None, 4, None), dtype=torch.float64, fill=math.nan
    )
    tokens = [[torch.randn(30, heads, 6).double() for heads in (4, 2, 2)]]
    sizes = [(20, 1, 1, 8)]
    from_pool = serve_tokens(cache, tokens, None, sizes)
    torch.testing.assert_close(from_pool, serve_tokens(cache, tokens, 4, sizes), rtol=0, atol=0)


def test_a_prompt_much_longer_than_its_window_is_attended_in_pieces():
    cache = PagedCache(shape(), CacheConfig(200, 16))
    step = PagedStep(cache, np.arange(200)[None], np.array([0]), np.array([3000]))
    reads = step.reads(256)
    assert max(read.mask.numel() for read in reads) <= 256 * 511
    assert [(read.begin, read.end) for read in reads] == [
        (n, min(n + 256, 3000)) for n in range(0, 3000, 256)
    ]


def test_capped_scores_of_ten_thousand_stay_finite_and_the_cap_matters():
    tokens = [[torch.full((5, heads, 6), 64.0) for heads in (4, 2)] + [torch.randn(5, 2, 6)]]
    tokens[0][1][2] *= -1
    outputs = [
        serve_tokens(
            PagedCache(shape(), CacheConfig(4, 2), fill=math.nan), tokens, None, [(3, 1, 1)], softcap=cap
        )[0]
        for cap in (None, 50.0, 1.0)
    ]
    assert all(output.isfinite().all() for output in outputs)
    assert (outputs[0] - outputs[2]).abs().max() > 0.01


def test_what_would_change_the_attention_and_is_not_applied_is_refused():
    with pytest.raises(ValueError, match="asks for 'position_bias'"):
        attention_function(
            SimpleNamespace(), *(torch.zeros(1, 1, 1, 1),) * 3, None, position_bias=torch.zeros(1)
        )
    with pytest.raises(ValueError, match="runs only inside a ModelExecutor"):
        attention_function(SimpleNamespace(), *(torch.zeros(1, 1, 1, 1),) * 3, None, position_bias=None)


def latent_step():
    cache = PagedCache(shape(latent_dim=5), CacheConfig(4, 2))
    return PagedStep(cache, np.array([[1, 0]]), np.array([0]), np.array([3]))


def test_a_model_that_caches_expanded_keys_in_place_of_latents_is_refused():
    with pytest.raises(ValueError, match=r"\[1, 4, 3, 6\] and \[1, 4, 3, 6\] where latents of 5 elements"):
        LatentCache(latent_step()).update(torch.zeros(1, 4, 3, 6), torch.zeros(1, 4, 3, 6), 0)


def test_a_model_that_does_not_read_its_latents_from_the_cache_is_refused():
    step = latent_step()
    key = torch.zeros(1, 4, 2, 6)
    with pytest.raises(ValueError, match="does not read its latents"):
        attention_function(SimpleNamespace(layer_idx=0), torch.zeros(1, 4, 3, 6), key, key, None, paged=step)


def test_a_window_over_latents_is_refused():
    step = latent_step()
    key = torch.zeros(1, 4, 3, 6)
    with pytest.raises(ValueError, match="a sliding window of 2 over latents"):
        attention_function(SimpleNamespace(layer_idx=0), key, key, key, None, paged=step, sliding_window=2)
