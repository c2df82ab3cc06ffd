"""The tensors of the paged KV cache on two tiers, and copies within and between them, against plain loops."""

import math

import numpy as np
import pytest
import torch
from helpers.attention_cases import shape

from cbresearch.attention import PagedCache, pool
from cbresearch.config import CacheConfig
from cbresearch.step import Transfer

NUM_TRANSFER_SEQUENCES = 200


def numbered(config, **changes):
    """Return a cache in which every element of both pools is different."""
    cache = PagedCache(shape(**changes), config, dtype=torch.float64)
    first = 0
    for each in (*cache.kv, cache.host):
        each.copy_(torch.arange(first, first + each.numel(), dtype=torch.float64).view(each.shape))
        first += each.numel()
    return cache


@pytest.mark.parametrize("changes", [{}, {"value_head_dim": 4}, {"latent_dim": 5}])
def test_transfer_keeps_every_bit_of_a_swap_to_permuted_blocks_and_back(changes):
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
def test_transfer_of_random_sequences_equals_one_copy_after_the_other(staged_bytes, monkeypatch):
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
def test_transfer_rejects_a_block_outside_its_pool(transfer, error, problem):
    with pytest.raises(error, match=problem):
        numbered(CacheConfig(4, 2, num_host_blocks=2)).transfer([transfer])


@pytest.mark.parametrize("name", ["num_blocks", "num_host_blocks"])
def test_paged_cache_without_room_names_the_setting_to_lower(name):
    sizes = {"num_blocks": 2, "block_size": 10**6, name: 10**7}
    with pytest.raises(ValueError, match=f"bytes, which .* does not have; lower {name}"):
        PagedCache(shape(), CacheConfig(**sizes))


def test_paged_cache_fills_both_pools():
    cache = PagedCache(shape(), CacheConfig(3, 2, num_host_blocks=2), fill=math.nan)
    assert all(each.isnan().all() for each in (*cache.kv, cache.host))
    assert cache.num_host_bytes * 3 == cache.num_bytes * 2
