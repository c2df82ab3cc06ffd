"""The plan of a paged-attention call: who computes what, and how much of a card that fills."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cbresearch.kernels.layout import ITEM_FIELDS, MERGE_FIELDS, Device, Layout, choose_launch, lay_out
from kernel_cases import layout_of, random_case

H100 = Device("cuda", 90, 132)
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}


def columns(layout: Layout) -> list[dict[str, np.ndarray]]:
    """Return the items of each launch, by field."""
    return [dict(zip(ITEM_FIELDS, work.items.numpy().T, strict=True)) for work in layout.works]


def num_programs(layout: Layout) -> int:
    return sum(len(work.items) for work in layout.works) * layout.heads[1]


def covered(layout: Layout) -> dict[tuple[int, int], int]:
    """Return how often each (token, key) pair is computed."""
    pairs: dict[tuple[int, int], int] = {}
    for items in columns(layout):
        for row in zip(*items.values(), strict=True):
            item = dict(zip(items, map(int, row), strict=True))
            for query in range(item["num_queries"]):
                position = item["position"] + query
                for key in range(item["begin"], min(item["end"], position + 1)):
                    if layout.window is None or key > position - layout.window:
                        pair = item["token"] + query, key
                        pairs[pair] = pairs.get(pair, 0) + 1
    return pairs


@pytest.mark.parametrize("seed", range(40))
def test_every_query_meets_every_key_that_it_sees_exactly_once(seed):
    case = random_case(seed)
    window = case.options.get("window")
    layout = layout_of(replace(case, split_keys=16))
    expected = {}
    token = 0
    for length, queries in zip(case.lengths, case.queries, strict=True):
        for position in range(length - queries, length):
            first = 0 if window is None else max(0, position - window + 1)
            expected.update({(token, key): 1 for key in range(first, position + 1)})
            token += 1
    assert covered(layout) == expected


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_written_once_and_merges_name_its_parts(seed):
    case = random_case(seed)
    layout = layout_of(replace(case, split_keys=16))
    direct, parts = [], []
    for items in columns(layout):
        for token, count, partial in zip(items["token"], items["num_queries"], items["partial"], strict=True):
            for query in range(count):
                if partial < 0:
                    direct.append(token + query)
                else:
                    parts.append((partial + query, token + query))
    merges = [dict(zip(MERGE_FIELDS, row, strict=True)) for row in layout.merges.numpy()]
    assert sorted(direct + [merge["token"] for merge in merges]) == list(range(layout.num_tokens))
    named = [
        (merge["first_partial"] + split * merge["stride"], merge["token"])
        for merge in merges
        for split in range(merge["num_splits"])
    ]
    assert sorted(named) == sorted(parts)
    assert sorted(partial for partial, _ in parts) == list(range(layout.num_partials))


@pytest.mark.parametrize("length", [16_384, 100_000, 1_000_000])
def test_a_single_long_sequence_fills_a_card_of_132_multiprocessors_once(length):
    layout = lay_out([length], [0, 1], **LLAMA, target=H100)
    resident = num_programs(layout) / H100.num_multiprocessors
    # As many as keep the memory busy: 36 kB under way, 8 kB in a program's tile of K and V.
    assert 4 < resident <= math.ceil(36_000 / 8192)
    (items,) = columns(layout)
    keys = items["end"] - items["begin"]
    assert np.ptp(np.sort(keys)[1:]) == 0


@pytest.mark.parametrize(("cache_dtype", "head_dim"), [(torch.float8_e4m3fn, 128), (torch.bfloat16, 64)])
def test_smaller_tiles_are_spread_over_more_programs(cache_dtype, head_dim):
    shape = {**LLAMA, "head_dim": head_dim}
    layout = lay_out([1_000_000], [0, 1], **shape, cache_dtype=cache_dtype, target=H100)
    launch = layout.works[0].launch
    tile_bytes = 2 * launch.tile_keys * head_dim * cache_dtype.itemsize
    under_way = num_programs(layout) / H100.num_multiprocessors * tile_bytes
    assert min(36_000, 8 * tile_bytes) * 0.95 <= under_way


def test_a_large_batch_is_not_split():
    layout = lay_out([4096] * 256, range(257), **LLAMA, target=H100)
    assert not len(layout.merges) and not layout.works[0].is_split


def test_one_long_sequence_among_short_ones_is_split_alone():
    layout = lay_out([65536, *[512] * 63], range(65), **LLAMA, target=H100)
    assert layout.merges[:, 0].tolist() == [0]
    (items,) = columns(layout)
    keys = items["end"] - items["begin"]
    assert keys.max() < 65536 / 10


def test_a_short_sequence_is_not_split_for_the_sake_of_a_merge():
    assert not len(lay_out([128], [0, 1], **LLAMA, target=H100).merges)


def test_long_programs_start_first():
    layout = lay_out([100, 5000, 900, 3000], [0, 1, 2, 3, 4], **LLAMA, target=H100, split_keys=10**6)
    (items,) = columns(layout)
    assert items["sequence"].tolist() == [1, 3, 2, 0]


def test_decodes_and_chunks_of_one_batch_get_tiles_of_their_own():
    layout = lay_out([100, 300, 70], [0, 1, 257, 260], **LLAMA, target=H100)
    narrow, wide = layout.works
    assert (narrow.is_wide, wide.is_wide) == (False, True)
    # Three queries of four heads each still fit the narrowest tile.
    assert set(narrow.items[:, 0].tolist()) == {0, 2}
    assert narrow.launch.tile_rows == 16 and wide.launch.tile_rows == 128


@pytest.mark.parametrize("group", [1, 3, 7, 8, 17, 48])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(
    "device", [H100, Device("cuda", 80, 108), Device("hip", 0, 304), Device("interpreter", 90, 1)]
)
def test_a_tile_holds_a_whole_group_in_powers_of_two(group, head_dim, device):
    for num_queries in (1, 2, 9, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            for cache_dtype in (dtype, torch.float8_e4m3fn):
                launch = choose_launch(head_dim, group, num_queries, dtype, cache_dtype, device)
                assert launch.tile_rows >= max(16, group)
                for size in (launch.tile_rows, launch.tile_keys, launch.num_warps):
                    assert size & (size - 1) == 0
                assert launch.tile_keys >= 16


def test_an_empty_batch_is_no_work():
    layout = lay_out([], [0], **LLAMA)
    assert layout.works == () and layout.num_partials == 0 and layout.merges.shape == (0, 4)
